"""1-bit Adam and 1-bit LAMB beside simulations of n workers in one process, written from the papers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from freshet.model.lamb import TrustRatios
from freshet.trainer.reducers.group_codecs import SignCodec
from freshet.trainer.reducers.one_bit_adam import CATCH_UP, Betas, Moments, OneBitAdam
from freshet.trainer.reducers.one_bit_lamb import OneBitLamb
from freshet.types import F32, F64
from tests.fixtures.rank_threads import ThreadCollectives, run_ranks
from tests.fixtures.rounded_sums import RoundedSums

SIZE, WORKERS, GROUP = 44, 3, 8
LAYERS = [16, 20, SIZE]
BETAS = Betas(0.9, 0.95)
WINDOW, WARMUP, REFRESH, ALERT = 20, 25, 40, 16
RATE, EPSILON = 0.02, 1e-8
STEPS, JUMP_AT, LATE_AT = 150, 110, 60
LATE = [3, 17, 30]
"""Values that see no gradient before step LATE_AT."""


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SignCodec, "group", GROUP)


def gradient_of(step: int, worker: int) -> F32:
    """Return a worker's addend of the mean gradient of a step."""
    rng = np.random.default_rng((step, worker))
    spread = np.exp(np.linspace(-2, 2, SIZE))
    gradient = spread * (rng.normal(size=SIZE) + np.sin(np.arange(SIZE))) / WORKERS
    if step < LATE_AT:
        gradient[LATE] = 0
    single: F32 = gradient.astype(np.float32)
    return single


def loss_of(step: int) -> float:
    return 0.9 if step >= JUMP_AT else 0.5


# --- the simulation


