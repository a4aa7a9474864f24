"""Ceilings come down and are held."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.house import __main__ as house
from ops.house import names, static, words
from ops.house.limits import Limit, Measure, lowered, read_limits, table, worse, write_limits
from ops.house.names import Names
from ops.house.static import Facts

BOUNDS = {"lines": Limit(10, 20)}


def test_only_a_measure_above_its_ceiling_is_worse() -> None:
    assert worse(BOUNDS, [Measure("lines", 20)]) == []
    assert worse(BOUNDS, [Measure("lines", 21)]) == ["lines: 21 is above its ceiling, 20"]


@pytest.mark.parametrize(("now", "ceiling"), [(15, 15), (5, 10), (30, 20)])
def test_a_ceiling_falls_to_the_measure_but_not_below_the_limit(now: int, ceiling: int) -> None:
    assert lowered(BOUNDS, [Measure("lines", now)]) == {"lines": Limit(10, ceiling)}


def test_a_ceiling_without_a_measure_stays() -> None:
    assert lowered(BOUNDS, []) == BOUNDS


def test_bounds_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    bounds = {"% of a, b": Limit(10, 51.9), "lines": Limit(55_000, 79_745)}
    write_limits(bounds, path)

    assert read_limits(path) == bounds


def test_a_ceiling_below_its_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("lines = { limit = 10, ceiling = 9 }\n")

    with pytest.raises(ValueError, match="lines: expected a ceiling of at least 10, found 9"):
        read_limits(path)


def test_the_table_has_a_line_for_each_measure() -> None:
    assert table(BOUNDS, [Measure("lines", 1234.5)]).splitlines() == [
        "measure      now  ceiling  limit",
        "lines    1,234.5       20     10",
    ]


def test_every_measure_has_bounds_and_every_bound_a_measure() -> None:
    paths = {f"modules on the path of {what}" for what in ("an event", "a gradient", "a rank request")}

    assert {one.name for one in [*static.measures_of([]), *names.measures_of([])]} | paths == set(
        read_limits()
    )


def test_facts_of_a_file_hold_its_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    path = tmp_path / "services" / "freshet" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text('"""A door."""\n')

    contents = house.read_file("services/freshet/a.py", words.Vocabulary.load())

    assert contents.facts == Facts("services/freshet/a.py", lines=1, words=2)
    assert contents.names == Names()
    assert [str(one) for one in contents.findings] == [
        'services/freshet/a.py:1: docstring: "door": write endpoint, listener'
    ]
