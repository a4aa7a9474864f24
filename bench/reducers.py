"""Reducers of dense gradients on a stream that drifts: bytes of a step, and AUC and logloss beside fp32.

    python -m bench.reducers [--ranks 4] [--batch 64] [--steps 6000] [--seeds 3] [--quick] [--json]

Ranks are threads of this process, and their bytes are counted (`tests.fixtures.rank_threads`). A sample has 8
ids, which are Zipf-distributed and of which some are replaced all the time, and 4 numbers; its click depends
on effects of ids and on products of two of them. After 60 % of the steps the click rate jumps from 3 to 33 %.
Embeddings learn by row-wise Adagrad on one table, so that reducers differ by the dense part alone: an MLP of
128 and 64 under Adam. Residuals are flushed every 1,000 steps, as for a version.

`bytes_per_step` are those that a rank sends, flushes and warm-up counted, a sum of whole arrays as a
ring. `ratio` is fp32's beside it. Each sample is scored before it is learned from; AUC and logloss are of
those after the first tenth, `after_jump` of the fifth of the steps after the jump. Differences are to
`--base` (for LAMB, to LAMB with sums in int8) with the same seed; `± 95 %` is of Student's t over the
seeds. `dct*` leave out Adam's momentum: their base is `fp32_no_momentum`, too.
`*_frozen` are the papers' forms: a threshold or a variance that is set once. `average_*` are mode
`async`: each rank steps alone by its own gradients, and all average their states every 16 steps
(`trainer.state_average`), whole or rounded. A site of n ranks, whose gradients are summed whole, learns
as one rank with n times the batch (`--batch`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from bench.report import Figures, command
from bench.rounds import interval_95
from freshet.evaluation import auc
from freshet.model import DenseModel, State
from freshet.model.lamb import TrustRatios
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.quality import Quality
from freshet.trainer.reducers import Collectives, Reducer
from freshet.trainer.reducers.dct import Dct
from freshet.trainer.reducers.group_codecs import IntegerCodec, SignCodec
from freshet.trainer.reducers.levels import AdaptiveLevels
from freshet.trainer.reducers.one_bit_adam import Betas, Moments, OneBitAdam, SumsForAdam
from freshet.trainer.reducers.one_bit_lamb import OneBitLamb
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.trainer.state_average import average
from freshet.trainer.state_sync import DenseState, Progress, SharedMeasures
from freshet.trainer.step_coordinator import DenseLedger
from freshet.types import F32, F64, I64
from tests.fixtures.rank_threads import ThreadCollectives, run_ranks

FIELDS, IDS, DIM, NUMBERS = 8, 4000, 8, 4
HIDDEN = (128, 64)
BATCH = 64
"""Samples of a rank's step, by default."""
RATE, WARMUP_STEPS, EPSILON = 1e-3, 100, 1e-8
LAMB_RATE = 4e-3
FLUSH_STEPS, CHURN_STEPS, CHURN = 1000, 50, 0.02
JUMP_AT, JUMP_SPAN, LEARNED_AT = 0.6, 0.2, 0.1
NEVER = 1 << 60
AVERAGE_EVERY = 16


class Stream:
    """Samples whose ids are replaced, and whose click rate jumps."""

    def __init__(self, seed: int, samples: int, steps: int) -> None:
        self.random, self.samples, self.steps = np.random.default_rng(seed), samples, steps
        chances = 1 / np.arange(1, IDS + 1) ** 1.05
        self.chances = np.cumsum(chances / chances.sum())
        self.effects = self.random.normal(0, 0.5, (FIELDS, IDS))
        self.factors = self.random.normal(0, 0.7, (FIELDS, IDS, 3))
        self.slopes = self.random.normal(0, 0.3, NUMBERS)
        self.step = 0

    def next_batch(self) -> tuple[I64, F32, F32]:
        """Return (B, FIELDS) ids, (B, NUMBERS) numbers and (B,) clicks."""
        if self.step % CHURN_STEPS == 0:
            self._replace_ids()
        ids = np.searchsorted(self.chances, self.random.random((self.samples, FIELDS)))
        ids = np.minimum(ids, IDS - 1)
        numbers = self.random.normal(size=(self.samples, NUMBERS))
        columns = np.arange(FIELDS)
        factors = self.factors[columns, ids]
        products = (factors[:, 0::2] * factors[:, 1::2]).sum(axis=(1, 2))
        bias = -6.0 if self.step < JUMP_AT * self.steps else -1.5
        logits = bias + self.effects[columns, ids].sum(axis=1) + products + numbers @ self.slopes
        clicks = self.random.random(self.samples) < 1 / (1 + np.exp(-logits))
        self.step += 1
        return ids, numbers.astype(np.float32), clicks.astype(np.float32)

    def _replace_ids(self) -> None:
        replaced = self.random.random((FIELDS, IDS)) < CHURN
        count = int(replaced.sum())
        self.effects[replaced] = self.random.normal(0, 0.5, count)
        self.factors[replaced] = self.random.normal(0, 0.7, (count, 3))


