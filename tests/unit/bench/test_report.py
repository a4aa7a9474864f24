"""The command line that measurements share."""

import json
import sys

import pytest

from bench.report import command, rounded, table


@pytest.fixture
def say(monkeypatch, capsys):
    def run(measure, *words, options=None):
        monkeypatch.setattr(sys, "argv", ["measurement", *words])
        command(measure, "What it measures.\n\nMore.", options)
        return capsys.readouterr().out

    return run


def test_json_is_one_line_of_what_was_measured(say):
    out = say(lambda quick=False: {"read": {"rows_per_s": 1.5, "quick": quick}}, "--json", "--quick")

    assert out.count("\n") == 1
    assert json.loads(out) == {"read": {"rows_per_s": 1.5, "quick": True}}


def test_without_json_it_is_a_line_for_each_figure(say):
    out = say(lambda quick=False: {"read": {"rows_per_s": 1234567.8}, "rows": 5})

    assert [line.split() for line in out.splitlines()] == [["read.rows_per_s", "1,235,000"], ["rows", "5"]]


def test_arguments_are_passed_only_if_given(say):
    def measure(quick=False, rows=7):
        return {"rows": rows}

    assert json.loads(say(measure, "--json", options={"rows": int})) == {"rows": 7}
    assert json.loads(say(measure, "--json", "--rows", "9", options={"rows": int})) == {"rows": 9}


def test_figures_have_four_digits():
    assert rounded(
        {"a": 0.123456, "b": {"c": 123456.7, "d": [1.23456, 2]}, "e": 123456, "f": "x", "g": 0.0}
    ) == {
        "a": 0.1235,
        "b": {"c": 123500, "d": [1.235, 2]},
        "e": 123456,
        "f": "x",
        "g": 0.0,
    }


def test_nothing_measured_is_an_empty_table():
    assert table({}) == ""
