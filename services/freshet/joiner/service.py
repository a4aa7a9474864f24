"""The joiner's loop: reads events, flushes what is decided, commits; one thread for all partitions of the
process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import Fenced, FreshetError, Unavailable
from freshet.joiner.decode import EventDecoder
from freshet.joiner.flushing import Flush, FlushThreads
from freshet.joiner.ledger import Ledger
from freshet.joiner.plan import JoinPlan
from freshet.joiner.recovery import load
from freshet.joiner.task import Task, Topics
from freshet.seams.eventlog import EventLog, Reader, Writer
from freshet.seams.eventlog.claims import LEASE_S
from freshet.seams.eventlog.sharing import Shares
from freshet.types import TopicPartition

__all__ = ["JoinerService", "JoinerStatus", "Pace"]

_log = structlog.get_logger("freshet.joiner")


@dataclass(frozen=True, slots=True)
class Pace:
    """How often the loop does what; `pace_of` says it for a log."""

    flush_interval_ms: int = 20  # a decided sample waits for its block at most this long
    commit_interval_ms: int = 200  # positions are committed at least this often while events come
    look_interval_ms: int = 100  # how often the ends of quiet topics are looked at
    keep_interval_ms: int = 10_000  # how often retention is told what a restart needs
    status_interval_ms: int = 500
    share_interval_ms: int = 100  # how often it is looked at who should have which partition
    poll_records: int = 16_384
    retry_ms: int = 500  # after the log could not be reached


@dataclass(frozen=True, slots=True)
class JoinerStatus:
    """What the joiner did, for metrics and `freshet status`."""

    events: int  # read by this process
    samples: int  # appended by this process
    commits: int
    watermark_ms: Mapping[int, int | None]  # partition -> W
    lag: Mapping[int, int]  # partition -> input records not read yet, when last looked at
    payload_bytes: int
    ids: int
    ledger: Ledger  # of all its partitions, since the model began


@dataclass(slots=True)
class JoinerService:
    """Joins some partitions of a model. `run` returns when `stop` is set, or at the end of the streams if
    asked.

    At most one process may own a partition at a time; a later one fences the earlier, whose appends then
    fail. That alone keeps samples exact: state is rebuilt from what the log holds after the writer was
    opened, so whoever opened it before can add nothing more. Claims (`shares`) only say who should open it.

    A writer spans all partitions (`all_partitions`), which costs least where one process has them for good.
    Or each has a writer of its own, named after it, wherever partitions move (ARCHITECTURE.md says why).
    """

    log: EventLog
    model: str
    plan: JoinPlan
    topics: Topics
    decoder: EventDecoder
    partitions: Sequence[int]
    all_partitions: bool = True
    shares: Shares | None = None  # of `partitions`, with other processes; None: all of them are this one's
    clock: Clock = SYSTEM_CLOCK
    pace: Pace = field(default_factory=Pace)
    stop: Event = field(default_factory=Event)
    on_status: Callable[[JoinerStatus], None] | None = None
    status: JoinerStatus | None = None
    tasks: dict[int, Task] = field(default_factory=dict)
    _writers: list[tuple[Writer, tuple[int, ...]]] = field(default_factory=list)
    _reader: Reader | None = None
    _threads: FlushThreads = field(default_factory=FlushThreads)
    _roles: dict[str, str] = field(default_factory=dict)
    _lag: dict[TopicPartition, int] = field(default_factory=dict)
    _since: dict[int, tuple[int, Mapping[str, int]]] = field(default_factory=dict)
    _done: dict[str, float] = field(default_factory=dict)  # what was last done when, monotonic
    _samples: int = 0
    _commits: int = 0

    def run(self, *, until_end: bool = False) -> None:
        """Join until told to stop. `until_end`: up to the streams' present ends, then close all windows and
        return.

        Raises:
            Fenced: another process owns the partitions now; or, if they are shared, has this one's seat.
            DataLost, Corrupt: see `freshet.joiner.recovery.load`; an operator decides.
        """
        if self.shares is not None:
            self.shares.sit(2 * LEASE_S)
        while not self.stop.is_set():
            try:
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
                # Whether the last append happened is not known: begin again from what the log says.
                _log.warning("begins again from what the log says", reason=str(error))
                if self.stop.wait(self.pace.retry_ms / 1000) and until_end:
                    raise
            finally:
                self.close()

    def __post_init__(self) -> None:
        if self.shares is not None and self.all_partitions:
            raise ValueError("partitions that are shared have a writer each: all_partitions=False")

    # -- the parts of the loop; tests drive them one by one

    def open(self) -> None:
        """Begin anew. Partitions of this one alone are rebuilt from the log now, shared ones by `share`."""
        self.close()
        self._roles = {topic: role for role, topic in self.topics.inputs.items()}
        self._reader = self.log.reader()
        if self.shares is None:
            self._enter(self.partitions)

    def share(self) -> None:
        """Leave what should be or is another's, enter what is this one's."""
        assert self.shares is not None, "partitions are shared"
        self.shares.look(self._let_go)
        new = [p for p in self.shares.fences if p not in self.tasks]
        if new:
            try:
                self._enter(new)
            except Fenced as error:  # opened by another at the same time: the claims tell whose they are
                self._mourn(dict.fromkeys(new, error))

    def step(self) -> None:
        """Read once, join, and flush what is due."""
        assert self._reader is not None, "open() comes first"
        if self.shares is not None and self._due("share", self.pace.share_interval_ms):
            self.share()
            if not self.tasks:
                self._tell()
                self.stop.wait(self.pace.share_interval_ms / 1000)
                return
        for at, records in self._reader.poll(self.pace.poll_records, self._wait_s()):
            task, role = self.tasks[at.partition], self._roles[at.topic]
            task.take(role, records)
            task.watermark.behind(role)
        if self._due("look", self.pace.look_interval_ms):
            self._look()
        if self._due("flush", self.pace.flush_interval_ms, mark=False):
            self.flush()
        if self._due("keep", self.pace.keep_interval_ms):
            self._keep()
        if self._due("status", self.pace.status_interval_ms):
            self._tell()

    def flush(self, *, only_due: bool = True) -> None:
        """Append, atomically, the output and commit of every partition that has something to say."""
        self._flush(
            self._writers, commit_all=not only_due or self._due("commit", self.pace.commit_interval_ms)
        )

    def finish(self) -> None:
        """The streams have ended: close every window, and commit."""
        for task in self.tasks.values():
            task.watermark.close(task.joiner.horizon_ms)
        self.flush(only_due=False)
        self._tell()

    def close(self) -> None:
        """Give back readers and writers. Idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._leave(list(self.tasks))
        self._threads.close()
        self._done.clear()

    # -- within

    def _enter(self, partitions: Sequence[int]) -> None:
        """Fence earlier owners, then rebuild the partitions' state from the log."""
        groups = [tuple(partitions)] if self.all_partitions else [(p,) for p in partitions]
        for group in groups:
            name = f"joiner-{self.model}" if self.all_partitions else f"joiner-{self.model}-{group[0]}"
            self._writers.append((self.log.writer(name), group))
            for partition in group:
                self.tasks[partition] = load(
                    self.log, self.topics, self.plan, self.decoder, partition, self.clock, self.stop.is_set
                )
        self._assign()

    def _let_go(self, partitions: Collection[int]) -> None:
        """Commit partitions that go to another, if they are still this one's, and forget them."""
        self._flush([(w, group) for w, group in self._writers if group[0] in partitions], commit_all=True)
        self._leave(partitions)
        self._assign()

    def _leave(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            self.tasks.pop(partition, None)
            self._since.pop(partition, None)
        for writer, group in self._writers:
            if group[0] not in self.tasks:
                writer.close()
        self._writers = [(writer, group) for writer, group in self._writers if group[0] in self.tasks]
        self._lag = {at: n for at, n in self._lag.items() if at.partition in self.tasks}

    def _assign(self) -> None:
        """Read the partitions that are here, each from where its task stands."""
        if self._reader is not None:
            self._reader.assign(
                {
                    TopicPartition(topic, partition): task.next[role]
                    for partition, task in self.tasks.items()
                    for role, topic in self.topics.inputs.items()
                }
            )

    def _flush(self, writers: Sequence[tuple[Writer, tuple[int, ...]]], *, commit_all: bool) -> None:
        flushes = []
        for writer, partitions in writers:
            tasks = [self.tasks[p] for p in partitions if p in self.tasks]
            ready = [t for t in tasks if t.has_output or (commit_all and t.has_progress)]
            if ready:
                flushes.append(Flush(writer, ready, self.topics.dead_letters, self.clock.now_ms()))
        if not flushes:
            return
        self._threads.append(flushes)
        for flush in flushes:
            if flush.error is None:
                self._count(flush)
        self._due("flush", 0)
        self._mourn({p: f.error for f in flushes if f.error is not None for p in f.partitions})

    def _count(self, flush: Flush) -> None:
        for task, output in flush.done:
            self._since[task.partition] = (output.commit.since, output.commit.low)
            self._samples += output.samples
            self._commits += 1

    def _mourn(self, void: Mapping[int, FreshetError]) -> None:
        """Tasks whose last append is not known to be written. A shared partition stops alone: it is entered
        again, if it still is this one's."""
        for partition, error in void.items():
            if self.shares is None or not isinstance(error, Fenced | Unavailable):
                raise error
            _log.warning("a partition is given up", partition=partition, reason=str(error))
        if void:
            self._leave(void.keys())
            self._assign()

    def _look(self) -> None:
        """Which topics are read to their end (PROTOCOL 19)."""
        now = self.clock.monotonic()
        for partition, task in self.tasks.items():
            for role, topic in self.topics.inputs.items():
                at = TopicPartition(topic, partition)
                behind = self.log.bounds(at).end - task.next[role]
                self._lag[at] = max(0, behind)
                if behind > 0:
                    task.watermark.behind(role)
                else:
                    task.watermark.at_end(role, now)

    def _ends(self) -> dict[TopicPartition, int]:
        inputs = self.topics.inputs.values()
        places = [TopicPartition(topic, partition) for topic in inputs for partition in self.partitions]
        return {at: self.log.bounds(at).end for at in places}

    def _reached(self, ends: Mapping[TopicPartition, int]) -> bool:
        return all(self.tasks[at.partition].next[self._roles[at.topic]] >= end for at, end in ends.items())

    def _keep(self) -> None:
        """Tell the log what a restart reads again, and drop the commits that none needs."""
        for _, group in self._writers:
            held: dict[TopicPartition, int] = {}
            for partition in group:
                if partition in self._since:
                    held |= self._needed(partition)
            if held:
                self.log.hold(f"joiner-{self.model}-{group[0]}", held)

    def _needed(self, partition: int) -> dict[TopicPartition, int]:
        since, low = self._since[partition]
        commits = TopicPartition(self.topics.joiner, partition)
        if since > 0:
            self.log.trim(commits, since)
        inputs = {TopicPartition(topic, partition): low[role] for role, topic in self.topics.inputs.items()}
        return inputs | {commits: max(since, 0)}

    def _tell(self) -> None:
        if not self.tasks and self.shares is None:
            return
        tasks = self.tasks.values()
        self.status = JoinerStatus(
            events=sum(t.events for t in tasks),
            samples=self._samples,
            commits=self._commits,
            watermark_ms={t.partition: t.watermark.value for t in tasks},
            lag={p: sum(n for at, n in self._lag.items() if at.partition == p) for p in self.tasks},
            payload_bytes=sum(t.joiner.payload_bytes for t in tasks),
            ids=sum(t.joiner.ids for t in tasks),
            ledger=Ledger.total(
                [Ledger.empty([x.name for x in self.plan.labels]), *(t.ledger() for t in tasks)]
            ),
        )
        if self.on_status is not None:
            self.on_status(self.status)

    def _wait_s(self) -> float:
        """How long to wait for events: until the next flush if samples are ready."""
        interval = self.pace.flush_interval_ms / 1000
        if not any(task.has_output for task in self.tasks.values()):
            return interval
        return max(0.0, self._done.get("flush", 0.0) + interval - self.clock.monotonic())

    def _due(self, what: str, interval_ms: int, *, mark: bool = True) -> bool:
        now = self.clock.monotonic()
        due = now - self._done.get(what, float("-inf")) >= interval_ms / 1000
        if due and mark:
            self._done[what] = now
        return due
