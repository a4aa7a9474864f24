"""Building a partition's task from the log: the last commit, and the replay of what its state rests on."""

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
from freshet.log.tail import newest
from freshet.types import BytesColumn, Records, TopicPartition

__all__ = ["Entered", "Entering", "last_commits", "load", "stream"]

# --- Partitions on their way to a joiner: a writer of their own opened, their state rebuilt from the log,
# by threads, while the partitions that are there already are joined on.


_AT_ONCE = 8


@dataclass(slots=True)
class Entered:
    """What became of partitions that share a writer. Either all tasks are there, or `error` says why not."""

    partitions: tuple[int, ...]
    writer: Writer | None = None
    tasks: list[Task] = field(default_factory=list)
    error: FreshetError | None = None


class Entering:
    """Used by one thread, but for `enter`, which threads of its own call."""

    def __init__(
        self,
        writer_of: Callable[[tuple[int, ...]], Writer],
        task_of: Callable[[int, Callable[[], bool]], Task],
    ) -> None:
        """Nothing enters yet.

        Args:
            writer_of: opens the writer of partitions, and fences whoever had it.
            task_of: rebuilds a partition; gives up with Unavailable once the function that it is given says
                so.
        """
        self._writer_of, self._task_of = writer_of, task_of
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: dict[Future[Entered], tuple[tuple[int, ...], Event]] = {}

    def begin(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Let these in, each group with one writer."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="joiner-enter")
        for group in groups:
            given_up = Event()
            self._under_way[self._threads.submit(self.enter, group, given_up)] = (group, given_up)

    @property
    def partitions(self) -> set[int]:
        """Those on their way, without those that were given up."""
        return {p for group, given_up in self._under_way.values() if not given_up.is_set() for p in group}

    def give_up(self, partitions: Collection[int]) -> None:
        """These are another's now. What was opened for them is closed, at the latest when it is there."""
        for group, given_up in self._under_way.values():
            if set(partitions).intersection(group):
                given_up.set()

    def take(self, *, waiting: bool = False) -> list[Entered]:
        """Those that are in, or could not get in, each once; `waiting`: of all."""
        if waiting:
            wait(self._under_way)
        found = []
        for future in [future for future in self._under_way if future.done()]:
            _, given_up = self._under_way.pop(future)
            if not given_up.is_set():
                found.append(future.result())
            elif future.exception() is None and (writer := future.result().writer) is not None:
                writer.close()
        return found

    def close(self) -> None:
        """Give everything up, and wait for it. Idempotent."""
        for _, given_up in self._under_way.values():
            given_up.set()
        self.take(waiting=True)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def enter(self, group: tuple[int, ...], given_up: Event) -> Entered:
        """Fence earlier owners first: then what the log says of the partitions is their last word."""
        entered = Entered(group)
        try:
            if given_up.is_set():
                raise Unavailable("the partitions went to another before they were opened")
            entered.writer = self._writer_of(group)
            entered.tasks = [self._task_of(p, given_up.is_set) for p in group]
        except FreshetError as error:
            if entered.writer is not None:
                entered.writer.close()
            entered.writer, entered.tasks, entered.error = None, [], error
        return entered


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
