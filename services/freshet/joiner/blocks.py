"""Samples to blocks: where they are cut (schemas/README.md, "Samples: blocks")."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from freshet.features.blocks import MAX_SAMPLES, encode_blocks
from freshet.joiner.core import Samples
from freshet.types import BytesColumn

__all__ = ["cuts", "encode"]


def encode(samples: Samples) -> BytesColumn:
    """Blocks in order. A block holds one schema id and never splits the samples of a request."""
    ends = np.array([stop for _, stop in cuts(samples)], np.int64)
    if not len(ends):
        return BytesColumn.of([])
    schemas = samples.schemas[ends - 1]
    parts = []
    first = start = 0
    # A run of blocks of one schema is encoded in one call; schemas change rarely.
    for last in [*np.flatnonzero(schemas[1:] != schemas[:-1]).tolist(), len(ends) - 1]:
        stop = int(ends[last])
        parts.append(
            encode_blocks(
                int(schemas[last]),
                sample_ids=samples.ids[start:stop],
                event_times_ms=samples.times_ms[start:stop],
                request_ids=samples.requests[start:stop],
                values=samples.values[start:stop],
                weights=samples.weights[start:stop],
                labels=samples.labels[start:stop],
                payloads=samples.payloads.slice(start, stop),
                block_ends=ends[first : last + 1] - start,
            )
        )
        first, start = last + 1, stop
    return BytesColumn.concat(parts)


def cuts(samples: Samples) -> Iterator[tuple[int, int]]:
    """[start, stop) of each block."""
    n = len(samples)
    if not n:
        return
    new_schema = np.flatnonzero(samples.schemas[1:] != samples.schemas[:-1]) + 1
    new_request = np.flatnonzero(samples.requests[1:] != samples.requests[:-1]) + 1
    schema_ends = np.append(new_schema, n)
    group_ends = np.append(np.union1d(new_schema, new_request), n)
    start = 0
    while start < n:
        limit = min(start + MAX_SAMPLES, int(schema_ends[np.searchsorted(schema_ends, start, side="right")]))
        fits = int(np.searchsorted(group_ends, limit, side="right")) - 1
        first = int(np.searchsorted(group_ends, start, side="right"))
        stop = int(group_ends[max(fits, first)])
        yield start, stop
        start = stop
