"""Group commit: one append for the events of all requests that arrive within a few milliseconds.

A durable append costs about the same for one record as for a thousand. A thread appends in turns: requests
that arrive during a turn form the next. Events of a request, or of all requests of a turn to one partition,
are a group that the log answers by itself. A turn ends once all its groups are answered, or after `TURN_S`:
then the answers of slow partitions are still outstanding while the next turns begin, which do not wait for
these partitions.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from freshet.errors import Overloaded, TooLarge, Unavailable
from freshet.gateway import metrics
from freshet.log import GroupOutcome, GroupWriter
from freshet.types import Append, BytesColumn, TopicPartition

Done = Callable[[Sequence[GroupOutcome | None]], None]
"""Called on the loop when groups have been answered, with the outcome of each group; None: outstanding."""

Check = Callable[[], None]
"""Validates queued requests and submits their events. An exception is logged; other checks run."""

logger = structlog.get_logger(__name__)

HEALTHY_AGAIN_S = 5.0
"""Seconds for which a failed append makes the gateway unready."""

TURN_S = 0.02
"""Longest wait for the answers of a turn before the next turn begins."""

_STEP_S = 0.005
"""Interval at which the thread sees that a turn is answered, or that one waits, while earlier groups are
outstanding."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record to append."""

    topic: str
    partition: int
    key: bytes
    value: bytes


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
class _Group:
    appends: Sequence[Append]
    events: int
    size: int  # bytes of records and keys
    submitted: _Submitted
    place: int  # in `submitted`
    started: float = 0.0  # of its turn, by time.perf_counter

    def partitions(self) -> set[TopicPartition]:
        """Return the partitions of its records."""
        return {TopicPartition(append.topic, append.partition) for append in self.appends}


@dataclass(slots=True, eq=False)
class _Submitted:
    """The groups of one call of `submit`."""

    done: Done
    events: int
    groups: list[_Group]
    outcomes: list[GroupOutcome | None]


_Answers = list[tuple[_Group, GroupOutcome]]


