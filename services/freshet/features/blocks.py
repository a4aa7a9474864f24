"""Blocks: the records of the samples topic, many samples each (schemas/README.md, "Samples: blocks")."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from freshet import _native
from freshet.errors import Corrupt
from freshet.types import F32, I64, U8, U32, U64, BytesColumn

__all__ = [
    "FRAME_BYTES",
    "MAX_SAMPLES",
    "BlockColumns",
    "SampleColumns",
    "add_frames",
    "block_samples",
    "encode_block",
    "encode_blocks",
    "frame_ids",
    "read_blocks",
    "rows_by_id",
    "strip_frames",
    "take",
]

# --- Columns of byte strings: Confluent frames, and picking values; whole columns at a time.


FRAME_BYTES = 5
"""A zero byte and the schema id, u32 big-endian."""


def frame_ids(values: BytesColumn) -> I64:
    """(N,) schema id of each framed record; -1 where there is no frame."""
    starts, lengths = values.starts, np.diff(values.ends, prepend=0)
    whole = lengths >= FRAME_BYTES
    ids = np.full(len(values), -1, np.int64)
    at = starts[whole]
    head = values.data[at[:, None] + np.arange(FRAME_BYTES)].astype(np.int64)
    ids[whole] = np.where(head[:, 0] == 0, head[:, 1:] @ np.array([1 << 24, 1 << 16, 1 << 8, 1]), -1)
    return ids


def rows_by_id(ids: I64) -> Iterator[tuple[int, I64]]:
    """Each id with its rows, ascending both; in one pass, as all of thousands of records may differ."""
    order = np.argsort(ids, kind="stable")
    found, begins = np.unique(ids[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, begins[1:]), strict=True) if len(ids) else ()


def take(values: BytesColumn, indexes: I64, skip: int = 0) -> BytesColumn:
    """Values at these indexes, in this order, without their first `skip` bytes (each must have as many)."""
    starts = values.starts[indexes] + skip
    ends = values.ends[indexes]
    spans = np.zeros((len(starts), 6), np.int64)
    spans[:, 0], spans[:, 1] = starts, ends
    return BytesColumn(*_native.splice(values.data, spans))


def strip_frames(values: BytesColumn) -> BytesColumn:
    """Framed records without their frames; each must have one (`frame_ids` says)."""
    return take(values, np.arange(len(values)), FRAME_BYTES)


def add_frames(values: BytesColumn, schema_id: int) -> BytesColumn:
    """Records with a frame of this schema id before each."""
    frame = np.frombuffer(b"\x00" + schema_id.to_bytes(4, "big"), np.uint8)
    ends = values.ends + FRAME_BYTES * np.arange(1, len(values) + 1)
    framed = np.empty(len(values.data) + FRAME_BYTES * len(values), np.uint8)
    at = ends - np.diff(values.ends, prepend=0) - FRAME_BYTES
    heads = (at[:, None] + np.arange(FRAME_BYTES)).ravel()
    framed[heads] = np.tile(frame, len(values))
    body = np.ones(len(framed), np.bool_)
    body[heads] = False
    framed[body] = values.data
    return BytesColumn(framed, ends)


MAX_SAMPLES = 256
"""Samples that close a block at most, and in logs of earlier releases always; more only where one request
alone has more, and few enough bytes."""


def block_samples(batch_rows: int) -> int:
    """Samples that close a block of a model with batches of so many rows.

    A batch is whole blocks (PROTOCOL 2), so a block is never larger than a batch.
    """
    return min(MAX_SAMPLES, batch_rows)


@dataclass(frozen=True, slots=True, eq=False)
class BlockColumns:
    """Samples of a batch of blocks, N in all, in the order of the blocks."""

    counts: I64  # (blocks,) samples of each
    schema_ids: U32  # (N,) writer's schema of each payload; one in a block
    sample_ids: I64  # (N,) hash of (impression, label)
    event_times_ms: I64  # (N,) event time of the impression
    request_ids: U64  # (N,) hash of the request id
    values: F32  # (N,) label value
    weights: F32  # (N,)
    labels: U8  # (N,) label index
    payloads: BytesColumn  # (N,) Avro without framing

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def block_of(self) -> I64:
        """(N,) index of each sample's block."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class SampleColumns(NamedTuple):
    """What blocks hold beside the payloads; N samples."""

    sample_ids: I64  # (N,) these and the following as in `BlockColumns`
    request_ids: U64
    event_times_ms: I64
    labels: U8
    values: F32
    weights: F32


def read_blocks(records: BytesColumn) -> BlockColumns:
    """Read blocks; every checksum is checked.

    Raises:
        Corrupt: names the first block (its index in `records`) that is none, and why.
    """
    made = _native.read_blocks(records.data, records.ends)
    if len(made) == 2:
        raise Corrupt(f"samples block {made[0]}: {made[1]}")
    counts, schema_ids, sample_ids, times_ms, requests, values, weights, labels, payloads = made
    return BlockColumns(
        counts=counts.astype(np.int64),
        schema_ids=np.repeat(schema_ids, counts),
        sample_ids=sample_ids,
        event_times_ms=times_ms,
        request_ids=requests,
        values=values,
        weights=weights,
        labels=labels,
        payloads=BytesColumn(*payloads),
    )


def encode_blocks(
    schema_id: int,
    *,
    sample_ids: I64,
    event_times_ms: I64,
    request_ids: U64,
    values: F32,
    weights: F32,
    labels: U8,
    payloads: BytesColumn,
    block_ends: I64,
) -> BytesColumn:
    """(blocks,) records of N samples of one schema, cut where `block_ends` says (rising, the last is N).

    The caller decides where requests are split. Raises ValueError if lengths do not agree, or a block is
    empty.
    """
    data, ends = _native.encode_blocks(
        schema_id,
        np.ascontiguousarray(sample_ids, np.int64),
        np.ascontiguousarray(event_times_ms, np.int64),
        np.ascontiguousarray(request_ids, np.uint64),
        np.ascontiguousarray(values, np.float32),
        np.ascontiguousarray(weights, np.float32),
        np.ascontiguousarray(labels, np.uint8),
        payloads.data,
        payloads.ends,
        np.ascontiguousarray(block_ends, np.int64),
    )
    return BytesColumn(data, ends)


def encode_block(
    schema_id: int,
    *,
    sample_ids: I64,
    event_times_ms: I64,
    request_ids: U64,
    values: F32,
    weights: F32,
    labels: U8,
    payloads: BytesColumn,
) -> bytes:
    """One block of all these samples, at least one."""
    return encode_blocks(
        schema_id,
        sample_ids=sample_ids,
        event_times_ms=event_times_ms,
        request_ids=request_ids,
        values=values,
        weights=weights,
        labels=labels,
        payloads=payloads,
        block_ends=np.array([len(payloads)]),
    )[0]
