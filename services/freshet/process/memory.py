"""Memory limits of the machine and the cgroup; settings of glibc's allocator and Python's collector."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path, PurePath

# glibc serves large allocations by mmap, but raises that threshold to the largest mapped block that was
# ever freed (up to 32 MiB). Arrays of a few MB that come and go with every version then lie in the arenas of
# several threads, between small objects that stay, and the process grows for hours. A fixed threshold
# prevents this. See mallopt(3), M_MMAP_THRESHOLD.

LARGE_BYTES = 1 << 20
"""glibc maps blocks of at least this size separately. A batch of the default size allocates less, so the hot
path makes no such system calls; most arrays of a version's snapshot are larger."""

_MOST_MMAP_THRESHOLD, _MOST_KEPT = 32 << 20, 1 << 30  # glibc accepts no threshold above the first
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # from malloc.h; part of glibc's ABI


def return_large_blocks() -> bool:
    """Fix glibc's mmap threshold at `LARGE_BYTES`; return False if the C library has none (musl)."""
    return _mallopt((_M_MMAP_THRESHOLD, LARGE_BYTES))


def keep_large_blocks() -> bool:
    """Keep up to 1 GiB of freed memory, for short commands; return False if the C library cannot (musl).

    Memory that returns to the system costs a page fault per 4 KiB when it is allocated again: a backtest of
    columns of 65,536 samples has two thirds fewer of them.
    """
    return _mallopt((_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, _MOST_KEPT))


def _mallopt(*options: tuple[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(*option) for option in options)


YOUNG_OBJECTS = 50_000
"""Live new containers that start a collection of the youngest generation. A request with 100 candidates
creates and frees a few hundred, none in cycles; at Python's default, 700, collection took a tenth of the
CPU."""

TURN_S = 0.0005
"""The interpreter's switch interval. At Python's default of 5 ms a request waits for the thread that writes
the served log; a switch costs some microseconds, a hundredth of this."""


def shorten_pauses() -> None:
    """Exclude all live objects from garbage collection, collect the rest less often, switch threads sooner.

    Call once the process has loaded its long-lived objects. Those objects may still change; cycles among them
    that become garbage later stay in memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    sys.setswitchinterval(TURN_S)


_UNLIMITED = 1 << 60
"""Limits from here on mean none: cgroup v1 gives a number near 2^63 for an unlimited group."""

_LIMITS = (("", "", "memory.max"), ("memory", "memory", "memory.limit_in_bytes"))
"""Controller as /proc names it, folder below /sys/fs/cgroup, and file: of cgroup v2, then of v1."""


def machine_memory_bytes() -> int:
    """Return the bytes available to all processes: the machine's memory, or the cgroup's limit if less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, memory_limit() or machine)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the least byte limit of this process's cgroup and the groups above it; None if there is none.

    In a container /proc may state the host's path; those of its groups count that are mounted there.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    groups = {"": "/", "memory": "/"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    found = []
    for controller, folder, name in _LIMITS:
        innermost = PurePath(groups[controller].lstrip("/"))
        for group in (innermost, *innermost.parents):
            with contextlib.suppress(OSError, ValueError):  # missing, or "max"
                found.append(int((root / "sys/fs/cgroup" / folder / group / name).read_text()))
    return min((limit for limit in found if limit < _UNLIMITED), default=None)
