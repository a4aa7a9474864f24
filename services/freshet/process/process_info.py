"""Processes as the kernel reports them: activity, identity, memory; and the exit reason in a log."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 8 << 10
"""Bytes read from the end of a log: an error takes a few hundred, and a traceback before it is not needed."""

REASON_CHARS = 600


def exit_reason(path: Path, start: int = 0) -> str:
    """Return the last error in a log from byte `start` on: the last unindented line that is no structured log
    record, with the indented lines after it. Empty if there is none, or the log cannot be read. A log that is
    shorter than `start` was emptied since, and is read from its beginning."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            start = start if start <= end else 0
            if end - READ_BYTES > start:
                file.seek(end - READ_BYTES)
                file.readline()  # skip the rest of a line
            else:
                file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("{")]
    heads = [i for i, line in enumerate(lines) if not line[0].isspace()]
    reason = "\n".join(lines[heads[-1] :])[:REASON_CHARS] if heads else ""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in reason)  # no escapes for the terminal


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of a process as /proc reports it."""

    state: str  # R runs or waits for a processor, S sleeps, D waits for a disk, T is stopped
    cpu_s: float  # total processor time of all threads
    traced: bool  # a debugger is attached


def activity_of(pid: int) -> Activity | None:
    """Read the activity of a process; None if it has ended, or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        ticks = int(fields[11]) + int(fields[12])
        traced = any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines())
        return Activity(fields[0].upper(), ticks / os.sysconf("SC_CLK_TCK"), traced)
    except (OSError, ValueError, IndexError):
        return None


def birth_of(pid: int) -> str:
    """Return the kernel's boot id and the tick at which the process began.

    The kernel reuses process ids, but never with the same birth. Empty if the process has ended, or if the
    system has no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if state in "XZ" else f"{boot}:{fields[18]}"
    except (OSError, ValueError, IndexError):
        return ""


def is_alive(pid: int, birth: str) -> bool:
    """Report whether the process with this id and this birth still runs.

    An empty birth means that the process had ended when its birth was read. A system without /proc leaves
    every birth empty; there the id alone decides, which another process may have by now.
    """
    if birth or _HAS_BIRTHS:
        return bool(birth) and birth_of(pid) == birth
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it runs as another user
    return True


_HAS_BIRTHS = bool(birth_of(os.getpid()))


def memory_mb(pid: int) -> float | None:
    """Return the resident memory of a process in MB; None if it is unknown."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
    except (OSError, ValueError):
        pass  # it has just ended, or the system has no /proc
    return None
