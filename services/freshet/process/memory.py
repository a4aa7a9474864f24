"""How much memory processes may take here: the machine's, and the limit of the control group."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

__all__ = [
    "LARGE_BYTES",
    "keep_large_blocks",
    "machine_memory_bytes",
    "memory_limit",
    "return_large_blocks",
    "shorten_pauses",
]

# --- Where large arrays go when they are freed: back to the system in a process that lives long, so that
# it does not grow by fragments; kept for the next one in a command that ends soon.
#
# glibc serves large allocations by mmap, but raises the limit from which it does so to the largest
# one that was ever freed (up to 32 MiB). Arrays of a few MB that come and go with every version then
# end in the arenas of several threads, between small objects that stay, and the process grows for
# hours. With the limit fixed it does not rise. See mallopt(3), M_MMAP_THRESHOLD.


LARGE_BYTES = 1 << 20
"""From this size on a block is mapped by itself. A batch of the default size allocates less, so the hot path
does not pay for the system calls; a version's snapshot is mostly above."""

_LARGEST_LIMIT, _MOST_KEPT = 32 << 20, 1 << 30  # glibc takes no limit above the first
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # from malloc.h; part of glibc's ABI


def return_large_blocks() -> bool:
    """Fix glibc's limit at `LARGE_BYTES`; False where the C library knows no such thing (musl)."""
    return _mallopt((_M_MMAP_THRESHOLD, LARGE_BYTES))


def keep_large_blocks() -> bool:
    """Keep up to 1 GiB that was freed instead of returning it and asking for it again, a page fault for every
    4 KiB: a backtest of columns of 65,536 samples has two thirds fewer of them. False as above."""
    return _mallopt((_M_MMAP_THRESHOLD, _LARGEST_LIMIT), (_M_TRIM_THRESHOLD, _MOST_KEPT))


def _mallopt(*options: tuple[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(*option) for option in options)


# --- Shorter pauses of a process that answers people: Python's garbage collector and its threads' turns.


YOUNG_OBJECTS = 50_000
"""Containers made, and not freed, before the collector looks at them. A request of 100 candidates makes and
frees a few hundred, none of them in cycles; at Python's 700 looking took a tenth of the CPU."""

TURN_S = 0.0005
"""How long a thread may keep the interpreter while another waits. At Python's 5 ms a request waits for the
thread that logs what was served; a turn costs some microseconds, a hundredth of this."""


def shorten_pauses() -> None:
    """Call once the process has what it keeps: that is never looked at again, the rest less often.

    What is kept may still change; only cycles that become garbage later stay, of objects that live as long as
    the process anyhow.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    sys.setswitchinterval(TURN_S)


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
