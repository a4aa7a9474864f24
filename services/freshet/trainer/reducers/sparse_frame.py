"""The frame of a sparse gradient: some of its values, as int8 codes with one scale.

    "DS", u8 version, u32 CRC-32 of the rest, u32 floats of the gradient, u32 values, f32 scale
    LEB128 bytes of the gaps between indexes: one or two bytes where one value in two hundred is sent
    i8 codes: a value is its code times the scale; -128 stands for NaN

Everything is little-endian. Version 1 had segments with a scale each, and other forms of indexes.

Letters: d floats of a gradient, K values sent.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.types import F32, I64, U8

MAGIC, VERSION = b"DS", 2
HEAD = np.dtype(
    [("magic", "S2"), ("version", "u1"), ("crc", "<u4"), ("size", "<u4"), ("count", "<u4"), ("scale", "<f4")]
)
CHECKED = HEAD.fields["size"][1]  # type: ignore[index]
"""Where the bytes that the CRC-32 covers start."""
LIMIT, NOT_FINITE = 127, -128
LONGEST = 5
"""Bytes of the longest gap: indexes are below 2^32."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The values that a frame has."""

    indexes: I64  # (K,) rising
    codes: NDArray[np.int8]  # (K,)
    scale: float

    def values(self) -> F32:
        """Return the (K,) values."""
        values: F32 = self.codes.astype(np.float32) * np.float32(self.scale)
        values[self.codes == NOT_FINITE] = np.nan
        return values


def quantized(values: F32, indexes: I64) -> Part:
    """Return the part of (K,) values, finite or NaN, at (K,) rising indexes, rounded to nearest.

    The scale maps the largest value to 127.
    """
    finite = np.isfinite(values)
    scale = np.float32(float(np.abs(values[finite]).max(initial=0.0)) / LIMIT)
    codes = np.full(len(values), NOT_FINITE, np.int8)
    if scale < np.finfo(np.float32).tiny:
        codes[finite] = 0
        return Part(indexes, codes, 0.0)
    scaled = values[finite].astype(np.float64) / float(scale)
    codes[finite] = np.rint(scaled).clip(-LIMIT, LIMIT)
    return Part(indexes, codes, float(scale))


def encode_frame(part: Part, size: int) -> U8:
    """Encode a part of a gradient of `size` floats as bytes."""
    body = encode_indexes(part.indexes).tobytes() + part.codes.tobytes()
    head = np.array((MAGIC, VERSION, 0, size, len(part.indexes), part.scale), HEAD)
    head["crc"] = zlib.crc32(body, zlib.crc32(head.tobytes()[CHECKED:]))
    return np.frombuffer(head.tobytes() + body, np.uint8)


def decode_frame(data: U8, size: int) -> Part:
    """Decode the (N,) bytes of `encode_frame`, of a gradient of `size` floats.

    Raises Corrupt if the bytes are no frame of such a gradient.
    """
    if len(data) < HEAD.itemsize:
        raise Corrupt(f"expected at least {HEAD.itemsize} bytes of a sparse gradient, found {len(data)}")
    magic, version, crc, floats, count, scale = np.frombuffer(data[: HEAD.itemsize].tobytes(), HEAD)[0].item()
    if (magic, version) != (MAGIC, VERSION):
        raise Corrupt(
            f"expected a sparse gradient, {MAGIC!r} version {VERSION}, found {magic!r} version {version}"
        )
    if (found := zlib.crc32(data[CHECKED:].tobytes())) != crc:
        raise Corrupt(f"expected the CRC-32 {crc:#010x} of a sparse gradient, found {found:#010x}")
    if floats != size:
        raise Corrupt(f"expected a gradient of {size} floats, found one of {floats}")
    if not (np.isfinite(scale) and scale >= 0):
        raise Corrupt(f"expected a scale of at least 0, found {scale}")
    indexes, used = decode_indexes(data[HEAD.itemsize :], count, size)
    codes = data[HEAD.itemsize + used :]
    if len(codes) != count:
        raise Corrupt(f"expected {count} codes, found {len(codes)}")
    return Part(indexes, codes.view(np.int8), scale)


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
