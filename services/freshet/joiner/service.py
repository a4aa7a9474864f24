"""Joiner service: reads events, flushes decided samples and commits, on one thread for all partitions of the
process.

Where each partition has a writer of its own, appends and partition recovery run on threads beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeVar

import structlog

from freshet.coordination.assignment import PartitionAssignment
from freshet.coordination.claims import LEASE_S
from freshet.errors import Unavailable
from freshet.joiner.commit import EventCounts, Ledger
from freshet.joiner.decoder import RefusalStreaks
from freshet.joiner.inputs import Growth, InputWatch
from freshet.joiner.partition import Outputs, Task, pieces
from freshet.joiner.partitions import Partitions
from freshet.joiner.plan import JoinContext
from freshet.joiner.watermark import JoinerClocks
from freshet.log import Reader
from freshet.observability.losses import JOINER_FIGURES, RECENT_S, Recent, counted
from freshet.process.lifecycle import Pulse
from freshet.types import Records, TopicPartition

_log = structlog.get_logger("freshet.joiner")

_T = TypeVar("_T")

UNREACHABLE_S = 15.0
"""Time for which a read of the log is repeated in place, before all partitions start anew from the log."""


@dataclass(frozen=True, slots=True)
class Intervals:
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
    losses: Mapping[str, Any] = field(default_factory=dict)  # shares of events that teach nothing
    placing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # see `PartitionerDetector`
    trouble: str | None = None  # why events of a stream, or a partition, are not joined
    bad_times: Mapping[str, str] = field(default_factory=dict)  # stream -> the first event with a wrong time
    now_ms: int = 0  # the time that is known to be right
    clock_step_ms: int = 0  # difference of the wall clock since it was set; 0: it runs evenly
    disputed_ms: Mapping[int, int] = field(default_factory=dict)  # partition -> its disputed event's lead


@dataclass(slots=True)
class JoinerService:
    """Joins partitions of a model. `run` returns when `stop` is set, or at the end of the streams on request.

    At most one process may own a partition at a time; a later one fences the earlier, and the earlier one's
    appends then fail. This alone keeps samples exact: state is rebuilt from the log after the writer was
    opened, so an earlier owner cannot append any more. Claims (`assignment`) only decide which process should
    open the writer.
    """

    context: JoinContext
    watches_growth: bool = False  # whether to join new partitions of the inputs, once all inputs have them
    assignment: PartitionAssignment | None = None  # None: this process has all partitions
    intervals: Intervals = field(default_factory=Intervals)
    stop: Event = field(default_factory=Event)
    on_status: Callable[[JoinerStatus], None] | None = None
    pulse: Pulse = field(default_factory=Pulse)
    log_time_counts: bool = True  # whether the log's time is its own, not the writers' (Kafka's CreateTime)
    status: JoinerStatus | None = None
    clocks: JoinerClocks = field(init=False)
    inputs: InputWatch = field(init=False)
    partitions: Partitions = field(init=False)
    _numbers: Sequence[int] = field(init=False)  # of the partitions that joiners read together
    _roles: Mapping[str, str] = field(init=False)  # topic -> role
    _reader: Reader | None = None
    _bad_times: dict[str, str] = field(default_factory=dict)  # role -> the first event with a wrong time
    _lag: dict[TopicPartition, int] = field(default_factory=dict)
    _starts: dict[TopicPartition, int] = field(default_factory=dict)  # of the log, at the last check
    _moved: bool = False  # whether the reader is to be assigned anew before the next poll
    _done: dict[str, float] = field(default_factory=dict)  # action -> when it was last done, monotonic
    _failing: dict[str, float] = field(default_factory=dict)  # read -> since when it fails, monotonic
    _samples: int = 0
    _commits: int = 0
    _newest_ms: int | None = None
    _counts: EventCounts = field(init=False)
    _refusals: RefusalStreaks = field(init=False)
    _recent: Recent = field(default_factory=Recent)

    def __post_init__(self) -> None:
        if self.assignment is not None and self.context.all_partitions:
            raise ValueError("shared partitions need a writer each: all_partitions=False")
        self.clocks = JoinerClocks(self.context.clock, log_counts=self.log_time_counts)
        self.inputs = InputWatch(self.context)
        self.partitions = Partitions(
            self.context,
            self.clocks,
            shared=self.assignment is not None,
            stopping=self.stop.is_set,
            on_change=self._on_partitions_changed,
            on_flushed=self._on_flushed,
        )
        self._numbers = self.context.partitions
        self._roles = {topic: role for role, topic in self.context.topics.inputs.items()}
        bounded = [label.name for label in self.context.plan.labels if label.bounds is not None]
        self._counts = EventCounts.of(self.context.topics.inputs, bounded)
        self._refusals = RefusalStreaks(self.context.clock.monotonic)

    @property
    def tasks(self) -> Mapping[int, Task]:
        """Running partitions."""
        return self.partitions.tasks

    def run(self, *, until_end: bool = False) -> None:
        """Join until `stop` is set. `until_end`: up to the streams' present ends, then close all windows.

        Raises:
            Fenced: another process has opened the writer; or, if partitions are shared, has this process's
                name.
            DataLost, Corrupt: as `freshet.joiner.replay.load`; an operator must decide.
            Unavailable: the log cannot be reached; only with `until_end`, otherwise it is retried.
        """
        self.clocks.is_history = until_end
        if self.assignment is not None:
            self.assignment.join(2 * LEASE_S)
        while not self.stop.is_set():
            try:
                self.pulse.rest()
                self.open()
                ends = self.ends() if until_end else None
                while not self.stop.is_set():
                    if ends is not None and self.has_reached(ends):
                        self.finish()
                        return
                    self.step()
                if self.tasks:
                    self.flush(only_due=False)
            except Unavailable as error:
                # The last append may or may not be written, so the log decides.
                _log.warning("restarting from the log", reason=str(error))
                if self.stop.wait(self.intervals.retry_ms / 1000) and until_end:
                    raise
            finally:
                self.close()

    # -- steps of the loop; tests call them one by one

    def open(self) -> None:
        """Start anew. Recover all partitions now, or leave shared ones to `update_assignment`."""
        self.close()
        self._reader = self.context.log.reader()
        self._due("end check", 0)  # the first check is an interval from now: nothing was read yet
        if self.assignment is None:
            self.partitions.join(self._numbers, waiting=True)

    def update_assignment(self) -> None:
        """Revoke partitions assigned to other joiners and start recovering newly assigned ones."""
        assert self.assignment is not None, "partitions are shared"
        self.assignment.update(self.partitions.revoke)
        self.partitions.add_recovered()
        self.partitions.join(self.partitions.missing_of(self.assignment.fences))

    def step(self) -> None:
        """Poll once, join, and flush if a flush is due.

        Raises Unavailable if an append is not known to be written, or if a read has failed for UNREACHABLE_S.
        """
        self.pulse.beat()
        if self.watches_growth and self._due("count", self.intervals.count_interval_ms):
            self._count_partitions()
        if self.assignment is not None and self._due("assignment", self.intervals.assignment_interval_ms):
            self.update_assignment()
            if not self.tasks:
                self.report_status()
                self.stop.wait(self.intervals.assignment_interval_ms / 1000)
                return
        if self._due("retry", self.intervals.retry_ms) and self.clocks.paused:
            self.clocks.paused.clear()  # the clocks judge their records anew
            self._moved = True
        slow_s = self.context.clock.monotonic() - self.intervals.slow_append_ms / 1000
        self.partitions.complete_flushes(self.partitions.appending_since(slow_s))
        self._join_polled(self._repeatable("poll", self._poll) or ())
        if self._due("end check", self.intervals.end_check_interval_ms):
            self._repeatable("end check", self._check_ends)
        if self._due("flush", self.intervals.flush_interval_ms, mark=False):
            self._begin_flushes(commit_all=self._due("commit", self.intervals.commit_interval_ms))
        self.partitions.complete_flushes()
        if self._due("pin", self.intervals.pin_interval_ms):
            try:
                self._pin_retention()
            except Unavailable as error:  # the next one replaces it
                _log.warning("retention pins were not updated", reason=str(error))
        if self._due("status", self.intervals.status_interval_ms):
            self.report_status()

    def flush(self, *, only_due: bool = True) -> None:
        """Append the outputs and commits, one atomic append per writer, and wait for them."""
        self.partitions.complete_flushes(self.tasks)
        self._begin_flushes(commit_all=not only_due or self._due("commit", self.intervals.commit_interval_ms))
        self.partitions.complete_flushes(self.tasks)

    def finish(self) -> None:
        """Close every window and commit, at the end of the streams."""
        for task in self.tasks.values():
            task.watermark.close(task.joiner.horizon_ms)
        self.flush(only_due=False)
        while any(task.has_output for task in self.tasks.values()):  # READY_BYTES bound one flush
            self.flush(only_due=False)
        self.report_status()

    def close(self) -> None:
        """Close readers and writers. Idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.partitions.close()
        self._on_partitions_changed()
        self._done.clear()
        self._failing.clear()

    def ends(self) -> dict[TopicPartition, int]:
        """Return the present ends of the inputs' partitions."""
        at = self.context.inputs_of(self._numbers)
        return {at: bounds.end for at, bounds in self.context.log.all_bounds(at).items()}

    def has_reached(self, ends: Mapping[TopicPartition, int]) -> bool:
        """Return whether the inputs are read up to these ends."""
        return all(self.tasks[at.partition].next[self._roles[at.topic]] >= end for at, end in ends.items())

    # -- internal

    def _repeatable(self, name: str, read: Callable[[], _T]) -> _T | None:
        """Return the result of a read of the log; None, after a delay, if the next step is to repeat it.

        A failed read changes no task, so the partitions need not start anew.

        Raises Unavailable if the read has failed for UNREACHABLE_S.
        """
        try:
            found = read()
        except Unavailable as error:
            now = self.context.clock.monotonic()
            if now - self._failing.setdefault(name, now) >= UNREACHABLE_S:
                raise
            _log.warning("the log cannot be read and is read again", reason=str(error))
            self.stop.wait(self.intervals.retry_ms / 1000)
            return None
        self._failing.pop(name, None)
        return found

    def _poll(self) -> Sequence[tuple[TopicPartition, Records]]:
        assert self._reader is not None, "open() comes first"
        if self._moved:
            self._assign(self._reader)
            self._moved = False
        return self._reader.poll(self.intervals.poll_records, self._wait_s())

    def _join_polled(self, polled: Sequence[tuple[TopicPartition, Records]]) -> None:
        """Join polled records; those with an unavailable schema are polled again later."""
        waiting: dict[TopicPartition, Unavailable] = {}
        disputed = False
        for at, records in polled:
            task, role = self.tasks.get(at.partition), self._roles[at.topic]
            if task is None:  # revoked since the poll
                continue
            if at not in waiting:
                if self.watches_growth:
                    self.inputs.sample(at, records.keys)
                disputed |= self._join_pieces(at, task, records, waiting)
            task.watermark.behind(role)
        if waiting:
            reason = str(next(iter(waiting.values())))
            _log.warning("events wait for their schema", topics=sorted(map(str, waiting)), reason=reason)
            self.stop.wait(self.intervals.retry_ms / 1000)
        if waiting or disputed:
            self._moved = True

    def _join_pieces(
        self, at: TopicPartition, task: Task, records: Records, waiting: dict[TopicPartition, Unavailable]
    ) -> bool:
        """Join records, and flush when the task is full; returns True at a record on which clocks disagree.

        Neither records with an unavailable schema nor later ones are joined; `waiting` then has the error.

        Raises Unavailable if an append is not known to be written: the task is void.
        """
        role = self._roles[at.topic]
        for piece in pieces(records):
            try:
                refused = task.join_records(role, piece, self.clocks.now(at))
            except Unavailable as error:
                waiting[at] = error
                return False
            self._refusals.count_batch(role, at.topic, len(piece), refused)
            if refused.first_bad_time and role not in self._bad_times:
                self._bad_times[role] = f"{at}, offset {refused.first_bad_time}"
            if self.clocks.pause_if_disputed(at, refused.disputed):
                return True
            if task.is_full:
                self.partitions.complete_flushes([task.partition])
                self._begin_flushes(commit_all=True, only=[task.partition])
                self.partitions.complete_flushes([task.partition])
                if self.tasks.get(at.partition) is not task:  # it was revoked
                    break
        return False

    def _begin_flushes(self, *, commit_all: bool, only: Sequence[int] | None = None) -> None:
        if self.partitions.begin_flushes(commit_all=commit_all, only=only):
            self._due("flush", 0)

    def _on_flushed(self, _task: Task, output: Outputs) -> None:
        self._samples += output.samples
        self._commits += 1
        for label, samples in output.out_of_bounds.items():
            if samples and not self._counts.out_of_bounds.get(label):
                _log.warning("values of a label lie outside of its bounds", label=label, samples=samples)
        self._counts.add(output.outcomes, output.refused, output.out_of_bounds)
        if output.newest_ms is not None:
            self._newest_ms = max(output.newest_ms, self._newest_ms or output.newest_ms)

    def _on_partitions_changed(self) -> None:
        self._lag = {at: n for at, n in self._lag.items() if at.partition in self.tasks}
        self._starts = {at: n for at, n in self._starts.items() if at.partition in self.tasks}
        self.clocks.keep(self.tasks)
        self._moved = True

    def _assign(self, reader: Reader) -> None:
        """Assign the reader each partition at its task's position.

        Only before a poll, when all records of the last poll are joined: it would return others twice.
        """
        reader.assign(
            {
                at: self.tasks[at.partition].next[self._roles[at.topic]]
                for at in self.context.inputs_of(self.tasks)
                if at not in self.clocks.paused
            }
        )

    def _count_partitions(self) -> None:
        """Count the inputs' partitions, and join new ones that all inputs have, from their start."""
        joined = self._repeatable("count", self.inputs.count)
        if joined is None or joined <= len(self._numbers):
            return
        new, self._numbers = range(len(self._numbers), joined), range(joined)
        if self.assignment is not None:
            self.assignment.partitions = joined
        else:
            self.partitions.join(new, waiting=True)

    def _check_ends(self) -> None:
        """Check which topics are read to their end (PROTOCOL 19)."""
        now = self.context.clock.monotonic()
        for at, bounds in self.context.log.all_bounds(self.context.inputs_of(self.tasks)).items():
            task, role = self.tasks[at.partition], self._roles[at.topic]
            behind = bounds.end - task.next[role]
            self._lag[at], self._starts[at] = max(0, behind), bounds.start
            if behind > 0:
                task.watermark.behind(role)
            else:
                task.watermark.at_end(role, now)

    def _pin_retention(self) -> None:
        """Pin the records that a restart replays, and drop commits that it does not need."""
        for group in self.partitions.running:
            pins: dict[TopicPartition, int] = {}
            for task in group.tasks:
                if task.commit is not None:
                    since, low = task.commit.since, task.commit.low
                    commits = TopicPartition(self.context.topics.joiner, task.partition)
                    if since > 0:
                        self.context.log.trim(commits, since)
                    inputs = self.context.inputs_of([task.partition])
                    pins |= {at: low[self._roles[at.topic]] for at in inputs}
                    pins[commits] = max(since, 0)
            if pins:
                self.context.log.hold(f"joiner-{self.context.model}-{group.partitions[0]}", pins)

    def report_status(self) -> None:
        """Set `status`, and report it to `on_status`."""
        if not self.tasks and self.assignment is None:
            return
        tasks, now_s = self.tasks.values(), self.context.clock.monotonic()
        none = Ledger.empty([label.name for label in self.context.plan.labels])
        ledger = Ledger.total([none, *(task.ledger() for task in tasks)])
        counts = self._counts
        lately = {**counts.outcomes, "refused": sum(sum(n.values()) for n in counts.refused.values())}
        self.status = JoinerStatus(
            events=self.partitions.ended_events + sum(t.events for t in tasks),
            samples=self._samples,
            commits=self._commits,
            newest_ms=self._newest_ms,
            watermark_ms={t.partition: t.watermark.value for t in tasks},
            lag={p: sum(n for at, n in self._lag.items() if at.partition == p) for p in self.tasks},
            room={t.partition: slack for t in tasks if (slack := self._retention_slack(t)) is not None},
            payload_bytes=sum(t.joiner.payload_bytes for t in tasks),
            ids=sum(t.joiner.ids for t in tasks),
            ledger=ledger,
            counts=counts,
            losses={
                "recent_s": int(RECENT_S),
                "recent": counted(JOINER_FIGURES, self._recent.take(lately, now_s)),
                "begun": counted(JOINER_FIGURES, {**ledger.events, "refused": ledger.refused}),
            },
            placing=self.inputs.partitioners(),
            growth=self.inputs.growth,
            trouble=self._trouble(),
            bad_times=self._bad_times,
            now_ms=self.clocks.steady.now_ms(),
            clock_step_ms=self.clocks.steady.step_ms,
            disputed_ms=self.clocks.disputed_ms,
        )
        if self.on_status is not None:
            self.on_status(self.status)

    def _trouble(self) -> str | None:
        """Return why events of a stream are refused, or a partition is not joined; None if all is well."""
        failed = [(p, one) for p, one in sorted(self.partitions.failed.items()) if p not in self.tasks]
        reasons = [
            self.inputs.growth.trouble,
            self._refusals.trouble(),
            *(f"partition {p} is not joined: {one.error}" for p, one in failed),
        ]
        return "\n".join(filter(None, reasons)) or None

    def _retention_slack(self, task: Task) -> int | None:
        """Return the input records between the log's start and the start of a replay; None: not known yet."""
        inputs = self.context.inputs_of([task.partition])
        if task.commit is None or not self._starts.keys() >= set(inputs):
            return None
        return min(task.commit.low[self._roles[at.topic]] - self._starts[at] for at in inputs)

    def _wait_s(self) -> float:
        """Return how long a poll may wait: until the next flush if samples are ready."""
        interval = self.intervals.flush_interval_ms / 1000
        if not any(task.has_output for task in self.tasks.values()):
            return interval
        return max(0.0, self._done.get("flush", 0.0) + interval - self.context.clock.monotonic())

    def _due(self, action: str, interval_ms: int, *, mark: bool = True) -> bool:
        now = self.context.clock.monotonic()
        due = now - self._done.get(action, float("-inf")) >= interval_ms / 1000
        if due and mark:
            self._done[action] = now
        return due
