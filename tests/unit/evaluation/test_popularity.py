"""Past rates of items: smoothed, in bounded memory, from samples decided before serving."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.evaluation import Popularity
from freshet.evaluation.popularity import PRIOR, SNAPSHOTS
from freshet.types import F32, U64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
HORIZON_MS = 10_000
LATER_MS = 1 << 40
"""Later than all samples of these tests."""


def items(*numbers: int) -> U64:
    """Return keys spread over 64 bits, like the decoder's."""
    return np.array(numbers, np.uint64) * GOLDEN


def make(labels: int = 1, *, slots: int = 1 << 10) -> Popularity:
    return Popularity(labels, HORIZON_MS, slots=slots)


def add(
    popularity: Popularity, keys: U64, values: list[float], label: int = 0, known_ms: int = 0
) -> Popularity:
    """Add samples decided at the same time."""
    n = len(keys)
    labels, weight = np.full(n, label, np.uint8), np.ones(n, np.float32)
    popularity.add(keys, labels, np.array(values, np.float32), weight, np.full(n, known_ms))
    return popularity


def rate(popularity: Popularity, keys: U64, label: int = 0, served_ms: int = LATER_MS) -> F32:
    return popularity.predict(keys, np.full(len(keys), label, np.uint8), np.full(len(keys), served_ms))


def test_nothing_is_known_before_the_first_sample() -> None:
    assert rate(make(), items(1, 2)).tolist() == [0.5, 0.5]


def test_rate_is_smoothed_towards_the_mean_of_all() -> None:
    popularity = add(make(), items(*[1] * 100, *[2] * 100), [1.0] * 50 + [0.0] * 150)
    mean = 50.5 / 201
    expected = [(50 + PRIOR * mean) / (100 + PRIOR), PRIOR * mean / (100 + PRIOR), mean]
    assert rate(popularity, items(1, 2, 3)) == pytest.approx(expected)


def test_labels_have_separate_rates() -> None:
    popularity = add(make(2), items(*[1] * 50), [1.0] * 50, label=0)
    add(popularity, items(*[1] * 50), [0.0] * 50, label=1, known_ms=HORIZON_MS)
    assert rate(popularity, items(1), 0)[0] > 0.9
    assert rate(popularity, items(1), 1)[0] < 0.1


def test_unknown_item_counts_in_the_mean_only() -> None:
    popularity = add(make(), np.zeros(10, np.uint64), [1.0] * 10)
    assert rate(popularity, np.zeros(1, np.uint64)) == rate(popularity, items(9))


def test_a_value_that_is_not_finite_does_not_count() -> None:
    popularity = add(make(), items(1, 1), [1.0, float("nan")])
    straight = add(make(), items(1), [1.0])
    assert rate(popularity, items(1, 2)).tolist() == rate(straight, items(1, 2)).tolist()


def test_rate_is_that_of_the_last_snapshot_before_serving() -> None:
    popularity = make()
    add(popularity, items(*[1] * 30), [1.0] * 30, known_ms=1_000)
    add(popularity, items(*[1] * 90), [0.0] * 90, known_ms=5_000)
    nothing, early, still, late = (
        rate(popularity, items(1), served_ms=t)[0] for t in (999, 1_000, 4_999, 5_000)
    )
    assert nothing == 0.5
    assert early == still > 0.9
    assert late < 0.4


def test_snapshots_are_an_interval_apart() -> None:
    popularity = make()
    assert popularity.interval_ms == HORIZON_MS / (SNAPSHOTS - 2)
    add(popularity, items(1), [1.0], known_ms=0)
    add(popularity, items(1), [1.0], known_ms=popularity.interval_ms - 1)
    assert rate(popularity, items(1)).tolist() == rate(add(make(), items(1), [1.0]), items(1)).tolist()
    assert Popularity(1, 0).interval_ms == 1_000
    assert Popularity(1, 36_000_000).interval_ms == 3_600_000


def test_snapshots_cover_the_horizon_and_nothing_older() -> None:
    popularity = make()
    steps = range(0, 100_000, 100)
    for known_ms in steps:
        add(popularity, items(1), [1.0], known_ms=known_ms)
    clock = steps[-1]
    assert rate(popularity, items(1), served_ms=clock - HORIZON_MS)[0] != 0.5
    oldest_ms = clock - SNAPSHOTS * popularity.interval_ms - 100
    assert rate(popularity, items(1), served_ms=oldest_ms)[0] == 0.5


