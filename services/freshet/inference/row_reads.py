"""Reads of rows that a server's cache lacks, from the row store; requests wait for them up to a bound.

The rows of all requests that wait at a moment are read together. What comes after a request's bound still
goes into the cache, if the read had begun.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from freshet.errors import Corrupt, FreshetError
from freshet.inference.row_cache import MissingKeys, RowCache
from freshet.rows.store import RowStore
from freshet.types import I64, U64, Bucket, BucketMeta, bucket_of

log = structlog.get_logger(__name__)

DEFAULTED_WHYS = ("late", "unavailable", "damaged", "busy")
"""Reasons why a row is served as if it had never learned: the row store did not answer in time, could not be
read, has damaged pages of the row's bucket, or too many keys waited to be read."""

THREADS = 2
"""Reads at a time: one waits for the row store while another is decoded."""
MOST_KEYS = 20_000
"""Keys of one read, about."""
MOST_WAITING = 200_000
"""Keys that may wait to be read."""


@dataclass(frozen=True, slots=True)
class RowsRead:
    """What the reads of a request's missing rows have come to."""

    until_s: float  # time of the loop until which the request may wait for rows
    failed: Mapping[str, U64] = field(default_factory=dict)  # keys that could not be read, by DEFAULTED_WHYS
    ended: str = ""  # why no more keys are read; "": they are


@dataclass(slots=True, eq=False)
class _Job:
    missing: MissingKeys
    cache: RowCache
    done: Callable[[RowsRead], None]
    loop: asyncio.AbstractEventLoop
    before: RowsRead
    timer: asyncio.TimerHandle | None = None
    is_over: bool = False

    def end(self, failed: Mapping[str, U64], ended: str = "") -> None:
        """Answer, once. On the loop's thread."""
        if not self.is_over:
            self.is_over = True
            if self.timer is not None:
                self.timer.cancel()
            none: U64 = np.empty(0, np.uint64)
            merged = {
                why: np.concatenate([of.get(why, none) for of in (self.before.failed, failed)])
                for why in {**self.before.failed, **failed}
            }
            self.done(RowsRead(self.before.until_s, merged, ended))


@dataclass(slots=True)
class _Waiting:
    jobs: list[_Job] = field(default_factory=list)
    keys: int = 0
    closed: bool = False


class RowReads:
    """Reads missing rows on threads."""

    def __init__(
        self,
        store: RowStore,
        buckets: int,
        wait_s: float,
        seconds: Callable[[float], object] = lambda s: None,
    ) -> None:
        """Start the threads.

        Args:
            store: the row store.
            buckets: of the model.
            wait_s: longest time that a request waits for rows.
            seconds: called with the duration of each read.
        """
        self._seconds = seconds
        self._store, self._buckets, self._wait_s = store, buckets, wait_s
        self._waiting, self._changed = _Waiting(), threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"row-reads-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def read(
        self,
        missing: MissingKeys,
        cache: RowCache,
        done: Callable[[RowsRead], None],
        before: RowsRead | None = None,
    ) -> None:
        """Read keys into the cache; `done` is called on the running loop, after `wait_s` at the latest.

        before: the last read for the same request.
        """
        loop = asyncio.get_running_loop()
        job = _Job(missing, cache, done, loop, before or RowsRead(loop.time() + self._wait_s))
        with self._changed:
            waiting = self._waiting
            is_busy = waiting.keys > 0 and waiting.keys + len(missing) > MOST_WAITING
            if not is_busy:
                waiting.jobs.append(job)
                waiting.keys += len(missing)
                self._changed.notify()
        if is_busy:
            loop.call_soon(job.end, {}, "busy")
        else:
            job.timer = loop.call_at(job.before.until_s, job.end, {}, "late")

    def close(self, wait_s: float) -> None:
        """End the threads, after what they read at the moment, and wait for them at most `wait_s` each."""
        with self._changed:
            self._waiting.closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(wait_s)

    # --- the threads

    def _run(self) -> None:
        while jobs := self._next():
            began = time.perf_counter()
            failed = self._read_all(jobs)
            self._seconds(time.perf_counter() - began)
            for job in jobs:
                if not job.loop.is_closed():
                    job.loop.call_soon_threadsafe(job.end, failed)

    def _next(self) -> list[_Job]:
        """Wait for jobs; none once closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting.jobs or self._waiting.closed)
                if self._waiting.closed:
                    return []
                waiting, taken, keys = self._waiting.jobs, 0, 0
                while taken < len(waiting) and keys < MOST_KEYS:
                    keys += len(waiting[taken].missing)
                    taken += 1
                self._waiting.keys -= keys
                jobs, self._waiting.jobs = waiting[:taken], waiting[taken:]
                if jobs := [job for job in jobs if not job.is_over]:
                    return jobs

    def _read_all(self, jobs: Sequence[_Job]) -> Mapping[str, U64]:
        """Read the keys of jobs; returns those that could not be read, by why."""
        failed: dict[str, list[U64]] = {}
        for cache in {id(job.cache): job.cache for job in jobs}.values():
            keys = MissingKeys.concat([job.missing for job in jobs if job.cache is cache])
            for why, some in self._read(cache, keys):
                failed.setdefault(why, []).append(some)
        return {why: np.concatenate(parts) for why, parts in failed.items()}

    def _read(self, cache: RowCache, keys: MissingKeys) -> list[tuple[str, U64]]:
        """Read keys into a cache; returns those that could not be read, with why."""
        try:
            read_into(cache, self._store, keys, self._buckets)
        except Corrupt as error:
            buckets = bucket_of(keys.keys, self._buckets)
            if buckets[0] == buckets[-1]:  # keys rise, and so do buckets
                log.warning("rows could not be read", reason=f"bucket {int(buckets[0])}: {error}")
                return [("damaged", keys.keys)]
            middle = int(np.searchsorted(buckets, buckets[len(buckets) // 2]))
            middle = middle or int(np.searchsorted(buckets, buckets[0], side="right"))
            parts = keys.part(0, middle), keys.part(middle, len(keys))
            return [one for part in parts for one in self._read(cache, part)]
        except FreshetError as error:
            log.warning("rows could not be read", reason=str(error))
            return [("unavailable", keys.keys)]
        except Exception as error:  # a bug must not end the thread
            log.error("rows could not be read", exc_info=error)
            return [("unavailable", keys.keys)]
        return []


def read_into(cache: RowCache, store: RowStore, keys: MissingKeys, buckets: int) -> None:
    """Read keys, which rise, from a row store of so many buckets. Raises as the row store does."""
    of_keys = bucket_of(keys.keys, buckets)
    touched = [Bucket(bucket) for bucket in np.unique(of_keys).tolist()]
    before = store.metas(touched)
    found = list(store.read_many(of_keys, keys.tables, keys.keys))
    stored: I64 = np.full(buckets, -1, np.int64)
    for bucket, meta in store.metas(touched).items():
        if _is_same(before[bucket], meta):
            stored[bucket] = meta.rows_offset
    cache.insert(keys, found, stored)


def _is_same(before: BucketMeta, after: BucketMeta) -> bool:
    return (before.fence, before.seq, before.rows_offset) == (after.fence, after.seq, after.rows_offset)