class Model:
    """Embeddings and an MLP; its gradients are a rank's each."""

    def __init__(self, ranks: int) -> None:
        random = np.random.default_rng(1)
        self.ranks = ranks
        self.rows: F32 = random.normal(0, 0.05, (FIELDS * IDS, DIM)).astype(np.float32)
        self.squares = np.full(FIELDS * IDS, 0.01, np.float32)
        widths = [FIELDS * DIM + NUMBERS, *HIDDEN, 1]
        self.shapes = [s for a, b in itertools.pairwise(widths) for s in ((a, b), (b,))]
        self.ends = np.cumsum([math.prod(shape) for shape in self.shapes]).tolist()
        parts = [
            random.normal(0, math.sqrt(2 / shape[0]), shape) if len(shape) == 2 else np.zeros(shape)
            for shape in self.shapes
        ]
        self.weights: F32 = np.concatenate([p.reshape(-1) for p in parts]).astype(np.float32)

    def learn(self, ids: I64, numbers: F32, clicks: F32) -> tuple[F32, F32]:
        """Return (B,) predictions and (n, d) gradients whose sum is the mean's; step the embeddings.

        `weights` are (d,) of all ranks, or (n, d) of each, for its B / n samples.
        """
        weights = np.atleast_2d(self.weights)
        keys = (ids + IDS * np.arange(FIELDS)).reshape(-1)
        x = np.concatenate([self.rows[keys].reshape(len(ids), -1), numbers], axis=1)
        x = x.reshape(self.ranks, -1, x.shape[1])
        tensors = [
            part.reshape(len(weights), *(shape if len(shape) == 2 else (1, *shape)))
            for part, shape in zip(np.split(weights, self.ends[:-1], axis=1), self.shapes, strict=True)
        ]
        layers = list(zip(tensors[0::2], tensors[1::2], strict=True))
        inputs = []
        for i, (weight, bias) in enumerate(layers):
            inputs.append(x)
            x = x @ weight + bias
            if i < len(HIDDEN):
                x = np.maximum(x, 0)
        predictions: F32 = (1 / (1 + np.exp(-x.reshape(-1)))).astype(np.float32, copy=False)
        delta = ((predictions - clicks) / np.float32(len(ids))).reshape(self.ranks, -1, 1)
        gradients: list[F32] = []
        for (weight, _), x in zip(reversed(layers), reversed(inputs), strict=True):
            products = x.transpose(0, 2, 1) @ delta
            gradients[:0] = [products.reshape(self.ranks, -1), delta.sum(axis=1)]
            delta = (delta @ weight.transpose(0, 2, 1)) * (x > 0 if x is not inputs[0] else 1)
        self._step_rows(keys, delta[:, :, : FIELDS * DIM].reshape(-1, DIM))
        return predictions, np.concatenate(gradients, axis=1)

    def _step_rows(self, keys: I64, gradients: F32) -> None:
        unique, places = np.unique(keys, return_inverse=True)
        sums = np.zeros((len(unique), DIM), np.float32)
        np.add.at(sums, places, gradients)
        sums *= 64  # Adagrad's first steps at the size of a batch's sum
        self.squares[unique] += np.square(sums).mean(axis=1)
        self.rows[unique] -= 0.05 * sums / np.sqrt(self.squares[unique])[:, None]


