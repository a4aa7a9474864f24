from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from freshet.load.open_loop import LEAST_S, MOST_S, RATIO, Durations, Waits

durations = st.lists(st.floats(LEAST_S, MOST_S), min_size=1, max_size=200)


def of(values: list[float]) -> Durations:
    made = Durations()
    for value in values:
        made.add(value)
    return made


@given(durations, st.floats(0.1, 100))
def test_a_percentile_is_at_most_one_percent_more_than_the_true_one(
    values: list[float], percent: float
) -> None:
    found = of(values).percentile(percent)

    true = sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]
    assert found is not None
    assert true * (1 - 1e-9) <= found <= true * RATIO * (1 + 1e-9)


@given(durations, durations)
def test_merging_is_as_if_all_had_been_added_to_one(some: list[float], others: list[float]) -> None:
    merged = of(some)
    merged.merge(of(others))

    assert merged.figures() == of(some + others).figures()
    assert merged.count == len(some) + len(others)


def test_none_have_no_percentiles() -> None:
    assert set(Durations().figures().values()) == {None}


def test_what_is_out_of_range_counts_at_its_end() -> None:
    made = of([0.0, 1e9])

    assert made.percentile(50) == LEAST_S
    assert made.longest_s == 1e9
    assert made.percentile(100) is not None


@given(durations, st.data())
def test_a_bound_from_below_is_at_most_one_percent_less_than_the_true_one(
    values: list[float], data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, len(values)))
    found = of(values).nth_at_least(n)

    true = sorted(values)[n - 1]
    assert true / RATIO * (1 - 1e-9) <= found <= true * (1 + 1e-9)


def waits(came: list[float], failed: list[float]) -> Waits:
    made = Waits()
    made.came, made.failed = of(came), of(failed)
    return made


@given(durations, durations, st.floats(0.1, 100))
def test_what_failed_counts_as_longer_than_all_that_came(
    came: list[float], failed: list[float], percent: float
) -> None:
    found = waits(came, failed).percentile(percent)

    wanted = max(1, math.ceil((len(came) + len(failed)) * percent / 100))
    assert found is not None
    assert found.at_least == (wanted > len(came))
    if found.at_least:
        true = max(*came, sorted(failed)[wanted - len(came) - 1])
        assert true / RATIO * (1 - 1e-9) <= found.seconds <= true * (1 + 1e-9)
    else:
        assert found.seconds == of(came).nth(wanted)


@given(durations, durations)
def test_percentiles_grow(came: list[float], failed: list[float]) -> None:
    mixed = waits(came, failed)
    shown = [mixed.percentile(p) for p in range(1, 101)] + [mixed.longest()]

    seconds = [waited.seconds for waited in shown if waited is not None]
    assert len(seconds) == 101
    assert seconds == sorted(seconds)


def test_timeouts_are_told_as_at_least_the_timeout() -> None:
    mixed = waits([0.001] * 97, [5.0, 5.0004, 5.001])

    told = mixed.figures()
    assert told == {
        "p50_ms": 1.0, "p90_ms": 1.0, "p99_ms": 5_000.0, "p99.9_ms": 5_000.0, "max_ms": 5_001.0,
        "at_least": ["p99_ms", "p99.9_ms", "max_ms"],
    }  # fmt: skip
    p99 = mixed.percentile(99)
    assert p99 is not None
    assert p99.ms() == ">= 5,000.0"


def test_waits_merge_as_durations_do() -> None:
    merged = waits([1.0], [2.0])
    merged.merge(waits([3.0], [0.5, 4.0]))

    assert merged.figures() == waits([1.0, 3.0], [2.0, 0.5, 4.0]).figures()
    assert Waits().figures() == dict.fromkeys(Durations().figures()) | {"at_least": []}
