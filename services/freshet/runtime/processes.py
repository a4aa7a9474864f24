"""What the system knows of a process: whether it still is the one that was started, and its memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_alive", "memory_mb"]


def is_alive(pid: int) -> bool:
    """Whether that process runs and is one of ours: ids are given to others after a while."""
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
