"""Blocks: the records of the samples topic, many samples each (schemas/README.md, "Samples: blocks").

Letters: N samples (or byte strings), K indexes, C blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from freshet import _native
from freshet.errors import Corrupt
from freshet.types import F32, I64, U8, U32, U64, BytesColumn

# --- Columns of byte strings: Confluent frames, selection


FRAME_BYTES = 5
"""A zero byte and the schema id, u32 big-endian."""


def frame_ids(values: BytesColumn) -> I64:
    """Return the (N,) schema ids of framed records; -1 for a record without a frame."""
    starts, lengths = values.starts, np.diff(values.ends, prepend=0)
    whole = lengths >= FRAME_BYTES
    ids = np.full(len(values), -1, np.int64)
    at = starts[whole]
    head = values.data[at[:, None] + np.arange(FRAME_BYTES)].astype(np.int64)
    ids[whole] = np.where(head[:, 0] == 0, head[:, 1:] @ np.array([1 << 24, 1 << 16, 1 << 8, 1]), -1)
    return ids


def rows_by_id(ids: I64) -> Iterator[tuple[int, I64]]:
    """Yield each distinct id of `ids`, (N,) int64, with its (K,) row indexes, both ascending.

    One sort finds all of them: each of thousands of records may have its own id.
    """
    order = np.argsort(ids, kind="stable")
    found, begins = np.unique(ids[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, begins[1:]), strict=True) if len(ids) else ()


def take(values: BytesColumn, indexes: I64, skip: int = 0) -> BytesColumn:
    """Return (K,) values at `indexes`, (K,) int64, without their first `skip` bytes.

    Each selected value must have at least `skip` bytes.
    """
    starts = values.starts[indexes] + skip
    ends = values.ends[indexes]
    spans = np.zeros((len(starts), 6), np.int64)
    spans[:, 0], spans[:, 1] = starts, ends
    return BytesColumn(*_native.splice(values.data, spans))


def add_frames(values: BytesColumn, schema_id: int) -> BytesColumn:
    """Return (N,) records, each with a frame of this schema id before it."""
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
"""Largest number of samples that closes a block. Only a request with more samples makes a larger block."""


def block_samples(batch_rows: int) -> int:
    """Return the number of samples that closes a block, for batches of `batch_rows`.

    A batch consists of whole blocks (PROTOCOL 2), so a block must not exceed a batch.
    """
    return min(MAX_SAMPLES, batch_rows)


@dataclass(frozen=True, slots=True, eq=False)
class BlockColumns:
    """Samples of C blocks, N in all, in the order of the blocks."""

    counts: I64  # (C,) samples of each block
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
        """Index of each sample's block, (N,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class SampleColumns(NamedTuple):
    """Columns of N samples except their payloads; (N,) each, as in `BlockColumns`."""

    sample_ids: I64
    request_ids: U64
    event_times_ms: I64
    labels: U8
    values: F32
    weights: F32


def read_blocks(records: BytesColumn) -> BlockColumns:
    """Read blocks and verify their checksums.

    Raises:
        Corrupt: A record is not a valid block; names the index of the first in `records`, and the reason.
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
    schema_id: int, samples: SampleColumns, payloads: BytesColumn, block_ends: I64 | None = None
) -> BytesColumn:
    """Encode N samples of one schema as (C,) blocks. The caller decides where requests are split.

    Args:
        schema_id: writer's schema of the payloads.
        samples: (N,) columns.
        payloads: (N,) Avro without framing.
        block_ends: (C,) int64, the ascending end of each block, the last is N; None: one block.

    Raises:
        ValueError: lengths differ, or a block is empty.
    """
    ends = np.array([len(payloads)], np.int64) if block_ends is None else block_ends
    data, ends = _native.encode_blocks(
        schema_id,
        np.ascontiguousarray(samples.sample_ids, np.int64),
        np.ascontiguousarray(samples.event_times_ms, np.int64),
        np.ascontiguousarray(samples.request_ids, np.uint64),
        np.ascontiguousarray(samples.values, np.float32),
        np.ascontiguousarray(samples.weights, np.float32),
        np.ascontiguousarray(samples.labels, np.uint8),
        payloads.data,
        payloads.ends,
        np.ascontiguousarray(ends, np.int64),
    )
    return BytesColumn(data, ends)