@dataclass(slots=True)
class Workers:
    """All workers and owners of 1-bit Adam, in float64."""

    m: F64 = field(default_factory=lambda: np.zeros(SIZE))
    v: F64 = field(default_factory=lambda: np.zeros(SIZE))
    w: F64 = field(default_factory=lambda: np.linspace(-1, 1, SIZE))
    worker_errors: F64 = field(default_factory=lambda: np.zeros((WORKERS, SIZE)))
    owner_errors: F64 = field(default_factory=lambda: np.zeros(SIZE))
    waiting: F64 = field(default_factory=lambda: np.zeros((WORKERS, SIZE)))
    sums: RoundedSums = field(default_factory=lambda: RoundedSums(WORKERS, SIZE))
    frozen_at: int | None = None
    v_steps: int = 0
    since: int = 0
    alert_until: int = 0
    norms: list[float] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    known: F64 = field(default_factory=lambda: np.zeros(SIZE))  # 1 where there is a variance

    def signs(self, values: F64) -> F64:
        """Return values as their groups' mean sizes with signs; those without variance are in no group."""
        active = np.flatnonzero(self.known)
        out = np.zeros(SIZE)
        for start in range(0, len(active), GROUP):
            of_group = active[start : start + GROUP]
            out[of_group] = np.abs(values[of_group]).mean() * np.where(values[of_group] < 0, -1, 1)
        return out

    def freeze(self, step: int) -> None:
        self.events.append((step, "freeze"))
        self.frozen_at, self.since, self.norms = step, 0, []
        self.known = (self.v > 0).astype(float)

    def scaling(self) -> F64:
        """Return what makes momenta steps."""
        scaling: F64 = np.where(self.v > 0, 1 / (np.sqrt(self.v) + EPSILON), 0)
        return scaling

    def errors(self, scaling: F64) -> F64:
        """Return all that is undelivered, in units of the gradient, and forget it."""
        errors = self.worker_errors.sum(axis=0) + self.owner_errors
        rest: F64 = np.divide(errors, scaling * (1 - BETAS.first), out=np.zeros(SIZE), where=self.known > 0)
        self.worker_errors[:] = 0
        self.owner_errors[:] = 0
        return rest

    def mean_gradient(self, step: int, jumped: bool) -> tuple[F64, bool]:
        """Return what Adam steps with, and whether its variance is frozen."""
        g = np.array([gradient_of(step, i) for i in range(WORKERS)], np.float64)
        if self.frozen_at is None and self.v_steps:
            self.norms.append(np.abs(self.v).sum() / (1 - BETAS.second**self.v_steps))
            if len(self.norms) > WINDOW and step >= WARMUP:
                ratio = self.norms[-1] / self.norms[-1 - WINDOW]
                if 0.8 <= ratio <= 1 / 0.8:
                    self.freeze(step)
        if self.frozen_at is None:
            self.v_steps += 1
            return self.sums.sum(g), False
        self.since += 1
        if jumped:
            self.alert_until = step + WINDOW
        left = self.alert_until - step
        if self.since >= (REFRESH if left <= 0 else 1 if left > WINDOW - WINDOW // 16 else ALERT):
            whole = self.sums.sum(g + self.waiting)
            self.waiting[:] = 0
            steps = min(self.since, CATCH_UP)
            weight = 1 - BETAS.second**steps
            before = self.scaling()
            self.v = (1 - weight) * self.v + weight * whole**2
            self.v_steps += steps
            self.since = 0
            self.events.append((step, "jump" if jumped else "refresh"))
            if (self.v > 0).sum() != self.known.sum():
                whole = whole + self.errors(before)
                self.known = (self.v > 0).astype(float)
            else:
                change = np.divide(self.scaling(), before, out=np.zeros(SIZE), where=self.known > 0)
                self.worker_errors *= change
                self.owner_errors *= change
            return whole, True
        out, scaling = self.known == 0, self.scaling()
        self.waiting[:, out] += g[:, out]
        momenta = (BETAS.first * self.m / WORKERS + (1 - BETAS.first) * g) * scaling
        most = (1 - BETAS.first) / np.sqrt((1 - BETAS.second) * WORKERS)
        bounded = np.clip(momenta, -most, most)
        self.waiting[:, ~out] += ((momenta - bounded) / (1 - BETAS.first))[:, ~out] / scaling[~out]
        sent = np.zeros(SIZE)
        for i in range(WORKERS):
            h = bounded[i] + self.worker_errors[i]
            h[out] = 0
            p = self.signs(h)
            self.worker_errors[i] = h - p
            sent += p
        total = sent + self.owner_errors
        q = self.signs(total)
        self.owner_errors = total - q
        g_eff = np.zeros(SIZE)
        g_eff[~out] = (q[~out] / scaling[~out] - BETAS.first * self.m[~out]) / (1 - BETAS.first)
        return g_eff, True

    def adam(self, g: F64, frozen: bool, step: int, factors: F64) -> None:
        self.m = BETAS.first * self.m + (1 - BETAS.first) * g
        if not frozen:
            self.v = BETAS.second * self.v + (1 - BETAS.second) * g**2
        self.w = self.w - RATE * factors * self.update(step)

    def update(self, step: int) -> F64:
        root = np.sqrt(self.v / (1 - BETAS.second**self.v_steps))
        update: F64 = self.m / (1 - BETAS.first ** (step + 1)) / (root + EPSILON)
        return update


class Jumps:
    """The jumps of the loss: two running means, and the variance of a loss."""

    def __init__(self) -> None:
        self.fast = self.slow = loss_of(0)
        self.variance = 0.0

    def at(self, step: int) -> bool:
        """Return whether the losses before the step have jumped."""
        if step:
            loss = loss_of(step - 1)
            self.variance += ((loss - self.slow) ** 2 - self.variance) / 512
            self.fast += (loss - self.fast) / 16
            self.slow += (loss - self.slow) / 512
        by_chance = 4 * np.sqrt(self.variance * (1 / 16) / (2 - 1 / 16))
        jumped = bool(self.fast > max(1.1 * self.slow, self.slow + by_chance))
        if jumped:
            self.slow = self.fast
        return jumped


def simulate_adam() -> tuple[list[F64], list[tuple[int, str]]]:
    """Return the weights after each step of 1-bit Adam, and when its variance was frozen and refreshed."""
    workers, jumps, found = Workers(), Jumps(), []
    for step in range(STEPS):
        g, frozen = workers.mean_gradient(step, jumps.at(step))
        workers.adam(g, frozen, step, np.ones(SIZE))
        found.append(workers.w)
    return found, workers.events


def simulate_lamb() -> tuple[list[F64], list[F64]]:
    """Return the weights after each step of 1-bit LAMB, and the factors of the layers' rates."""
    workers, jumps, found, rates = Workers(), Jumps(), [], []
    layer = np.repeat(range(len(LAYERS)), np.diff(LAYERS, prepend=0))
    c_bar, r, fresh = None, np.ones(len(LAYERS)), np.zeros(SIZE)
    was_frozen = False
    for step in range(STEPS):
        g, frozen = workers.mean_gradient(step, jumps.at(step))
        factors = np.ones(len(LAYERS))
        if not frozen:
            before = workers.m, workers.v, workers.w
            workers.adam(g, frozen, step, np.zeros(SIZE))
            u = workers.update(step)
            workers.m, workers.v, workers.w = before
            for k in range(len(LAYERS)):
                of_layer = layer == k
                ratio = np.linalg.norm(workers.w[of_layer]) / np.linalg.norm(u[of_layer])
                factors[k] = np.clip(ratio, 0.01, 10.0)
            c_bar = factors if c_bar is None else c_bar
            c_bar = 0.9 * c_bar + 0.1 * factors
        else:
            if not was_frozen:
                fresh, r = workers.v.copy(), np.ones(len(LAYERS))
            fresh = np.where((fresh == 0) & (workers.v > 0), workers.v, fresh)
            fresh = BETAS.second * fresh + (1 - BETAS.second) * g**2
            assert c_bar is not None
            for k in range(len(LAYERS)):
                of_layer = (layer == k) & (workers.v > 0)
                largest = np.max(
                    (np.sqrt(workers.v) + EPSILON)[of_layer] / (np.sqrt(fresh) + EPSILON)[of_layer]
                )
                r[k] = min(max(min(max(largest, 0.5), 4.0), 0.9 * r[k]), 1.1 * r[k])
            factors = c_bar * r
        was_frozen = workers.frozen_at is not None
        workers.adam(g, frozen, step, factors[layer])
        found.append(workers.w)
        rates.append(factors)
    return found, rates


# --- the reducers, in ranks


@dataclass(slots=True)
class Optimizer:
    """Adam, or with `trust` LAMB, that lets its variance be frozen, in float32."""

    weights: F32 = field(default_factory=lambda: np.linspace(-1, 1, SIZE, dtype=np.float32))
    moments: Moments = field(
        default_factory=lambda: Moments(np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32))
    )

    trust: TrustRatios | None = None

    def step(self, gradient: F32, frozen: bool, reducer: OneBitAdam) -> F64:
        """Step, and return the factors of the layers' rates."""
        m, v = self.moments.first, self.moments.second
        m[:] = BETAS.first * m + (1 - BETAS.first) * gradient
        if not frozen:
            v[:] = BETAS.second * v + (1 - BETAS.second) * np.square(gradient)
        root = np.sqrt(v / (1 - BETAS.second**reducer.variance_steps))
        update = m / (1 - BETAS.first**reducer.steps) / (root + EPSILON)
        rates = np.ones(len(LAYERS))
        if self.trust is not None:
            rates = self.trust.of_step(self.weights, update, frozen=frozen)
        self.weights -= (RATE * np.repeat(rates, np.diff(LAYERS, prepend=0)) * update).astype(np.float32)
        return rates


