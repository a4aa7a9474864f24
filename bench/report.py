"""What every measurement of this folder shares: its command line, and its figures as a table or as JSON.

A measurement is a module with `measure(quick: bool = False, ...) -> Figures` and a `main` that calls
`command`. Keys of figures are snake_case and end in their unit: `rows_per_s`, `p99_ms`, `share`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["Figures", "command", "flat", "rounded", "table"]

Figures = dict[str, Any]
"""Numbers, words and further figures by name; goes through JSON unchanged."""


def command(
    measure: Callable[..., Figures], doc: str | None, options: Mapping[str, type] | None = None
) -> None:
    """The whole of a measurement's `main`: parse the words, measure, print.

    `options` are arguments of `measure` with their types, such as `{"clicks": int}`, told by `--clicks 200`;
    one that is not told is not passed. The first line of `doc` explains the command.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: seconds")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    for name, kind in (options or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, default=argparse.SUPPRESS)
    told = vars(parser.parse_args())
    as_json = told.pop("json")
    figures = rounded(measure(**told))
    print(json.dumps(figures) if as_json else table(figures), flush=True)


def flat(figures: Figures, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each number with the names that lead to it, joined by dots."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, name))
        else:
            yield ".".join((*path, name)), value


def table(figures: Figures) -> str:
    """The same for people: a figure a line."""
    lines = list(flat(figures))
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:{width}}  {_text(value):>16}" for name, value in lines)


def rounded(figures: Figures) -> Figures:
    """The same with four significant digits: no more of them mean anything."""
    return {name: _round(value) for name, value in figures.items()}


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return rounded(value)
    if isinstance(value, list):
        return [_round(v) for v in value]
    if not isinstance(value, float):
        return value
    short = float(f"{value:.4g}")
    return int(short) if abs(short) >= 1e4 and short.is_integer() else short


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
