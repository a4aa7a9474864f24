"""Ranks that train a real model with each reducer of `train.reduce`: equal to the bit after each step, and no
gradient is lost by flushes, ranks that join and leave, rollbacks, or a version."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import pytest

from freshet.config.spec.model import Spec, Train
from freshet.model import VARIANCE_STEP, FreezesVariance, SplitStep, StepResult, build_model
from freshet.trainer.gradient_sums import MEAN_CARRY, GradientSums
from freshet.trainer.process_group import RankLost
from freshet.trainer.reducers import ObservesLoss
from freshet.trainer.reducers.build import build_reducer
from freshet.trainer.reducers.dct import Dct
from freshet.trainer.reducers.levels import SPAN
from freshet.trainer.reducers.one_bit_adam import CATCH_UP, Betas, MomentumReducer, OneBitAdam
from freshet.trainer.state_sync import pack_arrays, unpack_arrays
from freshet.types import F32, F64
from tests.fixtures.local_ranks import Member, Together, at_once, results_of
from tests.fixtures.rounded_sums import RoundedSums
from tests.fixtures.specs import make_batch, make_spec

BATCH = 16
DIVISOR = 4096  # batch_rows, more than ranks have: the divisor of a step, whatever the number of ranks
STEPS = 24  # of a phase
SPEC = make_spec(ids=2, dims=(8,), deep=(32,))

NAMES = next(f for f in fields(Train) if f.name == "reduce").metadata["form"].words

each = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "1bit-lamb" else name for name in NAMES]
)


class Rank:
    """A rank: its model, lane and sums."""

    def __init__(self, name: Any, number: int, spec: Spec = SPEC) -> None:
        train = replace(spec.train, reduce=name, batch_rows=DIVISOR)
        if name == "1bit-lamb":
            spec = replace(spec, model=replace(spec.model, kind="deepfm", dense_optimizer="lamb"))
        self.spec = replace(spec, train=train)
        self.model = build_model(self.spec, training=True)
        self.lane = self.model.lane()
        adam = self.model if isinstance(self.model, FreezesVariance) else None
        self.sums = GradientSums(build_reducer(self.spec, self.model), adam=adam)
        self.rng = np.random.default_rng(number)
        self.put: F64 = np.zeros(len(self.lane.reduce_buffers()[0]))  # gradients of own batches
        self.got: F64 = np.zeros_like(self.put)  # gradients of steps
        self.digests: list[int] = []

    def learn(self) -> StepResult:
        result = self.lane.forward_backward(make_batch(self.spec, BATCH, self.rng))
        self.put += self.lane.reduce_buffers()[0]
        return result

    def step(self, group: Member | None, *, idle: bool = False) -> None:
        """Learn a batch, unless the rank has none, and step with the others."""
        results = [] if idle else [self.learn()]
        (lane,) = self.sums.reduce(cast(Any, group), [self.lane], results)
        gradient = lane.reduce_buffers()[0].copy()
        self.digests.append(zlib.crc32(gradient.tobytes()))
        self.model.step([lane])
        core = getattr(self.sums.reducer, "core", None)
        if isinstance(core, Dct) and group is not None:  # it delivers by a momentum without a tail
            first, _ = cast(FreezesVariance, self.model).moments()
            gradient = first * np.float32(DIVISOR / core.correction)
        self.got += gradient
        self.digests.append(zlib.crc32(pack_arrays(self.model.state())))

    def steps(self, group: Member, count: int = STEPS) -> None:
        for step in range(count):
            self.step(group, idle=step % 5 == 4 and group.rank == 1)

    def flush(self, group: Member) -> None:
        self.sums.flush(group)
        self.digests.append(zlib.crc32(self.version()))

    def version(self) -> bytes:
        return pack_arrays({**self.model.state(), **self.sums.state()})

    def load(self, version: bytes) -> None:
        state = unpack_arrays(version)
        self.model.load_state(state)
        self.sums.load_state(state)


def together(ranks: Sequence[Rank], work: Callable[[Rank, Member], None]) -> None:
    """Do the work in all ranks, which must come to the same bits."""
    room = Together(len(ranks))
    for rank in ranks:
        rank.digests = []
    results_of(
        *(lambda i=i, rank=rank: work(rank, Member(room, i, len(ranks))) for i, rank in enumerate(ranks))
    )
    for rank in ranks[1:]:
        assert rank.digests == ranks[0].digests, "ranks differ"


def after_warmup(name: str, ranks: Sequence[Rank]) -> None:
    """Let ranks of 1-bit Adam or LAMB begin with a frozen variance: that of a step of whole gradients."""
    if "1bit" not in name:
        return

    def phase(rank: Rank, group: Member) -> None:
        rank.steps(group, 1)
        rank.flush(group)

    together(ranks, phase)
    for rank in ranks:
        reducer = cast(MomentumReducer, rank.sums.reducer)
        momentum = reducer.momentum
        assert isinstance(rank.model, FreezesVariance)
        active = np.packbits(rank.model.moments()[1] > 0)
        counts = np.array([1, 1, 0, 0, True])
        momentum.load_state({**momentum.state(), "counts": counts, "active": active})


def lose_the_last(ranks: Sequence[Rank], steps: int) -> None:
    """Make steps in which the last rank is lost; the others then have made one less than it began."""
    room = Together(len(ranks))

    def work(i: int) -> None:
        group = Member(room, i, len(ranks))
        ranks[i].steps(group, steps)
        if i == len(ranks) - 1:
            group.close()
        else:
            ranks[i].step(group)

    *others, _ = at_once(*(lambda i=i: work(i) for i in range(len(ranks))))
    assert all(isinstance(result, RankLost) for result in others)


def check_conserved(name: str, spec: Spec = SPEC) -> list[Rank]:
    """Ranks leave, are lost, join from a version, and end alone: all gradients are in their steps."""
    first, second, third, joins = ranks = [Rank(name, i, spec) for i in range(4)]
    after_warmup(name, [first, second, third])

    def phase(rank: Rank, group: Member) -> None:
        rank.steps(group)
        rank.flush(group)

    together([first, second, third], phase)
    together([first, second], phase)
    version = first.version()
    before = [(rank.put.copy(), rank.got.copy(), rank.rng.bit_generator.state) for rank in (first, second)]
    lose_the_last([first, second], 3)
    for rank, (put, got, rng) in zip((first, second), before, strict=True):
        rank.lane = rank.model.lane()
        rank.put, rank.got, rank.rng.bit_generator.state = put, got, rng
    for rank in (first, second, joins):
        rank.load(version)
    together([first, joins, second], phase)
    together([first], lambda rank, group: rank.step(None))

    put = np.sum([rank.put for rank in ranks], axis=0)
    error = np.linalg.norm(first.got - put) / np.linalg.norm(put)
    assert error < 1e-5, f"lost {error} of the gradients"
    return ranks


@each
def test_ranks_that_come_and_go_lose_no_gradient(name: str) -> None:
    first, *_ = check_conserved(name)
    assert first.sums.carry is None
    assert first.sums.lossy == (name != "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dct", "1bit-adam", "adaquantfl"])
def test_a_torch_network_loses_no_gradient(name: str) -> None:
    check_conserved(name, make_spec(ids=2, dims=(8,), deep=(32,), kind="deepfm"))


@pytest.mark.parametrize("name", ["adaquantfl", "1bit-adam"])
def test_all_ranks_observe_the_loss_of_all(name: str) -> None:
    ranks = [Rank(name, i) for i in range(2)]
    observed: list[list[float]] = [[], []]
    losses: list[float] = []
    for rank, into in zip(ranks, observed, strict=True):
        assert isinstance(rank.sums.reducer, ObservesLoss)
        cast(Any, rank.sums.reducer).observe = into.append

    def work(rank: Rank, group: Member) -> None:
        for step in range(4):
            results = [rank.learn()] if step != 2 or group.rank else []
            of_all = group.swap("results", results)
            if group.rank == 0:
                made = [result for of_rank in of_all for result in of_rank]
                rows = sum(result.rows.sum() for result in made)
                losses.append(sum(result.expert_losses.sum(axis=0).mean() for result in made) / rows)
            rank.sums.reduce(cast(Any, group), [rank.lane], results)
            rank.model.step([rank.lane])

    together(ranks, work)

    assert observed[0] == observed[1]
    np.testing.assert_allclose(observed[0], losses, rtol=1e-6)


def test_levels_follow_the_loss_of_a_training() -> None:
    ranks = [Rank("adaquantfl", i) for i in range(2)]
    together(ranks, lambda rank, group: rank.steps(group, SPAN + 2))

    for rank in ranks:
        (losses,) = rank.sums.reducer.state().values()  # type: ignore[attr-defined]
        assert losses.tolist()[2] == SPAN + 2
        assert 0.3 < losses[0] < 1.5


# --- 1-bit Adam beside a simulation of n workers in one process, written from the paper

WORKERS, ROWS = 3, 64
WINDOW, REFRESH, LAST = 1000, 40, 1100
RATE = 1e-3
UNSEEN = slice(5, 40)
"""Values that never have a gradient: they have no variance, so their signs are not exchanged."""


def drawn(step: int, worker: int, size: int) -> F32:
    """Return a worker's (d,) sum of gradients over its rows."""
    rng = np.random.default_rng((step, worker))
    found = ROWS * np.exp(np.linspace(-1, 1, size)) * (rng.normal(size=size) + np.sin(np.arange(size)))
    found[UNSEEN] = 0
    single: F32 = found.astype(np.float32)
    return single


