"""The joiner's loop: reads events, flushes what is decided, commits; one thread for all partitions of the
process. Where each partition has a writer of its own, appends and the taking over of partitions go on beside
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import structlog

from freshet.clock import CONFIRMED_S, SYSTEM_CLOCK, Clock, SteadyClock
from freshet.coordination.claims import LEASE_S
from freshet.coordination.partition_assignment import Shares
from freshet.errors import ConfigError, Fenced, FreshetError, Mismatch, Unavailable
from freshet.joiner.appends import Flush, Flushes
from freshet.joiner.counters import EventCounts
from freshet.joiner.decode import BadInARow, Disputed, EventDecoder
from freshet.joiner.ledger import Ledger
from freshet.joiner.partition import Task, Topics, pieces
from freshet.joiner.partitioners import Placing
from freshet.joiner.plan import Growth, JoinPlan
from freshet.joiner.replay import Entered, Entering, load
from freshet.joiner.watermark import Now
from freshet.log import EventLog, Reader, Writer
from freshet.observability.losses import JOINER_FIGURES, RECENT_S, Recent, counted
from freshet.process.lifecycle import Pulse
from freshet.types import Records, TopicPartition

__all__ = ["JoinerService", "JoinerStatus", "Pace"]

_log = structlog.get_logger("freshet.joiner")

_LONGEST_PAUSE_S = 60.0
"""Before a partition that cannot be joined is tried again."""


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
    count_interval_ms: int = 2_000  # how often partitions of the inputs are counted, where they may grow
    held_ms: int = 1000  # an append that takes longer holds reading up, or the next one would be ever larger
    retry_ms: int = 500  # after the log, or who knows schemas, could not be reached


@dataclass(frozen=True, slots=True)
class JoinerStatus:
    """What the joiner did, for metrics and `freshet status`."""

    events: int  # read by this process
    samples: int  # appended by this process
    commits: int
    newest_ms: int | None  # newest event time among these samples; None: none were appended
    watermark_ms: Mapping[int, int | None]  # partition -> W
    lag: Mapping[int, int]  # partition -> input records not read yet, when last looked at
    room: Mapping[int, int]  # partition -> input records between the log's start and what a restart reads
    payload_bytes: int
    ids: int
    ledger: Ledger  # of all its partitions, since the model began
    counts: EventCounts  # by this process
    growth: Growth = field(default_factory=lambda: Growth(0, 0, {}))  # partitions of the inputs
    losses: Mapping[str, Any] = field(default_factory=dict)  # shares, as `_shares` makes them
    placing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # as `Placing.to_json` makes it
    trouble: str | None = None  # why events of a stream, or a partition, are not used
    bad_times: Mapping[str, str] = field(default_factory=dict)  # stream -> the first event dated wrongly
    now_ms: int = 0  # the time that is known to be right
    clock_step_ms: int = 0  # by how much the wall clock differs from it since it was set; 0: it runs evenly
    disputed_ms: Mapping[int, int] = field(
        default_factory=dict
    )  # partition -> how far the event that waits is ahead


@dataclass(slots=True)
class _Held:
    """A partition of a topic that is not read on, as clocks disagree on its next record."""

    disputed: Disputed
    since_s: float  # monotonic
    lonely: bool = False  # the log's time was not confirmed by later records: it counts no longer


_LONELY_S = 5 * CONFIRMED_S
"""The log's time for one record, with no later record that confirms it, is given up after this long."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A partition that stands still for a reason that lasts."""

    error: FreshetError
    pause_s: float
    again_s: float  # when it is tried again, monotonic


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
    decoder: Callable[[], EventDecoder]  # makes one; each partition has its own
    partitions: Sequence[int]
    all_partitions: bool = True
    watches_growth: bool = False  # whether partitions that inputs get are joined as well, once all have them
    shares: Shares | None = None  # of `partitions`, with other processes; None: all of them are this one's
    clock: Clock = SYSTEM_CLOCK
    pace: Pace = field(default_factory=Pace)
    stop: Event = field(default_factory=Event)
    on_status: Callable[[JoinerStatus], None] | None = None
    pulse: Pulse = field(default_factory=Pulse)
    status: JoinerStatus | None = None
    tasks: dict[int, Task] = field(default_factory=dict)
    _writers: list[tuple[Writer, tuple[int, ...]]] = field(default_factory=list)
    _reader: Reader | None = None
    _entering: Entering = field(init=False)
    _flushes: Flushes = field(default_factory=Flushes)
    _roles: dict[str, str] = field(default_factory=dict)
    append_time: bool = (
        True  # the log's time is the log's own clock, not what writers say (Kafka's CreateTime)
    )
    _steady: SteadyClock | None = None
    _bad_times: dict[str, str] = field(default_factory=dict)  # role -> the first event dated wrongly
    _history: bool = False  # joins what is there, up to its end: the log's time is the only one
    _held: dict[TopicPartition, _Held] = field(default_factory=dict)
    _paused: set[TopicPartition] = field(default_factory=set)  # of those, until they are looked at again
    _lag: dict[TopicPartition, int] = field(default_factory=dict)
    _starts: dict[TopicPartition, int] = field(default_factory=dict)  # of the log, when last looked at
    _since: dict[int, tuple[int, Mapping[str, int]]] = field(default_factory=dict)
    _done: dict[str, float] = field(default_factory=dict)  # what was last done when, monotonic
    _samples: int = 0
    _events_elsewhere: int = 0  # read here, of partitions that have gone to others
    _commits: int = 0
    _newest_ms: int | None = None
    _counts: EventCounts = field(init=False)
    _bad: BadInARow = field(init=False)
    _growth: Growth = field(init=False)
    _misplaced: set[str] = field(default_factory=set)  # topics that were told of
    _placing: Placing = field(default_factory=Placing)
    _recent: Recent = field(default_factory=Recent)
    _failed: dict[int, _Failed] = field(default_factory=dict)  # shared partitions that wait to be tried again

    def run(self, *, until_end: bool = False) -> None:
        """Join until told to stop. `until_end`: up to the streams' present ends, then close all windows and
        return.

        Raises:
            Fenced: another process owns the partitions now; or, if they are shared, has this one's seat.
            DataLost, Corrupt: see `freshet.joiner.replay.load`; an operator decides.
        """
        self._history = until_end
        if self.shares is not None:
            self.shares.sit(2 * LEASE_S)
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
                # Whether the last append happened is not known: begin again from what the log says.
                _log.warning("begins again from what the log says", reason=str(error))
                if self.stop.wait(self.pace.retry_ms / 1000) and until_end:
                    raise
            finally:
                self.close()

    def __post_init__(self) -> None:
        if self.shares is not None and self.all_partitions:
            raise ValueError("partitions that are shared have a writer each: all_partitions=False")
        self._entering = Entering(self.writer_of, self._task_of)
        self._counts = EventCounts.of(self.topics.inputs)
        self._bad = BadInARow(self.clock.monotonic)
        self._growth = Growth(self.topics.samples_partitions, len(self.partitions), {})

    @property
    def steady(self) -> SteadyClock:
        """The time that is known to be right."""
        if self._steady is None or self._steady.clock is not self.clock:
            self._steady = SteadyClock(self.clock)
        return self._steady

    # -- the parts of the loop; tests drive them one by one

    def open(self) -> None:
        """Begin anew. Partitions of this one alone are rebuilt from the log now, shared ones by `share`."""
        self.close()
        self._roles = {topic: role for role, topic in self.topics.inputs.items()}
        self._reader = self.log.reader()
        self._due("look", 0)  # the first one an interval from now: what is there was not read yet
        if self.shares is None:
            self._entering.begin(self.groups(self.partitions))
            self._let_in(self._entering.take(waiting=True))

    def share(self) -> None:
        """Leave what should be or is another's, let in what is this one's."""
        assert self.shares is not None, "partitions are shared"
        self.shares.look(self._let_go)
        self._let_in(self._entering.take())
        here = self.tasks.keys() | self._entering.partitions
        now = self.clock.monotonic()
        here |= {p for p, failed in self._failed.items() if now < failed.again_s}
        self._entering.begin(self.groups([p for p in self.shares.fences if p not in here]))

    def step(self) -> None:
        """Read once, join, and flush what is due."""
        assert self._reader is not None, "open() comes first"
        self.pulse.beat()
        if self.shares is not None and self._due("share", self.pace.share_interval_ms):
            self.share()
            if not self.tasks:
                if self.watches_growth and self._due("count", self.pace.count_interval_ms):
                    self._count_partitions()
                self._tell()
                self.stop.wait(self.pace.share_interval_ms / 1000)
                return
        if self._due("held", self.pace.retry_ms):
            self._resume_held()
        if self.watches_growth and self._due("count", self.pace.count_interval_ms):
            self._count_partitions()
        self._settle(self._flushes.begun_before(self.clock.monotonic() - self.pace.held_ms / 1000))
        self._take(self._reader.poll(self.pace.poll_records, self._wait_s()))
        if self._due("look", self.pace.look_interval_ms):
            self._look()
        if self._due("flush", self.pace.flush_interval_ms, mark=False):
            self._begin_flush(self._writers, commit_all=self._due("commit", self.pace.commit_interval_ms))
        self._settle()
        if self._due("keep", self.pace.keep_interval_ms):
            self._keep()
        if self._due("status", self.pace.status_interval_ms):
            self._tell()

    def _take(self, polled: Sequence[tuple[TopicPartition, Records]]) -> None:
        """Join records. Where a schema cannot be had now nothing is taken: it is read again, while what else
        there is goes on."""
        waiting: dict[TopicPartition, Unavailable] = {}
        disputed = False
        for at, records in polled:
            task, role = self.tasks.get(at.partition), self._roles[at.topic]
            if task is None:  # given up meanwhile
                continue
            try:
                if at not in waiting:
                    if self.watches_growth:
                        self._placing.note(
                            at.topic, at.partition, self._growth.sizes, records.keys, self.clock.monotonic()
                        )
                    disputed |= self._take_pieces(at, task, role, records)
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
        held = self._held.get(at)
        log_counts = self.append_time and not (held is not None and held.lonely)
        return Now(self.steady.now_ms(), self.steady.latest_ms(), log_counts)

    def _hold(self, at: TopicPartition, disputed: Disputed | None) -> bool:
        """Do not read on where clocks disagree, until one has turned out to be wrong (PROTOCOL 19)."""
        if disputed is None:
            self._held.pop(at, None)
            return False
        held, now_s = self._held.get(at), self.clock.monotonic()
        if held is None or held.disputed.offset != disputed.offset:
            held = self._held[at] = _Held(disputed, now_s)
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
        held.lonely = waited_s >= _LONELY_S
        self._paused.add(at)
        return True

    def _resume_held(self) -> None:
        """Read held partitions again: their records are judged by what the clocks say now."""
        if self._paused:
            self._paused.clear()
            self._assign()

    def _take_pieces(self, at: TopicPartition, task: Task, role: str, records: Records) -> bool:
        """Join records, and flush in between where the task is full; returns whether clocks disagree on one
        of them, at which it stops. Raises Unavailable as `Task.take` does, with what came before it taken."""
        for piece in pieces(records):
            refused = task.take(role, piece, self._now(at))
            self._bad.note(role, at.topic, len(piece), refused)
            if refused.first_bad_time and role not in self._bad_times:
                self._bad_times[role] = f"{at}, offset {refused.first_bad_time}"
            if self._hold(at, refused.disputed):
                return True
            if task.is_full:
                self._flush_now(task)
                if self.tasks.get(at.partition) is not task:  # its next owner reads what follows
                    break
        return False

    def _flush_now(self, task: Task) -> None:
        """Append what one task has, with those that share its writer, and wait for it."""
        self._settle([task.partition])
        self._begin_flush(
            [(w, group) for w, group in self._writers if task.partition in group], commit_all=True
        )
        self._settle([task.partition])

    def flush(self, *, only_due: bool = True) -> None:
        """Append, atomically, the output and commit of every partition that has something to say, and wait
        for it."""
        self._settle(self.tasks)
        self._begin_flush(
            self._writers, commit_all=not only_due or self._due("commit", self.pace.commit_interval_ms)
        )
        self._settle(self.tasks)

    def finish(self) -> None:
        """The streams have ended: close every window, and commit."""
        for task in self.tasks.values():
            task.watermark.close(task.joiner.horizon_ms)
        self.flush(only_due=False)
        while any(task.has_output for task in self.tasks.values()):  # what one flush does not hold
            self.flush(only_due=False)
        self._tell()

    def close(self) -> None:
        """Give back readers and writers. Idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._entering.close()
        self._flushes.close()
        self._leave(list(self.tasks))
        self._done.clear()

    # -- within

    def _count_partitions(self) -> None:
        """Count the inputs' partitions, and join those that all of them have by now, from their start."""
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
        """Join this many partitions from now on; each joiner finds out by itself."""
        known = len(self.partitions)
        self.partitions, self._growth = range(every), replace(self._growth, joined=every)
        _log.warning(
            "topics grew, their new partitions are joined from their start",
            topics=sorted(set(self.topics.inputs.values())),
            partitions=every,
            partitions_before=known,
        )
        if self.shares is not None:
            self.shares.partitions = every
        else:
            self._entering.begin(self.groups(range(known, every)))
            self._let_in(self._entering.take(waiting=True))

    def groups(self, partitions: Sequence[int]) -> list[tuple[int, ...]]:
        """Those that share a writer, together."""
        return [tuple(partitions)] if self.all_partitions else [(p,) for p in partitions]

    def writer_of(self, group: tuple[int, ...]) -> Writer:
        """Open the writer of partitions that share one, as `groups` gives them; an earlier one is fenced."""
        return self.log.writer(f"joiner-{self.model}" + ("" if self.all_partitions else f"-{group[0]}"))

    def _task_of(self, partition: int, given_up: Callable[[], bool]) -> Task:
        return load(
            self.log,
            self.topics,
            self.plan,
            self.decoder(),
            partition,
            self.clock,
            lambda: given_up() or self.stop.is_set(),
        )

    def _let_in(self, entered: Sequence[Entered]) -> None:
        """Join what has come in. Raises why something could not, unless it is shared and may be tried
        again."""
        for group in entered:
            if group.writer is not None:
                self._writers.append((group.writer, group.partitions))
                self.tasks |= {task.partition: task for task in group.tasks}
                for task in group.tasks:
                    if task.clock is not None:
                        self.steady.resume(task.clock)
        failed = {p: group.error for group in entered if group.error for p in group.partitions}
        if any(group.writer is not None for group in entered):
            self._assign()
        self._mourn(failed)

    def _let_go(self, partitions: Collection[int]) -> None:
        """Commit partitions that go to another, if they are still this one's, and forget them."""
        self._entering.give_up(partitions)
        here = [p for p in partitions if p in self.tasks]
        self._settle(here)
        self._begin_flush([(w, group) for w, group in self._writers if group[0] in here], commit_all=True)
        self._settle(here)
        self._leave(here)
        if here:
            self._assign()

    def _leave(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            if (task := self.tasks.pop(partition, None)) is not None:
                self._events_elsewhere += task.events
            self._since.pop(partition, None)
        for writer, group in self._writers:
            if group[0] not in self.tasks:
                writer.close()
        self._writers = [(writer, group) for writer, group in self._writers if group[0] in self.tasks]
        self._lag = {at: n for at, n in self._lag.items() if at.partition in self.tasks}
        self._held = {at: held for at, held in self._held.items() if at.partition in self.tasks}
        self._paused = {at for at in self._paused if at.partition in self.tasks}

    def _assign(self) -> None:
        """Read the partitions that are here, each from where its task stands."""
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
        """Flush what is due, but for partitions whose last flush is still under way."""
        flushes, busy = [], self._flushes.busy
        for writer, partitions in writers:
            tasks = [self.tasks[p] for p in partitions if p in self.tasks]
            ready = [t for t in tasks if t.has_output or (commit_all and t.has_progress)]
            if ready and busy.isdisjoint(partitions):
                for task in ready:
                    task.clock = self.steady.state
                flushes.append(Flush(writer, ready, self.topics.dead_letters, self.steady.now_ms()))
        for flush in flushes:
            if self.all_partitions:  # nothing is gained by a thread: there is one writer, and a disk
                flush.append()
                self._ended([flush])
            else:
                self._flushes.begin(flush, self.clock.monotonic())
        if flushes or busy:
            self._due("flush", 0)

    def _settle(self, waiting_for: Iterable[int] = ()) -> None:
        """See what became of flushes; those of some partitions are waited for."""
        self._ended(self._flushes.take(set(waiting_for)))

    def _ended(self, flushes: Sequence[Flush]) -> None:
        for flush in flushes:
            if flush.error is None:
                flush.settle()
                self._count(flush)
        self._mourn({p: f.error for f in flushes if f.error is not None for p in f.partitions})

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

    def _mourn(self, void: Mapping[int, FreshetError]) -> None:
        """Tasks that could not begin, or whose last append is not known to be written. A shared partition
        stops alone: it is let in again, if it still is this one's; after a pause, if trying again may not
        help, as where the log takes smaller records than before. Its neighbours go on. A log whose named
        writers are not exact ends the joiner."""
        for partition, error in void.items():
            if self.shares is None or isinstance(error, Mismatch):
                raise error
            if isinstance(error, Fenced | Unavailable):
                _log.warning("a partition is given up", partition=partition, reason=str(error))
                continue
            pause_s = (
                min(2 * self._failed[partition].pause_s, _LONGEST_PAUSE_S)
                if partition in self._failed
                else 1.0
            )
            self._failed[partition] = _Failed(error, pause_s, self.clock.monotonic() + pause_s)
            _log.error(
                "a partition cannot be joined, tried again; the others go on",
                partition=partition,
                reason=str(error),
                again_in_s=pause_s,
            )
        here = [p for p in void if p in self.tasks]
        if here:
            self._leave(here)
            self._assign()

    def _look(self) -> None:
        """Which topics are read to their end (PROTOCOL 19)."""
        now = self.clock.monotonic()
        for at, bounds in self.log.all_bounds(self._places(self.tasks)).items():
            task, role = self.tasks[at.partition], self._roles[at.topic]
            behind = bounds.end - task.next[role]
            self._lag[at], self._starts[at] = max(0, behind), bounds.start
            if behind > 0:
                task.watermark.behind(role)
            else:
                task.watermark.at_end(role, now)

    def _places(self, partitions: Iterable[int]) -> list[TopicPartition]:
        return [TopicPartition(topic, p) for p in partitions for topic in self.topics.inputs.values()]

    def _ends(self) -> dict[TopicPartition, int]:
        return {at: bounds.end for at, bounds in self.log.all_bounds(self._places(self.partitions)).items()}

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
            events=self._events_elsewhere + sum(t.events for t in tasks),
            samples=self._samples,
            commits=self._commits,
            newest_ms=self._newest_ms,
            watermark_ms={t.partition: t.watermark.value for t in tasks},
            lag={p: sum(n for at, n in self._lag.items() if at.partition == p) for p in self.tasks},
            room={p: self._room(p) for p in self.tasks if p in self._since},
            payload_bytes=sum(t.joiner.payload_bytes for t in tasks),
            ids=sum(t.joiner.ids for t in tasks),
            ledger=Ledger.total(
                [Ledger.empty([x.name for x in self.plan.labels]), *(t.ledger() for t in tasks)]
            ),
            counts=self._counts,
            losses=self._shares(),
            placing=self._placed(),
            growth=self._growth,
            trouble=self._trouble(),
            bad_times=self._bad_times,
            now_ms=self.steady.now_ms(),
            clock_step_ms=self.steady.step_ms,
            disputed_ms={at.partition: held.disputed.ahead_ms for at, held in self._held.items()},
        )
        if self.on_status is not None:
            self.on_status(self.status)

    def _placed(self) -> dict[str, dict[str, str]]:
        found = self._placing.to_json()
        for topic, reason in found["trouble"].items():
            if topic not in self._misplaced:
                _log.error("clients place the keys of a topic elsewhere", topic=topic, reason=reason)
        self._misplaced = set(found["trouble"])
        return found

    def _shares(self) -> dict[str, Any]:
        """What of the events teaches nothing: lately, of this process; since the model began, of its
        partitions."""
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
        """None, or why hardly any event of some stream can be used, or a partition cannot be joined."""
        said = [f"partition {p} is not joined: {failed.error}" for p, failed in sorted(self._failed.items())]
        return "\n".join(filter(None, [self._growth.trouble, self._bad.trouble(), *said])) or None

    def _room(self, partition: int) -> int:
        _, low = self._since[partition]
        places = {role: TopicPartition(topic, partition) for role, topic in self.topics.inputs.items()}
        return min(low[role] - self._starts.get(at, 0) for role, at in places.items())

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
