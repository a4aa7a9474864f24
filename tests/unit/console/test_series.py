"""Series: bounded, the newest points are kept in full, thinned windows are summed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.console.history import POINTS, Series, added

HOUR, DAY = 3_600_000, 86_400_000


def test_the_last_hour_keeps_a_point_every_five_seconds() -> None:
    series = Series(DAY)
    for i in range(POINTS):
        series.add(i * 5_000, i, i * 5_000)

    assert series.last(HOUR, POINTS * 5_000) == list(range(POINTS))


def test_a_day_is_thinned_to_a_fixed_number_of_points() -> None:
    series = Series(DAY)
    for i in range(20_000):
        series.add(i * 5_000, i, i * 5_000)
    now = 20_000 * 5_000

    assert len(series.last(DAY, now)) <= POINTS + 1
    assert len(series.last(HOUR, now)) <= POINTS + 1
    assert series.last(DAY, now)[-1] == 19_999, "the newest point is always there"
    assert series.last(60_000, now) == list(range(19_988, 20_000))


def test_windows_of_one_place_are_added_once() -> None:
    series = Series(DAY, added)
    for i in range(1_000):
        window = {
            "v": 1,
            "kind": "clicks",
            "offset": i,
            "start_ms": i * 5_000,
            "stop_ms": (i + 1) * 5_000,
            "model": {"impressions": 10, "clicks": 1},
        }
        series.add((i + 1) * 5_000, window, (i + 1) * 5_000)

    day = series.last(DAY, 5_000_000)

    assert len(day) < 100
    assert sum(w["model"]["impressions"] for w in day) == 10_000
    assert day[0]["start_ms"] == 0
    assert day[-1]["stop_ms"] == 5_000_000
    assert {(w["v"], w["kind"]) for w in day} == {(1, "clicks")}, "what is no count is not added up"
    assert day[-1]["offset"] == 999
    assert all(w["model"]["clicks"] * 10 == w["model"]["impressions"] for w in day)


def test_adding_does_not_change_the_windows() -> None:
    first, second = {"n": {"a": 1}, "start_ms": 0}, {"n": {"a": 2}, "start_ms": 5}

    assert added(first, second) == {"n": {"a": 3}, "start_ms": 0}
    assert first == {"n": {"a": 1}, "start_ms": 0}


@pytest.mark.parametrize("restarted", [False, True])
def test_points_of_now_outlast_those_of_a_clock_ahead(restarted: bool) -> None:
    """The clock is set ahead by a day for an hour; a console that starts later reads all of it back."""
    series, now = Series(DAY), 2 * DAY + 3 * HOUR
    hours = ((2 * DAY, 0), (2 * DAY + HOUR, DAY), (2 * DAY + 2 * HOUR, 0))
    for start, ahead in hours:
        for at in range(start + ahead, start + ahead + HOUR, 5_000):
            series.add(at, at, now if restarted else at)

    expected = list(range(now - HOUR, now, 5_000))
    assert [at for at in series.last(HOUR, now) if at < now] == expected


def test_points_that_are_all_ahead_go_oldest_first() -> None:
    series = Series(DAY)
    for i in range(2 * POINTS):
        series.add(2 * DAY + i * 5_000, i, 0)

    assert series.last(HOUR, 2 * DAY) == list(range(POINTS, 2 * POINTS))


@given(st.lists(st.integers(0, 10 * DAY), min_size=1, max_size=300))
def test_points_come_out_in_order(times: list[int]) -> None:
    series = Series(DAY)
    for time in times:
        series.add(time, time, max(times))

    found = series.last(DAY, max(times))

    assert found == sorted(found)
    assert found[-1] == max(times)
    assert all(time >= max(times) - DAY - DAY // POINTS for time in found)