class Whole:
    """fp32: a sum of whole gradients."""

    def reduce(self, group: Collectives, gradient: F32) -> None:
        group.reduce([gradient])

    def flush(self, group: Collectives) -> F32:
        return np.zeros(1, np.float32)

    def reset(self) -> None:
        pass


class FrozenDct(Dct):
    """Keeps its first threshold and variance."""

    def _select(self, sizes: F32) -> I64:
        return np.flatnonzero(sizes > self.threshold) if self.threshold else super()._select(sizes)

    def _sum_variance(self, group: Collectives, moments: Moments) -> F32:
        return self._root(moments)


class PaperDct:
    """The paper's: values above a threshold of gradients that is set once; Adam has what they sum up to."""

    def __init__(self, size: int) -> None:
        self.core = FrozenDct(size, Betas(first=0.0))
        self.core.variance_steps = 1
        self.moments = Moments(np.zeros(size, np.float32), np.ones(size, np.float32))

    def reduce(self, group: Collectives, gradient: F32) -> None:
        self.core.reduce(group, gradient, self.moments)

    def flush(self, group: Collectives) -> F32:
        return self.core.flush(group, self.moments)

    def reset(self) -> None:
        self.core.reset()


@dataclass(slots=True)
class Adam:
    """The optimiser of a rank; `step` makes the reducer's sum a step."""

    size: int
    ends: Sequence[int]
    weights: F32
    moments: Moments = field(init=False)
    steps: int = 0
    kept: float = 0.9  # beta1
    trust: TrustRatios = field(init=False)  # of LAMB

    def __post_init__(self) -> None:
        self.trust = TrustRatios(self.ends)
        self.moments = Moments(np.zeros(self.size, np.float32), np.zeros(self.size, np.float32))

    def step(self, gradient: F32, frozen: bool, variance_steps: int, *, lamb: bool = False) -> None:
        self.steps += 1
        m, v = self.moments.first, self.moments.second
        m[:] = self.kept * m + np.float32(1 - self.kept) * gradient
        if not frozen:
            v[:] = 0.999 * v + np.float32(0.001) * np.square(gradient)
        root = np.sqrt(v / (1 - 0.999**variance_steps)) + EPSILON
        update = (m / root / (1 - self.kept**self.steps)).astype(np.float32)
        rates: F64 | float = RATE
        if lamb:
            ratios = self.trust.of_step(self.weights, update, frozen=frozen)
            rates = LAMB_RATE * np.repeat(ratios, np.diff(self.ends, prepend=0))
        self.weights -= (rates * min(1.0, self.steps / WARMUP_STEPS) * update).astype(np.float32)


class Case(Protocol):
    """How a rank sums and steps."""

    def step(self, group: Collectives, gradient: F32, adam: Adam) -> None: ...
    def flush(self, group: Collectives, adam: Adam) -> None: ...
    def observe(self, loss: float) -> None: ...


@dataclass(slots=True)
class Gradients:
    """A reducer of gradients under plain Adam."""

    reducer: Reducer
    momentum: float = 0.9
    carry: F32 = field(default_factory=lambda: np.zeros(1, np.float32))

    def step(self, group: Collectives, gradient: F32, adam: Adam) -> None:
        self.reducer.reduce(group, gradient)
        adam.kept = self.momentum
        adam.step(gradient + self.carry, False, adam.steps + 1)
        self.carry = np.zeros(1, np.float32)

    def flush(self, group: Collectives, adam: Adam) -> None:
        self.carry = self.reducer.flush(group)

    def observe(self, loss: float) -> None:
        if isinstance(self.reducer, AdaptiveLevels):
            self.reducer.observe(loss)


@dataclass(slots=True)
class Momenta:
    """1-bit Adam, 1-bit LAMB or DCT."""

    reducer: SumsForAdam
    drifts: bool = True  # report the loss to it
    carry: F32 = field(default_factory=lambda: np.zeros(1, np.float32))

    def step(self, group: Collectives, gradient: F32, adam: Adam) -> None:
        frozen = self.reducer.reduce(group, gradient, adam.moments)
        if lamb := isinstance(self.reducer, OneBitLamb):
            adam.trust.factors = self.reducer.factors
        carry = self.carry * np.float32(self.reducer.carry_weight)
        adam.step(gradient + carry, frozen, self.reducer.variance_steps, lamb=lamb)
        self.carry = np.zeros(1, np.float32)

    def flush(self, group: Collectives, adam: Adam) -> None:
        self.carry = self.reducer.flush(group, adam.moments)

    def observe(self, loss: float) -> None:
        if self.drifts and isinstance(self.reducer, OneBitAdam):
            self.reducer.observe(loss)


