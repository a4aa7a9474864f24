"""Keep a long-lived process from growing by fragments: large arrays go back to the system when they are
freed.

glibc serves large allocations by mmap, but raises the limit from which it does so to the largest one that
was ever freed (up to 32 MiB). Arrays of a few MB that come and go with every version then end in the arenas
of several threads, between small objects that stay, and the process grows for hours. With the limit fixed it
does not rise. See mallopt(3), M_MMAP_THRESHOLD.
"""

from __future__ import annotations

import ctypes

__all__ = ["LARGE_BYTES", "return_large_blocks"]

LARGE_BYTES = 1 << 20
"""From this size on a block is mapped by itself. A batch of the default size allocates less, so the hot path
does not pay for the system calls; a version's snapshot is mostly above."""

_M_MMAP_THRESHOLD = -3  # from malloc.h; part of glibc's ABI


def return_large_blocks() -> bool:
    """Fix glibc's limit at `LARGE_BYTES`; False where the C library knows no such thing (musl)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
