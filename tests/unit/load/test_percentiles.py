from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from freshet.load.percentiles import LEAST_S, MOST_S, RATIO, Durations

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
