"""Options that several verbs share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

DEFAULT_FOLDER = "freshet-run"
"""The settings' default, repeated so that --help need not import them; a test compares both."""

F = TypeVar("F", bound=Callable[..., Any])


class _Path(click.Path):
    """A path that is not empty: an empty one is an unset variable, not the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; several leading slashes, which would begin a host in a URL, become one."""
        text = os.fspath(value)
        if not text:
            self.fail("a path is expected, found nothing: is a variable not set?", param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"a path in UTF-8 is expected, found {os.fsencode(text)!r}: rename it", param, ctx)
        if text.startswith("//"):
            text = "/" + text.lstrip("/")
        if not self.dir_okay and os.path.isdir(text):
            self.fail(f"{text} is a folder: name the files in it, {_files_in(text)}", param, ctx)
        if self.exists and not os.path.exists(text):
            if "://" in text:
                self.fail(f"{text} is a URL, and only files are read: fetch it first", param, ctx)
            if text == "-":
                self.fail("'-' does not exist; standard input is /dev/stdin", param, ctx)
        return Path(str(super().convert(text, param, ctx)))


def _files_in(folder: str) -> str:
    """Return a pattern for the files of a folder, or of its partitions, without those that Spark and Hive
    skip."""
    shown = folder.rstrip("/")
    here = shown or "/"
    for _ in range(8):
        try:
            inside = sorted(
                (e for e in os.scandir(here) if not e.name.startswith(("_", "."))), key=lambda e: e.name
            )
        except OSError:
            break
        names = [e.name for e in inside if e.is_file()]
        if names:
            ends = {name[name.find(".") :] if "." in name else "" for name in names}
            common = os.path.splitext(names[0])[1] if len(ends) > 1 else ends.pop()
            return f"{shown}/*{common if all(n.endswith(common) for n in names) else ''}"
        folders = [e.path for e in inside if e.is_dir()]
        if not folders:
            break
        here, shown = folders[0], f"{shown}/*"
    return f"{folder.rstrip('/')}/*"


PATH = _Path(readable=False, path_type=Path)  # the reader's own error says more than click's
FILE = _Path(path_type=Path, exists=True, dir_okay=False)
"""An existing file."""

SEED = click.IntRange(0, 2**32 - 1)


class FiniteRange(click.FloatRange):
    """A finite number of a range; click's own range accepts "nan"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def examples(*lines: str) -> str:
    """Return the examples at the end of a verb's help, which the reference repeats and tests parse."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def folder_option(command: F) -> F:
    """Add `--folder DIR`, the run folder; by default FRESHET_COMMON_RUN_FOLDER, or `DEFAULT_FOLDER`."""
    return click.option(
        "--folder",
        type=PATH,
        envvar="FRESHET_COMMON_RUN_FOLDER",
        default=DEFAULT_FOLDER,
        show_default=True,
        help="Run folder: log, rows, versions and logs of one model.",
    )(command)


def json_option(command: F) -> F:
    """Add `--json`: one JSON object at the end of standard output."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")(command)