def new_adam() -> OneBitAdam:
    return OneBitAdam(SIZE, BETAS, warmup_steps=WARMUP, refresh_steps=REFRESH)


def new_lamb() -> OneBitLamb:
    return OneBitLamb(LAYERS, BETAS, warmup_steps=WARMUP, refresh_steps=REFRESH)


def adam_step(group: ThreadCollectives, reducer: OneBitAdam, optimizer: Optimizer, step: int) -> bool:
    gradient = gradient_of(step, group.rank)
    if step:
        reducer.observe(loss_of(step - 1))
    frozen = reducer.reduce(group, gradient, optimizer.moments)
    optimizer.step(gradient, frozen, reducer)
    return frozen


def test_adam_goes_the_way_of_its_simulation() -> None:
    expected, events = simulate_adam()

    def work(group: ThreadCollectives) -> list[F32]:
        reducer, optimizer, found = new_adam(), Optimizer(), []
        for step in range(STEPS):
            adam_step(group, reducer, optimizer, step)
            found.append(optimizer.weights.copy())
        return found

    of_ranks = run_ranks(WORKERS, work)

    kinds = [kind for _, kind in events]
    jumps = kinds.count("jump")
    assert kinds == [
        "freeze",
        "refresh",
        "refresh",
        *["jump"] * jumps,
        *["refresh"] * (len(kinds) - 3 - jumps),
    ]
    steps = [step for step, _ in events]
    assert steps[2] - steps[1] == REFRESH
    assert steps[3] == JUMP_AT + 3
    assert steps[3 + jumps] - steps[2 + jumps] == ALERT, events
    for found in of_ranks[1:]:
        assert [w.tobytes() for w in found] == [w.tobytes() for w in of_ranks[0]]
    np.testing.assert_allclose(of_ranks[0], expected, rtol=1e-4, atol=1e-4)


