"""Blocks of samples to columns, with what cannot be decoded set aside (PROTOCOL 3)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import orjson

from freshet.errors import Corrupt
from freshet.features import BlockColumns, Decoded, SampleDecoder, read_blocks
from freshet.types import F32, I64, U8, U64, BytesColumn

__all__ = ["BlockDecoder", "DecodedBatch", "Places"]

Places = tuple[tuple[int, I64], ...]
"""Where the blocks of a batch come from: (partition, offsets of its blocks), in the order of the blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedBatch:
    """The good samples of a batch; B of them, all columns in the same order."""

    columns: Decoded
    sample_ids: I64
    request_ids: U64
    event_times_ms: I64
    label_index: U8
    label_value: F32
    weight: F32


class BlockDecoder:
    """Decodes the blocks of a batch. One a lane: not thread-safe."""

    def __init__(self, decoder: SampleDecoder, labels: int, refuse: Callable[[list[bytes]], None]) -> None:
        """`refuse` takes JSON records for the topic of refused events; durable when it returns."""
        self._decoder, self._labels, self._refuse = decoder, labels, refuse
        self._schema_id: int | None = None  # of the last blocks

    def decode(self, blocks: BytesColumn, places: Places = ()) -> DecodedBatch:
        """Decode; samples that cannot be are refused by (partition, offset, index in the block) if `places`
        is given.

        Raises:
            Corrupt: a block itself is damaged: its partition stops until an operator decides.
        """
        usual = self._usual(blocks)
        return usual if usual is not None else self._any(blocks, places)

    def _usual(self, blocks: BytesColumn) -> DecodedBatch | None:
        """Blocks of the same schema as the last ones, in one native call; None for anything else."""
        made = None if self._schema_id is None else self._decoder.decode_usual(blocks, self._schema_id)
        if made is None or int(made[1].labels.max(initial=0)) >= self._labels:
            return None
        columns, of = made
        return DecodedBatch(
            columns, of.sample_ids, of.request_ids, of.event_times_ms, of.labels, of.values, of.weights
        )

    def _any(self, blocks: BytesColumn, places: Places) -> DecodedBatch:
        """As `decode`, of any blocks."""
        read = read_blocks(blocks)
        if len(read):
            self._schema_id = int(read.schema_ids[-1])
        if len(read) and int(read.labels.max()) >= self._labels:
            raise Corrupt(
                f"samples: a block holds label {int(read.labels.max())}, "
                f"but the spec has {self._labels} labels; "
                "was the log written under another spec?"
            )
        columns = self._decoder.decode(read.payloads, read.schema_ids, read.event_times_ms)
        if not len(columns.bad):
            return DecodedBatch(
                columns,
                read.sample_ids,
                read.request_ids,
                read.event_times_ms,
                read.labels,
                read.values,
                read.weights,
            )
        if places:
            self._refuse(self._letters(columns, read, places))
        good = np.ones(len(read), np.bool_)
        good[columns.bad] = False
        return DecodedBatch(
            columns=replace(columns, bad=np.empty(0, np.int64), why=()),
            sample_ids=read.sample_ids[good],
            request_ids=read.request_ids[good],
            event_times_ms=read.event_times_ms[good],
            label_index=read.labels[good],
            label_value=read.values[good],
            weight=read.weights[good],
        )

    @staticmethod
    def _letters(columns: Decoded, read: BlockColumns, places: Places) -> list[bytes]:
        partitions = np.concatenate([np.full(len(offsets), p) for p, offsets in places])
        offsets = np.concatenate([offsets for _, offsets in places])
        counts = read.counts.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        letters = []
        for index, why in zip(columns.bad.tolist(), columns.why, strict=True):
            block = int(np.searchsorted(firsts, index, side="right")) - 1
            letter = {
                "v": 1,
                "kind": "sample",
                "partition": int(partitions[block]),
                "offset": int(offsets[block]),
                "index": index - int(firsts[block]),
                "reason": why,
                "bytes": base64.b64encode(read.payloads[index]).decode(),
            }
            letters.append(orjson.dumps(letter))
        return letters
