"""What rows are behind a candidate's score."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freshet.inference.pipeline import explained, rows_of_feature
from freshet.types import I32, U8, U32

NOW_MS = 1_700_000_000_500
FOUND: U8 = np.array([1, 0, 1], np.uint8)
TOUCHED_S: U32 = np.array([1_700_000_000 - 60, 0, 1_700_000_000 - 5], np.uint32)


def positions(*rows: int) -> I32:
    return np.array(rows, np.int32)


def test_one_value_has_a_row_has_none_or_is_null() -> None:
    rows = {"user": rows_of_feature(positions(0, 1, -1), None, FOUND, TOUCHED_S, 3)}
    assert [explained(rows, i, NOW_MS)["user"] for i in range(3)] == [
        {"known": 1, "of": 1, "age_s": 60},
        {"known": 0, "of": 1, "age_s": None},
        {"known": 0, "of": 0, "age_s": None},
    ]


def test_a_list_counts_its_values_and_reports_the_newest_age() -> None:
    ends = np.array([3, 3, 5], np.uint32)
    rows = {"last": rows_of_feature(positions(0, 1, 2, -1, 1), ends, FOUND, TOUCHED_S, 3)}
    assert [explained(rows, i, NOW_MS)["last"] for i in range(3)] == [
        {"known": 2, "of": 3, "age_s": 5},
        {"known": 0, "of": 0, "age_s": None},
        {"known": 0, "of": 1, "age_s": None},
    ]


def test_an_event_dated_ahead_is_of_now() -> None:
    rows = {"user": rows_of_feature(positions(2), None, FOUND, TOUCHED_S + np.uint32(100), 1)}
    assert explained(rows, 0, NOW_MS)["user"]["age_s"] == 0


@given(st.lists(st.lists(st.integers(-1, 2), max_size=5), max_size=6))
def test_counts_are_those_of_a_loop(lists: list[list[int]]) -> None:
    ends = np.cumsum([len(one) for one in lists]).astype(np.uint32)
    flat = positions(*(row for one in lists for row in one))
    got = rows_of_feature(flat, ends, FOUND, TOUCHED_S, len(lists))
    for i, one in enumerate(lists):
        values = [row for row in one if row >= 0]
        assert got.of[i] == len(values)
        assert got.known[i] == sum(FOUND[row] for row in values)
        assert got.touched_s[i] == max((int(TOUCHED_S[row]) for row in values), default=0)