class Plain:
    """Reference implementation: a list of all samples, with the lengths at which snapshots were taken."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms, self.snapshots = interval_ms, list[tuple[int, int]]()
        self.samples: list[tuple[int, int, float, float, int]] = []

    def add(self, batch: list[tuple[int, int, float, float, int]]) -> None:
        self.samples += batch
        clock = max(known for *_, known in self.samples)
        if not self.snapshots or clock >= self.snapshots[-1][0] + self.interval_ms:
            self.snapshots.append((clock, len(self.samples)))

    def rate(self, item: int, label: int, served_ms: int) -> float:
        lengths = [length for at, length in self.snapshots[-SNAPSHOTS:] if at <= served_ms]
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        overall = [0.0, 0.0]
        for one, of, value, weight, _ in self.samples[: lengths[-1] if lengths else 0]:
            if of == label:
                for total in (overall, sums[one]):
                    total[0] += weight
                    total[1] += weight * value
        mean = (overall[1] + 0.5) / (overall[0] + 1)
        own = sums[item] if item else [0.0, 0.0]
        return (own[1] + PRIOR * mean) / (own[0] + PRIOR)


SAMPLE = st.tuples(
    st.integers(0, 4),  # item
    st.integers(0, 1),  # label
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1.0, 4.0]),
    st.integers(0, 40_000),  # ms at which it was decided
)
BATCHES = st.lists(st.lists(SAMPLE, min_size=1, max_size=8), min_size=1, max_size=30)


def feed(popularity: Popularity, batch: list[tuple[int, int, float, float, int]]) -> None:
    item, label, value, weight, known = zip(*batch, strict=True)
    popularity.add(
        items(*item),
        np.array(label, np.uint8),
        np.array(value, np.float32),
        np.array(weight, np.float32),
        np.array(known),
    )


@given(BATCHES, st.lists(st.integers(0, 50_000), min_size=1, max_size=6), st.integers(0, 30))
def test_rates_equal_those_of_the_plain_model_across_a_restart(
    batches: list[list[tuple[int, int, float, float, int]]], served: list[int], restart: int
) -> None:
    popularity, plain = make(2), Plain(1_000)
    for turn, batch in enumerate(sorted(batches, key=lambda b: max(known for *_, known in b))):
        if turn == restart:
            saved, popularity = popularity.state(), make(2)
            popularity.load_state(saved)
        feed(popularity, batch)
        plain.add(batch)
        for served_ms in served:
            for item in range(5):
                for label in (0, 1):
                    wanted = plain.rate(item, label, served_ms)
                    assert rate(popularity, items(item), label, served_ms)[0] == pytest.approx(wanted)


@given(BATCHES, st.integers(0, 29), st.integers(0, 7), st.integers(0, 20_000))
def test_a_late_positive_cannot_raise_its_own_score(
    batches: list[list[tuple[int, int, float, float, int]]], turn: int, place: int, late_ms: int
) -> None:
    turn %= len(batches)
    item, label, _, weight, known_ms = batches[turn][place % len(batches[turn])]
    rates = []
    for value in (0.0, 1.0):
        popularity = make(2)
        for at, batch in enumerate(batches):
            own = [(item, label, value, weight, known_ms)] if at == turn else []
            feed(popularity, [*batch, *own])
        rates.append(rate(popularity, items(item), label, served_ms=known_ms - 1 - late_ms)[0])
    assert rates[0] == rates[1]


def test_memory_is_bounded_for_any_number_of_items() -> None:
    popularity = make(slots=64)
    rng = np.random.default_rng(0)
    for turn in range(20):
        keys = rng.integers(1, 1 << 63, 1000).astype(np.uint64)
        add(popularity, keys, (rng.random(1000) < 0.2).astype(float).tolist(), known_ms=5_000 * turn)
    state = popularity.state()
    assert len(state["at"]) <= 64
    assert state["past"].nbytes <= SNAPSHOTS * 64 * 8
    assert rate(popularity, keys).mean() == pytest.approx(0.2, abs=0.03)


def test_loaded_state_continues_as_without_a_restart() -> None:
    rng = np.random.default_rng(1)
    straight, first = make(), make()
    pieces = [
        (
            items(*rng.integers(1, 300, 100).tolist()),
            (rng.random(100) < 0.3).astype(float).tolist(),
            700 * turn,
        )
        for turn in range(60)
    ]
    for keys, values, known_ms in pieces:
        add(straight, keys, values, known_ms=known_ms)
    for keys, values, known_ms in pieces[:30]:
        add(first, keys, values, known_ms=known_ms)
    resumed = add(make(), items(7), [1.0])  # `load_state` replaces this sample
    resumed.load_state(first.state())
    for keys, values, known_ms in pieces[30:]:
        add(resumed, keys, values, known_ms=known_ms)
    every = items(*range(1, 300))
    for served_ms in range(30_000, 43_000, 500):
        wanted = rate(straight, every, served_ms=served_ms)
        assert rate(resumed, every, served_ms=served_ms).tolist() == wanted.tolist()


def test_state_is_independent_of_later_samples() -> None:
    popularity = add(make(), items(1), [1.0])
    state = popularity.state()
    kept = {name: array.copy() for name, array in state.items()}
    for turn in range(2 * SNAPSHOTS):
        add(popularity, items(1), [0.0], known_ms=5_000 * turn)
    assert all((state[name] == kept[name]).all() for name in kept)


def test_a_state_of_other_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="expected popularity of 1 labels"):
        make().load_state(make(2).state())