def simulated(weights: F64, steps: int, group: int, kept: float) -> dict[int, F64]:
    """Return weights after some steps: Adam of this beta1 until v is steady, then signs of momenta."""
    size = len(weights)
    m, v = np.zeros(size), np.zeros(size)
    v_steps, frozen_at, since = 0, 0, 0
    errors, owned = np.zeros((WORKERS, size)), np.zeros(size)
    sums = RoundedSums(WORKERS, size)
    norms, found = [], {}

    def signs(values: F64) -> F64:
        out, seen = np.zeros(size), np.flatnonzero(v)
        for start in range(0, len(seen), group):
            of_group = seen[start : start + group]
            out[of_group] = np.abs(values[of_group]).mean() * np.where(values[of_group] < 0, -1, 1)
        return out

    for t in range(1, steps + 1):
        g = np.array([drawn(t, i, size) for i in range(WORKERS)], np.float64) / (WORKERS * ROWS)
        if v_steps and not frozen_at:
            norms.append(v.sum() / (1 - 0.999**v_steps))
            if len(norms) > WINDOW and 0.8 <= norms[-1] / norms[-1 - WINDOW] <= 1 / 0.8:
                frozen_at = t
        since += frozen_at > 0
        if not frozen_at:
            whole = sums.sum(g)
            m, v, v_steps = kept * m + (1 - kept) * whole, 0.999 * v + 0.001 * whole**2, v_steps + 1
        elif since == REFRESH:  # of a weight of 32 steps at most
            whole = sums.sum(g)
            m = kept * m + (1 - kept) * whole
            before = np.sqrt(v) + 1e-8
            v = 0.999**32 * v + (1 - 0.999**32) * whole**2
            v_steps, since = v_steps + 32, 0
            errors, owned = (e * before / (np.sqrt(v) + 1e-8) for e in (errors, owned))
        else:  # momenta as steps, over the root of the variance
            root, sent = np.sqrt(v) + 1e-8, np.zeros(size)
            for i in range(WORKERS):
                h = np.where(v > 0, (kept * m / WORKERS + (1 - kept) * g[i]) / root, 0) + errors[i]
                sent += signs(h)
                errors[i] = h - signs(h)
            total = sent + owned
            owned, m = total - signs(total), signs(total) * root
        root = np.sqrt(v / (1 - 0.999**v_steps)) + 1e-8 / ROWS
        weights = weights - RATE * min(1, t / 100) * m / (1 - kept**t) / root
        found[t] = weights
    assert WINDOW < frozen_at < LAST - 2 * REFRESH
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("kind", "kept"), [("mlp", 0.9), ("deepfm", 0.0)])
def test_one_bit_adam_goes_the_way_of_its_simulation(kind: str, kept: float) -> None:
    spec = make_spec(ids=2, dims=(8,), deep=(32,), kind=kind, dense_lr=RATE, dense_momentum=kept)
    spec = replace(spec, train=replace(spec.train, reduce="1bit-adam", batch_rows=ROWS))
    models = [build_model(spec, training=True) for _ in range(WORKERS)]

    def weights(model: Any) -> F32:
        flat = model.native.array("weights") if kind == "mlp" else model.flat.detach().numpy()
        return cast(F32, flat.copy())

    size = len(weights(models[0]))
    expected = simulated(weights(models[0]).astype(np.float64), LAST, 1024, kept)
    room = Together(WORKERS)

    def work(rank: int) -> dict[int, F32]:
        model, group = models[rank], Member(room, rank, WORKERS)
        assert isinstance(model, FreezesVariance)
        momentum = OneBitAdam(size, Betas(kept), warmup_steps=100, refresh_steps=REFRESH)
        sums, lane = GradientSums(MomentumReducer(momentum, model), adam=model), model.lane()
        found = {}
        for step in range(1, LAST + 1):
            if kind == "mlp":
                gradient, counts = cast(Any, lane.reduce_buffers())
                gradient[:], counts[:2] = drawn(step, rank, size), ROWS
            else:
                cast(Any, lane).gradient.numpy()[:] = drawn(step, rank, size)
                cast(Any, lane).sums.all[:2] = ROWS
            model.step(sums.reduce(cast(Any, group), [lane]))
            found[step] = weights(model)
        return found

    first, *others = results_of(*(lambda i=i: work(i) for i in range(WORKERS)))

    for step in (1, 100, WINDOW, WINDOW + 20, LAST):
        assert all(other[step].tobytes() == first[step].tobytes() for other in others)
        np.testing.assert_allclose(first[step], expected[step], rtol=0, atol=2e-5)
    assert cast(FreezesVariance, models[0]).variance_steps == WINDOW + 1 + 2 * CATCH_UP


