"""Group commit: what requests hand in within a few milliseconds is appended together, in a thread.

A durable append costs about the same for one record as for a thousand; while one is under way the next
collects.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import structlog
from prometheus_client import CollectorRegistry

from freshet.errors import Overloaded, TooLarge, Unavailable
from freshet.gateway import metrics
from freshet.gateway.core import Limits, QueueAccount
from freshet.log import Writer
from freshet.log.concurrent_appends import append_gathered
from freshet.types import Append

__all__ = ["Committer", "Done"]

Done = Callable[[Sequence[int] | Exception], None]
"""Called once, on the loop: with the first offset of each append, all durable; or with why they are not known
to be."""

Check = Callable[[], None]
"""Looks at requests that were let in unseen, and submits what became of them. What it raises is logged, and
keeps no other from being looked at."""

logger = structlog.get_logger(__name__)

HEALTHY_AGAIN_S = 5.0
"""How long a failed append keeps us from being ready; then the next append decides."""


@dataclass(slots=True, eq=False)
class _Waiting:
    appends: Sequence[Append]
    events: int
    size: int  # bytes of records and keys
    done: Done


_Outcomes = Sequence[Sequence[int] | TooLarge]
"""Of each group of an append: the first offset of each of its appends, or why it was not written."""


class _Appending:
    """Appends one batch after the other, on a thread that the end of the process does not wait for: an append
    may hang as long as the log's own patience lasts."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._asked: queue.SimpleQueue[tuple[Sequence[Sequence[Append]], Future[_Outcomes]] | None]
        self._asked = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to append."""
        threading.Thread(target=self._run, name="commit", daemon=True).start()

    def append(self, groups: Sequence[Sequence[Append]]) -> Future[_Outcomes]:
        """Append these groups, one a client, after what was asked for before."""
        done: Future[_Outcomes] = Future()
        self._asked.put((groups, done))
        return done

    def end(self) -> None:
        """End the thread, once all is appended."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            groups, done = asked
            if not done.set_running_or_notify_cancel():
                continue  # the gateway has stopped meanwhile, and told so
            try:
                done.set_result(append_gathered(self._writer.append, groups))
            except BaseException as error:
                done.set_exception(error)


class Committer:
    """Appends in, offsets out, once they are durable. Lives on one event loop; appends on one thread."""

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
        self._wait_s, self._batch_events = wait_s, batch_events
        self._retry_after_s = retry_after_s
        self._account = QueueAccount(limits)
        self._waiting: list[_Waiting] = []
        self._under_way: list[_Waiting] = []  # in the append that has begun
        self._append: Future[_Outcomes] | None = None  # the last one
        self._checks: dict[Check, None] = {}  # in the order in which they came
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
        """Begin to append; on the running loop."""
        self._thread.start()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def expect(self, size: int, check: Check) -> None:
        """Let in a request of `size` bytes that is not looked at yet: until then it counts as one event.

        Args:
            check: called on the loop, once for all that expect it, just before the next append: it is to give
                back what was expected (`looked_at`) and submit what became of it.

        Raises:
            Overloaded: too much waits already.   Unavailable: the gateway is stopping.
        """
        self._let_in(1, size)
        self._checks[check] = None
        self._wake.set()

    def looked_at(self, requests: int, size: int) -> None:
        """So many expected requests, of so many bytes together, have been looked at."""
        self._account.release(requests, size)

    def submit(self, appends: Sequence[Append], *, events: int, size: int, done: Done) -> None:
        """Have these appended with whatever else is submitted meanwhile; `done` is called some turns of the
        loop later.

        Args:
            events: how many records they hold.   size: bytes of their records and keys.

        Raises:
            Overloaded: too much waits already.   Unavailable: the gateway is stopping.
            Nothing was taken then, and `done` is not called.
        """
        self._let_in(events, size)
        self._waiting.append(_Waiting(appends, events, size, done))
        self._wake.set()

    def _let_in(self, events: int, size: int) -> None:
        if self._closing:
            raise Unavailable("the gateway is stopping; nothing was written, send it again")
        if not self._account.take(events, size):
            raise Overloaded(
                f"{self._account.events} events ({self._account.bytes} bytes) wait for the log; "
                f"the limits are {self._account.limits.events} and {self._account.limits.bytes}",
                retry_after_s=self._retry_after_s,
            )

    @property
    def healthy(self) -> bool:
        """False for a while after an append failed, and for good if nothing is appended any more."""
        if self._task is not None and self._task.done() and not self._closing:
            return False
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

    async def close(self, drain_s: float, last_s: float = 0.0) -> int:
        """Append what waits, for at most `drain_s`; returns how many events were cut off (told 503).

        An append that is still under way then may come to be written all the same: it has `last_s` more, and
        `appending` says afterwards whether it is left to itself.
        """
        self._look()
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=drain_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        cut = sum(w.events for w in (*self._under_way, *self._waiting))
        self._fail(self._under_way, Unavailable("not known to be written, the gateway stops: send it again"))
        self._fail(self._waiting, Unavailable("the gateway stopped before this was written; send it again"))
        self._under_way, self._waiting = [], []
        self._thread.end()
        if self.appending and self._append is not None:
            with suppress(Exception):  # a time-out, or the append's own: it was told already
                await asyncio.wait_for(asyncio.wrap_future(self._append), last_s)
        return cut

    @property
    def appending(self) -> bool:
        """Whether an append is under way."""
        return self._append is not None and not self._append.done()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._wait_s and not self._closing:
                await asyncio.sleep(self._wait_s)
            self._look()
            while self._waiting:
                await self._commit(self._next_batch())
                self._look()
            if self._closing:
                return

    def _look(self) -> None:
        """Have what was let in unseen looked at: together, as late as it can be."""
        checks, self._checks = self._checks, {}
        for check in checks:
            try:
                check()
            except Exception as error:  # it is of one stream; the others' events wait, too
                logger.error("events could not be looked at", exc_info=error)

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
        started = perf_counter()  # the loop's own clock has milliseconds
        self._under_way = batch  # until it is told; if this is cancelled, `close` tells it
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
        except Exception as error:  # one request's answer must not keep the others from theirs
            logger.error("an answer could not be given", exc_info=error)