@dataclass
class States:
    """A `DenseModel` that is the state of `Adam`."""

    adam: Adam

    @property
    def adam_tensors(self) -> Sequence[tuple[str, str, str]]:
        tensors = range(len(self.adam.ends))
        return [(f"weights/{i}", f"optimizer/first/{i}", f"optimizer/second/{i}") for i in tensors]

    def state(self) -> dict[str, NDArray[Any]]:
        return {name: part.copy() for name, part in self._parts()}

    def load_state(self, state: State, *, weights_only: bool = False) -> None:
        for name, part in self._parts():
            part[:] = state[name]

    def _parts(self) -> Iterator[tuple[str, F32]]:
        adam = self.adam
        flat = adam.weights, adam.moments.first, adam.moments.second
        of_tensors = zip(*(np.split(array, adam.ends[:-1]) for array in flat), strict=True)
        for names, parts in zip(self.adam_tensors, of_tensors, strict=True):
            yield from zip(names, parts, strict=True)


@dataclass(slots=True)
class Averaged:
    """Mode `async`: steps of each rank alone, and averagings."""

    batch: int
    rounded: bool
    state: DenseState | None = None

    def step(self, group: Collectives, gradient: F32, adam: Adam) -> None:
        if self.state is None:
            self.state = _dense_state(States(adam))
        adam.step(gradient * group.size, False, adam.steps + 1)
        if adam.steps % AVERAGE_EVERY == 0:
            rows = self.batch * AVERAGE_EVERY
            average(self.state, cast(ProcessGroup, group), rows, adam.steps, rounded=self.rounded)
            self.state.keep()

    def flush(self, group: Collectives, adam: Adam) -> None:
        pass

    def observe(self, loss: float) -> None:
        pass


def _dense_state(model: States) -> DenseState:
    """Return the state of a rank whose last averaging is the present."""
    none = cast(Quality, None)
    state = DenseState(
        cast(DenseModel, model), DenseLedger({}), none, cast(SharedMeasures, None), Progress(), ""
    )
    state.keep()
    return state


def cases(ends: Sequence[int], batch: int) -> Mapping[str, Callable[[int], Case]]:
    """Return by name how the case of a rank is made, for segments with these ends and its batch size."""
    size = ends[-1]
    plain: dict[str, Callable[[int], Reducer]] = {
        "fp32": lambda rank: Whole(),
        "int8": lambda rank: TwoPhase(IntegerCodec(8), size),
        "int4": lambda rank: TwoPhase(IntegerCodec(4), size),
        "levels": lambda rank: AdaptiveLevels(size),
        "gradient_signs": lambda rank: TwoPhase(SignCodec(), size),
        "dct_frozen": lambda rank: PaperDct(size),
    }
    momenta: dict[str, Callable[[int], Case]] = {
        "fp32_no_momentum": lambda rank: Gradients(Whole(), 0.0),
        "dct": lambda rank: Momenta(Dct(size)),
        "dct_2pct": lambda rank: Momenta(Dct(size, share=0.02)),
        "dct_1pct": lambda rank: Momenta(Dct(size, share=0.01)),
        "dct_025pct": lambda rank: Momenta(Dct(size, share=0.0025)),
        "one_bit_adam": lambda rank: Momenta(OneBitAdam(size, warmup_steps=WARMUP_STEPS)),
        "one_bit_adam_frozen": lambda rank: Momenta(
            OneBitAdam(size, warmup_steps=WARMUP_STEPS, refresh_steps=NEVER), drifts=False
        ),
        "lamb": lambda rank: Momenta(OneBitLamb(ends, warmup_steps=NEVER)),
        "one_bit_lamb": lambda rank: Momenta(OneBitLamb(ends, warmup_steps=WARMUP_STEPS)),
    }
    made = {name: lambda rank, make=make: Gradients(make(rank)) for name, make in plain.items()}
    averaged: dict[str, Callable[[int], Case]] = {
        "average_fp32": lambda rank: Averaged(batch, rounded=False),
        "average_int8": lambda rank: Averaged(batch, rounded=True),
    }
    return {**made, **momenta, **averaged}


