"""How much memory processes may take here: the machine's, and the limit of the control group."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["machine_memory_bytes", "memory_limit"]

_UNLIMITED = 1 << 60
"""Version 1 of cgroups says a number near 2^63 where nothing is limited."""

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory_bytes() -> int:
    """Memory that processes here may take together: the machine's, or the cgroup's limit if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, memory_limit() or machine)


def memory_limit(paths: tuple[str, ...] = _LIMITS) -> int | None:
    """Bytes that this process's cgroup may take; None where there is no limit, or it cannot be found out."""
    for path in paths:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):  # not there; or "max"
            continue
        if limit < _UNLIMITED:
            return limit
    return None
