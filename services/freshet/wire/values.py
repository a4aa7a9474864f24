"""How the values of rows are written on a wire: whole, or rounded to fewer bits.

Used by row deltas (`freshet.wire.rows`) and by frames (`freshet.wire.frames`). Letters: N rows, S floats of a
row.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.types import F32

__all__ = ["RowCodec", "pack_values", "unpack_values", "value_type"]


class RowCodec(enum.IntEnum):
    """How values are written. Lossy ones round to nearest, ties to even; NaN stays NaN."""

    FP32 = 0
    BF16 = 1
    FP16 = 2  # beyond ±65504: infinite, so only for tables whose rows are known to be small
    INT8 = (
        3  # with a scale a row, its largest magnitude / 127; a row that is not finite comes back as NaN whole
    )


_TYPES: Mapping[RowCodec, np.dtype[Any]] = {
    RowCodec.FP32: np.dtype("<f4"),
    RowCodec.BF16: np.dtype("<u2"),
    RowCodec.FP16: np.dtype("<f2"),
    RowCodec.INT8: np.dtype("i1"),
}


def value_type(codec: RowCodec) -> np.dtype[Any]:
    """Of the array that values are written as."""
    return _TYPES[codec]


def pack_values(values: F32, codec: RowCodec) -> tuple[NDArray[Any], F32 | None]:
    """Values (N, S) as `codec` writes them (N, S), and the scales (N,) where it has such."""
    flat = np.ascontiguousarray(values, "<f4")
    if codec is RowCodec.FP32:
        return flat, None
    if codec is RowCodec.FP16:
        with np.errstate(over="ignore"):
            return flat.astype("<f2"), None
    if codec is RowCodec.BF16:
        return _to_bf16(flat), None
    return _to_int8(flat)


def unpack_values(packed: NDArray[Any], codec: RowCodec, scales: F32 | None, out: F32) -> None:
    """Write what was packed into `out` (N, S)."""
    if codec is RowCodec.BF16:
        np.left_shift(packed, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    elif codec is RowCodec.INT8:
        if scales is None:
            raise ValueError("values in int8 need their scales")
        np.multiply(packed, scales[:, None], out=out, dtype=np.float32)
    else:
        out[...] = packed


def _to_bf16(values: F32) -> NDArray[np.uint16]:
    bits = values.view("<u4")
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)  # rounding could carry a NaN into infinity
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(nan, quiet, rounded).astype("<u2")


_SMALLEST_SCALE = np.finfo(np.float32).tiny
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
"""Of int8: below the first a scale has no inverse, above the second 127 times it has no end."""


def _to_int8(values: F32) -> tuple[NDArray[np.int8], F32]:
    largest = np.abs(values).max(axis=1, initial=0.0)
    finite = np.isfinite(largest)
    scales = np.minimum(largest / np.float32(127), _LARGEST_SCALE)
    scales[scales < _SMALLEST_SCALE] = 0  # such a row is zeros
    factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=finite & (scales > 0))
    safe = values if finite.all() else np.where(finite[:, None], values, np.float32(0))
    packed = np.rint(np.clip(safe * factors[:, None], -127, 127)).astype(np.int8)
    scales[~finite] = np.nan
    return packed, scales
