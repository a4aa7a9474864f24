"""Reads of rows on a server's local disk; requests wait for them up to a bound.

The rows of all requests that wait at a moment are read together. What is read after a request's bound is in
memory for later ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from freshet.types import U8, U64

log = structlog.get_logger(__name__)

Unread = frozenset[tuple[int, int]]
"""Keys whose rows may be on disk: (table id, key)."""

DEFAULTED_WHYS = ("late", "unreadable", "busy")
"""Reasons why a row that may be on disk is served as if it had never learned: it was not read in time, the
disk could not be read or is not as it was written, or too many keys waited to be read."""

THREADS = 2
"""Reads at a time: one waits for the disk while another is decoded."""
MOST_KEYS = 2_000
"""Keys of one read, about: other threads wait while as many are sorted, a millisecond."""
MOST_WAITING = 200_000
"""Keys that may wait to be read."""


def unread_of(tables: U8, keys: U64) -> Unread:
    """Return (N,) tables and keys as pairs."""
    return frozenset(zip(tables.tolist(), keys.tolist(), strict=True))


class RowsOnDisk(Protocol):
    """A table of which some rows are on disk."""

    def fetch(self, keys: Unread) -> Unread:
        """Read rows from disk into memory; returns the keys that have none. Raises OSError."""


@dataclass(frozen=True, slots=True)
class RowsRead:
    """What the reads of a request's rows have come to."""

    table: RowsOnDisk
    until_s: float  # time of the loop until which the request may wait for rows
    absent: Unread = frozenset()  # keys without a row
    unreadable: Unread = frozenset()
    ended: str = ""  # why no more keys are read, one of DEFAULTED_WHYS; "": they are


@dataclass(slots=True, eq=False)
class _Job:
    unread: Unread
    done: Callable[[RowsRead], None]
    loop: asyncio.AbstractEventLoop
    before: RowsRead  # of the same table
    timer: asyncio.TimerHandle | None = None
    is_over: bool = False

    def end(self, absent: Unread = frozenset(), unreadable: Unread = frozenset(), ended: str = "") -> None:
        """Answer, once. On the loop's thread."""
        if not self.is_over:
            self.is_over = True
            if self.timer is not None:
                self.timer.cancel()
            before = self.before
            absent |= before.absent
            self.done(RowsRead(before.table, before.until_s, absent, unreadable | before.unreadable, ended))


@dataclass(slots=True)
class _Waiting:
    jobs: dict[_Job, None] = field(default_factory=dict)  # the oldest first
    keys: int = 0
    closed: bool = False


class RowReads:
    """Reads rows on threads."""

    def __init__(self, wait_s: float, seconds: Callable[[float], object] = lambda s: None) -> None:
        """Start the threads.

        Args:
            wait_s: longest time that a request waits for rows.
            seconds: called with the duration of each read.
        """
        self._seconds, self._wait_s = seconds, wait_s
        self._waiting, self._changed = _Waiting(), threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"row-reads-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def read(
        self,
        unread: Unread,
        table: RowsOnDisk,
        done: Callable[[RowsRead], None],
        before: RowsRead | None = None,
    ) -> None:
        """Read rows; `done` is called on the running loop, after `wait_s` at the latest.

        before: the last read for the same request; what it found counts for the same table.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._wait_s if before is None else before.until_s
        if before is None or before.table is not table:
            before = RowsRead(table, until_s)
        job = _Job(unread, done, loop, before)
        with self._changed:
            waiting = self._waiting
            is_busy = waiting.keys > 0 and waiting.keys + len(unread) > MOST_WAITING
            if not is_busy:
                waiting.jobs[job] = None
                waiting.keys += len(unread)
                self._changed.notify()
        if is_busy:
            loop.call_soon(lambda: job.end(ended="busy"))
        else:
            job.timer = loop.call_at(until_s, self._late, job)

    def _late(self, job: _Job) -> None:
        with self._changed:
            if job in self._waiting.jobs:
                del self._waiting.jobs[job]
                self._waiting.keys -= len(job.unread)
        job.end(ended="late")

    def close(self, wait_s: float) -> None:
        """End the threads, after what they read at the moment, and wait for them at most `wait_s` each."""
        with self._changed:
            self._waiting.closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(wait_s)

    # --- the threads

    def _run(self) -> None:
        while self._read_next():
            pass  # without a job at hand: it would keep a table that is replaced, and its files

    def _read_next(self) -> bool:
        """Wait for jobs and read their rows; False once closed."""
        jobs = self._next()
        began = time.perf_counter()
        for table in {id(job.before.table): job.before.table for job in jobs}.values():
            mine = [job for job in jobs if job.before.table is table]
            keys = frozenset[tuple[int, int]]().union(*(job.unread for job in mine))
            absent, unreadable = read_into(table, keys)
            for job in mine:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    job.loop.call_soon_threadsafe(job.end, job.unread & absent, job.unread & unreadable)
        if jobs:
            self._seconds(time.perf_counter() - began)
        return bool(jobs)

    def _next(self) -> Sequence[_Job]:
        """Wait for jobs; none once closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting.jobs or self._waiting.closed)
                if self._waiting.closed:
                    return []
                jobs: list[_Job] = []
                keys = 0
                while self._waiting.jobs and keys < MOST_KEYS:
                    job = next(iter(self._waiting.jobs))
                    del self._waiting.jobs[job]
                    keys += len(job.unread)
                    jobs.append(job)
                self._waiting.keys -= keys
                return jobs


def read_into(table: RowsOnDisk, keys: Unread) -> tuple[Unread, Unread]:
    """Read rows; returns the keys without a row, and those that cannot be read, which costs no others."""
    absent: set[tuple[int, int]] = set()
    unreadable: set[tuple[int, int]] = set()
    waiting, reason = [keys], ""
    while waiting:
        some = waiting.pop()
        try:
            absent |= table.fetch(some)
        except Exception as error:  # also a bug: it must not end the thread
            reason = str(error)
            if len(some) == 1:
                unreadable |= some
            else:
                every = sorted(some)
                waiting += [frozenset(every[::2]), frozenset(every[1::2])]
    if unreadable:
        log.warning("rows on disk cannot be read", rows=len(unreadable), reason=reason)
    return frozenset(absent), frozenset(unreadable)
