"""What the system knows of a process: whether it still is the one that was started, and its memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["birth_of", "is_alive", "memory_mb"]


def birth_of(pid: int) -> str:
    """When a process began, as this boot of the kernel counts it: ids are given to others after a while, this
    is not. Empty of one that has ended, or where it cannot be found out.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if state in "XZ" else f"{boot}:{fields[18]}"
    except (OSError, ValueError, IndexError):
        return ""


def is_alive(pid: int, birth: str = "") -> bool:
    """Whether that process runs and is the one with this birth; or one of ours, if none is known."""
    if birth:
        return birth_of(pid) == birth
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    try:
        return b"freshet" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # no such thing on this system


def memory_mb(pid: int) -> float | None:
    """Resident memory of a process, MB; None where that cannot be found out."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
    except (OSError, ValueError):
        pass  # it has just ended, or this is no Linux
    return None
