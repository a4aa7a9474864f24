"""Partition recovery: rebuilds a partition's task from its last commit and a replay of its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Self

from freshet.clock import Clock
from freshet.errors import DataLost, Unavailable
from freshet.joiner.commit import Commit
from freshet.joiner.partition import Task
from freshet.joiner.plan import JoinContext, Topics
from freshet.log import EventLog, Reader
from freshet.log.records import newest
from freshet.types import Records, TopicPartition

READ_RECORDS = 8192
STALLED_S = 30.0
"""Time without records, though the log has more, after which a read fails."""


def load(context: JoinContext, partition: int, stopping: Callable[[], bool] = lambda: False) -> Task:
    """Rebuild the task of a partition as of its last commit, or make a new one.

    Raises:
        DataLost: a topic was created anew, or has removed records that must be replayed, or all commits.
        Corrupt: a commit cannot be read, or the replay contradicts it.
        Unavailable: the log cannot be read, or `stopping` returned True; nothing has changed.
    """
    log, topics = context.log, context.topics
    at = TopicPartition(topics.joiner, partition)
    found = _last_commit(log, at)
    if found is None:
        return Task(partition, context.plan, topics, context.decoder(), _first_offsets(context, at))
    offset, last = found
    _check_log(topics, last, at)
    task = Task(partition, context.plan, topics, context.decoder(), dict(last.next))
    _replay(context, task, offset, last, stopping)
    task.end_replay(last, context.clock.now_ms())
    return task


def _replay(
    context: JoinContext, task: Task, offset: int, last: Commit, stopping: Callable[[], bool]
) -> None:
    """Repeat the commits that the state depends on, up to `last`, which has this offset."""
    log, clock = context.log, context.clock
    at = TopicPartition(context.topics.joiner, task.partition)
    commits = _commits(log, at, max(last.since, log.bounds(at).start), offset + 1, clock)
    base = next(commits) if last.since >= 0 else None
    starts = task.begin_replay(base, last)
    with ExitStack() as readers:
        streams = {
            role: readers.enter_context(
                _Stream(log, TopicPartition(topic, task.partition), starts[role], clock)
            )
            for role, topic in context.topics.inputs.items()
        }
        for where, commit in commits:
            if stopping():
                raise Unavailable("the joiner stops; the recovery of a partition was not finished")
            if commit.set_back is not None:
                _recall(context, task, where, commit, last)
                continue
            read = {role: list(stream.until(commit.next[role])) for role, stream in streams.items()}
            task.replay(where, commit, read)


def _recall(context: JoinContext, task: Task, where: int, commit: Commit, last: Commit) -> None:
    """Repeat a commit that sets the watermark back. Events below the last commit's `low` do not matter any
    more; events that retention has removed since cannot be recalled."""
    assert commit.set_back is not None
    read = {}
    with ExitStack() as readers:
        for role, topic in context.topics.inputs.items():
            at = TopicPartition(topic, task.partition)
            start = max(commit.set_back.recall.get(role, 0), last.low[role], context.log.bounds(at).start)
            if start < commit.next[role]:
                found = _Stream(context.log, at, start, context.clock)
                read[role] = readers.enter_context(found).until(commit.next[role])
        task.replay_set_back(where, commit, read)


def last_commits(context: JoinContext, partitions: Iterable[int]) -> dict[int, tuple[int, Commit] | None]:
    """Return each partition's last commit and its offset in `<model>.joiner`; None where there is none yet.

    Raises as `load` does.
    """
    found = {}
    for partition in partitions:
        at = TopicPartition(context.topics.joiner, partition)
        found[partition] = _last_commit(context.log, at)
        if (commit := found[partition]) is not None:
            _check_log(context.topics, commit[1], at)
        else:
            _first_offsets(context, at)
    return found


def _first_offsets(context: JoinContext, at: TopicPartition) -> dict[str, int]:
    """Return the starts of the inputs of a partition in which `<model>.joiner`, at `at`, has no commit.

    If it had commits, the inputs' events may be joined already. Without events no sample can be doubled.

    Raises DataLost if commits were removed and the inputs have events.
    """
    log, topics = context.log, context.topics
    bounds = {role: log.bounds(TopicPartition(topic, at.partition)) for role, topic in topics.inputs.items()}
    held = [topics.inputs[role] for role, found in bounds.items() if found.start < found.end]
    removed = log.bounds(at).start
    if removed > 0 and held:
        raise DataLost(
            f"{at}: expected the last commit, found none: the log has removed the records before {removed}\n"
            f"  events in partition {at.partition} of {', '.join(held)} may be joined already; joined again, "
            "their samples would be trained on twice\n"
            "  restore the log from a copy, or start a model with another name; to join only later events, "
            "stop the writers of events, remove this partition's events (kafka-delete-records), and restart"
        )
    return {role: found.start for role, found in bounds.items()}


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
    with _Stream(log, at, start, clock) as found:
        for records in found.until(stop):
            for offset, value in zip(records.offsets.tolist(), records.values, strict=True):
                yield offset, Commit.decode(value, f"{at} at {offset}")


def stream(log: EventLog, at: TopicPartition, start: int, stop: int, clock: Clock) -> Iterator[Records]:
    """Yield a partition's records in [start, stop). Raises as a reader does; Unavailable if none come."""
    with _Stream(log, at, max(start, log.bounds(at).start), clock) as found:
        yield from found.until(stop)


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()


def _split(records: Records, stop: int) -> tuple[Records | None, Records | None]:
    n = int(records.offsets.searchsorted(stop))
    if n == len(records):
        return records, None
    if n == 0:
        return None, records
    return records.slice(0, n, stop), records.slice(n, len(records), records.next_offset)
