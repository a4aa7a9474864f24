"""Terminal output: standard streams that are open and accept any text, results and tables."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import click
import orjson

_NAMES = ("stdin", "stdout", "stderr")


def mend_streams() -> None:
    """Replace closed standard streams by the null device, and make output accept any text.

    Call it before any file is opened: a stream that the shell closed (`>&-`) leaves its number free, and a
    file that gets the number would receive the output. Characters that the encoding lacks are printed as
    escapes such as `\\xfc`.
    """
    for number, name in enumerate(_NAMES):
        if not _is_open(number):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Send the rest of a stream to the null device, after a write failed; its buffer would fail at exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def emit_end(value: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print the end of a run: JSON for programs, or text for a terminal that may be closed."""
    if as_json:
        echo_json(value)
    else:
        say(text)


def emit(value: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print a result as one line of JSON, or as text."""
    if as_json:
        echo_json(value)
    else:
        click.echo(text)


def echo_json(value: Mapping[str, Any]) -> None:
    """Print one line of JSON in UTF-8, independent of the terminal's encoding."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    click.echo(orjson.dumps(value, default=str, option=options))


def say(line: str, *, err: bool = False) -> None:
    """Print a line; if the stream is closed (`| head`), the process continues and drops further lines."""
    try:
        click.echo(line, err=err)
    except OSError:
        discard(sys.stderr if err else sys.stdout)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with columns aligned by spaces, numbers to the right."""
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
