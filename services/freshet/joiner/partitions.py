"""One life of a partition in a joiner, from its assignment until it is revoked or fails.

                 join                    recovered                  revoke
    (not here) ───────────► recovering ─────────────► running ─────────────────► (not here)
        ▲                       │                        │
        │   after a delay       │                        │
        └──────────────────── on_partition_failed ◄──────┘

Partitions that share a writer live together, as a `Group`. Recovery opens the writer first, which fences
earlier owners, and then rebuilds the tasks from the log (`replay`). A running group has at most one flush in
progress: one atomic append of the samples, dead letters and commits of its tasks. If an append is not known
to be written, the tasks are void and the log decides: the group fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event

import structlog

from freshet.errors import Fenced, FreshetError, Mismatch, Unavailable
from freshet.joiner.partition import Outputs, Task
from freshet.joiner.plan import JoinContext
from freshet.joiner.replay import load
from freshet.joiner.watermark import JoinerClocks
from freshet.log import Writer
from freshet.observability.spans import record_joined_samples
from freshet.types import Append, BytesColumn

_log = structlog.get_logger("freshet.joiner")

RECOVERIES_AT_ONCE = 8
APPENDS_AT_ONCE = 16

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Delays before a partition that cannot be joined is retried; each is twice the one before."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A partition that cannot be joined for a lasting reason."""

    error: FreshetError
    delay_s: float
    retry_at_s: float  # time of the next attempt, monotonic


class Flush:
    """The appends and commits of the tasks of one writer, written in one atomic append."""

    def __init__(self, tasks: Sequence[Task], dead_letters: str, now_ms: int) -> None:
        """Flush the tasks, which are void unless the appends are written.

        Args:
            tasks: of one writer.
            dead_letters: topic of their dead letters.
            now_ms: wall clock of the commits.
        """
        self.appends: list[Append] = []
        self._outputs: list[tuple[Task, Outputs, int]] = []  # with the index of the commit among the appends
        letters: list[bytes] = []
        for task in tasks:
            output = task.flush(now_ms)
            self.appends += output.appends
            letters += output.dead_letters
            self._outputs.append((task, output, len(self.appends) - 1))
        if letters:
            self.appends.append(Append(dead_letters, 0, BytesColumn.of(letters)))

    def record_appended(self, offsets: Sequence[int]) -> list[tuple[Task, Outputs]]:
        """Record in the tasks that the appends have these offsets; returns the tasks with their outputs."""
        for task, output, at in self._outputs:
            task.on_appended(output, int(offsets[at]))
            if output.joined:
                samples = at - len(output.appends) + 1  # index of the append of samples on time
                topic, where = task.topics.samples, task.topics.samples_partition(task.partition)
                record_joined_samples(output.joined, topic, where, int(offsets[samples]))
        return [(task, output) for task, output, _ in self._outputs]


@dataclass(frozen=True, slots=True)
class _Appending:
    """A flush that a thread appends."""

    flush: Flush
    offsets: Future[Sequence[int]]
    began_s: float  # monotonic


@dataclass(slots=True, eq=False)
class Group:
    """Partitions that share a writer. Recovering while `recovery` is set, else running."""

    partitions: tuple[int, ...]
    recovery: Future[None] | None = None
    revoked: Event = field(default_factory=Event)  # ends a recovery that is not needed any more
    writer: Writer | None = None
    tasks: list[Task] = field(default_factory=list)
    appending: _Appending | None = None  # the flush in progress


