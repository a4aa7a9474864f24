"""Group commit: what requests hand in within a few milliseconds is appended together, in a thread.

A durable append costs about the same for one record as for a thousand; while one is under way the next
collects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from freshet.errors import Overloaded, Unavailable
from freshet.gateway import metrics
from freshet.gateway.core import Entry, Limits, QueueAccount, group_entries, offsets_of
from freshet.seams.eventlog import Writer

__all__ = ["Committer"]

HEALTHY_AGAIN_S = 5.0
"""How long a failed append keeps us from being ready; then the next append decides."""


@dataclass(slots=True, eq=False)
class _Waiting:
    entries: Sequence[Entry]
    size: int
    done: asyncio.Future[list[int]]


class Committer:
    """Entries in, offsets out, once they are durable. Lives on one event loop; appends on one thread."""

    def __init__(
        self,
        writer: Writer,
        limits: Limits,
        registry: CollectorRegistry,
        *,
        wait_s: float,
        batch_events: int,
        retry_after_s: float = 1.0,
    ) -> None:
        self._writer, self._wait_s, self._batch_events = writer, wait_s, batch_events
        self._retry_after_s = retry_after_s
        self._account = QueueAccount(limits)
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._closing = False
        self.appending = False  # whether an append is under way
        self._failed_at: float | None = None
        self._done = self._failed = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._task: asyncio.Task[None] | None = None
        metrics.QUEUED.gauge(registry, lambda: self._account.events)
        self._appended = metrics.APPENDED.counter(registry)
        self._failures = metrics.APPEND_FAILURES.counter(registry)
        self._seconds = metrics.APPEND_SECONDS.histogram(registry)

    def start(self) -> None:
        """Begin to append; on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def append(self, entries: Sequence[Entry]) -> list[int]:
        """Offset of each entry, once all of them are durable.

        Raises:
            Overloaded: too much waits already; nothing was taken.
            Unavailable: not known to be written; sending the same again is safe (event ids).
        """
        if self._closing:
            raise Unavailable("the gateway is stopping; nothing was written, send it again")
        size = sum(e.size for e in entries)
        if not self._account.take(len(entries), size):
            raise Overloaded(
                f"{self._account.events} events ({self._account.bytes} bytes) wait for the log; "
                f"the limits are {self._account.limits.events} and {self._account.limits.bytes}",
                retry_after_s=self._retry_after_s,
            )
        waiting = _Waiting(entries, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._wake.set()
        try:
            return await waiting.done
        finally:
            self._account.release(len(entries), size)

    @property
    def healthy(self) -> bool:
        """False for a while after an append failed."""
        now = asyncio.get_running_loop().time()
        return self._failed_at is None or now - self._failed_at > HEALTHY_AGAIN_S

    def figures(self) -> dict[str, int]:
        """What waits, and what was done since the start."""
        return {
            "events_appended": self._done,
            "events_waiting": self._account.events,
            "bytes_waiting": self._account.bytes,
            "appends_failed": self._failed,
        }

    async def close(self, drain_s: float) -> int:
        """Append what waits, for at most `drain_s`; returns how many events were cut off (told 503)."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            _, pending = await asyncio.wait([self._task], timeout=drain_s)
            for task in pending:
                task.cancel()
        cut = sum(len(w.entries) for w in self._waiting)
        self._fail(self._waiting, Unavailable("the gateway stopped before this was written; send it again"))
        self._waiting = []
        self._thread.shutdown(wait=False)
        return cut

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._wait_s and not self._closing:
                await asyncio.sleep(self._wait_s)
            while self._waiting:
                await self._commit(self._next_batch())
            if self._closing:
                return

    def _next_batch(self) -> list[_Waiting]:
        events = 0
        for i, waiting in enumerate(self._waiting):
            events += len(waiting.entries)
            if events > self._batch_events and i:
                batch, self._waiting = self._waiting[:i], self._waiting[i:]
                return batch
        batch, self._waiting = self._waiting, []
        return batch

    async def _commit(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.appending = True
        try:
            offsets = await loop.run_in_executor(
                self._thread, self._append, [e for w in batch for e in w.entries]
            )
        except asyncio.CancelledError:
            self._fail(batch, Unavailable("the gateway stopped while this was being written; send it again"))
            raise
        except Exception as error:
            self._failed_at = loop.time()
            self._failures.inc()
            self._failed += 1
            self._fail(batch, error)
            return
        finally:
            self.appending = False
        self._failed_at = None
        self._seconds.observe(loop.time() - started)
        self._appended.inc(len(offsets))
        self._done += len(offsets)
        at = 0
        for waiting in batch:
            if not waiting.done.done():
                waiting.done.set_result(offsets[at : at + len(waiting.entries)])
            at += len(waiting.entries)

    def _append(self, entries: list[Entry]) -> list[int]:
        appends, places = group_entries(entries)
        return offsets_of(self._writer.append(appends), places)

    def _fail(self, batch: list[_Waiting], error: Exception) -> None:
        for waiting in batch:
            if not waiting.done.done():
                waiting.done.set_exception(error)
