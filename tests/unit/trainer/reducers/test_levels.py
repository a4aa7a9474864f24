"""Levels: no bias, the variance of QSGD at most, the bits of the paper, and a rule that follows the loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.trainer.reducers.levels import (
    FIRST_LEVELS,
    LEAST_LEVELS,
    MOST_LEVELS,
    SPAN,
    AdaptiveLevels,
    LevelCodec,
    levels_for,
)
from freshet.types import F32
from tests.fixtures.rank_threads import ThreadCollectives, run_ranks

DRAWS = 4000


def drawn(values: F32, levels: int) -> F32:
    """Return (DRAWS, S) decodings of one group of S values."""
    codec = LevelCodec(7, levels)
    rows = np.tile(values, (DRAWS, 1))
    return codec.decode(codec.encode(rows, rows.size))


@pytest.mark.parametrize("levels", [2, 3, 7, 100, 127])
def test_rounding_has_no_bias_and_little_variance(levels: int) -> None:
    values = np.random.default_rng(levels).normal(size=LevelCodec.group).astype(np.float32)
    values[:3] = 0.0, 1e-6, -1e-6

    found = drawn(values, levels).astype(np.float64)

    step = float(np.abs(values).max()) / levels
    share = values / step - np.floor(values / step)
    sigma = step * np.sqrt(share * (1 - share) / DRAWS)
    np.testing.assert_array_less(np.abs(found.mean(axis=0) - values), 4 * sigma + 1e-6 * step)
    squares = float((values.astype(np.float64) ** 2).sum())
    error = float(((found - values) ** 2).sum(axis=1).mean())
    size = len(values)
    assert error <= min(size / levels**2, math.sqrt(size) / levels) * squares


@pytest.mark.parametrize("levels", range(LEAST_LEVELS, MOST_LEVELS + 1))
def test_codes_take_the_bits_of_the_paper(levels: int) -> None:
    codec = LevelCodec(0, levels)
    values = np.linspace(-1, 1, 2 * codec.group, dtype=np.float32).reshape(2, -1)

    packed = codec.encode(values, values.size)

    bits = math.ceil(math.log2(levels + 1)) + 1
    assert packed.shape == (2, codec.group_bytes) == (2, 4 + codec.group * bits // 8)
    decoded = codec.decode(packed)
    np.testing.assert_allclose(decoded, values, rtol=0, atol=1.001 / levels)
    assert decoded[0, 0] == pytest.approx(-1, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_group_that_is_not_finite_is_nan(bad: float) -> None:
    codec = LevelCodec(0)
    values = np.ones((2, codec.group), np.float32)
    values[0, 9] = bad

    decoded = codec.decode(codec.encode(values, values.size))

    assert np.isnan(decoded[0]).all()
    np.testing.assert_array_equal(decoded[1], values[1])


@pytest.mark.parametrize(
    ("loss", "levels"),
    [(0.6, 8), (0.599, 9), (0.15, 16), (0.006, 80), (1e-9, 127), (60.0, 2), (0.0, 127)],
)
def test_levels_follow_the_loss(loss: float, levels: int) -> None:
    assert levels_for(0.6, loss) == levels


def started(first: float) -> AdaptiveLevels:
    """Return a reducer with this loss in each of its first steps."""
    reducer = AdaptiveLevels(1)
    for _ in range(SPAN):
        assert reducer.levels.levels == FIRST_LEVELS
        reducer.observe(first)
    return reducer


@given(st.floats(1e-6, 1e6), st.lists(st.floats(0, 1e6), min_size=1))
def test_levels_follow_the_running_loss_within_bounds(first: float, losses: list[float]) -> None:
    reducer, running = started(first), first
    for loss in losses:
        reducer.observe(loss)
        running += (loss - running) / SPAN if loss else 0.0
        assert LEAST_LEVELS <= reducer.levels.levels <= MOST_LEVELS
        assert abs(reducer.levels.levels - levels_for(first, running)) <= 1, "up to rounding"


def test_levels_rise_as_the_loss_falls_and_fall_again() -> None:
    reducer = started(0.6)
    for _ in range(20 * SPAN):
        reducer.observe(0.15)
    assert reducer.levels.levels == levels_for(0.6, 0.15)
    for _ in range(20 * SPAN):
        reducer.observe(60.0)
    assert reducer.levels.levels == LEAST_LEVELS


def test_losses_that_say_nothing_change_nothing() -> None:
    reducer = started(0.6)
    before = reducer.state()["losses"].tolist()
    for loss in (math.nan, math.inf, 0.0, -1.0):
        reducer.observe(loss)
    assert reducer.state()["losses"].tolist() == before


@pytest.mark.parametrize("losses", [SPAN - 1, 3 * SPAN])
def test_a_rank_that_joins_has_equal_levels_from_then_on(losses: int) -> None:
    first, joined = AdaptiveLevels(1), AdaptiveLevels(1)
    for i in range(losses):
        first.observe(1 / (1 + i))

    joined.load_state(first.state())

    for i in range(SPAN):
        assert joined.levels.levels == first.levels.levels
        for reducer in (first, joined):
            reducer.observe(1 / (losses + i))


def test_rounding_errors_of_ranks_are_independent() -> None:
    def work(group: ThreadCollectives) -> F32:
        reducer = AdaptiveLevels(LevelCodec.group)
        reducer.reduce(group, np.linspace(-1, 1, LevelCodec.group, dtype=np.float32))
        return reducer.undelivered(group)

    first, second, _ = run_ranks(3, work)  # the last one owns the only group, and the error of its sum
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.3
