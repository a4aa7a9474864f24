"""The terminal: standard streams that are open and take any text, and how results are printed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import click
import orjson

__all__ = ["echo_json", "emit", "emit_end", "let_go", "mend_streams", "say", "table"]

_NAMES = ("stdin", "stdout", "stderr")


def mend_streams() -> None:
    """Before anything else is opened: a stream that the shell closed (`>&-`) becomes the null device, or a
    file of ours would take its number and what is printed would go into it. What an encoding lacks, such as
    an umlaut in the name of a folder where only ASCII is known, is printed as `\\xfc`.
    """
    for number, name in enumerate(_NAMES):
        if not _is_open(number):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def let_go(stream: TextIO) -> None:
    """After a write to it failed: what it still holds goes nowhere, instead of failing again at the end."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def emit_end(value: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print how a run ended: JSON for programs, text for a terminal that may be gone."""
    if as_json:
        echo_json(value)
    else:
        say(text)


def emit(value: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print the result: as one JSON line, or as text."""
    if as_json:
        echo_json(value)
    else:
        click.echo(text)


def echo_json(value: Mapping[str, Any]) -> None:
    """One line of JSON, in UTF-8 whatever the terminal's encoding is."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    click.echo(orjson.dumps(value, default=str, option=options))


def say(line: str, *, err: bool = False) -> None:
    """Print a line. If standard output is closed (`| head`, a closed terminal), the process goes on and
    further lines are dropped.
    """
    try:
        click.echo(line, err=err)
    except OSError:
        let_go(sys.stderr if err else sys.stdout)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned with spaces; numbers to the right."""
    cells = [[*header], *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flag else cell.ljust(width)
            for cell, width, flag in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
