"""Changed rows as records of `<model>.rows`. Pure."""

from __future__ import annotations

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
        places, gone = _partitions(part.keys, buckets), _partitions(part.removed, buckets)
        for p in np.union1d(places, gone).tolist():
            mine = places == p
            delta = RowDelta(
                table=part.table,
                fence=fence,
                event_time_ms=TimeMs(batch.clock_ms),
                keys=part.keys[mine],
                values=part.values[mine],
                removed=part.removed[gone == p],
            )
            records.setdefault(p, []).append(encode_rows(delta))
    return [Append(topic, p, BytesColumn.of(values)) for p, values in sorted(records.items())]


def _partitions(keys: U64, buckets: int) -> I64:
    return bucket_of(keys, buckets) * ROWS_PARTITIONS // buckets
