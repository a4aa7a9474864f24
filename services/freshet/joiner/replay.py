"""Building a partition's task from the log: the last commit, and the replay of what its state rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from freshet.clock import Clock
from freshet.errors import DataLost, Unavailable
from freshet.joiner.commit import Commit
from freshet.joiner.decode import EventDecoder
from freshet.joiner.partition import Task, Topics
from freshet.joiner.plan import JoinPlan
from freshet.log import EventLog, Reader
from freshet.log.tail import newest
from freshet.types import BytesColumn, Records, TopicPartition

__all__ = ["last_commits", "load", "stream"]

READ_RECORDS = 8192
STALLED_S = 30.0
"""A read that yields nothing for so long, though the log holds more, is given up."""


def load(
    log: EventLog,
    topics: Topics,
    plan: JoinPlan,
    decoder: EventDecoder,
    partition: int,
    clock: Clock,
    stopping: Callable[[], bool] = lambda: False,
) -> Task:
    """The task of a partition as its last commit left it, or a new one.

    Raises:
        DataLost: the log is another one, or no longer holds what must be replayed.
        Corrupt: a commit cannot be read, or the replay contradicts it.
        Unavailable: the log cannot be read, or `stopping` said so; nothing has changed.
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
                raise Unavailable("the joiner was asked to stop while it read its state back")
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
    more; those that retention has removed since cannot be made known again."""
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
    """Each partition's last commit and its offset in `<model>.joiner`; None where there is none yet.

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
                f"{at}: the last commit rests on log id {last.log_ids.get(topic)!r} of {topic}\n"
                f"  found {log_id!r}: the topic was made anew since, its offsets mean nothing to this model"
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
    """Records of one partition in [start, stop). Raises what a reader raises; Unavailable if none come."""
    found = _Stream(log, at, max(start, log.bounds(at).start), clock)
    try:
        yield from found.until(stop)
    finally:
        found.close()


class _Stream:
    """One partition of one topic, read in pieces that end where the caller says."""

    def __init__(self, log: EventLog, at: TopicPartition, start: int, clock: Clock) -> None:
        self._at, self._clock = at, clock
        self._position = start  # next offset to hand out
        self._held: Records | None = None  # read, not handed out
        self._reader: Reader = log.reader()
        self._reader.assign({at: start})

    def until(self, stop: int) -> Iterator[Records]:
        """Records from the present position up to `stop`, exclusive."""
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
                self._position = stop  # the rest up to `stop` is a gap

    def close(self) -> None:
        """Free the reader."""
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