def test_lamb_goes_the_way_of_its_simulation() -> None:
    expected, factors = simulate_lamb()

    def work(group: ThreadCollectives) -> tuple[list[F32], list[F64]]:
        reducer, trust, found, rates = new_lamb(), TrustRatios(LAYERS), [], []
        optimizer = Optimizer(trust=trust)
        for step in range(STEPS):
            gradient = gradient_of(step, group.rank)
            if step:
                reducer.observe(loss_of(step - 1))
            frozen = reducer.reduce(group, gradient, optimizer.moments)
            trust.factors = reducer.factors
            rates.append(optimizer.step(gradient, frozen, reducer))
            found.append(optimizer.weights.copy())
        return found, rates

    of_ranks = run_ranks(WORKERS, work)

    for found, _ in of_ranks[1:]:
        assert [w.tobytes() for w in found] == [w.tobytes() for w in of_ranks[0][0]]
    np.testing.assert_allclose(of_ranks[0][1], factors, rtol=1e-3)
    np.testing.assert_allclose(of_ranks[0][0], expected, rtol=1e-3, atol=1e-3)


# --- state, drift


def test_ranks_that_join_take_the_state() -> None:
    states: list[tuple[dict[str, object], Optimizer]] = []

    def before(group: ThreadCollectives) -> None:
        reducer, optimizer = new_adam(), Optimizer()
        frozen = [adam_step(group, reducer, optimizer, step) for step in range(70)]
        assert frozen[-1], "the warm-up goes on"
        optimizer.moments.first[:] += (1 - BETAS.first) * reducer.flush(group, optimizer.moments)  # the carry
        if group.rank == 0:
            states.append((dict(reducer.state()), optimizer))

    def after(group: ThreadCollectives) -> tuple[bytes, int, int]:
        reducer, optimizer = new_adam(), Optimizer()
        state, other = states[0]
        reducer.load_state(state)  # type: ignore[arg-type]
        optimizer.weights[:] = other.weights
        optimizer.moments.first[:] = other.moments.first
        optimizer.moments.second[:] = other.moments.second
        for step in range(70, STEPS):
            adam_step(group, reducer, optimizer, step)
        return optimizer.weights.tobytes(), group.sent, group.reduced

    run_ranks(2, before)
    found = run_ranks(3, after)

    assert len({weights for weights, _, _ in found}) == 1
    assert len({reduced for _, _, reduced in found}) == 1
    assert all(sent > 0 for _, sent, _ in found)


