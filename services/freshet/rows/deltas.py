"""Row deltas: records of `<model>.rows`, by which shards publish changed rows for serving.

The layout is in `schemas/README.md`. A delta holds whole rows of one table, without optimiser state, under
the fence of their owner. Inference applies deltas in log order, so the last one of a row wins (PROTOCOL 17).
N rows, R removed keys, S floats of a row.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Corrupt
from freshet.tables import Published
from freshet.types import F32, I64, U64, Append, BytesColumn, Fence, TimeMs, bucket_of
from freshet.wires.codecs import RowCodec, RowFormat, format_for, pack_rows, unpack_rows
from freshet.wires.row_wire import RowWire

__all__ = [
    "DELTA_BYTES",
    "RowCodec",
    "RowDelta",
    "decode_rows",
    "encode_rows",
    "records_of",
]

MAGIC = 0xB2
VERSION = 1
_HEADER = struct.Struct("<BBBBIqqIIII")
_MAX_COUNT = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, eq=False)
class RowDelta:
    """Changed and evicted rows of one table; the keys' buckets belong to one partition of `rows`."""

    table: int  # table id, 0..255
    fence: Fence  # of the buckets' owner; readers drop deltas with a lower fence than seen for the bucket
    event_time_ms: TimeMs  # newest event time applied when this was written
    keys: U64  # (N,)
    values: F32  # (N, S) slots as serving needs them
    removed: U64  # (R,) evicted keys


def encode_rows(delta: RowDelta, codec: RowCodec = RowCodec.FP32, scalars: int = 0) -> bytes:
    """Encode a record.

    Args:
        delta: the rows.
        codec: their encoding; bf16 in its place if the rows are no shorter in integers.
        scalars: floats of a row before its vector.

    Raises ValueError if shapes do not agree or a number exceeds its field.
    """
    if delta.values.ndim != 2:
        raise ValueError(f"a row delta needs values (N, S); found {delta.values.shape}")
    form = format_for(codec, delta.values.shape[1], scalars)
    return _encode(delta, pack_rows(delta.values, form), form)


def _encode(delta: RowDelta, packed: NDArray[Any], form: RowFormat) -> bytes:
    """Encode a record with these (N, form.columns) values in place of the delta's."""
    keys = np.ascontiguousarray(delta.keys, "<u8")
    removed = np.ascontiguousarray(delta.removed, "<u8")
    if keys.ndim != 1 or removed.ndim != 1 or len(packed) != len(keys):
        raise ValueError(
            f"a row delta needs keys (N,), values (N, S) and removed (R,); found {keys.shape}, "
            f"{(len(packed), form.width)} and {removed.shape}"
        )
    if not 0 <= delta.table <= 255:
        raise ValueError(f"a table id must be from 0 to 255, found {delta.table}")
    if max(len(keys), len(removed), form.width) > _MAX_COUNT:
        raise ValueError("a row delta holds at most 2^32 - 1 rows; write several")
    body = b"".join((keys.tobytes(), removed.tobytes(), packed.tobytes()))
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        form.codec,
        delta.table,
        len(keys),
        delta.fence,
        delta.event_time_ms,
        len(removed),
        form.width,
        _crc32(body),
        _scalars_in_head(form),
    )
    return header + body


def decode_rows(record: bytes | memoryview) -> RowDelta:
    """Decode a record; `keys`, `removed` and fp32 `values` are read-only views of it.

    Raises:
        Corrupt: magic, version, codec, length or checksum is wrong, or a key is 0; lengths are checked first.
    """
    data = memoryview(record)
    if len(data) < _HEADER.size:
        raise Corrupt(f"row delta: expected at least {_HEADER.size} bytes, found {len(data)}")
    magic, version, codec, table, n, fence, event_time_ms, r, width, crc, scalars = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise Corrupt(
            f"row delta: expected magic {MAGIC:#x} and version {VERSION}, found {magic:#x} and {version}; "
            "a newer freshet may have written it"
        )
    if codec not in RowCodec.__members__.values():
        raise Corrupt(f"row delta: expected a codec from 0 to {max(RowCodec)}, found {codec}")
    form = RowFormat(RowCodec(codec), width, scalars)
    if scalars > (width if form.codec.bits <= 8 else 0):
        raise Corrupt(
            f"row delta: expected at most {width} scalars, and 0 outside of integers, at byte 36 of rows in "
            f"{form.codec.name.lower()}, found {scalars}; a newer freshet may have written it"
        )
    expected = _HEADER.size + 8 * (n + r) + n * form.row_bytes  # Python integers: cannot overflow
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
    if not (keys.all() and removed.all()):
        raise Corrupt("row delta: expected keys from 1, found key 0, which stands for null and has no row")
    packed = np.frombuffer(body[8 * (n + r) :], form.dtype).reshape(n, form.columns)
    values = packed
    if form.codec != RowCodec.FP32:
        values = np.empty((n, width), np.float32)
        unpack_rows(packed, form, values)
    return RowDelta(table, Fence(fence), TimeMs(event_time_ms), keys, values, removed)


