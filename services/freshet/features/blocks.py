"""Blocks: the records of the samples topic, many samples each (schemas/README.md, "Samples: blocks")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.errors import Corrupt
from freshet.types import F32, I64, U8, U32, U64, BytesColumn

__all__ = ["MAX_SAMPLES", "BlockColumns", "encode_block", "encode_blocks", "read_blocks"]

MAX_SAMPLES = 256
"""Samples that close a block; more only where one request alone has more."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockColumns:
    """Samples of a batch of blocks, N in all, in the order of the blocks."""

    counts: U32  # (blocks,) samples of each
    schema_ids: U32  # (blocks,) writer's schema of its payloads
    sample_ids: I64  # (N,) hash of (impression, label)
    times_ms: I64  # (N,) event time of the impression
    requests: U64  # (N,) hash of the request id
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

    @property
    def schema_of(self) -> int | U32:
        """The schema id, if all blocks have one; else (N,) of each sample: as the decoder takes it."""
        if len(self.schema_ids) and (self.schema_ids == self.schema_ids[0]).all():
            return int(self.schema_ids[0])
        return np.repeat(self.schema_ids, self.counts)


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
        counts, schema_ids, sample_ids, times_ms, requests, values, weights, labels, BytesColumn(*payloads)
    )


def encode_blocks(
    schema_id: int,
    *,
    sample_ids: I64,
    times_ms: I64,
    requests: U64,
    values: F32,
    weights: F32,
    labels: U8,
    payloads: BytesColumn,
    block_ends: I64,
) -> BytesColumn:
    """(blocks,) records of N samples of one schema, cut where `block_ends` says (rising, the last is N).

    The caller keeps the samples of one request together. Raises ValueError if lengths do not agree, or a
    block is empty.
    """
    data, ends = _native.encode_blocks(
        schema_id,
        np.ascontiguousarray(sample_ids, np.int64),
        np.ascontiguousarray(times_ms, np.int64),
        np.ascontiguousarray(requests, np.uint64),
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
    times_ms: I64,
    requests: U64,
    values: F32,
    weights: F32,
    labels: U8,
    payloads: BytesColumn,
) -> bytes:
    """One block of all these samples, at least one."""
    return encode_blocks(
        schema_id,
        sample_ids=sample_ids,
        times_ms=times_ms,
        requests=requests,
        values=values,
        weights=weights,
        labels=labels,
        payloads=payloads,
        block_ends=np.array([len(payloads)]),
    )[0]
