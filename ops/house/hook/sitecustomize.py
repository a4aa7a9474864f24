"""Record the functions of freshet that a process enters; Python imports this module from PYTHONPATH at start.

The module imports nothing of the project, since it runs before any of it, and does nothing unless
`HOUSE_WINDOWS` names a folder. The one byte of the folder's file `window` is the number of the open window, 0
for none. At the last number the process writes its functions by window to `PID.json`.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "HOUSE_WINDOWS"
LAST = 255
LOOK_S = 0.05


class Entered:
    """The functions of freshet that this process enters, by window, as (module, qualified name)."""

    def __init__(self, folder: Path) -> None:
        with (folder / "window").open("rb") as file:
            self._window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._folder = folder
        self._functions: dict[int, set[tuple[str, str]]] = defaultdict(set)

    def start(self) -> None:
        """Record in this thread and in those that `threading` starts from now on."""
        (self._folder / f"{os.getpid()}.started").touch()
        threading.Thread(target=self._write_at_last, daemon=True).start()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def stop(self) -> None:
        """Record no more in this thread and in those that start from now on."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        number = self._window[0]
        if event == "call" and 0 < number < LAST:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("freshet."):
                self._functions[number].add((module, frame.f_code.co_qualname))

    def _write_at_last(self) -> None:
        while self._window[0] != LAST:
            time.sleep(LOOK_S)
        windows = {number: sorted(functions) for number, functions in self._functions.items()}
        written = self._folder / f"{os.getpid()}.part"
        written.write_text(json.dumps({"command": sys.orig_argv, "windows": windows}), encoding="utf-8")
        written.rename(written.with_suffix(".json"))


if VARIABLE in os.environ:
    Entered(Path(os.environ[VARIABLE])).start()
