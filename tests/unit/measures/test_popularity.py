"""The past rate of items: smoothed, progressive, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from freshet.measures import Popularity
from freshet.measures.popularity import PRIOR
from freshet.types import F32, U64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def items(*numbers: int) -> U64:
    """Keys as the decoder's are: spread over 64 bits."""
    return np.array(numbers, np.uint64) * GOLDEN


def add(popularity: Popularity, keys: U64, values: list[float], label: int = 0) -> None:
    n = len(keys)
    popularity.add(keys, np.full(n, label, np.uint8), np.array(values, np.float32), np.ones(n, np.float32))


def rate(popularity: Popularity, keys: U64, label: int = 0) -> F32:
    return popularity.predict(keys, np.full(len(keys), label, np.uint8))


def test_nothing_is_known_before_the_first_sample() -> None:
    assert rate(Popularity(1), items(1, 2)).tolist() == [0.5, 0.5]


def test_an_item_is_its_own_rate_drawn_towards_the_mean_of_all() -> None:
    popularity = Popularity(1)
    add(popularity, items(*[1] * 100, *[2] * 100), [1.0] * 50 + [0.0] * 150)
    mean = 50.5 / 201
    expected = [(50 + PRIOR * mean) / (100 + PRIOR), PRIOR * mean / (100 + PRIOR), mean]
    assert rate(popularity, items(1, 2, 3)) == pytest.approx(expected)


def test_labels_have_rates_of_their_own() -> None:
    popularity = Popularity(2)
    add(popularity, items(*[1] * 50), [1.0] * 50, label=0)
    add(popularity, items(*[1] * 50), [0.0] * 50, label=1)
    assert rate(popularity, items(1), 0)[0] > 0.9
    assert rate(popularity, items(1), 1)[0] < 0.1


def test_an_item_that_is_not_known_counts_in_the_mean_only() -> None:
    popularity = Popularity(1)
    add(popularity, np.zeros(10, np.uint64), [1.0] * 10)
    assert rate(popularity, np.zeros(1, np.uint64)) == rate(popularity, items(9))


def test_a_value_that_is_not_finite_does_not_count() -> None:
    popularity = Popularity(1)
    add(popularity, items(1, 1), [1.0, float("nan")])
    straight = Popularity(1)
    add(straight, items(1), [1.0])
    assert rate(popularity, items(1, 2)).tolist() == rate(straight, items(1, 2)).tolist()


def test_memory_is_bounded_however_many_items_there_are() -> None:
    popularity = Popularity(1, slots=64)
    rng = np.random.default_rng(0)
    for _ in range(20):
        keys = rng.integers(1, 1 << 63, 1000).astype(np.uint64)
        add(popularity, keys, (rng.random(1000) < 0.2).astype(float).tolist())
    assert len(popularity.state()["at"]) <= 64
    assert rate(popularity, keys).mean() == pytest.approx(0.2, abs=0.03)


def test_a_saved_state_goes_on_as_if_never_stopped() -> None:
    rng = np.random.default_rng(1)
    keys = items(*rng.integers(1, 300, 2000).tolist())
    values = (rng.random(2000) < 0.3).astype(float).tolist()
    straight, first, resumed = Popularity(1), Popularity(1), Popularity(1)
    add(straight, keys, values)
    add(first, keys[:1000], values[:1000])
    resumed.load_state(first.state())
    add(resumed, keys[1000:], values[1000:])
    assert rate(resumed, keys).tolist() == rate(straight, keys).tolist()


def test_a_state_of_other_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="expected popularity of 1 labels"):
        Popularity(1).load_state(Popularity(2).state())
