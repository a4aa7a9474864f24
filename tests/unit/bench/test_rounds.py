"""Figures of interleaved rounds."""

import itertools
from functools import partial

import pytest

from bench.rounds import Figure, figures_by_key, interleaved, interval_95, micros, rate


def test_each_case_is_called_once_a_round_and_has_its_median():
    values = {"a": iter([3.0, 1.0, 2.0]), "b": iter([30.0, 10.0, 20.0])}

    found = interleaved({name: v.__next__ for name, v in values.items()}, 3, unit="rows/s")

    assert found == {"a": Figure(2, 1, 3, "rows/s", 3), "b": Figure(20, 10, 30, "rows/s", 3)}


def test_figures_by_key_are_those_of_each_key_over_the_rounds():
    calls = iter([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 5.0}])

    found = figures_by_key({"one": lambda: next(calls)}, 2)

    assert found == {"one": {"a": Figure(2, 1, 3, "", 2), "b": Figure(5, 5, 5, "", 2)}}


def test_no_case_always_follows_the_same_one():
    order = []

    def case(name):
        order.append(name)
        return 1.0

    interleaved({name: partial(case, name) for name in "abc"}, 3)

    assert "".join(order) == "abc" + "bca" + "cab"


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_rounds_are_refused(rounds):
    with pytest.raises(ValueError, match="expected 1 or more"):
        interleaved({"a": lambda: 1.0}, rounds)


def test_a_figure_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one round"):
        Figure.of([])


def test_a_figure_has_no_unit_in_json_as_its_key_has_it():
    assert Figure.of([1.0, 2.0, 6.0], "ms").as_json() == {"median": 2, "low": 1, "high": 6, "n": 3}


def test_a_rate_is_what_was_done_a_second_of_the_clock_given():
    clock = itertools.count(start=10, step=4)

    assert rate(lambda: None, 100, lambda: float(next(clock)))() == 25


def test_micros_are_cpu_time_of_the_calling_thread():
    assert 0 < micros(lambda: sum(range(1_000)), 0.01) < 1e5


def test_interval_is_that_of_students_t():
    assert interval_95([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    with pytest.raises(ValueError, match="needs 2 to 10"):
        interval_95([1.0])
