"""Codecs of rows and row gradients: the values of a (N, S) float32 array in fewer bits.

A row is a few scalars (weights of linear parts, a count), then a vector. C scalars, V floats of the vector:

| codec | bytes of a row | values | used for |
|---|---|---|---|
| `fp32` | 4 (C + V) | as they are | both |
| `bf16`, `fp16` | 2 (C + V) | nearest, ties to even | both |
| `int8`, `int4` | 2 C + 2 + V, or V / 2 | code × scale; zero is exact | gradients, and rows in int8 |
| `uint8`, `uint4` | 2 C + 4 + V, or V / 2 | low + code × step, nearest | rows in int4 |

In integers each row's vector has a scale of its own; scalars travel beside it as bf16, as their sizes differ
from the vector's. A gradient is rounded stochastically, by a seed (QSGD, Alistarh et al., 1610.02132): its
expectation is the value, so no residual has to be kept for each key. A row is a state, not a sum: its nearest
code is best; an asymmetric range, which uses all, is worth two bytes with 16 of them, not with 256 (`uint8`
is read from records of development releases). Scale, low and step are bf16: no vector vanishes for being
small. Rows that integers make no shorter travel as bf16 (`format_for`). Tests hold the native code to numpy.

Letters: N rows, S floats of a row.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.types import F32


class RowCodec(enum.IntEnum):
    """Encodings of rows' values; the number is the one in a frame."""

    FP32 = 0
    BF16 = 1
    FP16 = 2  # beyond ±65504: infinite, so only for tables with rows known to be small
    INT8 = 3
    INT4 = 4
    UINT8 = 5
    UINT4 = 6

    @property
    def bits(self) -> int:
        """Bits of a value, without heads."""
        return _BITS[self]


_BITS = {
    RowCodec.FP32: 32,
    RowCodec.BF16: 16,
    RowCodec.FP16: 16,
    RowCodec.INT8: 8,
    RowCodec.INT4: 4,
    RowCodec.UINT8: 8,
    RowCodec.UINT4: 4,
}

SCALE_BYTES, RANGE_BYTES = 2, 4
"""Bytes before the codes of a vector: its scale, or low and step."""

ASYMMETRIC = (RowCodec.UINT8, RowCodec.UINT4)


def rows_codec(name: str) -> RowCodec:
    """Return the codec of rows for a setting (`fp32`, `bf16`, `fp16`, `int8`, `int4`)."""
    return RowCodec.UINT4 if name == "int4" else RowCodec[name.upper()]


def gradients_codec(name: str) -> RowCodec:
    """Return the codec of gradients for a setting (`fp32`, `bf16`, `fp16`, `int8`, `int4`)."""
    return RowCodec[name.upper()]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The form in which the rows of a store group travel."""

    codec: RowCodec
    width: int  # S
    scalars: int = 0  # floats before the vector

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the array of encoded rows."""
        return _TYPES[self.codec]

    @property
    def columns(self) -> int:
        """Columns of the array of encoded rows, (N, columns) of `dtype`."""
        if self.codec.bits > 8:
            return self.width
        vector = self.width - self.scalars
        head = RANGE_BYTES if self.codec in ASYMMETRIC else SCALE_BYTES
        return 2 * self.scalars + head + (vector if self.codec.bits == 8 else (vector + 1) // 2)

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row."""
        return self.columns * self.dtype.itemsize


def format_for(codec: RowCodec, width: int, scalars: int = 0) -> RowFormat:
    """Return the format of rows of `width` floats in a frame of `codec`; both ends call this.

    It has the frame's codec, or bf16 if rows are no shorter in integers: it is the more exact one then.
    """
    wanted, halves = RowFormat(codec, width, scalars), RowFormat(RowCodec.BF16, width, scalars)
    return halves if codec.bits <= 8 and wanted.row_bytes >= halves.row_bytes else wanted


_BYTE: np.dtype[Any] = np.dtype("u1")
_TYPES: Mapping[RowCodec, np.dtype[Any]] = {
    RowCodec.FP32: np.dtype("<f4"),
    RowCodec.BF16: np.dtype("<u2"),
    RowCodec.FP16: np.dtype("<f2"),
    RowCodec.INT8: _BYTE,
    RowCodec.INT4: _BYTE,
    RowCodec.UINT8: _BYTE,
    RowCodec.UINT4: _BYTE,
}


def pack_rows(values: F32, form: RowFormat, seed: int = 0) -> NDArray[Any]:
    """Encode (N, S) float32 rows; returns (N, form.columns) of form.dtype.

    Args:
        values: the rows; in fp32 they are returned as they are.
        form: their format.
        seed: of the stochastic rounding of `int8` and `int4`, below 2^64; 0: nearest, as for rows.

    Raises ValueError if the rows have another width.
    """
    plain = np.ascontiguousarray(values, "<f4")
    if plain.shape[1] != form.width:
        raise ValueError(f"expected rows of {form.width} floats, found {plain.shape[1]}")
    codec = form.codec
    if codec is RowCodec.FP32:
        return plain
    packed = np.empty((len(plain), form.columns), form.dtype)
    if codec.bits <= 8:
        _native.pack_integers(plain, codec.bits, codec in ASYMMETRIC, form.scalars, seed, packed)
    elif codec is RowCodec.FP16:
        _native.pack_fp16(plain, packed.view("<u2"))
    else:
        _native.pack_bf16(plain, packed)
    return packed


def unpack_rows(packed: NDArray[Any], form: RowFormat, out: F32) -> None:
    """Decode into `out`, (N, S) float32 and contiguous. Raises ValueError if shapes do not agree."""
    if packed.shape != (len(out), form.columns) or out.shape[1] != form.width:
        raise ValueError(f"packed and plain rows must be of equal shape: {packed.shape}, {out.shape}")
    codec = form.codec
    if codec is RowCodec.FP32:
        out[...] = packed
    elif codec.bits <= 8:
        _native.unpack_integers(packed, codec.bits, codec in ASYMMETRIC, form.scalars, out)
    elif codec is RowCodec.FP16:
        _native.unpack_fp16(packed.view("<u2"), out)
    else:
        _native.unpack_bf16(packed, out)


class Seeds:
    """Seeds for stochastic rounding: a new one for each array, never 0. Thread-safe."""

    def __init__(self, first: int) -> None:
        """`first`: the start of the sequence, so that a run can be repeated."""
        self._first, self._count = first, itertools.count(1)

    def next(self) -> int:
        """Return the next seed: splitmix64 over a counter (Steele et al. 2014)."""
        z = (self._first + next(self._count) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (z ^ (z >> 31)) or 1


_MASK = (1 << 64) - 1
