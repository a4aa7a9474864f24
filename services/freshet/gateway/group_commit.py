"""Group commit: one append for the events of all requests that arrive within a few milliseconds.

A durable append costs about the same for one record as for a thousand. Appends run in a thread, one at a
time; requests that arrive meanwhile form the next.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import structlog
from prometheus_client import CollectorRegistry

from freshet.errors import Overloaded, TooLarge, Unavailable
from freshet.gateway import metrics
from freshet.log import Writer
from freshet.log.records import append_gathered
from freshet.types import Append, BytesColumn

Done = Callable[[Sequence[int] | Exception], None]
"""Called once, on the loop, with the first offset of each durable append, or with the error."""

Check = Callable[[], None]
"""Validates queued requests and submits their events. An exception is logged; other checks run."""

logger = structlog.get_logger(__name__)

HEALTHY_AGAIN_S = 5.0
"""Seconds for which a failed append makes the gateway unready."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record to append."""

    topic: str
    partition: int
    key: bytes
    value: bytes

    @property
    def size(self) -> int:
        """Bytes that count against the queue's limit."""
        return len(self.key) + len(self.value)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue before the log."""

    events: int
    bytes: int


@dataclass(slots=True)
class QueueAccount:
    """Events and bytes that wait for the log's acknowledgement, within limits."""

    limits: QueueLimits
    events: int = 0
    bytes: int = 0

    def reserve(self, events: int, size: int) -> bool:
        """Add events and bytes; False, without a change, if a limit is exceeded. An empty queue has none."""
        if self.events and (
            self.events + events > self.limits.events or self.bytes + size > self.limits.bytes
        ):
            return False
        self.events += events
        self.bytes += size
        return True

    def release(self, events: int, size: int) -> None:
        """Subtract events and bytes that were reserved."""
        self.events -= events
        self.bytes -= size


def group_entries(entries: Sequence[Entry]) -> tuple[list[Append], list[tuple[int, int]]]:
    """Group entries into one append per partition, in order.

    Returns the appends, and (append, position in it) of each entry.
    """
    members: dict[tuple[str, int], list[Entry]] = {}
    order: dict[tuple[str, int], int] = {}
    places: list[tuple[int, int]] = []
    for entry in entries:
        where = (entry.topic, entry.partition)
        list_ = members.setdefault(where, [])
        places.append((order.setdefault(where, len(order)), len(list_)))
        list_.append(entry)
    appends = [
        Append(topic, partition, BytesColumn.of(e.value for e in group), BytesColumn.of(e.key for e in group))
        for (topic, partition), group in members.items()
    ]
    return appends, places


def offsets_of(first: Sequence[int], places: Iterable[tuple[int, int]]) -> list[int]:
    """Return the offset of each entry, given the first offset of each append."""
    return [first[append] + position for append, position in places]


@dataclass(slots=True, eq=False)
class _Waiting:
    appends: Sequence[Append]
    events: int
    size: int  # bytes of records and keys
    done: Done


_Outcomes = Sequence[Sequence[int] | TooLarge]
"""For each group: the first offset of each of its appends, or the reason why not all of it was written."""


class _Appending:
    """Appends batches one at a time on a daemon thread.

    The process does not wait for the thread at its end, as an append may block until the log's time-out.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._jobs: queue.SimpleQueue[tuple[Sequence[Sequence[Append]], Future[_Outcomes]] | None]
        self._jobs = queue.SimpleQueue()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="commit", daemon=True).start()

    def append(self, groups: Sequence[Sequence[Append]]) -> Future[_Outcomes]:
        """Queue the appends of several requests, one group each."""
        done: Future[_Outcomes] = Future()
        self._jobs.put((groups, done))
        return done

    def end(self) -> None:
        """End the thread after the queued appends."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            groups, done = job
            if not done.set_running_or_notify_cancel():
                continue  # the gateway has stopped and has answered these requests
            try:
                done.set_result(append_gathered(self._writer.append, groups))
            except BaseException as error:  # the request raises it
                done.set_exception(error)


