"""Joiner service: reads events, flushes decided samples and commits, on one thread for all partitions of the
process.

Where each partition has a writer of its own, appends and partition recovery run on threads beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import structlog

from freshet.clock import CONFIRMED_S, SYSTEM_CLOCK, Clock, SteadyClock
from freshet.coordination.assignment import PartitionAssignment
from freshet.coordination.claims import LEASE_S
from freshet.errors import ConfigError, Fenced, FreshetError, Mismatch, Unavailable
from freshet.joiner.appends import Flush, PendingFlushes
from freshet.joiner.counters import EventCounts
from freshet.joiner.decode import Disputed, EventDecoder, RefusalStreaks
from freshet.joiner.ledger import Ledger
from freshet.joiner.partition import Task, Topics, pieces
from freshet.joiner.partitioners import PartitionerDetector
from freshet.joiner.plan import Growth, JoinPlan
from freshet.joiner.replay import PartitionRecovery, RecoveredGroup, load
from freshet.joiner.watermark import Now
from freshet.log import EventLog, Reader, Writer
from freshet.observability.losses import JOINER_FIGURES, RECENT_S, Recent, counted
from freshet.process.lifecycle import Pulse
from freshet.types import Records, TopicPartition

__all__ = ["JoinerService", "JoinerStatus", "Pace"]

_log = structlog.get_logger("freshet.joiner")

_LONGEST_PAUSE_S = 60.0
"""Longest delay before a partition that cannot be joined is retried."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals of the loop; `pace_of` chooses them for a log."""

    flush_interval_ms: int = 20  # longest wait of a decided sample for its block
    commit_interval_ms: int = 200  # longest time between commits while events come
    end_check_interval_ms: int = 100  # between checks of the topics' ends
    pin_interval_ms: int = 10_000  # between updates of the retention pins
    status_interval_ms: int = 500
    assignment_interval_ms: int = 100  # between checks of the partition assignment
    poll_records: int = 16_384
    count_interval_ms: int = 2_000  # between counts of the inputs' partitions, where they may grow
    slow_append_ms: int = 1000  # an append that takes longer pauses reading, which bounds the next one
    retry_ms: int = 500  # delay after the log, or a source of schemas, could not be reached


@dataclass(frozen=True, slots=True)
class JoinerStatus:
    """Figures of the joiner, for metrics and `freshet status`."""

    events: int  # read by this process
    samples: int  # appended by this process
    commits: int
    newest_ms: int | None  # newest event time of these samples; None: none were appended
    watermark_ms: Mapping[int, int | None]  # partition -> W
    lag: Mapping[int, int]  # partition -> unread input records at the last check
    room: Mapping[int, int]  # partition -> input records between the log's start and the start of a replay
    payload_bytes: int
    ids: int
    ledger: Ledger  # of all partitions of this process, since the model began
    counts: EventCounts  # by this process
    growth: Growth = field(default_factory=lambda: Growth(0, 0, {}))  # partitions of the inputs
    losses: Mapping[str, Any] = field(default_factory=dict)  # as `_losses` makes it
    placing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # see `PartitionerDetector`
    trouble: str | None = None  # why events of a stream, or a partition, are not joined
    bad_times: Mapping[str, str] = field(default_factory=dict)  # stream -> the first event with a wrong time
    now_ms: int = 0  # the time that is known to be right
    clock_step_ms: int = 0  # difference of the wall clock since it was set; 0: it runs evenly
    disputed_ms: Mapping[int, int] = field(default_factory=dict)  # partition -> its disputed event's lead


@dataclass(slots=True)
class _DisputedPartition:
    """A partition of a topic that is not read, as clocks disagree on its next record."""

    disputed: Disputed
    since_s: float  # monotonic
    unconfirmed: bool = False  # no later record confirmed the log's time, which therefore no longer counts


_UNCONFIRMED_S = 5 * CONFIRMED_S
"""Time after which the log's time of a record does not count if no later record confirms it."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A partition that cannot be joined for a lasting reason."""

    error: FreshetError
    delay_s: float
    retry_at_s: float  # time of the next attempt, monotonic