def test_every_reducer_adds_a_carry_of_the_mean_gradient() -> None:
    before = Rank("1bit-adam", 0)
    after_warmup("1bit-adam", [before])
    before.sums.carry = np.full(len(before.put), 0.5, np.float32)
    before.sums.carry_of_mean = True
    assert MEAN_CARRY in before.sums.state()
    for name in ("fp32", "1bit-adam"):
        rank = Rank(name, 1)
        rank.load(before.version())
        seconds = [a.copy() for a in cast(FreezesVariance, rank.model).moments()]
        rank.learn()
        gradient = rank.lane.reduce_buffers()[0].copy()
        (lane,) = rank.sums.reduce(None, [rank.lane])
        np.testing.assert_allclose(lane.reduce_buffers()[0], gradient + 0.5 * DIVISOR, rtol=1e-5)
        rank.model.step([lane])
        np.testing.assert_array_equal(cast(FreezesVariance, rank.model).moments()[1], seconds[1])
        assert rank.sums.carry is None


@pytest.mark.parametrize("name", ["fp32", "dct"])
@pytest.mark.parametrize("former", ["1bit-adam", "dct", "dct before"])
def test_a_carry_is_delivered_once_by_any_reducer(name: str, former: str) -> None:
    """fp32 delivers it by a momentum with a tail, DCT by one without; `dct before` had sums, not means."""
    before = Rank("dct", 0)
    together([before], lambda rank, group: rank.steps(group, 40))
    carry = np.full(len(before.put), 0.5, np.float32)
    before.sums.carry = carry * np.float32(DIVISOR) if former == "dct before" else carry
    before.sums.carry_of_mean = former != "dct before"
    rank = Rank(name, 1)
    rank.load(before.version())
    together([rank], lambda rank, group: rank.steps(group, 2))
    got, put = rank.got, rank.put
    tail = cast(FreezesVariance, rank.model).moments()[0] * 0
    if name == "dct":
        together([rank], lambda rank, group: rank.flush(group))
        assert rank.sums.carry is not None
        tail = rank.sums.carry * np.float32(DIVISOR)
    momentum = before.model.moments()[0] * np.float32(9 * DIVISOR if name == "dct" else 0)  # type: ignore[attr-defined]
    np.testing.assert_allclose(got + tail, put + momentum + 0.5 * DIVISOR, rtol=1e-3, atol=0.05)


