"""The joiner's loop: reads events, flushes what is decided, commits; one thread for all partitions of the
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import Unavailable
from freshet.joiner.decode import EventDecoder
from freshet.joiner.ledger import Ledger
from freshet.joiner.plan import JoinPlan
from freshet.joiner.recovery import load
from freshet.joiner.task import Outputs, Task, Topics
from freshet.seams.eventlog import EventLog, Reader, Writer
from freshet.types import Append, BytesColumn, TopicPartition

__all__ = ["JoinerService", "JoinerStatus", "Pace"]


@dataclass(frozen=True, slots=True)
class Pace:
    """How often the loop does what. On Kafka set both intervals to 200 ms: a transaction costs more there."""

    flush_interval_ms: int = 20  # a decided sample waits for its block at most this long
    commit_interval_ms: int = 200  # positions are committed at least this often while events come
    look_interval_ms: int = 100  # how often the ends of quiet topics are looked at
    keep_interval_ms: int = 10_000  # how often retention is told what a restart needs
    status_interval_ms: int = 500
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
    fail.
    """

    log: EventLog
    model: str
    plan: JoinPlan
    topics: Topics
    decoder: EventDecoder
    partitions: Sequence[int]
    all_partitions: bool = True
    clock: Clock = SYSTEM_CLOCK
    pace: Pace = field(default_factory=Pace)
    stop: Event = field(default_factory=Event)
    on_status: Callable[[JoinerStatus], None] | None = None
    status: JoinerStatus | None = None
    tasks: dict[int, Task] = field(default_factory=dict)
    _writers: list[tuple[Writer, tuple[int, ...]]] = field(default_factory=list)
    _reader: Reader | None = None
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
            Fenced: another process owns the partitions now.
            DataLost, Corrupt: see `freshet.joiner.recovery.load`; an operator decides.
        """
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
            except Unavailable:
                # Whether the last append happened is not known: begin again from what the log says.
                if self.stop.wait(self.pace.retry_ms / 1000) and until_end:
                    raise
            finally:
                self.close()

    # -- the parts of the loop; tests drive them one by one

    def open(self) -> None:
        """Fence earlier owners, then rebuild every partition's state from the log."""
        self.close()
        self._roles = {topic: role for role, topic in self.topics.inputs.items()}
        groups = [tuple(self.partitions)] if self.all_partitions else [(p,) for p in self.partitions]
        for group in groups:
            name = f"joiner-{self.model}" if self.all_partitions else f"joiner-{self.model}-{group[0]}"
            self._writers.append((self.log.writer(name), group))
        for partition in self.partitions:
            self.tasks[partition] = load(
                self.log, self.topics, self.plan, self.decoder, partition, self.clock, self.stop.is_set
            )
        self._reader = self.log.reader()
        self._reader.assign(
            {
                TopicPartition(topic, partition): task.next[role]
                for partition, task in self.tasks.items()
                for role, topic in self.topics.inputs.items()
            }
        )

    def step(self) -> None:
        """Read once, join, and flush what is due."""
        assert self._reader is not None, "open() comes first"
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
        commit_all = not only_due or self._due("commit", self.pace.commit_interval_ms)
        for writer, partitions in self._writers:
            tasks = [self.tasks[p] for p in partitions]
            ready = [t for t in tasks if t.has_output or (commit_all and t.has_progress)]
            if ready:
                self._append(writer, ready)

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
        for writer, _ in self._writers:
            writer.close()
        self._writers.clear()
        self.tasks.clear()
        self._done.clear()

    # -- within

    def _append(self, writer: Writer, tasks: Sequence[Task]) -> None:
        now_ms = self.clock.now_ms()
        outputs: list[tuple[Task, Outputs, int]] = []
        appends: list[Append] = []
        letters: list[bytes] = []
        for task in tasks:
            output = task.flush(now_ms)
            appends += output.appends
            letters += output.dead_letters
            outputs.append((task, output, len(appends) - 1))
        if letters:
            appends.append(Append(self.topics.dead_letters, 0, BytesColumn.of(letters)))
        offsets = writer.append(appends)
        for task, output, at in outputs:
            task.appended(output, int(offsets[at]))
            self._since[task.partition] = (output.commit.since, output.commit.low)
            self._samples += output.samples
            self._commits += 1
        self._due("flush", 0)

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
        held = {}
        for partition, (since, low) in self._since.items():
            for role, topic in self.topics.inputs.items():
                held[TopicPartition(topic, partition)] = low[role]
            commits = TopicPartition(self.topics.joiner, partition)
            held[commits] = max(since, 0)
            if since > 0:
                self.log.trim(commits, since)
        if held:
            self.log.hold(f"joiner-{self.model}-{self.partitions[0]}", held)

    def _tell(self) -> None:
        if not self.tasks:
            return
        tasks = self.tasks.values()
        self.status = JoinerStatus(
            events=sum(t.events for t in tasks),
            samples=self._samples,
            commits=self._commits,
            watermark_ms={t.partition: t.watermark.value for t in tasks},
            lag={p: sum(n for at, n in self._lag.items() if at.partition == p) for p in self.partitions},
            payload_bytes=sum(t.joiner.payload_bytes for t in tasks),
            ids=sum(t.joiner.ids for t in tasks),
            ledger=Ledger.total([t.ledger() for t in tasks]),
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
