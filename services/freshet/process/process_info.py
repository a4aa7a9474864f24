"""What the kernel reports of a process: whether it still is the one that was started, and its memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Activity", "activity_of", "birth_of", "is_alive", "last_words", "memory_mb"]

# --- What a process said last before it ended: the error at the end of its log.


READ_BYTES = 8 << 10
"""Read from the log's end: an error takes a few hundred, a long traceback before it is not wanted."""

SAID_CHARS = 600


def last_words(path: Path, start: int = 0) -> str:
    """The last message of a log from byte `start` on that is no line of structured log: an error with what
    it says to do, of a traceback its last line. Empty if there is none, or the log cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            if end - READ_BYTES > start:
                file.seek(end - READ_BYTES)
                file.readline()  # the rest of a line that began before
            else:
                file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("{")]
    heads = [i for i, line in enumerate(lines) if not line[0].isspace()]
    said = "\n".join(lines[heads[-1] :])[:SAID_CHARS] if heads else ""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in said)  # terminals show it: no escapes


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process does, as the kernel says."""

    state: str  # R runs or waits for a processor, S sleeps, D waits for a disk, T is stopped
    cpu_s: float  # processor time so far, of all its threads
    traced: bool  # a debugger holds it


def activity_of(pid: int) -> Activity | None:
    """None where that cannot be found out: the process has ended, or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        ticks = int(fields[11]) + int(fields[12])
        traced = any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines())
        return Activity(fields[0].upper(), ticks / os.sysconf("SC_CLK_TCK"), traced)
    except (OSError, ValueError, IndexError):
        return None


def birth_of(pid: int) -> str:
    """The boot of the kernel and the tick in it at which a process began: the kernel gives an id to another
    process after a while, but never with the same birth. Empty if the process has ended, or if the system has
    no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if state in "XZ" else f"{boot}:{fields[18]}"
    except (OSError, ValueError, IndexError):
        return ""


def is_alive(pid: int, birth: str) -> bool:
    """Whether the process that had this id and this birth still runs.

    An empty birth names a process that had ended when its birth was read, so it does not run. Only a system
    without /proc leaves every birth empty; there the id alone decides, which another process may have by now.
    """
    if birth or _HAS_BIRTHS:
        return bool(birth) and birth_of(pid) == birth
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True


_HAS_BIRTHS = bool(birth_of(os.getpid()))


def memory_mb(pid: int) -> float | None:
    """Resident memory of a process, MB; None where that cannot be found out."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
    except (OSError, ValueError):
        pass  # it has just ended, or this is no Linux
    return None