def run(name: str, seed: int, ranks: int, batch: int, steps: int) -> Figures:
    """Train on one stream; returns bytes, AUC and logloss."""
    model, stream = Model(ranks), Stream(seed, ranks * batch, steps)
    make = cases(model.ends, batch)[name]
    size = model.ends[-1]

    def work(group: ThreadCollectives) -> tuple[float, list[tuple[F32, F32]], int]:
        case, adam = make(group.rank), Adam(size, model.ends, model.weights.copy())
        scored: list[tuple[F32, F32]] = []
        peak = 0
        for step in range(steps):
            mine: tuple[Any, ...] = ()
            of_ranks = group.meet(adam.weights)
            if group.rank == 0:
                ids, numbers, clicks = stream.next_batch()
                model.weights = np.stack(of_ranks) if isinstance(case, Averaged) else adam.weights
                predictions, gradients = model.learn(ids, numbers, clicks)
                scored.append((predictions, clicks))
                mine = gradients, logloss(predictions, clicks)
            gradients, loss = group.meet(mine)[0]
            before = group.sent
            case.step(group, gradients[group.rank].copy(), adam)
            peak = max(peak, group.sent - before)
            case.observe(loss)
            if (step + 1) % FLUSH_STEPS == 0:
                case.flush(group, adam)
        return group.sent + group.reduced * 2 * (ranks - 1) / ranks, scored, peak

    found = run_ranks(ranks, work)
    scored = found[0][1]
    jump = int(JUMP_AT * steps)
    figures: Figures = {
        "bytes_per_step": sum(sent for sent, _, _ in found) / ranks / steps,
        "peak_bytes": max(peak for _, _, peak in found),
    }
    spans = {"": (int(LEARNED_AT * steps), steps), "_after_jump": (jump, jump + int(JUMP_SPAN * steps))}
    for suffix, (start, stop) in spans.items():
        predictions, clicks = (np.concatenate(c) for c in zip(*scored[start:stop], strict=True))
        figures[f"auc{suffix}"] = auc(predictions, clicks)
        figures[f"logloss{suffix}"] = logloss(predictions, clicks)
    return figures


def logloss(predictions: F32, clicks: F32) -> float:
    """Return the mean logloss of (B,) predictions."""
    p = np.clip(predictions.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.where(clicks > 0, np.log(p), np.log1p(-p)).mean())


def compared(found: Sequence[Figures], base: Sequence[Figures]) -> Iterator[tuple[str, float]]:
    """Yield the means over seeds, and the differences to the same seeds of another case."""
    for key in found[0]:
        yield key, statistics.mean(f[key] for f in found)
    yield (
        "ratio",
        statistics.mean(b["bytes_per_step"] / f["bytes_per_step"] for f, b in zip(found, base, strict=True)),
    )
    for key in ("auc", "auc_after_jump", "logloss_after_jump"):
        differences = [f[key] - b[key] for f, b in zip(found, base, strict=True)]
        yield f"d_{key}", statistics.mean(differences)
        if len(differences) > 1:
            yield f"d_{key}_95", interval_95(differences)


def measure(
    quick: bool = False,
    ranks: int = 4,
    batch: int = BATCH,
    steps: int = 0,
    seeds: int = 0,
    only: str = "",
    base: str = "fp32",
) -> Figures:
    """Measure all reducers, or those whose names are in `only`, separated by commas, and what they need.

    `base`: the case that differences are to.
    """
    steps, seeds = steps or (1000 if quick else 6000), seeds or (1 if quick else 3)
    names = list(cases([1], batch))
    if only:
        wanted = {base, *only.split(",")} | ({"lamb"} if "lamb" in only else set())
        names = [name for name in names if name in wanted]
    found = {name: [run(name, seed, ranks, batch, steps) for seed in range(1, seeds + 1)] for name in names}
    return {
        name: dict(compared(of_seeds, found["lamb" if "lamb" in name else base]))
        for name, of_seeds in found.items()
    }


if __name__ == "__main__":
    command(measure, __doc__)