class Partitions:
    """Partitions of one joiner. Used by one thread; recoveries and appends run on threads beside it."""

    def __init__(
        self,
        context: JoinContext,
        clocks: JoinerClocks,
        *,
        shared: bool,
        stopping: Callable[[], bool],
        on_change: Callable[[], None],
        on_flushed: Callable[[Task, Outputs], None],
    ) -> None:
        """Join nothing yet.

        Args:
            context: log and topics; rebuilds tasks and opens writers.
            clocks: of the commits.
            shared: whether a partition may fail alone, as joiners share them.
            stopping: whether the process stops, which ends recoveries.
            on_change: called when partitions have begun or ended to run.
            on_flushed: called with each task that was flushed, once its outputs are written.
        """
        self._context, self._clocks, self._shared = context, clocks, shared
        self._stopping, self._on_change, self._on_flushed = stopping, on_change, on_flushed
        self.tasks: dict[int, Task] = {}  # running partitions
        self.failed: dict[int, Failed] = {}  # with a lasting reason; until an append, though it may run again
        self.ended_events = 0  # read here, of partitions that run here no more
        self._groups: list[Group] = []
        self._recoveries: ThreadPoolExecutor | None = None
        self._appends: ThreadPoolExecutor | None = None

    @property
    def running(self) -> list[Group]:
        """Groups that join records."""
        return [group for group in self._groups if group.recovery is None]

    @property
    def recovering(self) -> set[int]:
        """Partitions in recovery that were not revoked."""
        groups = [g for g in self._groups if g.recovery is not None and not g.revoked.is_set()]
        return {p for group in groups for p in group.partitions}

    def missing_of(self, assigned: Iterable[int]) -> list[int]:
        """Return assigned partitions to join: neither here, nor waiting for a retry."""
        now_s = self._context.clock.monotonic()
        here = self.tasks.keys() | self.recovering
        here |= {p for p, failed in self.failed.items() if now_s < failed.retry_at_s}
        return [p for p in assigned if p not in here]

    def join(self, partitions: Sequence[int], *, waiting: bool = False) -> None:
        """Begin to recover partitions; `waiting`: until they run. Raises as `add_recovered` does."""
        if self._recoveries is None:
            self._recoveries = ThreadPoolExecutor(RECOVERIES_AT_ONCE, thread_name_prefix="joiner-recovery")
        for members in self._context.groups(partitions) if partitions else ():
            group = Group(members)
            group.recovery = self._recoveries.submit(self._recover, group)
            self._groups.append(group)
        if waiting:
            self.add_recovered(waiting=True)

    def _recover(self, group: Group) -> None:
        """Open the group's writer, then rebuild its tasks; on a thread."""
        if group.revoked.is_set():
            raise Unavailable("another process was assigned the partitions before their recovery began")
        writer = self._context.writer_of(group.partitions)
        try:
            group.tasks = [
                load(self._context, p, lambda: group.revoked.is_set() or self._stopping())
                for p in group.partitions
            ]
        except BaseException:
            writer.close()
            raise
        group.writer = writer

    def add_recovered(self, *, waiting: bool = False) -> None:
        """Run the partitions that are recovered; `waiting` waits for all.

        Raises the error of a failed recovery, unless it is of a shared partition and may be retried.
        """
        recovering = [group for group in self._groups if group.recovery is not None]
        if waiting:
            wait([group.recovery for group in recovering if group.recovery is not None])
        failed: dict[int, FreshetError] = {}
        has_new = False
        for group in recovering:
            if group.recovery is None or not group.recovery.done():
                continue
            error, group.recovery = group.recovery.exception(), None
            if group.revoked.is_set() or error is not None:
                self._end(group)
            else:
                has_new = True
                self.tasks |= {task.partition: task for task in group.tasks}
                for task in group.tasks:
                    if task.clock is not None:
                        self._clocks.steady.resume(task.clock)
            if error is not None and not group.revoked.is_set():
                if not isinstance(error, FreshetError):
                    raise error
                failed |= dict.fromkeys(group.partitions, error)
        if has_new:
            self._on_change()
        self.on_partition_failed(failed)

    def revoke(self, partitions: Collection[int]) -> None:
        """Commit partitions that go to another process, if this one still owns them, and drop them."""
        for group in self._groups:
            if group.recovery is not None and not set(partitions).isdisjoint(group.partitions):
                group.revoked.set()
        here = [p for p in partitions if p in self.tasks]
        self.complete_flushes(here)
        self.begin_flushes(commit_all=True, only=here)
        self.complete_flushes(here)
        self._drop(here)
        for partition in partitions:
            self.failed.pop(partition, None)

    def on_partition_failed(self, errors: Mapping[int, FreshetError]) -> None:
        """Drop partitions with a failed recovery or append.

        A shared partition fails alone: the next assignment recovers it if this process still owns it, after a
        delay if a retry may not help, as when the log's record limit was lowered. Raises the error if
        partitions are not shared, or if the log's named writers are not exact (Mismatch).
        """
        for partition, error in errors.items():
            if not self._shared or isinstance(error, Mismatch):
                raise error
            if isinstance(error, Fenced | Unavailable):
                _log.warning("a partition is dropped", partition=partition, reason=str(error))
                continue
            before = self.failed.get(partition)
            delay_s = min(2 * before.delay_s, LONGEST_DELAY_S) if before is not None else FIRST_DELAY_S
            self.failed[partition] = Failed(error, delay_s, self._context.clock.monotonic() + delay_s)
            _log.error(
                "a partition cannot be joined and is retried; the others go on",
                partition=partition,
                reason=str(error),
                again_in_s=delay_s,
            )
        self._drop(errors)

    def _drop(self, partitions: Collection[int]) -> None:
        """End the running groups of these partitions."""
        ending = [group for group in self.running if not set(partitions).isdisjoint(group.partitions)]
        for group in ending:
            self._end(group)
        if ending:
            self._on_change()

    def _end(self, group: Group) -> None:
        self._groups.remove(group)
        for task in group.tasks:
            if self.tasks.get(task.partition) is task:
                self.ended_events += self.tasks.pop(task.partition).events
        if group.writer is not None:
            group.writer.close()

    # -- flushes

    def begin_flushes(self, *, commit_all: bool, only: Collection[int] | None = None) -> bool:
        """Flush tasks with output, except groups with a flush in progress.

        Args:
            commit_all: commit tasks without output, too, that have read records.
            only: partitions to flush, with those that share their writer; None: all.

        Returns whether a flush has begun or is in progress.
        """
        begun: list[tuple[Group, Flush]] = []
        for group in self.running:
            if only is not None and set(only).isdisjoint(group.partitions):
                continue
            ready = [t for t in group.tasks if t.has_output or (commit_all and t.has_progress)]
            if ready and group.appending is None:
                for task in ready:
                    task.clock = self._clocks.steady.state
                now_ms = self._clocks.steady.now_ms()
                begun.append((group, Flush(ready, self._context.topics.dead_letters, now_ms)))
        for group, flush in begun:
            assert group.writer is not None, "a running group has a writer"
            if self._context.all_partitions:  # a thread gains nothing with one writer
                self._record_appended(flush, group.writer.append(flush.appends))
            else:
                offsets = self._append_threads().submit(group.writer.append, flush.appends)
                group.appending = _Appending(flush, offsets, self._context.clock.monotonic())
        return bool(begun) or any(group.appending is not None for group in self.running)

    def _append_threads(self) -> ThreadPoolExecutor:
        """Return threads for appends, which mostly wait for brokers; the tasks can join meanwhile."""
        if self._appends is None:
            self._appends = ThreadPoolExecutor(APPENDS_AT_ONCE, thread_name_prefix="joiner-append")
        return self._appends

    def complete_flushes(self, waiting_for: Collection[int] = ()) -> None:
        """Complete finished flushes, after waiting for those of some partitions.

        Raises the error of a failed append, unless it is of a shared partition and may be retried.
        """
        appending = [(group, group.appending) for group in self.running if group.appending is not None]
        wanted = set(waiting_for)
        wait([one.offsets for group, one in appending if not wanted.isdisjoint(group.partitions)])
        failed: dict[int, FreshetError] = {}
        for group, one in appending:
            if not one.offsets.done():
                continue
            group.appending = None
            try:
                self._record_appended(one.flush, one.offsets.result())
            except FreshetError as error:
                failed |= dict.fromkeys(group.partitions, error)
        self.on_partition_failed(failed)

    def _record_appended(self, flush: Flush, offsets: Sequence[int]) -> None:
        for task, output in flush.record_appended(offsets):
            self.failed.pop(task.partition, None)
            self._on_flushed(task, output)

    def appending_since(self, began_s: float) -> set[int]:
        """Return the partitions of flushes in progress that began before an instant, monotonic."""
        slow = [g for g in self.running if g.appending is not None and g.appending.began_s < began_s]
        return {p for group in slow for p in group.partitions}

    def close(self) -> None:
        """Cancel recoveries, wait for flushes in progress, and close writers. Idempotent."""
        for group in self._groups:
            group.revoked.set()
        for threads in (self._recoveries, self._appends):
            if threads is not None:
                threads.shutdown()
        self._recoveries = self._appends = None
        for group in list(self._groups):
            self._end(group)
