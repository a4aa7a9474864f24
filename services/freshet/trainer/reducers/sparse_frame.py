"""The frame of a sparse gradient: some values of each segment, in the shortest of three forms.

    "DS", u8 version, u8 value bytes (1: int8, 2: fp16), u32 floats of the gradient, u32 CRC-32 of the rest
    for each segment:  u8 form, f32 scale, u32 values
    for each segment:  its indexes, then its values

| form | indexes |
|---|---|
| `DENSE` | none: all values of the segment |
| `BITMAP` | a bit for each value of the segment |
| `GAPS` | `varint` |
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
from freshet.trainer.reducers.varint import decode_indexes, encode_indexes, varint_bytes
from freshet.types import F32, I64, U8

MAGIC, VERSION = b"DS", 1
HEAD = np.dtype([("magic", "S2"), ("version", "u1"), ("value", "u1"), ("size", "<u4"), ("crc", "<u4")])
SEGMENT = np.dtype([("form", "u1"), ("scale", "<f4"), ("count", "<u4")])
INT8_LIMIT = 127


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