@dataclass(slots=True)
class JoinerService:
    """Joins partitions of a model. `run` returns when `stop` is set, or at the end of the streams on request.

    At most one process may own a partition at a time; a later one fences the earlier, whose appends then
    fail. This alone keeps samples exact: state is rebuilt from the log after the writer was opened, so an
    earlier owner cannot append any more. Claims (`assignment`) only decide which process should open the
    writer.

    One writer may span all partitions (`all_partitions`), which is cheapest where one process always has them
    all. Where partitions move, each has a writer of its own, named after it (ARCHITECTURE.md has the
    reasons).
    """

    log: EventLog
    model: str
    plan: JoinPlan
    topics: Topics
    decoder: Callable[[], EventDecoder]  # makes a decoder; each partition has its own
    partitions: Sequence[int]
    all_partitions: bool = True
    watches_growth: bool = False  # whether to join new partitions of the inputs, once all inputs have them
    assignment: PartitionAssignment | None = None  # None: this process has all `partitions`
    clock: Clock = SYSTEM_CLOCK
    pace: Pace = field(default_factory=Pace)
    stop: Event = field(default_factory=Event)
    on_status: Callable[[JoinerStatus], None] | None = None
    pulse: Pulse = field(default_factory=Pulse)
    status: JoinerStatus | None = None
    tasks: dict[int, Task] = field(default_factory=dict)
    _writers: list[tuple[Writer, tuple[int, ...]]] = field(default_factory=list)
    _reader: Reader | None = None
    _recovery: PartitionRecovery = field(init=False)
    _flushes: PendingFlushes = field(default_factory=PendingFlushes)
    _roles: dict[str, str] = field(default_factory=dict)
    append_time: bool = True  # whether the log's time is its own, not the writers' (Kafka's CreateTime)
    _steady: SteadyClock | None = None
    _bad_times: dict[str, str] = field(default_factory=dict)  # role -> the first event with a wrong time
    _history: bool = False  # whether to join up to the log's end, with the log's time as the only one
    _disputed: dict[TopicPartition, _DisputedPartition] = field(default_factory=dict)
    _paused: set[TopicPartition] = field(default_factory=set)  # disputed ones, until the next retry
    _lag: dict[TopicPartition, int] = field(default_factory=dict)
    _starts: dict[TopicPartition, int] = field(default_factory=dict)  # of the log, at the last check
    _since: dict[int, tuple[int, Mapping[str, int]]] = field(default_factory=dict)
    _done: dict[str, float] = field(default_factory=dict)  # action -> when it was last done, monotonic
    _samples: int = 0
    _revoked_events: int = 0  # read here, of partitions that were revoked since
    _commits: int = 0
    _newest_ms: int | None = None
    _counts: EventCounts = field(init=False)
    _refusals: RefusalStreaks = field(init=False)
    _growth: Growth = field(init=False)
    _misplaced: set[str] = field(default_factory=set)  # topics that were logged as misplaced
    _detector: PartitionerDetector = field(default_factory=PartitionerDetector)
    _recent: Recent = field(default_factory=Recent)
    _failed: dict[int, _Failed] = field(default_factory=dict)  # shared partitions that wait for a retry

    def run(self, *, until_end: bool = False) -> None:
        """Join until `stop` is set. `until_end`: up to the streams' present ends, then close all windows.

        Raises:
            Fenced: another process has opened the writer; or, if partitions are shared, has this process's
                name. DataLost, Corrupt: as `freshet.joiner.replay.load`; an operator must decide.
            Unavailable: the log cannot be reached; only with `until_end`, otherwise it is retried.
        """
        self._history = until_end
        if self.assignment is not None:
            self.assignment.join(2 * LEASE_S)
        while not self.stop.is_set():
            try:
                self.pulse.rest()
                self.open()
                ends = self._ends() if until_end else None
                while not self.stop.is_set():
                    if ends is not None and self._reached(ends):
                        self.finish()
                        return
                    self.step()
                if self.tasks:
                    self.flush(only_due=False)
            except Unavailable as error:
                # The last append may or may not be written, so the log decides.
                _log.warning("restarting from the log", reason=str(error))
                if self.stop.wait(self.pace.retry_ms / 1000) and until_end:
                    raise
            finally:
                self.close()

    def __post_init__(self) -> None:
        if self.assignment is not None and self.all_partitions:
            raise ValueError("shared partitions need a writer each: all_partitions=False")
        self._recovery = PartitionRecovery(self.writer_of, self._task_of)
        self._counts = EventCounts.of(self.topics.inputs)
        self._refusals = RefusalStreaks(self.clock.monotonic)
        self._growth = Growth(self.topics.samples_partitions, len(self.partitions), {})

    @property
    def steady(self) -> SteadyClock:
        """Clock of the time that is known to be right."""
        if self._steady is None or self._steady.clock is not self.clock:
            self._steady = SteadyClock(self.clock)
        return self._steady

    # -- steps of the loop; tests call them one by one

    def open(self) -> None:
        """Start anew. Recover all partitions now, or leave shared ones to `update_assignment`."""
        self.close()
        self._roles = {topic: role for role, topic in self.topics.inputs.items()}
        self._reader = self.log.reader()
        self._due("end check", 0)  # the first check is an interval from now: nothing was read yet
        if self.assignment is None:
            self._recovery.begin(self.groups(self.partitions))
            self._add_recovered(self._recovery.pop_finished(waiting=True))

    def update_assignment(self) -> None:
        """Revoke partitions assigned to other joiners and start recovering newly assigned ones."""
        assert self.assignment is not None, "partitions are shared"
        self.assignment.update(self._revoke)
        self._add_recovered(self._recovery.pop_finished())
        here = self.tasks.keys() | self._recovery.partitions
        now = self.clock.monotonic()
        here |= {p for p, failed in self._failed.items() if now < failed.retry_at_s}
        self._recovery.begin(self.groups([p for p in self.assignment.fences if p not in here]))

    def step(self) -> None:
        """Poll once, join, and flush if a flush is due."""
        assert self._reader is not None, "open() comes first"
        self.pulse.beat()
        if self.assignment is not None and self._due("assignment", self.pace.assignment_interval_ms):
            self.update_assignment()
            if not self.tasks:
                if self.watches_growth and self._due("count", self.pace.count_interval_ms):
                    self._count_partitions()
                self._report_status()
                self.stop.wait(self.pace.assignment_interval_ms / 1000)
                return
        if self._due("retry", self.pace.retry_ms):
            self._retry_paused()
        if self.watches_growth and self._due("count", self.pace.count_interval_ms):
            self._count_partitions()
        self._complete_flushes(
            self._flushes.begun_before(self.clock.monotonic() - self.pace.slow_append_ms / 1000)
        )
        self._join_polled(self._reader.poll(self.pace.poll_records, self._wait_s()))
        if self._due("end check", self.pace.end_check_interval_ms):
            self._check_ends()
        if self._due("flush", self.pace.flush_interval_ms, mark=False):
            self._begin_flush(self._writers, commit_all=self._due("commit", self.pace.commit_interval_ms))
        self._complete_flushes()
        if self._due("pin", self.pace.pin_interval_ms):
            self._pin_retention()
        if self._due("status", self.pace.status_interval_ms):
            self._report_status()

    def _join_polled(self, polled: Sequence[tuple[TopicPartition, Records]]) -> None:
        """Join polled records; those whose schema is unavailable are polled again later."""
        waiting: dict[TopicPartition, Unavailable] = {}
        disputed = False
        for at, records in polled:
            task, role = self.tasks.get(at.partition), self._roles[at.topic]
            if task is None:  # revoked since the poll
                continue
            try:
                if at not in waiting:
                    if self.watches_growth:
                        self._detector.sample(
                            at.topic, at.partition, self._growth.sizes, records.keys, self.clock.monotonic()
                        )
                    disputed |= self._join_pieces(at, task, role, records)
            except Unavailable as error:
                waiting[at] = error
            task.watermark.behind(role)
        if waiting:
            reason = str(next(iter(waiting.values())))
            _log.warning("events wait for their schema", topics=sorted(map(str, waiting)), reason=reason)
            self.stop.wait(self.pace.retry_ms / 1000)
        if waiting or disputed:
            self._assign()

    def _now(self, at: TopicPartition) -> Now | None:
        if self._history:
            return None
        held = self._disputed.get(at)
        log_counts = self.append_time and not (held is not None and held.unconfirmed)
        return Now(self.steady.now_ms(), self.steady.latest_ms(), log_counts)

    def _pause_if_disputed(self, at: TopicPartition, disputed: Disputed | None) -> bool:
        """Pause a partition where clocks disagree, until one has proved wrong (PROTOCOL 19)."""
        if disputed is None:
            self._disputed.pop(at, None)
            return False
        held, now_s = self._disputed.get(at), self.clock.monotonic()
        if held is None or held.disputed.offset != disputed.offset:
            held = self._disputed[at] = _DisputedPartition(disputed, now_s)
            _log.warning(
                "an event is dated ahead and clocks disagree on that: it waits",
                topic=at.topic,
                partition=at.partition,
                offset=disputed.offset,
                ahead_ms=disputed.ahead_ms,
                clock_step_ms=self.steady.step_ms,
            )
        waited_s = now_s - held.since_s
        moved_ms = disputed.newest_ms - held.disputed.logged_ms
        if waited_s >= CONFIRMED_S and moved_ms >= CONFIRMED_S * 500:
            _log.warning(
                "this machine's clock is behind the log's, which is followed",
                topic=at.topic,
                partition=at.partition,
            )
            self.steady.lead(disputed.newest_ms)
        held.unconfirmed = waited_s >= _UNCONFIRMED_S
        self._paused.add(at)
        return True

    def _retry_paused(self) -> None:
        """Read paused partitions again; the clocks judge their records anew."""
        if self._paused:
            self._paused.clear()
            self._assign()

    def _join_pieces(self, at: TopicPartition, task: Task, role: str, records: Records) -> bool:
        """Join records, and flush when the task is full; returns True at a record on which clocks disagree.

        Raises Unavailable as `Task.join_records` does; the records before are joined.
        """
        for piece in pieces(records):
            refused = task.join_records(role, piece, self._now(at))
            self._refusals.count_batch(role, at.topic, len(piece), refused)
            if refused.first_bad_time and role not in self._bad_times:
                self._bad_times[role] = f"{at}, offset {refused.first_bad_time}"
            if self._pause_if_disputed(at, refused.disputed):
                return True
            if task.is_full:
                self._flush_now(task)
                if self.tasks.get(at.partition) is not task:  # it was revoked
                    break
        return False

    def _flush_now(self, task: Task) -> None:
        """Append the output of a task and of those that share its writer, and wait for it."""
        self._complete_flushes([task.partition])
        self._begin_flush(
            [(w, group) for w, group in self._writers if task.partition in group], commit_all=True
        )
        self._complete_flushes([task.partition])

    def flush(self, *, only_due: bool = True) -> None:
        """Append the outputs and commits, one atomic append per writer, and wait for them."""
        self._complete_flushes(self.tasks)
        self._begin_flush(
            self._writers, commit_all=not only_due or self._due("commit", self.pace.commit_interval_ms)
        )
        self._complete_flushes(self.tasks)

    def finish(self) -> None:
        """Close every window and commit, at the end of the streams."""
        for task in self.tasks.values():
            task.watermark.close(task.joiner.horizon_ms)
        self.flush(only_due=False)
        while any(task.has_output for task in self.tasks.values()):  # READY_BYTES bound one flush
            self.flush(only_due=False)
        self._report_status()

    def close(self) -> None:
        """Close readers and writers. Idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._recovery.close()
        self._flushes.close()
        self._drop_tasks(list(self.tasks))
        self._done.clear()

    # -- internal

    def _count_partitions(self) -> None:
        """Count the inputs' partitions, and join new ones that all inputs have, from their start."""
        inputs = self.topics.inputs.values()
        counts = self.log.partition_counts(inputs)
        before, self._growth = self._growth, replace(self._growth, counts=counts, why="")
        every = min((counts.get(topic, 0) for topic in inputs), default=0)
        if every > len(self.partitions):
            try:
                self.log.grow_topic(self.topics.joiner, every)
            except (ConfigError, Unavailable) as error:
                self._growth = replace(
                    self._growth, why=f"{self.topics.joiner} cannot grow with them: {error}"
                )
            else:
                self._join_grown(every)
        now = self._growth
        if now.unread and (now.counts, now.why) != (before.counts, before.why):
            _log.error("partitions of a topic are not read", reason=now.trouble)

    def _join_grown(self, every: int) -> None:
        """Join this many partitions from now on. Each joiner detects the growth by itself."""
        known = len(self.partitions)
        self.partitions, self._growth = range(every), replace(self._growth, joined=every)
        _log.warning(
            "topics grew, their new partitions are joined from their start",
            topics=sorted(set(self.topics.inputs.values())),
            partitions=every,
            partitions_before=known,
        )
        if self.assignment is not None:
            self.assignment.partitions = every
        else:
            self._recovery.begin(self.groups(range(known, every)))
            self._add_recovered(self._recovery.pop_finished(waiting=True))

    def groups(self, partitions: Sequence[int]) -> list[tuple[int, ...]]:
        """Group partitions that share a writer."""
        return [tuple(partitions)] if self.all_partitions else [(p,) for p in partitions]

    def writer_of(self, group: tuple[int, ...]) -> Writer:
        """Open the writer of a group of partitions, which fences its former owner."""
        return self.log.writer(f"joiner-{self.model}" + ("" if self.all_partitions else f"-{group[0]}"))

    def _task_of(self, partition: int, cancelled: Callable[[], bool]) -> Task:
        return load(
            self.log,
            self.topics,
            self.plan,
            self.decoder(),
            partition,
            self.clock,
            lambda: cancelled() or self.stop.is_set(),
        )

    def _add_recovered(self, recovered: Sequence[RecoveredGroup]) -> None:
        """Join recovered partitions. Raises the error of a failed recovery, unless it is of a shared
        partition and may be retried."""
        for group in recovered:
            if group.writer is not None:
                self._writers.append((group.writer, group.partitions))
                self.tasks |= {task.partition: task for task in group.tasks}
                for task in group.tasks:
                    if task.clock is not None:
                        self.steady.resume(task.clock)
        failed = {p: group.error for group in recovered if group.error for p in group.partitions}
        if any(group.writer is not None for group in recovered):
            self._assign()
        self._on_partition_failed(failed)

    def _revoke(self, partitions: Collection[int]) -> None:
        """Commit partitions that go to another process, if this one still owns them, and drop them."""
        self._recovery.cancel(partitions)
        here = [p for p in partitions if p in self.tasks]
        self._complete_flushes(here)
        self._begin_flush([(w, group) for w, group in self._writers if group[0] in here], commit_all=True)
        self._complete_flushes(here)
        self._drop_tasks(here)
        if here:
            self._assign()

    def _drop_tasks(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            if (task := self.tasks.pop(partition, None)) is not None:
                self._revoked_events += task.events
            self._since.pop(partition, None)
        for writer, group in self._writers:
            if group[0] not in self.tasks:
                writer.close()
        self._writers = [(writer, group) for writer, group in self._writers if group[0] in self.tasks]
        self._lag = {at: n for at, n in self._lag.items() if at.partition in self.tasks}
        self._disputed = {at: held for at, held in self._disputed.items() if at.partition in self.tasks}
        self._paused = {at for at in self._paused if at.partition in self.tasks}

    def _assign(self) -> None:
        """Assign the reader each partition at its task's position."""
        if self._reader is not None:
            self._reader.assign(
                {
                    TopicPartition(topic, partition): task.next[role]
                    for partition, task in self.tasks.items()
                    for role, topic in self.topics.inputs.items()
                    if TopicPartition(topic, partition) not in self._paused
                }
            )

    def _begin_flush(self, writers: Sequence[tuple[Writer, tuple[int, ...]]], *, commit_all: bool) -> None:
        """Flush tasks with output, except partitions whose last flush is in progress."""
        flushes, busy = [], self._flushes.busy
        for writer, partitions in writers:
            tasks = [self.tasks[p] for p in partitions if p in self.tasks]
            ready = [t for t in tasks if t.has_output or (commit_all and t.has_progress)]
            if ready and busy.isdisjoint(partitions):
                for task in ready:
                    task.clock = self.steady.state
                flushes.append(Flush(writer, ready, self.topics.dead_letters, self.steady.now_ms()))
        for flush in flushes:
            if self.all_partitions:  # a thread gains nothing with one writer
                flush.append()
                self._complete([flush])
            else:
                self._flushes.begin(flush, self.clock.monotonic())
        if flushes or busy:
            self._due("flush", 0)

    def _complete_flushes(self, waiting_for: Iterable[int] = ()) -> None:
        """Complete finished flushes, after waiting for those of some partitions."""
        self._complete(self._flushes.pop_finished(set(waiting_for)))

    def _complete(self, flushes: Sequence[Flush]) -> None:
        for flush in flushes:
            if flush.error is None:
                flush.report_appended()
                self._count(flush)
        self._on_partition_failed({p: f.error for f in flushes if f.error is not None for p in f.partitions})

    def _count(self, flush: Flush) -> None:
        for task, output in flush.done:
            self._since[task.partition] = (output.commit.since, output.commit.low)
            self._failed.pop(task.partition, None)
            self._samples += output.samples
            self._commits += 1
            for label, samples in output.out_of_bounds.items():
                if samples and not self._counts.out_of_bounds.get(label):
                    _log.warning("values of a label lie outside of its bounds", label=label, samples=samples)
            self._counts.add(output.outcomes, output.refused, output.out_of_bounds)
            if output.newest_ms is not None:
                self._newest_ms = max(output.newest_ms, self._newest_ms or output.newest_ms)

    def _on_partition_failed(self, void: Mapping[int, FreshetError]) -> None:
        """Drop partitions whose recovery or append failed.

        A shared partition fails alone: the next assignment recovers it if this process still owns it, after a
        delay if a retry may not help, as when the log's record limit was lowered. Raises the error if
        partitions are not shared, or if the log's named writers are not exact (Mismatch).
        """
        for partition, error in void.items():
            if self.assignment is None or isinstance(error, Mismatch):
                raise error
            if isinstance(error, Fenced | Unavailable):
                _log.warning("a partition is dropped", partition=partition, reason=str(error))
                continue
            delay_s = (
                min(2 * self._failed[partition].delay_s, _LONGEST_PAUSE_S)
                if partition in self._failed
                else 1.0
            )
            self._failed[partition] = _Failed(error, delay_s, self.clock.monotonic() + delay_s)
            _log.error(
                "a partition cannot be joined and is retried; the others go on",
                partition=partition,
                reason=str(error),
                again_in_s=delay_s,
            )
        here = [p for p in void if p in self.tasks]
        if here:
            self._drop_tasks(here)
            self._assign()

    def _check_ends(self) -> None:
        """Check which topics are read to their end (PROTOCOL 19)."""
        now = self.clock.monotonic()
        for at, bounds in self.log.all_bounds(self._inputs_of(self.tasks)).items():
            task, role = self.tasks[at.partition], self._roles[at.topic]
            behind = bounds.end - task.next[role]
            self._lag[at], self._starts[at] = max(0, behind), bounds.start
            if behind > 0:
                task.watermark.behind(role)
            else:
                task.watermark.at_end(role, now)

    def _inputs_of(self, partitions: Iterable[int]) -> list[TopicPartition]:
        return [TopicPartition(topic, p) for p in partitions for topic in self.topics.inputs.values()]

    def _ends(self) -> dict[TopicPartition, int]:
        return {
            at: bounds.end for at, bounds in self.log.all_bounds(self._inputs_of(self.partitions)).items()
        }

    def _reached(self, ends: Mapping[TopicPartition, int]) -> bool:
        return all(self.tasks[at.partition].next[self._roles[at.topic]] >= end for at, end in ends.items())

    def _pin_retention(self) -> None:
        """Pin the records that a restart replays, and drop commits that it does not need."""
        for _, group in self._writers:
            held: dict[TopicPartition, int] = {}
            for partition in group:
                if partition in self._since:
                    held |= self._pins_of(partition)
            if held:
                self.log.hold(f"joiner-{self.model}-{group[0]}", held)

    def _pins_of(self, partition: int) -> dict[TopicPartition, int]:
        since, low = self._since[partition]
        commits = TopicPartition(self.topics.joiner, partition)
        if since > 0:
            self.log.trim(commits, since)
        inputs = {TopicPartition(topic, partition): low[role] for role, topic in self.topics.inputs.items()}
        return inputs | {commits: max(since, 0)}

    def _report_status(self) -> None:
        if not self.tasks and self.assignment is None:
            return
        tasks = self.tasks.values()
        self.status = JoinerStatus(
            events=self._revoked_events + sum(t.events for t in tasks),
            samples=self._samples,
            commits=self._commits,
            newest_ms=self._newest_ms,
            watermark_ms={t.partition: t.watermark.value for t in tasks},
            lag={p: sum(n for at, n in self._lag.items() if at.partition == p) for p in self.tasks},
            room={p: self._retention_slack(p) for p in self.tasks if p in self._since},
            payload_bytes=sum(t.joiner.payload_bytes for t in tasks),
            ids=sum(t.joiner.ids for t in tasks),
            ledger=Ledger.total(
                [Ledger.empty([x.name for x in self.plan.labels]), *(t.ledger() for t in tasks)]
            ),
            counts=self._counts,
            losses=self._losses(),
            placing=self._partitioners(),
            growth=self._growth,
            trouble=self._trouble(),
            bad_times=self._bad_times,
            now_ms=self.steady.now_ms(),
            clock_step_ms=self.steady.step_ms,
            disputed_ms={at.partition: held.disputed.ahead_ms for at, held in self._disputed.items()},
        )
        if self.on_status is not None:
            self.on_status(self.status)

    def _partitioners(self) -> dict[str, dict[str, str]]:
        found = self._detector.to_json()
        for topic, reason in found["trouble"].items():
            if topic not in self._misplaced:
                _log.error("clients place the keys of a topic elsewhere", topic=topic, reason=reason)
        self._misplaced = set(found["trouble"])
        return found

    def _losses(self) -> dict[str, Any]:
        """Return the shares of events that teach nothing: recent ones of this process, and those of its
        partitions since the model began."""
        counts = self._counts
        lately = {**counts.outcomes, "refused": sum(sum(n.values()) for n in counts.refused.values())}
        ledgers = [task.ledger() for task in self.tasks.values()]
        begun = Ledger.total([Ledger.empty([label.name for label in self.plan.labels]), *ledgers])
        return {
            "recent_s": int(RECENT_S),
            "recent": counted(JOINER_FIGURES, self._recent.take(lately, self.clock.monotonic())),
            "begun": counted(JOINER_FIGURES, {**begun.events, "refused": begun.refused}),
        }

    def _trouble(self) -> str | None:
        """Return why events of a stream are refused, or a partition is not joined; None if all is well."""
        reasons = [
            f"partition {p} is not joined: {failed.error}" for p, failed in sorted(self._failed.items())
        ]
        return "\n".join(filter(None, [self._growth.trouble, self._refusals.trouble(), *reasons])) or None

    def _retention_slack(self, partition: int) -> int:
        _, low = self._since[partition]
        places = {role: TopicPartition(topic, partition) for role, topic in self.topics.inputs.items()}
        return min(low[role] - self._starts.get(at, 0) for role, at in places.items())

    def _wait_s(self) -> float:
        """Return how long a poll may wait: until the next flush if samples are ready."""
        interval = self.pace.flush_interval_ms / 1000
        if not any(task.has_output for task in self.tasks.values()):
            return interval
        return max(0.0, self._done.get("flush", 0.0) + interval - self.clock.monotonic())

    def _due(self, action: str, interval_ms: int, *, mark: bool = True) -> bool:
        now = self.clock.monotonic()
        due = now - self._done.get(action, float("-inf")) >= interval_ms / 1000
        if due and mark:
            self._done[action] = now
        return due
