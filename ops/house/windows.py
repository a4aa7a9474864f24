"""Windows of time, in which processes record the functions they enter (`hook/sitecustomize.py`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ops.house.hook.sitecustomize import LAST, VARIABLE

Functions = frozenset[tuple[str, str]]  # (module, qualified name)

HOOK = Path(__file__).parent / "hook"
SETTLE_S = 0.5
"""After an answer the server still counts the request, which must not fall into the next window."""

WRITE_S = 30.0
"""A process writes within a tenth of a second; a machine may be busy."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The functions that one process entered."""

    command: str
    windows: Mapping[int, Functions]


class Windows:
    """Opens and closes windows for the processes that were started with `environment()`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "window"
        self._file.write_bytes(b"\0")
        self._number = 0

    def environment(self) -> dict[str, str]:
        """Return the variables with which a process records."""
        path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {VARIABLE: str(self._folder), "PYTHONPATH": path}

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open a window for a block; yields its number."""
        time.sleep(SETTLE_S)
        self._number += 1
        assert self._number < LAST
        self._set(self._number)
        try:
            yield self._number
        finally:
            self._set(0)

    def read(self) -> list[Recorded]:
        """End the recording; returns what each running process entered.

        Raises:
            TimeoutError: a process that runs has not written its functions.
        """
        self._set(LAST)
        deadline = time.monotonic() + WRITE_S
        while missing := [pid for pid in self._started() if not self._has_written(pid) and is_running(pid)]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"processes {missing} have not written {self._folder}/PID.json in {WRITE_S:g} s"
                )
            time.sleep(0.05)
        return [recorded_of(path) for path in sorted(self._folder.glob("*.json"))]

    def _set(self, number: int) -> None:
        with self._file.open("r+b") as file:  # in place: processes have the file mapped
            file.write(bytes([number]))

    def _started(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.started")]

    def _has_written(self, pid: int) -> bool:
        return (self._folder / f"{pid}.json").exists()


def recorded_of(path: Path) -> Recorded:
    """Read the file of one process."""
    content = json.loads(path.read_text(encoding="utf-8"))
    windows = {
        int(number): frozenset(map(tuple, functions)) for number, functions in content["windows"].items()
    }
    return Recorded(" ".join(content["command"]), windows)


def is_running(pid: int) -> bool:
    """Whether a process of this user runs."""
    return Path(f"/proc/{pid}").exists()


def path_of(processes: list[Recorded], passes: list[int], idle: list[int]) -> list[str]:
    """Return the modules on the path of a datum, sorted.

    A module is on the path if in each window with a datum the processes entered a function of it that they
    entered in no idle window. This leaves out functions that run anyway (heartbeats, polls, supervision) and
    modules that run now and then. The function may differ: a new connection is read by another.
    """

    def entered(window: int) -> Functions:
        return frozenset[tuple[str, str]]().union(
            *(one.windows.get(window, frozenset()) for one in processes)
        )

    anyway = frozenset[tuple[str, str]]().union(*map(entered, idle))
    by_pass = [{module for module, _ in entered(window) - anyway} for window in passes]
    return sorted(set.intersection(*by_pass))
