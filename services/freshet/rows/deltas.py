"""Row deltas: records of `<model>.rows`, by which shards publish changed rows for serving.

The layout is in `schemas/README.md`. A delta holds whole rows of one table, without optimiser state, under
the fence of their owner. Inference applies deltas in log order, so the last one of a row wins (PROTOCOL 17).
N rows, R removed keys, S floats of a row.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.errors import Corrupt
from freshet.rpc.frames import RowCodec, pack_values, unpack_values, value_type
from freshet.types import F32, U64, Fence, TimeMs

__all__ = ["MAGIC", "VERSION", "RowCodec", "RowDelta", "decode_rows", "encode_rows"]

MAGIC = 0xB2
VERSION = 1
_HEADER = struct.Struct("<BBBBIqqIIII")
_MAX_COUNT = 0xFFFF_FFFF
_CODECS = (RowCodec.FP32, RowCodec.BF16, RowCodec.FP16)
"""Codecs of a delta; others need scales, for which its layout has no field."""


@dataclass(frozen=True, slots=True, eq=False)
class RowDelta:
    """Changed and evicted rows of one table; the keys' buckets belong to one partition of `rows`."""

    table: int  # table id, 0..255
    fence: Fence  # of the buckets' owner; readers drop deltas with a lower fence than seen for the bucket
    event_time_ms: TimeMs  # newest event time applied when this was written
    keys: U64  # (N,)
    values: F32  # (N, S) slots as serving needs them
    removed: U64  # (R,) evicted keys


def encode_rows(delta: RowDelta, codec: RowCodec = RowCodec.FP32) -> bytes:
    """Encode a record. Raises ValueError if shapes do not agree or a number exceeds its field."""
    keys = np.ascontiguousarray(delta.keys, "<u8")
    removed = np.ascontiguousarray(delta.removed, "<u8")
    if delta.values.ndim != 2 or keys.ndim != 1 or removed.ndim != 1 or len(delta.values) != len(keys):
        raise ValueError(
            f"a row delta needs keys (N,), values (N, S) and removed (R,); found {keys.shape}, "
            f"{delta.values.shape} and {removed.shape}"
        )
    if not 0 <= delta.table <= 255:
        raise ValueError(f"a table id must be from 0 to 255, found {delta.table}")
    if codec not in _CODECS:
        raise ValueError(f"a row delta is written in fp32, bf16 or fp16, found {codec.name}")
    width = delta.values.shape[1]
    if max(len(keys), len(removed), width) > _MAX_COUNT:
        raise ValueError("a row delta holds at most 2^32 - 1 rows; write several")
    body = b"".join((keys.tobytes(), removed.tobytes(), pack_values(delta.values, codec)[0].tobytes()))
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        codec,
        delta.table,
        len(keys),
        delta.fence,
        delta.event_time_ms,
        len(removed),
        width,
        _crc32(body),
        0,
    )
    return header + body


def decode_rows(record: bytes | memoryview) -> RowDelta:
    """Decode a record; `keys`, `removed` and fp32 `values` are read-only views of it.

    Raises:
        Corrupt: magic, version, codec, length or checksum is wrong; lengths are checked first.
    """
    data = memoryview(record)
    if len(data) < _HEADER.size:
        raise Corrupt(f"row delta: expected at least {_HEADER.size} bytes, found {len(data)}")
    magic, version, codec, table, n, fence, event_time_ms, r, width, crc, reserved = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or reserved != 0:
        raise Corrupt(
            f"row delta: expected magic {MAGIC:#x}, version {VERSION} and a zero at byte 36, "
            f"found {magic:#x}, {version} and {reserved}; a newer freshet may have written it"
        )
    if codec not in _CODECS:
        raise Corrupt(f"row delta: expected codec 0 (fp32), 1 (bf16) or 2 (fp16), found {codec}")
    dtype = value_type(RowCodec(codec))
    expected = _HEADER.size + 8 * (n + r) + n * width * dtype.itemsize  # Python integers: cannot overflow
    if len(data) != expected:
        raise Corrupt(
            f"row delta: {n} rows of {width} floats and {r} removed keys take {expected} bytes, "
            f"found {len(data)}"
        )
    body = data[_HEADER.size :]
    if (found := _crc32(body)) != crc:
        raise Corrupt(f"row delta: expected checksum {crc:#010x}, found {found:#010x}")
    keys = np.frombuffer(body, "<u8", n)
    removed = np.frombuffer(body, "<u8", r, 8 * n)
    packed = np.frombuffer(body[8 * (n + r) :], dtype).reshape(n, width)
    values = packed
    if codec != RowCodec.FP32:
        values = np.empty((n, width), np.float32)
        unpack_values(packed, RowCodec(codec), None, values)
    return RowDelta(table, Fence(fence), TimeMs(event_time_ms), keys, values, removed)


def _crc32(body: bytes | memoryview) -> int:
    """CRC-32 as zlib's, seven times as fast."""
    return _native.crc32(np.frombuffer(body, np.uint8), 0)
