"""One run: a seed makes a system, its traffic and its faults; the run is drained and the ledger checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from .control import HEARTBEAT, LEASE, NOBODY, ControlView, Record
from .embedder import Embedder
from .faults import Strike, plan
from .joiner import DISORDER, HORIZON, UNKNOWN, WINDOW, Checkpoint, Event, Joiner, Kind, sample_id
from .ledger import Broken, Ledger
from .log import Topic, Transactions
from .rules import Rules
from .serving import Reader
from .shard import Delta, Shard
from .simulation import Process, Simulation
from .store import Store
from .trainer import Trainer, Versions

TRAFFIC = 740  # ticks in which clients send events
FAULTS = 1000  # ticks in which things break, the quiet end of the log included; then the run is drained
DRAIN = 3000  # ticks until all must be done: many times what a sound run needs
AFTERMATH = 300  # ticks after which all processes are awake and every failover begun is over
GRACE = 120  # ticks after which readers must have caught up with a store that is complete
IMPRESSIONS = 90
WRONG = 120  # ticks for which a clock is wrong: a tick stands for a second
HOUR, DAY = 3_600, 86_400


@dataclass(frozen=True, slots=True)
class Failure:
    """How a seed failed: replay it with `python -m tests.model --seed N --trace`."""

    seed: int
    now: int
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"seed {self.seed}, step {self.now}, {self.kind}: {self.detail}"


class WrongClock:
    """One clock of a seed, the clients' or the log's, is set wrong, and right again before the traffic ends.

    It dates the events by which idle topics move on. Its random numbers are its own: they change no other
    draw of the seed.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"clocks of {seed}")
        self._of_log = rng.random() < 0.5
        self._step = rng.choice([-DAY, -HOUR, 0, HOUR, DAY])
        self._from = rng.randrange(TRAFFIC // 2)
        self._to = self._from + WRONG

    def dates(self, time: int) -> int:
        """The clients' date of an event that happens at `time`."""
        return time if self._of_log else self._wrong(time)

    def log_reads(self, time: int) -> int:
        """The log's time of a record that is appended at `time`."""
        return self._wrong(time) if self._of_log else time

    def _wrong(self, time: int) -> int:
        return max(0, time + self._step) if self._from <= time < self._to else time


class World:
    """Everything there is, wired together."""

    keys = 40
    buckets = 4
    partitions = 3  # of `samples`
    nodes = 2
    rows_partitions = 2

    def __init__(
        self,
        seed: int,
        rules: Rules,
        trace: Callable[[str], None] | None = None,
        faults: Callable[[World, int], list[tuple[int, Strike]]] = plan,
    ) -> None:
        self.sim = Simulation(seed, trace)
        self.rules = rules
        self.disorder = self.sim.rng.choice([0.0, 0.02, 0.05])
        self.ledger = Ledger(self)
        self.control: Topic[Record] = Topic(1)
        self.inputs: Topic[Event] = Topic(4)
        self.samples: Topic[int] = Topic(self.partitions)
        self.rows: Topic[Delta] = Topic(self.rows_partitions)
        self.transactions = Transactions(self.samples)
        self.transactions.saved = Checkpoint((0,) * 4, (0,) * 4, UNKNOWN)
        self.store = Store(self.sim, rules, self.buckets, self.partitions, self.nodes)
        self.store.on_flushed = self.ledger.check_stored
        self.versions = Versions(self.partitions)
        self.shards: dict[str, Shard] = {}  # every life there was
        self.trainers: dict[str, Trainer] = {}
        self.slots: dict[str, Process] = {}  # who lives now
        self._lives = 0
        self._judge = ControlView(rules)
        self._readable = [0]  # per tick, for how many ticks `control` could be read so far
        self.ambushes: list[Callable[[int, str], None]] = []  # for the next claim of a bucket
        for kind, count in (("shard", 3), ("embedder", 2), ("trainer", 2), ("reader", 2), ("joiner", 1)):
            for number in range(count):
                self.start(f"{kind}{number}")
        self.expected = self._traffic()
        for at, what in faults(self, FAULTS):
            self.sim.after(at, partial(self._strike, *what))
        self.sim.after(1, self._watch_claims)

    # Places ---

    def bucket_of(self, key: int) -> int:
        """The bucket of a key, fixed for life."""
        return key % self.buckets

    def rows_partition(self, bucket: int) -> int:
        """The partition of `rows` of a bucket, fixed for life (rule 17)."""
        return bucket // self.nodes % self.rows_partitions

    def rows_end(self, bucket: int) -> int:
        """The end of a bucket's partition of `rows`."""
        return self.rows[self.rows_partition(bucket)].end

    def publish(self, delta: Delta) -> int:
        """Append to `rows`; returns the offset."""
        return self.rows[self.rows_partition(delta.bucket)].append(delta)

    def start(self, slot: str) -> Process:
        """A new life in a slot; the old one may go on as a zombie."""
        self._lives += 1
        name = f"{slot}.{self._lives}"
        process: Process
        if slot.startswith("shard"):
            process = self.shards[name] = Shard(self, name)
        elif slot.startswith("embedder"):
            process = Embedder(self, name, rank=int(slot[-1]) % 2)
        elif slot.startswith("trainer"):
            process = self.trainers[name] = Trainer(self, name)
        elif slot.startswith("reader"):
            process = Reader(self, name)
        else:
            process = Joiner(self, name)
        self.slots[slot] = process
        return process

    # Schedule ---

    def _strike(self, name: str, what: Callable[[], None]) -> None:
        self.sim.note(name)
        what()

    def _traffic(self) -> list[int]:
        """Schedule the clients' events; returns the samples of an undisturbed join."""
        rng = self.sim.rng
        expected: list[int] = []
        clocks = WrongClock(self.sim.seed)
        for impression in range(IMPRESSIONS):
            served = rng.randrange(TRAFFIC)
            self._send(Event(Kind.SERVED, impression, served))
            clicked = rng.random() < 0.6
            if clicked:
                action = served + rng.randrange(WINDOW * 3 // 2)
                self._send(Event(Kind.ACTION, impression, action))
                clicked = action <= served + WINDOW
            expected.append(sample_id(impression, clicked=clicked))
        for time in [*range(0, TRAFFIC + WINDOW * 2, 30), TRAFFIC + HORIZON]:
            for partition in range(4):
                tick = Event(Kind.TICK, partition, clocks.dates(time))
                self.sim.after(time, partial(self._append, partition, tick, clocks.log_reads(time)))
        return expected

    def _send(self, event: Event) -> None:
        """An event reaches the log a little after it happened, and sometimes again much later."""
        rng = self.sim.rng
        partition = 2 * (event.kind is Kind.ACTION) + event.impression % 2
        self.sim.after(event.time + rng.randrange(DISORDER), partial(self._append, partition, event))
        if rng.random() < 0.15:
            again = event.time + rng.randrange(HORIZON - DISORDER)
            self.sim.after(max(again, event.time + DISORDER), partial(self._append, partition, event))

    def _append(self, partition: int, event: Event, logged: int | None = None) -> None:
        logged = self.sim.now if logged is None else logged
        self.inputs.partitions[partition].append(replace(event, logged=logged))

    def _watch_claims(self) -> None:
        """Every claim that counts is checked against what really happened to the owner it replaced."""
        records = self.control.partitions[0].records
        for offset in range(self._judge.position, len(records)):
            record = records[offset]
            assert record is not None
            replaced = self._judge.apply(offset, record)
            if replaced is None or record.owner == NOBODY:
                continue
            self.sim.note(
                f"{record.owner} claims {record.resource} from {replaced.owner or 'nobody'}, fence {offset}"
            )
            owner = next((p for p in self.slots.values() if p.name == replaced.owner), None)
            if owner is not None and owner.alive and record.owner != owner.name:
                self._judge_claim(record, owner)
            if record.resource.startswith("bucket") and self.ambushes:
                self.ambushes.pop()(int(record.resource.split("/")[1]), record.owner.split(".")[0])
        self._readable.append(self._readable[-1] + (not self.control.away))
        self.sim.after(1, self._watch_claims)

    def _judge_claim(self, record: Record, owner: Process) -> None:
        """Rule 9: no process may lose a resource that was awake through a full lease of readable log."""
        well = self._readable[record.decided_at] - self._readable[min(owner.healthy_since, record.decided_at)]
        if well > LEASE + 2 * HEARTBEAT:
            raise Broken("deposed", f"{record.resource} was taken from {owner.name}, which was well")

    # The run ---

    def run(self) -> None:
        """Run the schedule, drain it, check the ledger.

        Raises:
            Broken: the promise was not kept.
        """
        self.sim.run(FAULTS)
        self.sim.note("the faults are over")
        self.disorder = self.sim.lost_answers = 0.0
        self.ambushes.clear()
        self.sim.run(FAULTS + AFTERMATH)
        while missing := self._missing():
            if self.sim.now > FAULTS + DRAIN:
                raise Broken("stall", missing)
            self.sim.run(self.sim.now + 25)
        self.sim.run(self.sim.now + GRACE)
        self._check()

    def _missing(self) -> str:
        """What is not done yet; empty if all is."""
        saved = self.transactions.saved
        assert isinstance(saved, Checkpoint)
        if (
            saved.following != tuple(p.end for p in self.inputs.partitions)
            or saved.watermark < TRAFFIC + WINDOW
        ):
            return f"the joiner stands at {saved}"
        self.ledger.check_joined(self.expected)
        ends = [_after_last_record(partition.records) for partition in self.samples.partitions]
        for bucket in range(self.buckets):
            applied = self.store.node(bucket).master.metas[bucket].applied
            if any(offset < end for offset, end in zip(applied, ends, strict=True)):
                return f"bucket {bucket} is stored at {applied}, the log ends at {ends}"
        trainer = self._trainer()
        vector = None if trainer is None else trainer.applied(self._judge.owner("seat").fence)
        if vector is None or any(offset < end for offset, end in zip(vector, ends, strict=True)):
            return f"dense is at {vector}, the log ends at {ends}"
        for slot, process in self.slots.items():
            if isinstance(process, Reader) and any(served.position is None for served in process.served):
                return f"{slot} has not finished its scan"
        return ""

    def _trainer(self) -> Trainer | None:
        return self.trainers.get(self._judge.owner("seat").owner)

    def _check(self) -> None:
        stored = {}
        for bucket in range(self.buckets):
            stored.update(self.store.node(bucket).master.rows[bucket])
        self.ledger.check_rows("store", stored)
        for slot, process in self.slots.items():
            if isinstance(process, Reader):
                served = {key: row for table in process.served for key, row in table.rows.items()}
                self.ledger.check_rows(slot, served)
        trainer = self._trainer()
        for dense in trainer.ranks if trainer else []:
            self.ledger.check_dense(dense.total())


def _after_last_record(records: list[int | None]) -> int:
    """Where a partition's last sample ends; the markers behind it need not be applied."""
    return max((offset + 1 for offset, record in enumerate(records) if record is not None), default=0)


def run_seed(
    seed: int,
    rules: Rules,
    trace: Callable[[str], None] | None = None,
    faults: Callable[[World, int], list[tuple[int, Strike]]] = plan,
) -> Failure | None:
    """Run one seed; returns how it failed, or None."""
    world = World(seed, rules, trace, faults)
    try:
        world.run()
    except Broken as broken:
        return Failure(seed, world.sim.now, broken.kind, broken.detail)
    return None
