"""Changed rows as records of `<model>.rows`. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from freshet.spec.topics import ROWS_PARTITIONS
from freshet.tables import Published
from freshet.types import I64, U64, Append, BytesColumn, Fence, TimeMs, bucket_of
from freshet.wire.rows import RowDelta, encode_rows

__all__ = ["records_of"]


def records_of(batch: Published, topic: str, fences: I64) -> list[Append]:
    """Records of a table, a partition of `rows` and a fence each; the partition follows from the bucket and
    is fixed (PROTOCOL 17). `fences` (B,) are those under which each bucket is owned."""
    records: dict[int, list[bytes]] = {}
    for part in batch.tables:
        kept, gone = _places(part.keys, fences), _places(part.removed, fences)
        for p, fence in sorted({*kept, *gone}):
            delta = RowDelta(
                table=part.table,
                fence=Fence(fence),
                event_time_ms=TimeMs(batch.clock_ms),
                keys=part.keys[kept.get((p, fence), _NONE)],
                values=part.values[kept.get((p, fence), _NONE)],
                removed=part.removed[gone.get((p, fence), _NONE)],
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
