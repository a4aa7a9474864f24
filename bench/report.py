"""The command line that all measurements share, and their figures as a table or as JSON.

A measurement is a module with `measure(quick: bool = False, ...) -> Figures` that ends in
`command(measure, __doc__)`. Keys of figures are snake_case and end in their unit: `rows_per_s`, `p99_ms`,
`share`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

Figures = dict[str, Any]
"""Numbers, words and further figures by name; goes through JSON unchanged."""


def command(measure: Callable[..., Figures], doc: str | None) -> None:
    """Run a measurement from the command line: parse the options, measure, print.

    Each parameter of `measure` is an option of its type (`clicks: int | None` is `--clicks 200`), except
    `quick`, which is a flag. An option that is not given is not passed. The first line of `doc` explains the
    command.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: seconds")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    for name, hint in get_type_hints(measure).items():
        if name not in {"quick", "return"}:
            kind = next(iter(get_args(hint)), hint)  # the int of `int | None`
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, dest=name, type=kind, default=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    figures = rounded(measure(**options))
    print(json.dumps(figures) if as_json else table(figures), flush=True)


def flat(figures: Figures, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each number with its names, joined by dots."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, name))
        else:
            yield ".".join((*path, name)), value


def table(figures: Figures) -> str:
    """Return the figures for people, one a line."""
    lines = list(flat(figures))
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:{width}}  {_text(value):>16}" for name, value in lines)


def rounded(figures: Figures) -> Figures:
    """Round to four significant digits: no more of them mean anything."""
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
