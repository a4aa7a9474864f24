"""What each reducer must hold, as functions that raise AssertionError: mutants are held to them too."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from freshet.trainer.gradient_sums import SharesState
from freshet.trainer.reducers import Collectives, Reducer
from freshet.trainer.reducers.one_bit_adam import Moments, OneBitAdam
from freshet.types import F32, F64, U8
from tests.fixtures.rank_threads import ThreadCollectives, run_ranks

Make = Callable[[int], Reducer]
"""Makes the reducer of a rank."""


@dataclass(slots=True)
class Sums:
    """What one rank has put in and got out over its steps."""

    put: F64
    got: F64
    largest: float = 0.0  # absolute value of a gradient
    digest: int = 0  # of all results, in order


def gradients(size: int, rank: int, seed: int) -> Callable[[int], F32]:
    """Return the gradient of a step: values of sizes apart, whose mean moves; steps come in order."""
    rng = np.random.default_rng((seed, rank))
    spread = np.exp(np.random.default_rng(seed).normal(0, 1.5, size))

    def next_gradient(step: int) -> F32:
        noise = rng.normal(0.2 * np.sin(step / 50), 1, size)
        gradient: F32 = (noise * spread).astype(np.float32)
        return gradient

    return next_gradient


def step_all(
    group: Collectives,
    reducer: Reducer,
    size: int,
    steps: int,
    scale: Callable[[int], float] = lambda step: 1.0,
) -> Sums:
    """Reduce the gradients of `steps` steps; returns what was put in and got out."""
    sums = Sums(np.zeros(size), np.zeros(size))
    next_gradient = gradients(size, group.rank, group.size)
    for step in range(steps):
        gradient = next_gradient(step) * np.float32(scale(step))
        sums.put += gradient
        sums.largest = max(sums.largest, float(np.abs(gradient).max()))
        reducer.reduce(group, gradient)
        sums.got += gradient
        sums.digest = zlib.crc32(gradient.tobytes(), sums.digest)
    return sums


def check_conserved(make: Make, size: int, steps: int, ranks: Sequence[int] = (2, 3, 1)) -> None:
    """Sum of results + flushes == sum of gradients, for several numbers of ranks after one another.

    Results and flushes are equal on all ranks, to the bit. Rank 0 keeps its reducer throughout.
    """
    reducers = [make(rank) for rank in range(max(ranks))]
    put, got = np.zeros(size), np.zeros(size)
    for n in ranks:
        for reducer in reducers[1:n]:
            if isinstance(reducer, AdamReducer) and isinstance(reducers[0], AdamReducer):
                reducer.join(reducers[0])
            elif isinstance(reducer, SharesState) and isinstance(reducers[0], SharesState):
                reducer.load_state(reducers[0].state())

        def work(group: ThreadCollectives) -> Sums:
            reducer = reducers[group.rank]
            sums = step_all(group, reducer, size, steps)
            carry = reducer.flush(group)
            sums.got += carry
            sums.digest = zlib.crc32(carry.tobytes(), sums.digest)
            return sums

        found = run_ranks(n, work)
        assert len({sums.digest for sums in found}) == 1, f"{n} ranks differ"
        put += np.sum([sums.put for sums in found], axis=0)
        got += found[0].got
    error = np.linalg.norm(got - put) / np.linalg.norm(put)
    assert error < 1e-6, f"lost {error} of the gradients"


def check_flush_empties(make: Make, size: int) -> None:
    """A second flush finds nothing, and the first found something."""

    def work(group: ThreadCollectives) -> tuple[F32, F32]:
        reducer = make(group.rank)
        step_all(group, reducer, size, 30)
        return reducer.flush(group), reducer.flush(group)

    first, second = run_ranks(2, work)[0]
    assert first.any(), "the first flush found nothing"
    assert not second.any(), "the second flush found something"


def check_bounded(make: Make, size: int, bound: float, steps: int = 400) -> None:
    """After gradients became a hundred times larger, no residual is more than `bound` times the largest."""

    def work(group: ThreadCollectives) -> tuple[Sums, F32]:
        reducer = make(group.rank)
        sums = step_all(group, reducer, size, steps, lambda step: 100.0 if step >= 20 else 1.0)
        return sums, reducer.flush(group)

    found = run_ranks(2, work)
    largest = sum(sums.largest for sums, _ in found)
    rest = float(np.abs(found[0][1]).max())
    assert rest <= bound * largest, f"a residual of {rest / largest} of the largest gradient"


def check_not_finite(make: Make, size: int, *, others_finite: bool = True) -> None:
    """A NaN and an infinity of one rank reach all ranks in their step, and no later step or flush."""

    def work(group: ThreadCollectives) -> tuple[F32, Sums, F32]:
        reducer = make(group.rank)
        step_all(group, reducer, size, 25)
        bad = np.ones(size, np.float32)
        if group.rank == 1:
            bad[3], bad[5] = np.nan, np.inf
        reducer.reduce(group, bad)
        after = step_all(group, reducer, size, 25)
        return bad, after, reducer.flush(group)

    for bad, after, rest in run_ranks(2, work):
        assert not np.isfinite(bad[3]), "the NaN did not arrive"
        assert not np.isfinite(bad[5]), "the infinity did not arrive"
        assert np.isfinite(bad[-1]) == others_finite
        assert np.isfinite(rest).all(), "a residual is not finite"
        assert np.isfinite(after.got).all(), "a later result is not finite"


class Frames:
    """A `Collectives` that keeps the parts given to `all_gather`."""

    def __init__(self, group: ThreadCollectives) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.parts: list[U8] = []

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        self.group.reduce(buffers)

    def all_to_all(self, parts: Sequence[U8], sizes: Sequence[int] | None = None) -> list[U8]:
        return self.group.all_to_all(parts, sizes)

    def all_gather(self, part: U8, sizes: Sequence[int] | None = None) -> list[U8]:
        self.parts.append(part)
        return self.group.all_gather(part, sizes)


class AdamReducer:
    """`OneBitAdam` with the moments of an Adam, as a plain `Reducer`; its warm-up is over.

    Some values have no variance yet. Conservation holds for g_eff.
    """

    def __init__(self, size: int, refresh_steps: int) -> None:
        self.inner = OneBitAdam(size, refresh_steps=refresh_steps)
        self.moments = Moments(np.zeros(size, np.float32), np.linspace(0.5, 2, size, dtype=np.float32))
        self.moments.second[50:60] = 0
        bits = np.packbits(self.moments.second > 0)
        counts = np.array([1000, 1000, 0, 0, True])
        self.inner.load_state({**self.inner.state(), "counts": counts, "active": bits})

    def join(self, other: AdamReducer) -> None:
        """Load the state of another rank."""
        self.inner.load_state(other.inner.state())
        self.moments.first[:], self.moments.second[:] = other.moments.first, other.moments.second

    def reduce(self, group: Collectives, gradient: F32) -> None:
        assert self.inner.reduce(group, gradient, self.moments)
        betas = self.inner.betas
        decayed = betas.first * self.moments.first
        self.moments.first[:] = decayed + (1 - betas.first) * np.nan_to_num(gradient)

    def flush(self, group: Collectives) -> F32:
        return self.inner.flush(group, self.moments)

    def reset(self) -> None:
        self.inner.reset()
