"""Wall clocks of processes that jump while they run, as when an operator sets the time."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from tests.servers.processes import run_to_end

SOURCE = Path(__file__).with_suffix(".c")


def build_clock(folder: Path) -> Path:
    """Compile what is preloaded into processes. RuntimeError if that cannot be done.

    It is our own and not libfaketime: under that one (0.9.10) Python's `time.sleep` fails when monotonic
    clocks stay real, and it does not know C11's waits, which librdkafka uses.
    """
    return compiled(SOURCE, folder / "jumping_clock.so", "-O2", "-shared", "-fPIC")


def compiled(source: Path, to: Path, *options: str) -> Path:
    """Compile a file of C. RuntimeError if that cannot be done."""
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("moving clocks needs a C compiler: install gcc, or g++ as for the native core")
    command = [compiler, *options, "-x", "c", "-o", str(to), str(source), "-ldl", "-lpthread"]
    run_to_end(command, within_s=60)
    return to


class JumpingClock:
    """The wall clock of one process, or of several: the machine's and an offset. Monotonic clocks go on."""

    def __init__(self, library: Path, file: Path) -> None:
        """No offset yet; `file` carries it."""
        self._library, self._file = library, file
        file.write_bytes(bytes(8))

    @property
    def environment(self) -> Mapping[str, str]:
        """For the processes that have this clock."""
        return {"LD_PRELOAD": str(self._library), "JUMPING_CLOCK": str(self._file)}

    def jump(self, seconds: float) -> None:
        """From now on it is so much ahead of the machine's (behind it, if negative)."""
        _write_offset(self._file, seconds)


class JumpingClocks:
    """The wall clocks of a process and of all that it starts: one for each, by its process id."""

    def __init__(self, library: Path, folder: Path) -> None:
        """No offsets yet; files in `folder`, which is created, carry them."""
        folder.mkdir()
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(folder)}
        self._folder = folder

    def jump(self, pid: int, seconds: float) -> None:
        """From now on the clock of a process is so much ahead of the machine's (behind it, if negative).

        Raises FileNotFoundError if the process has no clock of its own.
        """
        _write_offset(self._folder / str(pid), seconds)


def _write_offset(file: Path, seconds: float) -> None:
    with file.open("r+b") as opened:
        opened.write(struct.pack("=q", round(seconds * 1e9)))
