"""Options that several verbs share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = [
    "DEFAULT_FOLDER",
    "FILE",
    "PATH",
    "SEED",
    "FiniteRange",
    "examples",
    "folder_option",
    "json_option",
]

DEFAULT_FOLDER = "freshet-run"
"""As the settings have it; not imported from there, so that --help stays fast. A test compares them."""

F = TypeVar("F", bound=Callable[..., Any])


class _Path(click.Path):
    """A path that is given: an empty one is a variable that was not set, and not the folder one stands in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; of two leading slashes, which would begin a host in a URL, one is left."""
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
    """A pattern for the files of a folder: those that Spark and Hive would read, in its partitions too."""
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


PATH = _Path(readable=False, path_type=Path)  # what reads it says more than that it may not
FILE = _Path(path_type=Path, exists=True, dir_okay=False)
"""What a verb reads, one that is there."""

SEED = click.IntRange(0, 2**32 - 1)


class FiniteRange(click.FloatRange):
    """A number of a range: "nan", which lies in none, is refused, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def examples(*lines: str) -> str:
    """The end of a verb's help: command lines to copy. They stand in the reference, too; tests parse them."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def folder_option(command: F) -> F:
    """`--folder DIR`: the run folder, which holds log, rows, versions and logs of one model.

    Without it FRESHET_COMMON_RUN_FOLDER, or `DEFAULT_FOLDER`.
    """
    return click.option(
        "--folder",
        type=PATH,
        envvar="FRESHET_COMMON_RUN_FOLDER",
        default=DEFAULT_FOLDER,
        show_default=True,
        help="Run folder: log, rows, versions and logs of one model.",
    )(command)


def json_option(command: F) -> F:
    """`--json`: one JSON object on standard output, last."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")(command)
