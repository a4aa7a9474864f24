"""The past rate of items: smoothed, in bounded memory, and known no earlier than it was decided."""

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
"""Long after all that these tests add."""


def items(*numbers: int) -> U64:
    """Keys as the decoder's are: spread over 64 bits."""
    return np.array(numbers, np.uint64) * GOLDEN


def make(labels: int = 1, *, slots: int = 1 << 10) -> Popularity:
    return Popularity(labels, HORIZON_MS, slots=slots)


def add(
    popularity: Popularity, keys: U64, values: list[float], label: int = 0, known_ms: int = 0
) -> Popularity:
    """Add samples that were all decided at once."""
    n = len(keys)
    labels, weight = np.full(n, label, np.uint8), np.ones(n, np.float32)
    popularity.add(keys, labels, np.array(values, np.float32), weight, np.full(n, known_ms))
    return popularity


def rate(popularity: Popularity, keys: U64, label: int = 0, served_ms: int = LATER_MS) -> F32:
    return popularity.predict(keys, np.full(len(keys), label, np.uint8), np.full(len(keys), served_ms))


def test_nothing_is_known_before_the_first_sample() -> None:
    assert rate(make(), items(1, 2)).tolist() == [0.5, 0.5]


def test_an_item_is_its_own_rate_drawn_towards_the_mean_of_all() -> None:
    popularity = add(make(), items(*[1] * 100, *[2] * 100), [1.0] * 50 + [0.0] * 150)
    mean = 50.5 / 201
    expected = [(50 + PRIOR * mean) / (100 + PRIOR), PRIOR * mean / (100 + PRIOR), mean]
    assert rate(popularity, items(1, 2, 3)) == pytest.approx(expected)


def test_labels_have_rates_of_their_own() -> None:
    popularity = add(make(2), items(*[1] * 50), [1.0] * 50, label=0)
    add(popularity, items(*[1] * 50), [0.0] * 50, label=1, known_ms=HORIZON_MS)
    assert rate(popularity, items(1), 0)[0] > 0.9
    assert rate(popularity, items(1), 1)[0] < 0.1


def test_an_item_that_is_not_known_counts_in_the_mean_only() -> None:
    popularity = add(make(), np.zeros(10, np.uint64), [1.0] * 10)
    assert rate(popularity, np.zeros(1, np.uint64)) == rate(popularity, items(9))


def test_a_value_that_is_not_finite_does_not_count() -> None:
    popularity = add(make(), items(1, 1), [1.0, float("nan")])
    straight = add(make(), items(1), [1.0])
    assert rate(popularity, items(1, 2)).tolist() == rate(straight, items(1, 2)).tolist()


def test_what_was_served_before_a_snapshot_is_answered_by_the_one_before() -> None:
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


def test_what_was_served_within_the_horizon_is_answered_and_what_is_older_is_not_guessed_at() -> None:
    popularity = make()
    steps = range(0, 100_000, 100)
    for known_ms in steps:
        add(popularity, items(1), [1.0], known_ms=known_ms)
    clock = steps[-1]
    assert rate(popularity, items(1), served_ms=clock - HORIZON_MS)[0] != 0.5
    oldest_ms = clock - SNAPSHOTS * popularity.interval_ms - 100
    assert rate(popularity, items(1), served_ms=oldest_ms)[0] == 0.5


class Plain:
    """Popularity written down: every sample with the moment at which it was decided, in the order of coming.

    A look is taken when the clock has moved on by an interval: it knows the samples that had come by then.
    """

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms, self.looks = interval_ms, list[tuple[int, int]]()
        self.samples: list[tuple[int, int, float, float, int]] = []

    def add(self, batch: list[tuple[int, int, float, float, int]]) -> None:
        self.samples += batch
        clock = max(known for *_, known in self.samples)
        if not self.looks or clock >= self.looks[-1][0] + self.interval_ms:
            self.looks.append((clock, len(self.samples)))

    def rate(self, item: int, label: int, served_ms: int) -> float:
        looks = [came for at, came in self.looks[-SNAPSHOTS:] if at <= served_ms]
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        overall = [0.0, 0.0]
        for one, of, value, weight, _ in self.samples[: looks[-1] if looks else 0]:
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
def test_rates_are_those_of_what_was_known_whatever_comes_in_which_order_and_over_a_restart(
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


def test_memory_is_bounded_however_many_items_there_are() -> None:
    popularity = make(slots=64)
    rng = np.random.default_rng(0)
    for turn in range(20):
        keys = rng.integers(1, 1 << 63, 1000).astype(np.uint64)
        add(popularity, keys, (rng.random(1000) < 0.2).astype(float).tolist(), known_ms=5_000 * turn)
    state = popularity.state()
    assert len(state["at"]) <= 64
    assert state["past"].nbytes <= SNAPSHOTS * 64 * 8
    assert rate(popularity, keys).mean() == pytest.approx(0.2, abs=0.03)


def test_a_saved_state_goes_on_as_if_never_stopped() -> None:
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
    resumed = add(make(), items(7), [1.0])  # what it knew before is forgotten
    resumed.load_state(first.state())
    for keys, values, known_ms in pieces[30:]:
        add(resumed, keys, values, known_ms=known_ms)
    every = items(*range(1, 300))
    for served_ms in range(30_000, 43_000, 500):
        wanted = rate(straight, every, served_ms=served_ms)
        assert rate(resumed, every, served_ms=served_ms).tolist() == wanted.tolist()


def test_a_state_is_not_changed_by_what_comes_after() -> None:
    popularity = add(make(), items(1), [1.0])
    state = popularity.state()
    kept = {name: array.copy() for name, array in state.items()}
    for turn in range(2 * SNAPSHOTS):
        add(popularity, items(1), [0.0], known_ms=5_000 * turn)
    assert all((state[name] == kept[name]).all() for name in kept)


def test_a_state_written_before_there_were_snapshots_goes_on_from_its_sums() -> None:
    state = add(make(), items(*[1] * 100), [1.0] * 100, known_ms=50_000).state()
    resumed = add(make(), items(2), [1.0], known_ms=90_000)
    resumed.load_state({name: state[name] for name in ("slots", "at", "sums", "overall")})
    assert rate(resumed, items(1)).tolist() == [0.5]  # nobody knows since when it was known
    add(resumed, items(3), [0.0], known_ms=60_000)
    assert rate(resumed, items(1), served_ms=59_999).tolist() == [0.5]
    assert rate(resumed, items(1), served_ms=60_000)[0] > 0.9


def test_a_state_of_other_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="expected popularity of 1 labels"):
        make().load_state(make(2).state())
