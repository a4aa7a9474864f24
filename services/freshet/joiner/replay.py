"""Partition recovery: rebuilds a partition's task from its last commit and a replay of its events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event

from freshet.clock import Clock
from freshet.errors import DataLost, FreshetError, Unavailable
from freshet.joiner.commit import Commit
from freshet.joiner.decode import EventDecoder
from freshet.joiner.partition import Task, Topics
from freshet.joiner.plan import JoinPlan
from freshet.log import EventLog, Reader, Writer
from freshet.log.records import newest
from freshet.types import BytesColumn, Records, TopicPartition

__all__ = ["PartitionRecovery", "RecoveredGroup", "last_commits", "load", "stream"]

_AT_ONCE = 8


@dataclass(slots=True)
class RecoveredGroup:
    """Result of the recovery of partitions that share a writer: all their tasks, or `error`."""

    partitions: tuple[int, ...]
    writer: Writer | None = None
    tasks: list[Task] = field(default_factory=list)
    error: FreshetError | None = None


class PartitionRecovery:
    """Recovers partitions on threads beside the joiner's. Used by one thread, except `recover`."""

    def __init__(
        self,
        writer_of: Callable[[tuple[int, ...]], Writer],
        task_of: Callable[[int, Callable[[], bool]], Task],
    ) -> None:
        """Create an idle instance.

        Args:
            writer_of: opens the writer of partitions and fences its former owner.
            task_of: rebuilds a partition; raises Unavailable once the function that it gets returns True.
        """
        self._writer_of, self._task_of = writer_of, task_of
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: dict[Future[RecoveredGroup], tuple[tuple[int, ...], Event]] = {}

    def begin(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Start to recover groups of partitions; each group shares a writer."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="joiner-recovery")
        for group in groups:
            cancelled = Event()
            self._under_way[self._threads.submit(self.recover, group, cancelled)] = (group, cancelled)

    @property
    def partitions(self) -> set[int]:
        """Partitions in recovery that were not cancelled."""
        return {p for group, cancelled in self._under_way.values() if not cancelled.is_set() for p in group}

    def cancel(self, partitions: Collection[int]) -> None:
        """Cancel the recovery of partitions; their writers are closed, once opened."""
        for group, cancelled in self._under_way.values():
            if set(partitions).intersection(group):
                cancelled.set()

    def pop_finished(self, *, waiting: bool = False) -> list[RecoveredGroup]:
        """Return finished recoveries, each once, without cancelled ones; `waiting` waits for all."""
        if waiting:
            wait(self._under_way)
        found = []
        for future in [future for future in self._under_way if future.done()]:
            _, cancelled = self._under_way.pop(future)
            if not cancelled.is_set():
                found.append(future.result())
            elif future.exception() is None and (writer := future.result().writer) is not None:
                writer.close()
        return found

    def close(self) -> None:
        """Cancel all recoveries and wait for them. Idempotent."""
        for _, cancelled in self._under_way.values():
            cancelled.set()
        self.pop_finished(waiting=True)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def recover(self, group: tuple[int, ...], cancelled: Event) -> RecoveredGroup:
        """Recover a group. Its writer opens first, which fences earlier owners: the log of these partitions
        cannot change afterwards. Raises no FreshetError: the result has it."""
        recovered = RecoveredGroup(group)
        try:
            if cancelled.is_set():
                raise Unavailable("another process was assigned the partitions before their recovery began")
            recovered.writer = self._writer_of(group)
            recovered.tasks = [self._task_of(p, cancelled.is_set) for p in group]
        except FreshetError as error:
            if recovered.writer is not None:
                recovered.writer.close()
            recovered.writer, recovered.tasks, recovered.error = None, [], error
        return recovered


READ_RECORDS = 8192
STALLED_S = 30.0
"""Time without records, though the log has more, after which a read fails."""


def load(
    log: EventLog,
    topics: Topics,
    plan: JoinPlan,
    decoder: EventDecoder,
    partition: int,
    clock: Clock,
    stopping: Callable[[], bool] = lambda: False,
) -> Task:
    """Rebuild the task of a partition as of its last commit, or make a new one.

    Raises:
        DataLost: the topic was created anew, or has removed records that must be replayed.
        Corrupt: a commit cannot be read, or the replay contradicts it.
        Unavailable: the log cannot be read, or `stopping` returned True; nothing has changed.
    """
    at = TopicPartition(topics.joiner, partition)
    found = _last_commit(log, at)
    if found is None:
        starts = {
            role: log.bounds(TopicPartition(topic, partition)).start for role, topic in topics.inputs.items()
        }
        return Task(partition, plan, topics, decoder, starts)
    offset, last = found
    _check_log(topics, last, at)
    task = Task(partition, plan, topics, decoder, dict(last.next))
    _replay(log, task, at, offset, last, clock, stopping)
    task.end_replay(last, clock.now_ms())
    return task


def _replay(
    log: EventLog,
    task: Task,
    at: TopicPartition,
    offset: int,
    last: Commit,
    clock: Clock,
    stopping: Callable[[], bool],
) -> None:
    commits = _commits(log, at, max(last.since, log.bounds(at).start), offset + 1, clock)
    base = next(commits) if last.since >= 0 else None
    starts = task.begin_replay(base, last)
    streams = {
        role: _Stream(log, TopicPartition(topic, task.partition), starts[role], clock)
        for role, topic in task.topics.inputs.items()
    }
    try:
        for where, commit in commits:
            if stopping():
                raise Unavailable("the joiner stops; the recovery of a partition was not finished")
            if commit.set_back is not None:
                _recall(log, task, where, commit, last, clock)
                continue
            task.replay(
                where,
                commit,
                {role: list(stream.until(commit.next[role])) for role, stream in streams.items()},
            )
    finally:
        for stream in streams.values():
            stream.close()


def _recall(log: EventLog, task: Task, where: int, commit: Commit, last: Commit, clock: Clock) -> None:
    """Repeat a commit that sets the watermark back. Events below the last commit's `low` do not matter any
    more; events that retention has removed since cannot be recalled."""
    assert commit.set_back is not None
    streams = {}
    try:
        for role, topic in task.topics.inputs.items():
            at = TopicPartition(topic, task.partition)
            start = max(commit.set_back.recall.get(role, 0), last.low[role], log.bounds(at).start)
            streams[role] = _Stream(log, at, min(start, commit.next[role]), clock)
        read = {role: stream.until(commit.next[role]) for role, stream in streams.items()}
        task.replay_set_back(where, commit, read)
    finally:
        for stream in streams.values():
            stream.close()


def last_commits(
    log: EventLog, topics: Topics, partitions: Iterable[int]
) -> dict[int, tuple[int, Commit] | None]:
    """Return each partition's last commit and its offset in `<model>.joiner`; None where there is none yet.

    Raises as `load` does.
    """
    found = {}
    for partition in partitions:
        at = TopicPartition(topics.joiner, partition)
        found[partition] = _last_commit(log, at)
        if (commit := found[partition]) is not None:
            _check_log(topics, commit[1], at)
    return found


def _check_log(topics: Topics, last: Commit, at: TopicPartition) -> None:
    for topic, log_id in topics.log_ids.items():
        if last.log_ids.get(topic) != log_id:
            raise DataLost(
                f"{at}: the last commit depends on log id {last.log_ids.get(topic)!r} of {topic}\n"
                f"  found {log_id!r}: the topic was created anew, its offsets have no meaning for this model"
            )


def _last_commit(log: EventLog, at: TopicPartition) -> tuple[int, Commit] | None:
    for offset, value in newest(log, at, 1):
        return offset, Commit.decode(value, f"{at} at {offset}")
    return None


def _commits(
    log: EventLog, at: TopicPartition, start: int, stop: int, clock: Clock
) -> Iterator[tuple[int, Commit]]:
    stream = _Stream(log, at, start, clock)
    try:
        for records in stream.until(stop):
            for offset, value in zip(records.offsets.tolist(), records.values, strict=True):
                yield offset, Commit.decode(value, f"{at} at {offset}")
    finally:
        stream.close()


def stream(log: EventLog, at: TopicPartition, start: int, stop: int, clock: Clock) -> Iterator[Records]:
    """Yield a partition's records in [start, stop). Raises as a reader does; Unavailable if none come."""
    found = _Stream(log, at, max(start, log.bounds(at).start), clock)
    try:
        yield from found.until(stop)
    finally:
        found.close()


class _Stream:
    """Reader of one partition of one topic, in pieces that end at offsets of the caller's choice."""

    def __init__(self, log: EventLog, at: TopicPartition, start: int, clock: Clock) -> None:
        self._at, self._clock = at, clock
        self._position = start  # next offset to return
        self._held: Records | None = None  # read, but not returned yet
        self._reader: Reader = log.reader()
        self._reader.assign({at: start})

    def until(self, stop: int) -> Iterator[Records]:
        """Yield the records from the present position up to `stop`, exclusive."""
        deadline = self._clock.monotonic() + STALLED_S
        while self._position < stop:
            if self._held is None:
                polled = self._reader.poll(READ_RECORDS, 1.0)
                if not polled:
                    if self._clock.monotonic() > deadline:
                        raise Unavailable(
                            f"{self._at}: expected records up to {stop}, found none after {self._position}"
                        )
                    continue
                self._held = polled[0][1]
            piece, self._held = _split(self._held, stop)
            if piece is not None:
                self._position = piece.next_offset
                yield piece
            else:
                self._position = stop  # there are no records up to `stop`

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


def _split(records: Records, stop: int) -> tuple[Records | None, Records | None]:
    n = int(records.offsets.searchsorted(stop))
    if n == len(records):
        return records, None
    if n == 0:
        return None, records
    return _part(records, 0, n, stop), _part(records, n, len(records), records.next_offset)


def _part(records: Records, start: int, stop: int, next_offset: int) -> Records:
    def column(values: BytesColumn) -> BytesColumn:
        return values.slice(start, stop)

    return Records(
        records.offsets[start:stop],
        records.times_ms[start:stop],
        column(records.keys),
        column(records.values),
        next_offset,
    )
