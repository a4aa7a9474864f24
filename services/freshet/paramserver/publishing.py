"""Changed rows as records of `<model>.rows`. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from freshet.spec.topics import ROWS_PARTITIONS
from freshet.tables import Published
from freshet.types import I64, U64, Append, BytesColumn, Fence, TimeMs, bucket_of
from freshet.wire.rows import RowDelta, encode_rows

__all__ = ["records_of"]


def records_of(batch: Published, topic: str, buckets: int, fence: Fence) -> list[Append]:
    """One record a table and partition of `rows`; the partition follows from the bucket and is fixed
    (PROTOCOL 17)."""
    records: dict[int, list[bytes]] = {}
    for part in batch.tables:
        gone = _partitions(part.removed, buckets)
        starts = np.searchsorted(_partitions(part.keys, buckets), np.arange(ROWS_PARTITIONS + 1)).tolist()
        for p, (start, stop) in enumerate(pairwise(starts)):
            removed = part.removed[gone == p]
            if start == stop and not len(removed):
                continue
            delta = RowDelta(
                table=part.table,
                fence=fence,
                event_time_ms=TimeMs(batch.clock_ms),
                keys=part.keys[start:stop],
                values=part.values[start:stop],
                removed=removed,
            )
            records.setdefault(p, []).append(encode_rows(delta))
    return [Append(topic, p, BytesColumn.of(values)) for p, values in sorted(records.items())]


def _partitions(keys: U64, buckets: int) -> I64:
    return bucket_of(keys, buckets) * ROWS_PARTITIONS // buckets
