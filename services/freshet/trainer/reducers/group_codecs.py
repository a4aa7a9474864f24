"""Codecs of groups of floats, for `two_phase`: each group of S consecutive values has a scale of its own.

| codec | S | bytes of a group | values |
|---|---|---|---|
| `IntegerCodec(8)`, `IntegerCodec(4)` | 256 | 2 + S, or S / 2 | code × scale, nearest |
| `SignCodec` | 1,024 | 4 + S / 8 | ± scale, the mean of the absolute values |
| `LevelCodec` (`levels`) | 256 | 4 + bits × S / 8 | code × scale, stochastic |
| `SquareCodec` | 256 | 4 + S | scale × 2^(-code / 8), nearest in the logarithm |

A group that is not finite decodes as NaN. A group of zeros decodes as zeros. A scale stands before the codes:
of integers it is bf16, otherwise float32.

Letters: G groups, S floats of a group.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from freshet.types import F32, U8
from freshet.wires.codecs import RowFormat, gradients_codec, pack_rows, unpack_rows

HEAD_BYTES = 4
"""Bytes of a float32 scale."""


class GroupCodec(Protocol):
    """Encodes groups of floats. The result depends on no state of a rank, except for random rounding."""

    group: int  # S

    @property
    def group_bytes(self) -> int:
        """Bytes of an encoded group."""

    def encode(self, values: F32, real: int) -> U8:
        """Encode (G, S) values, of which the first `real` are no padding, as (G, group_bytes) bytes.

        The padding is zeros, and at most a part of the last group.
        """

    def decode(self, packed: U8) -> F32:
        """Decode (G, group_bytes) bytes as (G, S) values; those of padding have no meaning."""


class IntegerCodec:
    """Symmetric integers of 8 or 4 bits, rounded to nearest: those of row gradients (`wires.codecs`).

    Error feedback delivers the rounding error later, so stochastic rounding would add noise for nothing.
    """

    group = 256

    def __init__(self, bits: int) -> None:
        self._form = RowFormat(gradients_codec(f"int{bits}"), self.group)

    @property
    def group_bytes(self) -> int:
        """Bytes of an encoded group."""
        return self._form.row_bytes

    def encode(self, values: F32, real: int) -> U8:
        """Encode (G, S) values as (G, group_bytes) bytes; zeros of padding change no scale."""
        return pack_rows(values, self._form)

    def decode(self, packed: U8) -> F32:
        """Decode (G, group_bytes) bytes as (G, S) values."""
        values = np.empty((len(packed), self.group), np.float32)
        unpack_rows(packed, self._form, values)
        return values


class SignCodec:
    """The sign of each value, and one scale a group; the sign of 0 is +.

    The scale is the mean of the absolute values (EF-SignSGD, Karimireddy et al., 1901.09847), which has the
    least squared error. 1-bit Adam's authors take the root mean square; that error is larger.
    """

    group = 1024

    @property
    def group_bytes(self) -> int:
        """Bytes of an encoded group."""
        return HEAD_BYTES + self.group // 8

    def encode(self, values: F32, real: int) -> U8:
        """Encode (G, S) values as (G, group_bytes) bytes; padding does not count in the mean."""
        packed = np.empty((len(values), self.group_bytes), np.uint8)
        counts = np.minimum(real - self.group * np.arange(len(values)), self.group)
        means: F32 = (np.abs(values) / self.group).sum(axis=1) * (self.group / counts).astype(np.float32)
        scales = np.where(np.isfinite(means), means, np.float32(np.nan)).astype("<f4")
        packed[:, :HEAD_BYTES] = scales[:, None].view(np.uint8)
        packed[:, HEAD_BYTES:] = np.packbits(values < 0, axis=1, bitorder="little")
        return packed

    def decode(self, packed: U8) -> F32:
        """Decode (G, group_bytes) bytes as (G, S) values."""
        negative = np.unpackbits(packed[:, HEAD_BYTES:], axis=1, bitorder="little").astype(np.uint32)
        negative <<= 31
        negative |= heads_of(packed).view(np.uint32)
        values: F32 = negative.view(np.float32)
        return values


class SquareCodec:
    """Means of squares: none becomes negative, and none but 0 becomes 0.

    The scale is the largest. A value is off by a 16th of an octave, 4.4 %, within 31 octaves of it; smaller
    ones become larger. Code 255 is 0.
    """

    group = 256
    _factors: F32 = np.array([2.0 ** (-code / 8) for code in range(255)] + [0.0], np.float32)

    @property
    def group_bytes(self) -> int:
        """Bytes of an encoded group."""
        return HEAD_BYTES + self.group

    def encode(self, values: F32, real: int) -> U8:
        """Encode (G, S) values of at least 0 as (G, group_bytes) bytes; zeros of padding change no scale."""
        packed = np.empty((len(values), self.group_bytes), np.uint8)
        largest = values.max(axis=1, keepdims=True)
        scales = np.where(np.isfinite(largest), largest, np.float32(np.nan)).astype("<f4")
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.rint(8 * (np.log2(largest) - np.log2(values))).clip(0, 254)
        packed[:, :HEAD_BYTES] = scales.view(np.uint8)
        packed[:, HEAD_BYTES:] = np.where(values > 0, np.nan_to_num(codes), 255)
        return packed

    def decode(self, packed: U8) -> F32:
        """Decode (G, group_bytes) bytes as (G, S) values."""
        values: F32 = heads_of(packed) * self._factors[packed[:, HEAD_BYTES:]]
        return values


def heads_of(packed: U8) -> F32:
    """Return the (G, 1) float32 scales of (G, group_bytes) bytes."""
    heads: F32 = np.ascontiguousarray(packed[:, :HEAD_BYTES]).view("<f4").astype(np.float32, copy=False)
    return heads