def test_a_carry_in_the_warm_up_moves_the_variance() -> None:
    """A flush after each step must not leave the variance at 0."""
    rank = Rank("1bit-adam", 0)

    def phase(rank: Rank, group: Member) -> None:
        rank.step(group)
        rank.flush(group)

    for _ in range(3):
        together([rank], phase)

    assert rank.sums.carry is not None
    assert cast(FreezesVariance, rank.model).variance_steps == 3


def test_variance_counts_the_steps_of_a_rank_alone() -> None:
    rank = Rank("1bit-adam", 0)
    after_warmup("1bit-adam", [rank])
    cast(MomentumReducer, rank.sums.reducer).momentum.refresh_steps = 1
    for _ in range(10):
        rank.step(None)

    together([rank], lambda rank, group: rank.steps(group, 1))

    alone = 10 - 1  # one adds the carry of the flush before, and leaves the variance as it is
    assert cast(FreezesVariance, rank.model).variance_steps == 1 + alone + 1
    assert rank.model.state()["optimizer/step"].tolist() == [12]


@pytest.mark.parametrize("kind", ["mlp", "deepfm"])
def test_model_freezes_its_variance_for_one_step(kind: str) -> None:
    spec = make_spec(ids=2, dims=(8,), deep=(32,), kind=kind)
    model, loaded = (cast(Any, build_model(spec, training=True)) for _ in range(2))
    lane, rng = model.lane(), np.random.default_rng(3)
    seconds = []
    for step in range(3):
        lane.forward_backward(make_batch(spec, BATCH, rng))
        if step == 1:
            assert VARIANCE_STEP not in model.state()
            model.freeze_variance()
        if isinstance(model, SplitStep):
            model.begin_step([lane])
            for part in range(2):
                model.step_part([lane], part, 2)
        else:
            model.step([lane])
        seconds.append(model.moments()[1].copy())

    loaded.load_state(model.state())

    np.testing.assert_array_equal(seconds[1], seconds[0])
    assert (seconds[2] != seconds[1]).any()
    assert [m.state()["optimizer/step"].tolist() for m in (model, loaded)] == [[3], [3]]
    assert (model.variance_steps, loaded.variance_steps) == (2, 2)
    loaded.load_state({name: array for name, array in model.state().items() if name != VARIANCE_STEP})
    assert loaded.variance_steps == 3, "a version without the count"
