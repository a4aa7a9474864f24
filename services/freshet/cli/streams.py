"""Standard input, output and error as a verb needs them: open, and able to take any text."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

__all__ = ["let_go", "mend_streams"]

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


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
