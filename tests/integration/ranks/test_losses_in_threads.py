"""Ranks in threads that die within a collective and come back from a version: at each flush point, and at the
end, the dense state holds every sample that its vector covers exactly once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from freshet.batches.stream import TrainBatch
from freshet.config.spec import load_spec
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec, Train
from freshet.config.spec.topics import topics_of
from freshet.log import EventLog
from freshet.log.topics import ModelContext
from freshet.model import Lane, State, build_model
from freshet.testing.ledger import LedgerModel, hash_of
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.membership import Membership, Quorum
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.quality import Quality
from freshet.trainer.reducers import PlainReducer, Reducer
from freshet.trainer.reducers.levels import AdaptiveLevels
from freshet.trainer.service import TrainingLoop
from freshet.trainer.state_sync import DenseState, FlushPoint, Progress, SharedMeasures
from freshet.trainer.step_coordinator import DenseLedger
from freshet.types import F32, F64, Fence, OffsetRange
from tests.fixtures.local_ranks import Member, Together
from tests.integration.ranks.process import REDUCERS, SPEC
from tests.integration.ranks.shared_rows import PARTITIONS, SharedRows, SharedStream

STOP = 150
"""Samples of each partition."""

RANKS = 3
KILLS = 4
WITHIN_S = 120.0
FLUSH_EVERY = 5  # steps between two versions of the leader


class Killed(Exception):
    """The rank ends at once, as by SIGKILL."""


@dataclass
class MemoryRows:
    """`SharedRows` of threads."""

    at: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(PARTITIONS), 0))
    sums: F64 = field(default_factory=lambda: np.zeros(2))
    fences: dict[int, Fence] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> int:
        return STOP

    def applied(self) -> dict[int, int]:
        with self.lock:
            return dict(self.at)

    def push(self, ranges: tuple[OffsetRange, ...], fence: Fence, count: int, hashes: int) -> None:
        (r,) = ranges
        with self.lock:
            if self.at[r.partition] >= r.stop:
                return
            assert self.at[r.partition] == r.start, "no rank moves another's partition"
            self.at[r.partition] = r.stop
            self.sums += (count, hashes)


PREFIX = np.zeros((PARTITIONS, STOP + 1, 2))
"""(count, sum of hashes) of the samples of each partition before each offset."""
for _p in range(PARTITIONS):
    _seq = np.arange(STOP) * PARTITIONS + _p
    PREFIX[_p, 1:, 0] = np.arange(1, STOP + 1)
    PREFIX[_p, 1:, 1] = np.cumsum(hash_of(_seq, np.zeros(STOP, np.int64)))


def expected(vector: Mapping[int, int]) -> list[float]:
    return cast(list[float], sum(PREFIX[p, offset] for p, offset in vector.items()).tolist())


def dense_of(state: DenseState) -> list[float]:
    carry = np.zeros(2) if state.sums.carry is None else state.sums.carry
    return cast(list[float], (cast(LedgerModel, state.model).totals + carry).tolist())


class WithAdam(LedgerModel):
    """The ledger, and a tensor that moves with every step as if Adam stepped it."""

    adam_tensors = (("weights/w", "optimizer/first", "optimizer/second"),)

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, training=True)
        self.tensor = {name: np.zeros(300, np.float32) for name in self.adam_tensors[0]}

    def step(self, lanes: Sequence[Lane]) -> None:
        before = self._steps
        super().step(lanes)
        if self._steps > before:
            for array in self.tensor.values():
                np.add(array, np.float32(0.01), out=array)

    def state(self) -> dict[str, NDArray[Any]]:
        return super().state() | {name: array.copy() for name, array in self.tensor.items()}

    def load_state(self, state: State, *, weights_only: bool = False) -> None:
        super().load_state(state, weights_only=weights_only)
        self.tensor = {name: state[name].copy() for name in self.tensor}


@dataclass
class World:
    """The ranks, their quorums, and the last version."""

    train: Train
    reducer: Callable[[], Reducer]
    rng: random.Random
    rows: MemoryRows = field(default_factory=MemoryRows)
    changed: threading.Condition = field(default_factory=threading.Condition)
    alive: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    groups: dict[int, tuple[Quorum, Mortal]] = field(default_factory=dict)
    version: FlushPoint | None = None
    sites: int = 0  # 0: each rank is one
    kills: int = KILLS
    started: int = 0
    fence: int = 0
    ranks: dict[int, Rank] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)

    def start(self) -> None:
        with self.changed:
            number, self.started = self.started, self.started + 1
            self.alive.add(number)
            fuel = None
            if self.kills:
                self.kills -= 1
                fuel = self.rng.randrange(5, 40)
            rank = self.ranks[number] = Rank(self, number, fuel, self.rng.random() < 0.5)
        rank.thread.start()

    def form(self) -> None:
        """Form a quorum if all ranks wait for one."""
        if not self.waiting or self.waiting != self.alive:
            return
        self.fence += 1
        members = sorted(self.waiting)
        together = Together(len(members))
        for i, number in enumerate(members):
            quorum = Quorum({n: Fence(n) for n in members}, "", 1, Fence(self.fence))
            member = Mortal(together, i, len(members), Fence(self.fence), owner=self.ranks[number])
            self.groups[number] = quorum, member
        self.waiting = set()
        self.changed.notify_all()


@dataclass
class Mortal(Member):
    """A `Member` that dies before or after a collective, once its rank has made so many."""

    owner: Rank = None  # type: ignore[assignment]  # fields before it have defaults

    def split(self, site: str) -> Member:
        part = super().split(site)
        return Mortal(part.all, part.rank, part.size, part.fence, owner=self.owner)

    def swap(self, call: str, value: Any) -> list[Any]:
        owner = self.owner
        dies = owner.fuel == 0
        owner.fuel = None if owner.fuel is None else owner.fuel - 1
        if dies and owner.dies_before:
            raise Killed
        found = super().swap(call, value)
        if dies:
            raise Killed
        return found


class Rank:
    """A rank: its membership, and the callback of its training loop."""

    member = 0

    def __init__(self, world: World, number: int, fuel: int | None, dies_before: bool) -> None:
        self.world, self.number, self.fuel, self.dies_before = world, number, fuel, dies_before
        self.stop = threading.Event()
        self.quorum: Quorum | None = None
        self.leads, self.flushed = False, 0
        spec = replace(load_spec(SPEC), train=world.train)
        context = ModelContext(spec, "ledger", layout_of(spec), cast(EventLog, None), topics_of(spec))
        model = WithAdam(spec) if world.train.mode == "async" else build_model(spec, training=True)
        quality, version = Quality(spec), world.version
        progress, applied = Progress(), dict.fromkeys(range(PARTITIONS), 0)
        sums = GradientSums(world.reducer())
        if version is not None:
            model.load_state(version.model)
            sums.load_state(version.sums)
            progress.steps, applied = version.step, dict(version.applied)
        shared = SharedMeasures(quality)
        self.state = DenseState(model, DenseLedger(applied), quality, shared, progress, "ledger", sums)
        site = f"site {number % world.sites}" if world.sites else ""
        member = cast(Membership, self)
        self.loop = TrainingLoop(context, member, self.state, self.open_stream, site=site)
        self.thread = threading.Thread(target=self.run, name=f"rank-{number}", daemon=True)

    def run(self) -> None:
        try:
            self.loop.run(self, self.stop)
        except Killed:
            self.world.start()
        except BaseException as error:
            self.world.errors.append(error)

    def open_stream(self, group: ProcessGroup, lanes: int) -> SharedStream:
        mine = [[p for p in range(PARTITIONS) if p % group.size == group.rank]]
        rows = cast(SharedRows, self.world.rows)
        return SharedStream(rows, self.state.ledger.applied_offsets, group.fence, mine, lambda: None)

    # --- membership

    def join(self) -> ProcessGroup | None:
        world = self.world
        with world.changed:
            world.groups.pop(self.number, None)
            world.waiting.add(self.number)
            world.form()
            world.changed.wait_for(lambda: self.number in world.groups or self.stop.is_set(), WITHIN_S)
            if self.number not in world.groups:
                world.waiting.discard(self.number)
                return None
            self.quorum, group = world.groups[self.number]
            return cast(ProcessGroup, group)

    def members_waiting(self) -> bool:
        return bool(self.world.waiting)

    def await_superseded(self) -> bool:
        return False

    def leave(self) -> None:
        world = self.world
        with world.changed:
            world.alive.discard(self.number)
            world.waiting.discard(self.number)
            world.groups.pop(self.number, None)
            world.form()

    # --- callback

    def on_state_synced(self, group: ProcessGroup) -> None:
        self.leads = group.rank == 0
        self.check()

    def on_trained(self, batch: TrainBatch, predictions: F32) -> None:
        self.state.progress.samples += len(batch)

    def on_stepped(self, step: int, rows: int) -> None:
        self.state.progress.steps = step

    def flush_due(self) -> bool:
        return self.state.progress.steps >= self.flushed + FLUSH_EVERY

    def on_flush_point(self) -> None:
        self.check()
        self.flushed = self.state.progress.steps
        if self.leads:
            self.state.keep()
            self.world.version = self.state.flush_point

    def check(self) -> None:
        state = self.state
        assert_complete(dense_of(state), state.ledger.applied)


def assert_complete(dense: list[float], vector: Mapping[int, int]) -> None:
    """Assert that the sums are those of the samples below the vector, up to the rounding of a residual."""
    np.testing.assert_allclose(dense, expected(vector), rtol=0, atol=0.02, err_msg="samples are lost")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [*REDUCERS, "async", "async int8", "sites", "sites int8"])
def test_lost_ranks_lose_no_sample(kind: str, seed: int) -> None:
    train, reducer = replace(load_spec(SPEC).train, batch_wait_ms=5), REDUCERS.get(kind, PlainReducer)
    if kind not in REDUCERS:
        train = replace(train, mode="async", average_every=3, reduce="int8" if "int8" in kind else "fp32")
    world = World(train, reducer, random.Random(seed), sites=2 if "sites" in kind else 0)
    for _ in range(RANKS):
        world.start()
    deadline, pause = time.monotonic() + WITHIN_S, threading.Event()

    def done() -> bool:
        with world.changed:
            ranks = [world.ranks[number] for number in world.alive]
        ends = [world.rows.applied(), *(dict(rank.state.ledger.applied) for rank in ranks)]
        return len(ranks) == RANKS and all(set(end.values()) == {STOP} for end in ends)

    while not done():
        assert not world.errors, world.errors
        assert time.monotonic() < deadline
        pause.wait(0.02)
    ranks = [world.ranks[number] for number in world.alive]
    for rank in ranks:
        rank.stop.set()
    for rank in world.ranks.values():
        rank.thread.join(WITHIN_S)

    assert not world.errors
    whole = expected(dict.fromkeys(range(PARTITIONS), STOP))
    assert world.rows.sums.tolist() == whole
    for rank in ranks:
        assert_complete(dense_of(rank.state), rank.state.ledger.applied)
        if isinstance(followed := rank.state.sums.reducer, AdaptiveLevels):
            assert followed.losses > 0
            assert followed.running == pytest.approx(np.log(2)), "the ledger's loss of every sample"
    assert len({str(dense_of(rank.state)) for rank in ranks}) == 1, "equal to the bit"
    tensors = {b"".join(t.tobytes() for t in rank.state.model.state().values()) for rank in ranks}
    assert len(tensors) == 1, "and so are weights and moments"
    assert len(world.ranks) > RANKS + 1, "several ranks were killed"
    assert sum(rank.loop.lost for rank in ranks) > 0
