"""1-bit Adam and LAMB after a gradient at the edge of float32: what they keep stays finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from freshet.trainer.reducers.one_bit_adam import Moments, OneBitAdam, finite_squares
from freshet.trainer.reducers.one_bit_lamb import OneBitLamb
from freshet.types import F32

SIZE, REFRESH = 2_048, 8


class Alone:
    """The collectives of the only rank."""

    rank, size = 0, 1

    def reduce(self, buffers: Sequence[F32]) -> None:
        pass

    def all_to_all(self, parts: Sequence[F32], _sizes: object = None) -> list[F32]:
        return list(parts)

    def all_gather(self, part: F32, _sizes: object = None) -> list[F32]:
        return [part]


@pytest.mark.parametrize("wild", [1e25, np.inf, np.nan])
@pytest.mark.parametrize("refreshes", [True, False])
@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_a_wild_gradient_leaves_what_reducers_keep_finite(kind: str, refreshes: bool, wild: float) -> None:
    every = REFRESH if refreshes else 10_000
    reducer = OneBitAdam(SIZE, refresh_steps=every)
    if kind == "lamb":
        reducer = OneBitLamb([1_024, SIZE], refresh_steps=every)
    moments = Moments(np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32))
    rng, group = np.random.default_rng(0), Alone()

    def step(value: float | None = None) -> bool:
        gradient = (rng.normal(size=SIZE) * 0.01).astype(np.float32)
        if value is not None:
            gradient[5] = value
        frozen = reducer.reduce(group, gradient, moments)  # type: ignore[arg-type]
        squares = finite_squares(gradient)
        gradient[(squares == 0) & (gradient != 0)] = 0  # as the model steps
        moments.first[:] = 0.9 * moments.first + 0.1 * gradient
        if not frozen:
            moments.second[:] = 0.999 * moments.second + 0.001 * squares
        return frozen

    for _ in range(5_000):
        if step():
            break
    for _ in range(REFRESH - 2):
        step()
    step(wild)
    for _ in range(30):
        assert step()
        assert np.isfinite(moments.first).all()
    assert np.isfinite(moments.second).all()
    assert all(np.isfinite(x).all() for x in reducer.state().values() if x.dtype.kind == "f")
