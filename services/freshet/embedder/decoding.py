"""Blocks of samples to columns, with what cannot be decoded set aside (PROTOCOL 3)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import orjson

from freshet.features import Decoded, SampleDecoder, read_blocks
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

    def decode(self, blocks: BytesColumn, places: Places = ()) -> DecodedBatch:
        """Decode; samples that cannot be are refused by (partition, offset, index in the block) if `places`
        is given.

        Raises:
            Corrupt: a block itself is damaged: its partition stops until an operator decides.
        """
        read = read_blocks(blocks)
        columns = self._decoder.decode(read.payloads, read.schema_ids, read.event_times_ms)
        good = np.ones(len(read.sample_ids), np.bool_)
        good[columns.bad] = False
        unknown = good & (read.labels >= self._labels)
        if len(columns.bad) and places:
            self._refuse(self._letters(blocks, columns, read.counts, read.payloads, places))
        if unknown.any():
            raise ValueError("labels")
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
    def _letters(
        blocks: BytesColumn, columns: Decoded, counts: I64, payloads: BytesColumn, places: Places
    ) -> list[bytes]:
        partitions = np.concatenate([np.full(len(offsets), p) for p, offsets in places])
        offsets = np.concatenate([offsets for _, offsets in places])
        ends = np.cumsum(counts)
        letters = []
        for index, why in zip(columns.bad.tolist(), columns.why, strict=True):
            block = int(np.searchsorted(ends, index, side="right"))
            letters.append(
                orjson.dumps(
                    {
                        "v": 1,
                        "kind": "sample",
                        "partition": int(partitions[block]),
                        "offset": int(offsets[block]),
                        "index": index - int(ends[block] - counts[block]),
                        "reason": why,
                        "bytes": base64.b64encode(payloads[index]).decode(),
                    }
                )
            )
        return letters
