"""Boundaries and encoding of the blocks that hold samples (schemas/README.md, "Samples: blocks").

A block ends at a request boundary, after `max_samples` samples or before it exceeds `max_bytes`. A request
that alone exceeds `max_bytes` is split between samples; its blocks follow each other in one append. Only a
sample that alone exceeds `max_bytes` makes a larger block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from freshet.config.spec.topics import BLOCK_BYTES, block_bytes
from freshet.features import SampleColumns
from freshet.features.blocks import MAX_SAMPLES, encode_blocks
from freshet.joiner.core import Samples
from freshet.types import BytesColumn

__all__ = ["cuts", "encode"]


def encode(samples: Samples, max_bytes: int = BLOCK_BYTES, max_samples: int = MAX_SAMPLES) -> BytesColumn:
    """Encode samples as blocks in order, each with one schema id. The module describes where blocks end."""
    ends = np.array([stop for _, stop in cuts(samples, max_bytes, max_samples)], np.int64)
    if not len(ends):
        return BytesColumn.of([])
    schemas = samples.schemas[ends - 1]
    parts = []
    first = start = 0
    # A run of blocks with one schema is encoded in one call; schemas change rarely.
    for last in [*np.flatnonzero(schemas[1:] != schemas[:-1]).tolist(), len(ends) - 1]:
        stop = int(ends[last])
        parts.append(
            encode_blocks(
                int(schemas[last]),
                SampleColumns(
                    sample_ids=samples.ids[start:stop],
                    event_times_ms=samples.times_ms[start:stop],
                    request_ids=samples.requests[start:stop],
                    values=samples.values[start:stop],
                    weights=samples.weights[start:stop],
                    labels=samples.labels[start:stop],
                ),
                payloads=samples.payloads.slice(start, stop),
                block_ends=ends[first : last + 1] - start,
            )
        )
        first, start = last + 1, stop
    return BytesColumn.concat(parts)


def cuts(
    samples: Samples, max_bytes: int = BLOCK_BYTES, max_samples: int = MAX_SAMPLES
) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of each block, as indices of samples."""
    n = len(samples)
    if not n:
        return
    new_schema = np.flatnonzero(samples.schemas[1:] != samples.schemas[:-1]) + 1
    new_request = np.flatnonzero(samples.requests[1:] != samples.requests[:-1]) + 1
    schema_ends = np.append(new_schema, n)
    group_ends = np.append(np.union1d(new_schema, new_request), n)
    # Bytes up to each sample's end: a block of one sample has 40 bytes besides its payload, each further 37.
    sizes = samples.payloads.ends + np.arange(1, n + 1) * (block_bytes(1, 0) - block_bytes(0, 0))
    start = before = 0
    while start < n:
        limit = before + max_bytes - block_bytes(0, 0)
        fitting = max(start + 1, int(np.searchsorted(sizes, limit, side="right")))
        most = min(
            fitting, start + max_samples, int(schema_ends[np.searchsorted(schema_ends, start, side="right")])
        )
        fits = int(np.searchsorted(group_ends, most, side="right")) - 1
        first = int(np.searchsorted(group_ends, start, side="right"))
        # The first request is kept whole, even beyond max_samples, unless it has too many bytes.
        stop = min(int(group_ends[max(fits, first)]), fitting)
        yield start, stop
        start, before = stop, int(sizes[stop - 1])