def check_variance_follows(reducer: OneBitAdam) -> None:
    """Gradients grow tenfold while the variance is frozen; it must follow, though no loss shows it."""
    true = 100.0
    moments = Moments(np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32))
    counts, active = np.array([1000, 1000, 0, 0, True]), np.packbits(np.ones(SIZE, np.bool_))
    reducer.load_state({**reducer.state(), "counts": counts, "active": active})

    def work(group: ThreadCollectives) -> None:
        rng = np.random.default_rng(0)
        for _ in range(1500):
            gradient = (np.sqrt(true) * rng.normal(size=SIZE)).astype(np.float32)
            assert reducer.reduce(group, gradient, moments)
            moments.first[:] = BETAS.first * moments.first + (1 - BETAS.first) * gradient

    run_ranks(1, work)
    found = float(np.median(moments.second))  # single ones depend on the gradient of one step
    assert true / 4 < found < 2 * true, f"a variance of {found}, not {true}"


def test_a_frozen_variance_follows_the_stream() -> None:
    check_variance_follows(new_adam())


def test_a_variance_that_is_never_refreshed_is_found() -> None:
    with pytest.raises(AssertionError, match=r"a variance of 1\.0"):
        check_variance_follows(OneBitAdam(SIZE, BETAS, refresh_steps=1 << 60))


def test_values_out_of_use_do_not_run_away() -> None:
    """Their variance falls with each refresh; the error of their group's scale, over its root, would be any
    step."""
    unused = slice(0, GROUP // 2)

    def work(group: ThreadCollectives) -> float:
        reducer, optimizer = new_adam(), Optimizer()
        largest = 0.0
        for step in range(700):
            gradient = gradient_of(step, group.rank)
            if step > WARMUP:
                gradient[unused] = 0
            before = optimizer.weights[unused].copy()
            frozen = reducer.reduce(group, gradient, optimizer.moments)
            optimizer.step(gradient, frozen, reducer)
            if step > 2 * WARMUP:
                largest = max(largest, float(np.abs(optimizer.weights[unused] - before).max()))
        assert optimizer.moments.second[unused].min() < 1e-5
        return largest

    assert max(run_ranks(2, work)) < 5 * RATE


def test_without_variance_a_value_still_reports_an_infinity() -> None:
    reducer, moments = new_adam(), Moments(np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32))
    counts, active = np.array([1000, 1000, 0, 0, True]), np.packbits(np.arange(SIZE) > 0)
    reducer.load_state({**reducer.state(), "counts": counts, "active": active})

    def work(group: ThreadCollectives) -> tuple[F32, F32]:
        gradient = np.ones(SIZE, np.float32)
        gradient[0] = np.inf
        reducer.reduce(group, gradient, moments)
        return gradient, reducer.flush(group, moments)

    gradient, rest = run_ranks(1, work)[0]
    assert np.isnan(gradient[1 : GROUP + 1]).all()
    assert np.isfinite(gradient[GROUP + 1 :]).all()
    assert np.isfinite(rest).all()


def test_a_flush_of_values_without_variance_is_a_usual_step() -> None:
    """Ten gradients have waited: their value moves by a few rates, not by their sum over epsilon."""
    reducer, optimizer = new_adam(), Optimizer()
    optimizer.moments.second[:] = 1
    optimizer.moments.second[0] = 0
    counts, active = np.array([1000, 1000, 0, 0, True]), np.packbits(np.arange(SIZE) > 0)
    reducer.load_state({**reducer.state(), "counts": counts, "active": active})
    start = float(optimizer.weights[0])

    def work(group: ThreadCollectives) -> None:
        carry = np.zeros(SIZE, np.float32)
        for step in range(20):
            gradient = np.ones(SIZE, np.float32)
            frozen = reducer.reduce(group, gradient, optimizer.moments)
            optimizer.step(gradient + carry, frozen, reducer)
            carry = reducer.flush(group, optimizer.moments) if step == 9 else carry * 0
            if step == 9:
                assert optimizer.weights[0] == np.float32(start)
                assert carry[0] == 10

    run_ranks(1, work)
    assert RATE / 2 < abs(float(optimizer.weights[0]) - start) < 20 * RATE