def _scalars_in_head(form: RowFormat) -> int:
    """Return the scalars of a row in an integer codec; the length of other rows does not depend on them."""
    return form.scalars if form.codec.bits <= 8 else 0


def _crc32(body: bytes | memoryview) -> int:
    """CRC-32 as zlib's, seven times as fast."""
    return _native.crc32(np.frombuffer(body, np.uint8), 0)


# --- A round of publishing as records.

DELTA_BYTES, REMOVED_BYTES = 512 << 10, 256 << 10
"""Most bytes of rows, and of removed keys, in a record. A round of wide rows is several times the largest
record of a log (16 MiB on Kafka by default, often 1 MiB on a managed service). Their sum stays below
LEAST_TOPIC_BYTES (`freshet.config.spec.topics`)."""


def records_of(
    batch: Published, topic: str, fences: I64, wire: RowWire, codec: RowCodec = RowCodec.FP32
) -> list[Append]:
    """Encode changed rows as records, each of one table, partition of `rows` and fence.

    The partition follows from the bucket and is fixed (PROTOCOL 17). Rows that exceed the record size are
    split.

    Args:
        batch: the changed rows.
        topic: the topic `rows` of the model.
        fences: (B,) int64, the fence under which each bucket is owned.
        wire: encodes and counts the values.
        codec: their encoding, or bf16 for rows that integers make no shorter.
    """
    records: dict[int, list[bytes]] = {}
    for part in batch.tables:
        form = wire.form(codec, part.group, part.values.shape[1])
        packed = wire.pack(part.group, part.values, codec)
        kept, removed_at = _positions(part.keys, fences), _positions(part.removed, fences)
        for p, fence in sorted({*kept, *removed_at}):
            at = kept.get((p, fence), _EMPTY)
            keys, values = part.keys[at], packed[at]
            removed = part.removed[removed_at.get((p, fence), _EMPTY)]
            rows = max(1, DELTA_BYTES // (keys.itemsize + form.row_bytes))
            keys_a_record = REMOVED_BYTES // removed.itemsize
            pieces = max(-(-len(keys) // rows), -(-len(removed) // keys_a_record))
            for i in range(pieces):
                mine = slice(i * rows, (i + 1) * rows)
                delta = RowDelta(
                    table=part.table,
                    fence=Fence(fence),
                    event_time_ms=TimeMs(batch.clock_ms),
                    keys=keys[mine],
                    values=part.values[:0],
                    removed=removed[i * keys_a_record : (i + 1) * keys_a_record],
                )
                records.setdefault(p, []).append(_encode(delta, values[mine], form))
    return [Append(topic, p, BytesColumn.of(values)) for p, values in sorted(records.items())]


_EMPTY = slice(0)


def _positions(keys: U64, fences: I64) -> dict[tuple[int, int], slice | I64]:
    """{(partition of `rows`, fence): positions of its keys}.

    The positions are a slice, hence no copy, where keys are sorted and a partition's buckets have one fence;
    this is the usual case.
    """
    if not len(keys):
        return {}
    buckets = len(fences)
    of_key = bucket_of(keys, buckets)
    pairs = np.stack([of_key * ROWS_PARTITIONS // buckets, fences[of_key]], axis=1)
    cuts = np.flatnonzero((pairs[1:] != pairs[:-1]).any(axis=1)) + 1
    starts = [0, *cuts.tolist()]
    found: dict[tuple[int, int], list[slice]] = {}
    for start, stop in pairwise([*starts, len(keys)]):
        p, fence = pairs[start].tolist()
        found.setdefault((p, fence), []).append(slice(start, stop))
    return {
        pair: runs[0] if len(runs) == 1 else np.concatenate([np.arange(r.start, r.stop) for r in runs])
        for pair, runs in found.items()
    }