class Committer:
    """Queues appends and reports their offsets once durable. Methods run on one event loop."""

    def __init__(
        self,
        writer: Writer,
        limits: QueueLimits,
        registry: CollectorRegistry,
        *,
        wait_s: float,
        batch_events: int,
        retry_after_s: float = 1.0,
    ) -> None:
        self._wait_s, self._batch_events = wait_s, batch_events
        self._retry_after_s = retry_after_s
        self._account = QueueAccount(limits)
        self._waiting: list[_Waiting] = []
        self._under_way: list[_Waiting] = []  # in the current append
        self._append: Future[_Outcomes] | None = None  # the newest
        self._checks: dict[Check, None] = {}  # an ordered set
        self._wake = asyncio.Event()
        self._closing = False
        self._failed_at: float | None = None
        self._done = self._failed = 0
        self._thread = _Appending(writer)
        self._task: asyncio.Task[None] | None = None
        metrics.QUEUED.gauge(registry, lambda: self._account.events)
        self._appended = metrics.APPENDED.counter(registry)
        self._failures = metrics.APPEND_FAILURES.counter(registry)
        self._seconds = metrics.APPEND_SECONDS.histogram(registry)

    def start(self) -> None:
        """Start the thread, and the task on the running loop."""
        self._thread.start()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def reserve_unchecked(self, size: int, check: Check) -> None:
        """Reserve one event and `size` bytes for a request that is not validated yet.

        Args:
            check: called once on the loop for all its requests, just before the next append. It must call
                `release_unchecked` for them and submit their events.

        Raises:
            Overloaded: the queue is full.   Unavailable: the gateway is stopping.
        """
        self._reserve(1, size)
        self._checks[check] = None
        self._wake.set()

    def release_unchecked(self, requests: int, size: int) -> None:
        """Release the reservations of requests that have `size` bytes together."""
        self._account.release(requests, size)

    def submit(self, appends: Sequence[Append], *, events: int, size: int, done: Done) -> None:
        """Queue appends; `done` is called in a later iteration of the loop, or not at all if this raises.

        Args:
            events: number of their records.   size: bytes of their records and keys.

        Raises:
            Overloaded: the queue is full.   Unavailable: the gateway is stopping.
        """
        self._reserve(events, size)
        self._waiting.append(_Waiting(appends, events, size, done))
        self._wake.set()

    def _reserve(self, events: int, size: int) -> None:
        if self._closing:
            raise Unavailable("the gateway is stopping; nothing was written, send it again")
        if not self._account.reserve(events, size):
            raise Overloaded(
                f"{self._account.events} events ({self._account.bytes} bytes) wait for the log; "
                f"the limits are {self._account.limits.events} and {self._account.limits.bytes}",
                retry_after_s=self._retry_after_s,
            )

    @property
    def healthy(self) -> bool:
        """False for `HEALTHY_AGAIN_S` after a failed append, and for ever once the task has failed."""
        if self._task is not None and self._task.done() and not self._closing:
            return False
        now = asyncio.get_running_loop().time()
        return self._failed_at is None or now - self._failed_at > HEALTHY_AGAIN_S

    def figures(self) -> dict[str, int]:
        """Return figures of the queue, and counts since the start, for `/status`."""
        return {
            "events_appended": self._done,
            "events_waiting": self._account.events,
            "bytes_waiting": self._account.bytes,
            "appends_failed": self._failed,
        }

    async def close(self, drain_s: float, last_s: float = 0.0) -> int:
        """Append queued events for at most `drain_s`; return the number of events answered with 503.

        An append that has begun by then has `last_s` more and may still be written. If `appending` is true
        afterwards, the append still runs.
        """
        self._run_checks()
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=drain_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        failed = sum(w.events for w in (*self._under_way, *self._waiting))
        self._fail(self._under_way, Unavailable("not known to be written, the gateway stops: send it again"))
        self._fail(self._waiting, Unavailable("the gateway stopped before this was written; send it again"))
        self._under_way, self._waiting = [], []
        self._thread.end()
        if self.appending and self._append is not None:
            with suppress(Exception):  # a time-out, or the append's own error: requests are answered
                await asyncio.wait_for(asyncio.wrap_future(self._append), last_s)
        return failed

    @property
    def appending(self) -> bool:
        """Whether an append runs."""
        return self._append is not None and not self._append.done()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._wait_s and not self._closing:
                await asyncio.sleep(self._wait_s)
            self._run_checks()
            while self._waiting:
                await self._commit(self._next_batch())
                self._run_checks()
            if self._closing:
                return

    def _run_checks(self) -> None:
        """Validate all queued requests in one batch, just before the append."""
        checks, self._checks = self._checks, {}
        for check in checks:
            try:
                check()
            except Exception as error:  # events of other streams wait too
                logger.error("events could not be validated", exc_info=error)

    def _next_batch(self) -> list[_Waiting]:
        events = 0
        for i, waiting in enumerate(self._waiting):
            events += waiting.events
            if events > self._batch_events and i:
                batch, self._waiting = self._waiting[:i], self._waiting[i:]
                return batch
        batch, self._waiting = self._waiting, []
        return batch

    async def _commit(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        started = perf_counter()  # the loop's clock may have a resolution of milliseconds
        self._under_way = batch  # if this is cancelled, `close` answers the batch
        self._append = self._thread.append([waiting.appends for waiting in batch])
        try:
            outcomes = await asyncio.wrap_future(self._append)
        except Exception as error:
            self._under_way = []
            self._failed_at = loop.time()
            self._failures.inc()
            self._failed += 1
            self._fail(batch, error)
            return
        self._under_way = []
        self._failed_at = None
        self._seconds.observe(perf_counter() - started)
        events = 0
        for waiting, outcome in zip(batch, outcomes, strict=True):
            events += 0 if isinstance(outcome, TooLarge) else waiting.events
        self._appended.inc(events)
        self._done += events
        for waiting, outcome in zip(batch, outcomes, strict=True):
            self._finish(waiting, outcome)

    def _fail(self, batch: list[_Waiting], error: Exception) -> None:
        for waiting in batch:
            self._finish(waiting, error)

    def _finish(self, waiting: _Waiting, outcome: Sequence[int] | Exception) -> None:
        self._account.release(waiting.events, waiting.size)
        try:
            waiting.done(outcome)
        except Exception as error:  # other requests must be answered
            logger.error("a request could not be answered", exc_info=error)