class _Appending:
    """Appends groups in turns, on a daemon thread.

    The process does not wait for the thread at its end, as an append may block until the log's time-out.
    """

    def __init__(self, writer: GroupWriter) -> None:
        self._writer = writer
        self._turns: queue.SimpleQueue[Sequence[_Group] | None] = queue.SimpleQueue()
        self._ended = False  # groups that are still queued are not appended
        self._turn: set[_Group] = set()  # this turn's groups without an answer
        self._earlier: dict[_Group, set[TopicPartition]] = {}  # groups that no turn waits for; and where
        self._slow: Counter[TopicPartition] = Counter()  # partitions of these groups
        self._answers: _Answers = []

    def start(self, answer: Callable[[_Answers, bool], None]) -> None:
        """Start the thread. `answer` is called on the running loop: new answers, and whether a turn ended."""
        loop = asyncio.get_running_loop()

        def deliver(turn_ended: bool) -> None:
            if turn_ended or self._answers:
                answers, self._answers = self._answers, []
                try:
                    loop.call_soon_threadsafe(answer, answers, turn_ended)
                except RuntimeError:  # the loop was closed: the gateway has stopped
                    self._ended = True
                    self._earlier.clear()
                    self._slow.clear()

        threading.Thread(target=self._run, args=(deliver,), name="commit", daemon=True).start()

    def append(self, groups: Sequence[_Group]) -> None:
        """Queue the groups of the next turn."""
        self._turns.put(groups)

    def end(self) -> None:
        """End the thread once all groups of turns that have begun are answered."""
        self._ended = True
        self._turns.put(None)

    def _run(self, deliver: Callable[[bool], None]) -> None:
        while self._earlier or not self._ended or not self._turns.empty():
            try:
                groups = self._turns.get(timeout=_STEP_S if self._earlier else None)
            except queue.Empty:
                self._wait(_STEP_S)
                deliver(False)
                continue
            if groups is not None:
                self._append(groups)
                deliver(True)

    def _append(self, groups: Sequence[_Group]) -> None:
        """Run a turn."""
        if self._ended:  # the gateway has answered them
            error = Unavailable("the gateway stopped before this was written; send it again")
            self._answers += ((group, error) for group in groups)
            return
        ends = time.monotonic() + TURN_S
        self._turn.update(groups)
        try:
            self._writer.append(
                [group.appends for group in groups], partial(self._answered, dict(enumerate(groups)))
            )
        except Exception as error:
            self._end_groups([*self._turn], error)
        if self._slow:
            self._set_aside([group for group in self._turn if group.partitions() & self._slow.keys()])
            self._wait(_STEP_S)  # a turn of such groups alone must take answers, too
        while self._turn and time.monotonic() < ends:
            self._wait(_STEP_S)
        self._set_aside([*self._turn])
        for group in groups:
            group.appends = ()  # the writer has what it needs

    def _set_aside(self, groups: Iterable[_Group]) -> None:
        """Go on without the answers of these groups."""
        for group in groups:
            self._turn.remove(group)
            self._earlier[group] = group.partitions()
            self._slow.update(self._earlier[group])

    def _wait(self, within_s: float) -> None:
        try:
            self._writer.wait(within_s)
        except Exception as error:
            self._end_groups([*self._turn, *self._earlier], error)

    def _answered(self, unanswered: dict[int, _Group], index: int, outcome: GroupOutcome) -> None:
        group = unanswered.pop(index, None)
        if group is not None and (group in self._turn or group in self._earlier):
            self._end_groups([group], outcome)

    def _end_groups(self, groups: Iterable[_Group], outcome: GroupOutcome) -> None:
        for group in groups:
            self._answers.append((group, outcome))
            self._turn.discard(group)
            for partition in self._earlier.pop(group, ()):
                self._slow[partition] -= 1
                if not self._slow[partition]:
                    del self._slow[partition]


