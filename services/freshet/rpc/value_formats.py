"""How the values of rows are written on a wire: whole, or rounded to fewer bits.

Row deltas (`freshet.rows.deltas`) and frames (`freshet.rpc.frames`) use it.

Letters: N rows, S floats of a row.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet import _native
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
    plain = np.ascontiguousarray(values, "<f4")
    if codec is RowCodec.FP32:
        return plain, None
    packed = np.empty(plain.shape, _TYPES[codec])
    if codec is RowCodec.INT8:
        scales = np.empty(len(plain), np.float32)
        _native.pack_int8(plain, packed, scales)
        return packed, scales
    pack = _native.pack_fp16 if codec is RowCodec.FP16 else _native.pack_bf16
    pack(plain, packed.view("<u2"))
    return packed, None


def unpack_values(packed: NDArray[Any], codec: RowCodec, scales: F32 | None, out: F32) -> None:
    """Write what was packed into `out` (N, S), contiguous. Raises ValueError if shapes do not agree."""
    if codec is RowCodec.FP32:
        out[...] = packed
    elif codec is RowCodec.INT8:
        if scales is None:
            raise ValueError("values in int8 need their scales")
        _native.unpack_int8(packed, scales, out)
    else:
        unpack = _native.unpack_fp16 if codec is RowCodec.FP16 else _native.unpack_bf16
        unpack(packed.view("<u2"), out)
