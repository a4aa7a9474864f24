"""Rising indexes as LEB128 bytes of their gaps: most take one byte where one in a hundred is sent."""

from __future__ import annotations

import numpy as np

from freshet.errors import Corrupt
from freshet.types import I64, U8

LONGEST = 5
"""Bytes of the longest gap: indexes are below 2^32."""


def varint_bytes(indexes: I64) -> int:
    """Return how many bytes `encode_indexes` makes of (K,) indexes."""
    return int(_lengths(_gaps(indexes)).sum())


def encode_indexes(indexes: I64) -> U8:
    """Encode (K,) rising indexes as bytes: of each the distance to the one before, less one."""
    gaps = _gaps(indexes)
    lengths = _lengths(gaps)
    ends = np.cumsum(lengths)
    encoded = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - lengths
    for i in range(LONGEST):
        longer = lengths > i
        if not longer.any():
            break
        more = np.where(lengths[longer] > i + 1, 0x80, 0)
        encoded[starts[longer] + i] = ((gaps[longer] >> 7 * i) & 0x7F) | more
    return encoded


def decode_indexes(encoded: U8, count: int, size: int) -> tuple[I64, int]:
    """Decode `count` rising indexes below `size` from the start of (N,) bytes.

    Returns (count,) indexes and the bytes that they take. Raises Corrupt if there are not as many, or one is
    not below `size` or in its shortest form.
    """
    last = np.flatnonzero(encoded[: LONGEST * count] < 0x80)[:count]
    if len(last) < count:
        raise Corrupt(f"expected {count} indexes, found {len(last)} in {len(encoded)} bytes")
    if not count:
        return np.empty(0, np.int64), 0
    used = int(last[-1]) + 1
    lengths = _gaps(last) + 1
    if int(lengths.max()) > LONGEST:
        raise Corrupt(f"expected gaps of at most {LONGEST} bytes, found one of {int(lengths.max())}")
    if np.any((encoded[last] == 0) & (lengths > 1)):
        raise Corrupt("expected gaps in their shortest form, found one that ends in a zero")
    starts = last + 1 - lengths
    shifts = 7 * (np.arange(used) - np.repeat(starts, lengths))
    gaps = np.add.reduceat((encoded[:used] & 0x7F).astype(np.int64) << shifts, starts)
    if int(gaps.max()) >= size:  # before the sum, which could overflow
        raise Corrupt(f"expected gaps below {size}, found {int(gaps.max())}")
    indexes: I64 = np.cumsum(gaps + 1) - 1
    if int(indexes[-1]) >= size:
        raise Corrupt(f"expected indexes below {size}, found {int(indexes[-1])}")
    return indexes, used


def _gaps(indexes: I64) -> I64:
    gaps = indexes - 1
    gaps[1:] -= indexes[:-1]
    gaps[:1] += 1
    return gaps


def _lengths(gaps: I64) -> I64:
    lengths: I64 = 1 + np.searchsorted([1 << 7, 1 << 14, 1 << 21, 1 << 28], gaps, side="right")
    return lengths
