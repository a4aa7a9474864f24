"""Changed rows as records of `<model>.rows`. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.rows.deltas import RowDelta, encode_rows
from freshet.tables import Published
from freshet.types import I64, U64, Append, BytesColumn, Fence, TimeMs, bucket_of

__all__ = ["DELTA_BYTES", "records_of"]

DELTA_BYTES, REMOVED_BYTES = 512 << 10, 256 << 10
"""Of rows in a record, and of removed keys: a round of wide rows is several times what a log takes as one
record (16 MiB on Kafka by default, and often no more than 1 MiB on a managed service). Together they
stay below LEAST_TOPIC_BYTES (`freshet.config.spec.record_sizes`)."""


def records_of(batch: Published, topic: str, fences: I64) -> list[Append]:
    """Records of a table, a partition of `rows` and a fence each, several where they would be too long; the
    partition follows from the bucket and is fixed (PROTOCOL 17). `fences` (B,) are those under which each
    bucket is owned."""
    records: dict[int, list[bytes]] = {}
    for part in batch.tables:
        kept, gone = _places(part.keys, fences), _places(part.removed, fences)
        for p, fence in sorted({*kept, *gone}):
            keys, values = part.keys[kept.get((p, fence), _NONE)], part.values[kept.get((p, fence), _NONE)]
            removed = part.removed[gone.get((p, fence), _NONE)]
            rows = max(1, DELTA_BYTES // (keys.itemsize + values.itemsize * values.shape[1]))
            keys_a_record = REMOVED_BYTES // removed.itemsize
            pieces = max(-(-len(keys) // rows), -(-len(removed) // keys_a_record))
            for i in range(pieces):
                mine = slice(i * rows, (i + 1) * rows)
                delta = RowDelta(
                    table=part.table,
                    fence=Fence(fence),
                    event_time_ms=TimeMs(batch.clock_ms),
                    keys=keys[mine],
                    values=values[mine],
                    removed=removed[i * keys_a_record : (i + 1) * keys_a_record],
                )
                records.setdefault(p, []).append(encode_rows(delta))
    return [Append(topic, p, BytesColumn.of(values)) for p, values in sorted(records.items())]


_NONE = slice(0)


def _places(keys: U64, fences: I64) -> dict[tuple[int, int], slice | I64]:
    """{(partition of `rows`, fence): where the keys of its buckets lie}. A slice where keys come in order and
    a partition's buckets have one fence, as they mostly do: no copy."""
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
