"""Limits and ceilings of the measures, and their table.

The limit is the value a measure should reach, the ceiling the value it may have today. No command raises a
ceiling; `--lower` brings it down to the measure, at most to the limit. The number of files and lines may rise
with a feature: its commit sets those two ceilings by hand.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMITS_FILE = Path(__file__).with_name("limits.toml")
HEADER = """\
# limit: the value a measure should reach. ceiling: the value it may have today. Less is better.
# `python -m ops.house --lower` (with --paths for the paths) lowers ceilings to what it measures.
# A commit that adds a feature may raise those of files and lines by hand.
"""


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of the package; less is better."""

    name: str
    now: float
    items: Sequence[str] = ()  # the places that count


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds of a measure; limit <= ceiling."""

    limit: float
    ceiling: float


def read_limits(path: Path = LIMITS_FILE) -> dict[str, Limit]:
    """Read the bounds of all measures.

    Raises:
        ValueError: a ceiling is below its limit.
    """
    limits = {name: Limit(**entry) for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items()}
    for name, one in limits.items():
        if one.ceiling < one.limit:
            raise ValueError(
                f"{path.name}: {name}: expected a ceiling of at least {one.limit:g}, found {one.ceiling:g}"
            )
    return limits


def lowered(limits: Mapping[str, Limit], measures: Sequence[Measure]) -> dict[str, Limit]:
    """Return the bounds with ceilings brought down to the measures, never below the limits."""
    now = {one.name: one.now for one in measures}
    return {
        name: Limit(one.limit, max(one.limit, min(one.ceiling, now.get(name, one.ceiling))))
        for name, one in limits.items()
    }


def write_limits(limits: Mapping[str, Limit], path: Path = LIMITS_FILE) -> None:
    """Write the bounds of all measures."""
    lines = [
        f'"{name}" = {{ limit = {one.limit:g}, ceiling = {one.ceiling:g} }}\n' for name, one in limits.items()
    ]
    path.write_text(HEADER + "".join(lines), encoding="utf-8")


def worse(limits: Mapping[str, Limit], measures: Sequence[Measure]) -> list[str]:
    """Return a line for each measure above its ceiling. Raises KeyError for a measure without bounds."""
    return [
        f"{one.name}: {one.now:g} is above its ceiling, {limits[one.name].ceiling:g}"
        for one in measures
        if one.now > limits[one.name].ceiling
    ]


def table(limits: Mapping[str, Limit], measures: Sequence[Measure]) -> str:
    """Return the measures as a table: name, now, ceiling, limit."""
    rows = [("measure", "now", "ceiling", "limit")]
    rows += [
        (one.name, f"{one.now:,g}", f"{limits[one.name].ceiling:,g}", f"{limits[one.name].limit:,g}")
        for one in measures
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    )
