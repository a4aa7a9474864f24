"""The frame of a sparse gradient: some values of each segment, in the shortest of three forms.

    "DS", u8 version, u8 value bytes (1: int8, 2: fp16), u32 floats of the gradient, u32 CRC-32 of the rest
    for each segment:  u8 form, f32 scale, u32 values
    for each segment:  its indexes, then its values

| form | indexes |
|---|---|
| `DENSE` | none: all values of the segment |
| `BITMAP` | a bit for each value of the segment |
| `GAPS` | LEB128 bytes of their gaps: most take one byte where one in a hundred is sent |
| `NOT_FINITE` | none, and no values: all of the segment is NaN |

A value is its code times the scale of its segment. Everything is little-endian.

Letters: d floats of a gradient, N floats of a segment, K values sent.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.types import F32, I64, U8

MAGIC, VERSION = b"DS", 1
HEAD = np.dtype([("magic", "S2"), ("version", "u1"), ("value", "u1"), ("size", "<u4"), ("crc", "<u4")])
SEGMENT = np.dtype([("form", "u1"), ("scale", "<f4"), ("count", "<u4")])
INT8_LIMIT = 127
LONGEST = 5
"""Bytes of the longest gap: indexes are below 2^32."""


class Form(enum.IntEnum):
    """How a segment says which of its values it has; the number is the one in a frame."""

    DENSE = 0
    BITMAP = 1
    GAPS = 2
    NOT_FINITE = 3


class Values(enum.IntEnum):
    """Types of codes; the number is their bytes."""

    INT8 = 1
    FP16 = 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an array of codes."""
        return np.dtype("<i1" if self is Values.INT8 else "<f2")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The values that a frame has of one segment."""

    indexes: I64  # (K,) rising; of a segment that is not finite: none
    codes: NDArray[Any]  # (K,)
    scale: float  # NaN: all of the segment is NaN

    def values(self) -> F32:
        """Return the (K,) values."""
        values: F32 = self.codes.astype(np.float32) * np.float32(self.scale)
        return values


def quantized(values: F32, indexes: I64, kind: Values) -> Part:
    """Return the part of (K,) finite values at (K,) rising indexes, rounded to nearest.

    The scale maps the largest value to 127 of int8, and to at most 1 of fp16 by a power of two, so that the
    values keep all bits of fp16.
    """
    largest = float(np.abs(values).max(initial=0.0))
    if kind is Values.INT8:
        scale = np.float32(largest / INT8_LIMIT)
    else:
        scale = np.float32(2.0 ** min(np.frexp(largest)[1], 127))
    if largest == 0.0 or scale < np.finfo(np.float32).tiny:
        return Part(indexes, np.zeros(len(values), kind.dtype), 0.0)
    scaled = values.astype(np.float64) / float(scale)
    codes = np.rint(scaled).clip(-INT8_LIMIT, INT8_LIMIT) if kind is Values.INT8 else scaled
    return Part(indexes, codes.astype(kind.dtype), float(scale))


def encode_frame(parts: Sequence[Part], sizes: Sequence[int], kind: Values) -> U8:
    """Encode the parts of the segments of `sizes` floats as bytes."""
    table = np.zeros(len(parts), SEGMENT)
    bodies: list[bytes] = []
    for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        form = form_of(part, size)
        table[i] = (form, part.scale, len(part.indexes))
        if form is Form.BITMAP:
            marks = np.zeros(size, np.bool_)
            marks[part.indexes] = True
            bodies.append(np.packbits(marks, bitorder="little").tobytes())
        elif form is Form.GAPS:
            bodies.append(encode_indexes(part.indexes).tobytes())
        bodies.append(part.codes.tobytes())
    rest = table.tobytes() + b"".join(bodies)
    head = np.array((MAGIC, VERSION, kind, sum(sizes), zlib.crc32(rest)), HEAD)
    return np.frombuffer(head.tobytes() + rest, np.uint8)


def form_of(part: Part, size: int) -> Form:
    """Return the shortest form of a part of a segment of `size` floats."""
    if np.isnan(part.scale):
        return Form.NOT_FINITE
    if len(part.indexes) == size:
        return Form.DENSE
    return Form.GAPS if varint_bytes(part.indexes) <= _bitmap_bytes(size) else Form.BITMAP


def decode_frame(data: U8, sizes: Sequence[int]) -> list[Part]:
    """Decode the (N,) bytes of `encode_frame`; `sizes` are those of the receiver's segments.

    Raises Corrupt if the bytes are no frame of such segments.
    """
    parts: list[Part] = []
    kind, table, at = _read_heads(data, sizes)
    for i, (segment, size) in enumerate(zip(table.tolist(), sizes, strict=True)):
        form, scale, count = segment
        _check_segment(i, segment, size)
        indexes: I64 = np.arange(count)
        if form == Form.BITMAP:
            used = _bitmap_bytes(size)
            bits = np.unpackbits(_take(data, at, used), bitorder="little")
            indexes = np.flatnonzero(bits)
            if len(indexes) != count or bits[size:].any():
                raise Corrupt(f"expected {count} of {size} bits of segment {i}, found {len(indexes)}")
            at += used
        elif form == Form.GAPS:
            indexes, used = decode_indexes(data[at:], count, size)
            at += used
        codes = np.frombuffer(_take(data, at, count * kind).tobytes(), kind.dtype)
        at += count * kind
        if kind is Values.FP16 and not np.isfinite(codes).all():
            raise Corrupt(f"expected finite values of segment {i}, found others")
        parts.append(Part(indexes, codes, scale))
    if at != len(data):
        raise Corrupt(f"expected a frame of {at} bytes, found {len(data)}")
    return parts


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


def _read_heads(data: U8, sizes: Sequence[int]) -> tuple[Values, NDArray[np.void], int]:
    """Return value type, table of segments, and where the rest starts. Raises Corrupt."""
    start = HEAD.itemsize + SEGMENT.itemsize * len(sizes)
    if len(data) < start:
        raise Corrupt(f"expected at least {start} bytes of a sparse gradient, found {len(data)}")
    magic, version, value, size, crc = np.frombuffer(data[: HEAD.itemsize].tobytes(), HEAD)[0].tolist()
    if (magic, version) != (MAGIC, VERSION):
        raise Corrupt(
            f"expected a sparse gradient, {MAGIC!r} version {VERSION}, found {magic!r} version {version}"
        )
    if value not in (Values.INT8, Values.FP16):
        raise Corrupt(f"expected values of 1 or 2 bytes, found {value}")
    if size != sum(sizes):
        raise Corrupt(f"expected a gradient of {sum(sizes)} floats, found one of {size}")
    found = zlib.crc32(data[HEAD.itemsize :].tobytes())
    if found != crc:
        raise Corrupt(f"expected the CRC-32 {crc:#010x} of a sparse gradient, found {found:#010x}")
    table = np.frombuffer(data[HEAD.itemsize : start].tobytes(), SEGMENT)
    return Values(value), table, start


def _check_segment(i: int, segment: tuple[int, float, int], size: int) -> None:
    """Raise Corrupt if an entry of the table is not one of a segment of `size` floats."""
    form, scale, count = segment
    if form > Form.NOT_FINITE:
        raise Corrupt(f"expected a form of segment {i} up to {Form.NOT_FINITE.value}, found {form}")
    if form == Form.NOT_FINITE:
        if count or not np.isnan(scale):
            raise Corrupt(f"expected no values of segment {i}, which is not finite, found {count}")
        return
    if not (np.isfinite(scale) and scale >= 0):
        raise Corrupt(f"expected a scale of segment {i} of at least 0, found {scale}")
    if count > size or (form == Form.DENSE and count != size):
        raise Corrupt(f"expected values of segment {i} of {size} floats, found {count}")


def _take(data: U8, at: int, count: int) -> U8:
    """Return `count` bytes from `at` on. Raises Corrupt if there are fewer."""
    if at + count > len(data):
        raise Corrupt(f"expected {count} bytes from {at} on, found {max(len(data) - at, 0)}")
    return data[at : at + count]


def _bitmap_bytes(size: int) -> int:
    return (size + 7) // 8


def _gaps(indexes: I64) -> I64:
    gaps = indexes - 1
    gaps[1:] -= indexes[:-1]
    gaps[:1] += 1
    return gaps


def _lengths(gaps: I64) -> I64:
    lengths: I64 = 1 + np.searchsorted([1 << 7, 1 << 14, 1 << 21, 1 << 28], gaps, side="right")
    return lengths