class Committer:
    """Queues appends and reports their offsets once durable. Methods run on one event loop."""

    def __init__(
        self,
        writer: GroupWriter,
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
        self._waiting: list[_Submitted] = []
        self._under_way: dict[_Group, None] = {}  # handed to the thread, without an answer
        self._turn_ended = asyncio.Event()
        self._checks: dict[Check, None] = {}  # an ordered set
        self._wake = asyncio.Event()
        self._closing = self._closed = False
        self._failed_at: float | None = None
        self._succeeded_at = float("-inf")  # by time.perf_counter
        self._done = self._failed = 0
        self._thread = _Appending(writer)
        self._task: asyncio.Task[None] | None = None
        metrics.QUEUED.gauge(registry, lambda: self._account.events)
        self._appended = metrics.APPENDED.counter(registry)
        self._failures = metrics.APPEND_FAILURES.counter(registry)
        self._seconds = metrics.APPEND_SECONDS.histogram(registry)

    def start(self) -> None:
        """Start the thread, and the task on the running loop."""
        self._thread.start(self._answer)
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

    def submit(self, groups: Sequence[Sequence[Append]], done: Done) -> None:
        """Queue groups of records, which the log answers one by one.

        Args:
            groups: at least one.
            done: called in later iterations of the loop, until no group is outstanding; not at all if this
                raises.

        Raises:
            Overloaded: the queue is full.   Unavailable: the gateway is stopping.
        """
        submitted = _Submitted(done, 0, [], [None] * len(groups))
        size = 0
        for place, appends in enumerate(groups):
            group = _Group(appends, 0, 0, submitted, place)
            for append in appends:
                group.events += len(append.values.ends)
                group.size += len(append.values.data) + (0 if append.keys is None else len(append.keys.data))
            submitted.groups.append(group)
            submitted.events += group.events
            size += group.size
        self._reserve(submitted.events, size)
        self._waiting.append(submitted)
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
        """False for `HEALTHY_AGAIN_S` after a failed append, unless another succeeded since it began.

        False for ever once the task has failed.
        """
        if self._task is not None and self._task.done() and not self._closing:
            return False
        return self._failed_at is None or time.perf_counter() - self._failed_at > HEALTHY_AGAIN_S

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

        Groups that have no answer by then have `last_s` more and may still be written. If `appending` is true
        afterwards, the writer is still in use.
        """
        self._run_checks()
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=drain_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._closed = True
        unknown = Unavailable("not known to be written, the gateway stops: send it again")
        unwritten = Unavailable("the gateway stopped before this was written; send it again")
        under_way, waiting, self._waiting = list(self._under_way), self._waiting, []
        queued = [group for submitted in waiting for group in submitted.groups]
        self._finish([*((group, unknown) for group in under_way), *((group, unwritten) for group in queued)])
        self._thread.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(last_s):
                while self.appending:
                    self._turn_ended.clear()
                    await self._turn_ended.wait()
        return sum(group.events for group in (*under_way, *queued))

    @property
    def appending(self) -> bool:
        """Whether the log has not answered all groups that were handed to its writer."""
        return bool(self._under_way)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._wait_s and not self._closing:
                await asyncio.sleep(self._wait_s)
            self._run_checks()
            while self._waiting:
                await self._append(self._next_batch())
                self._run_checks()
            if self._closing and not self._under_way:
                return

    def _run_checks(self) -> None:
        """Validate all queued requests in one batch, just before the append."""
        checks, self._checks = self._checks, {}
        for check in checks:
            try:
                check()
            except Exception as error:  # events of other streams wait too
                logger.error("events could not be validated", exc_info=error)

    def _next_batch(self) -> list[_Submitted]:
        events = 0
        for i, submitted in enumerate(self._waiting):
            events += submitted.events
            if events > self._batch_events and i:
                batch, self._waiting = self._waiting[:i], self._waiting[i:]
                return batch
        batch, self._waiting = self._waiting, []
        return batch

    async def _append(self, batch: Sequence[_Submitted]) -> None:
        """Run a turn of the thread."""
        groups = [group for submitted in batch for group in submitted.groups]
        started = time.perf_counter()  # the loop's clock may have a resolution of milliseconds
        for group in groups:
            group.started = started
            self._under_way[group] = None
        self._turn_ended.clear()
        self._thread.append(groups)
        await self._turn_ended.wait()

    def _answer(self, answers: _Answers, turn_ended: bool) -> None:
        """Count the outcomes of groups and pass them on."""
        for group, _ in answers:
            del self._under_way[group]
        if not self._closed:  # otherwise `close` has answered them
            self._count(answers)
            self._finish(answers)
        if turn_ended or self._closed:
            self._turn_ended.set()
        if self._closing:
            self._wake.set()

    def _count(self, answers: _Answers) -> None:
        now, events, begun = time.perf_counter(), 0, set[float]()
        for group, outcome in answers:
            if not isinstance(outcome, Exception):
                events += group.events
                begun.add(group.started)
            elif not isinstance(outcome, TooLarge):
                self._failures.inc()
                self._failed += 1
                if self._succeeded_at < group.started:
                    self._failed_at = now
        for started in begun:
            self._seconds.observe(now - started)
        if begun:
            self._succeeded_at, self._failed_at = now, None
            self._appended.inc(events)
            self._done += events

    def _finish(self, answers: _Answers) -> None:
        """Release the reservations of groups, and answer their requests."""
        changed: dict[_Submitted, None] = {}
        for group, outcome in answers:
            self._account.release(group.events, group.size)
            group.submitted.outcomes[group.place] = outcome
            changed[group.submitted] = None
        for submitted in changed:
            try:
                submitted.done(submitted.outcomes)
            except Exception as error:  # other requests must be answered
                logger.error("a request could not be answered", exc_info=error)
