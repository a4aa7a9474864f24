"""The command line that measurements share."""

import json
import sys
from pathlib import Path

import pytest

from bench.report import Figures, command, rounded, table


@pytest.fixture
def say(monkeypatch, capsys):
    def run(measure, *words):
        monkeypatch.setattr(sys, "argv", ["measurement", *words])
        command(measure, "What it measures.\n\nMore.")
        return capsys.readouterr().out

    return run


def test_json_is_one_line_of_what_was_measured(say):
    out = say(lambda quick=False: {"read": {"rows_per_s": 1.5, "quick": quick}}, "--json", "--quick")

    assert out.count("\n") == 1
    assert json.loads(out) == {"read": {"rows_per_s": 1.5, "quick": True}}


def test_without_json_it_is_a_line_for_each_figure(say):
    out = say(lambda quick=False: {"read": {"rows_per_s": 1234567.8}, "rows": 5})

    assert [line.split() for line in out.splitlines()] == [["read.rows_per_s", "1,235,000"], ["rows", "5"]]


def test_only_given_options_are_passed(say):
    def measure(quick: bool = False, rows: int | None = None, folder: Path = Path("here")) -> Figures:
        return {"rows": rows, "folder": str(folder)}

    assert json.loads(say(measure, "--json")) == {"rows": None, "folder": "here"}
    assert json.loads(say(measure, "--json", "--rows", "9")) == {"rows": 9, "folder": "here"}


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
