"""Where large arrays go when they are freed: back to the system in a process that lives long, so that it does
not grow by fragments; kept for the next one in a command that ends soon.

glibc serves large allocations by mmap, but raises the limit from which it does so to the largest one that
was ever freed (up to 32 MiB). Arrays of a few MB that come and go with every version then end in the arenas
of several threads, between small objects that stay, and the process grows for hours. With the limit fixed it
does not rise. See mallopt(3), M_MMAP_THRESHOLD.
"""

from __future__ import annotations

import ctypes

__all__ = ["LARGE_BYTES", "keep_large_blocks", "return_large_blocks"]

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
