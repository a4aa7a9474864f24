from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from freshet.load.open_loop import LEAST_S, MOST_S, RATIO, Durations, Latencies

durations = st.lists(st.floats(LEAST_S, MOST_S), min_size=1, max_size=200)


def histogram(values: list[float]) -> Durations:
    found = Durations()
    for value in values:
        found.add(value)
    return found


@given(durations, st.floats(0.1, 100))
def test_percentile_is_at_most_one_percent_above_exact(values: list[float], percent: float) -> None:
    found = histogram(values).percentile(percent)

    true = sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]
    assert found is not None
    assert true * (1 - 1e-9) <= found <= true * RATIO * (1 + 1e-9)


@given(durations, durations)
def test_merging_is_as_if_all_had_been_added_to_one(some: list[float], others: list[float]) -> None:
    merged = histogram(some)
    merged.merge(histogram(others))

    assert merged.figures() == histogram(some + others).figures()
    assert merged.count == len(some) + len(others)


def test_empty_histogram_has_no_percentiles() -> None:
    assert set(Durations().figures().values()) == {None}


def test_durations_are_clipped_to_range() -> None:
    clipped = histogram([0.0, 1e9])

    assert clipped.percentile(50) == LEAST_S
    assert clipped.longest_s == 1e9
    assert clipped.percentile(100) is not None


@given(durations, st.data())
def test_lower_bound_is_at_most_one_percent_below_exact(values: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(values)))
    found = histogram(values).nth_at_least(n)

    true = sorted(values)[n - 1]
    assert true / RATIO * (1 - 1e-9) <= found <= true * (1 + 1e-9)


def latencies(answered: list[float], failed: list[float]) -> Latencies:
    found = Latencies()
    found.answered, found.failed = histogram(answered), histogram(failed)
    return found


@given(durations, durations, st.floats(0.1, 100))
def test_failures_count_as_longer_than_successes(
    answered: list[float], failed: list[float], percent: float
) -> None:
    found = latencies(answered, failed).percentile(percent)

    wanted = max(1, math.ceil((len(answered) + len(failed)) * percent / 100))
    assert found is not None
    assert found.at_least == (wanted > len(answered))
    if found.at_least:
        true = max(*answered, sorted(failed)[wanted - len(answered) - 1])
        assert true / RATIO * (1 - 1e-9) <= found.seconds <= true * (1 + 1e-9)
    else:
        assert found.seconds == histogram(answered).nth(wanted)


@given(durations, durations)
def test_percentiles_grow(answered: list[float], failed: list[float]) -> None:
    mixed = latencies(answered, failed)
    shown = [mixed.percentile(p) for p in range(1, 101)] + [mixed.longest()]

    seconds = [waited.seconds for waited in shown if waited is not None]
    assert len(seconds) == 101
    assert seconds == sorted(seconds)


def test_timeouts_are_lower_bounds() -> None:
    mixed = latencies([0.001] * 97, [5.0, 5.0004, 5.001])

    shown = mixed.figures()
    assert shown == {
        "p50_ms": 1.0, "p90_ms": 1.0, "p99_ms": 5_000.0, "p99.9_ms": 5_000.0, "max_ms": 5_001.0,
        "at_least": ["p99_ms", "p99.9_ms", "max_ms"],
    }  # fmt: skip
    p99 = mixed.percentile(99)
    assert p99 is not None
    assert p99.ms() == ">= 5,000.0"


def test_latencies_merge_as_durations_do() -> None:
    merged = latencies([1.0], [2.0])
    merged.merge(latencies([3.0], [0.5, 4.0]))

    assert merged.figures() == latencies([1.0, 3.0], [2.0, 0.5, 4.0]).figures()
    assert Latencies().figures() == dict.fromkeys(Durations().figures()) | {"at_least": []}
