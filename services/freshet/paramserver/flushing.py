"""What the native store copied out, as the row store's deltas. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freshet.paramserver.core import FlushBook
from freshet.spec.topics import ROWS_PARTITIONS
from freshet.tables import FlushBatch
from freshet.types import Bucket, BucketDelta, PackedRows, TimeMs

__all__ = ["deltas_of"]


def deltas_of(
    batch: FlushBatch, book: FlushBook, rows_offsets: Sequence[int], buckets: int, *, whole: bool = False
) -> list[BucketDelta]:
    """One delta a bucket, with the meta that it brings the bucket to.

    Args:
        rows_offsets: (ROWS_PARTITIONS,) where a reader of each partition of `rows` must follow from.
        buckets:      of the model.
        whole:        the batch holds each bucket's every row, and replaces what is stored.
    """
    rows: dict[int, list[PackedRows]] = {}
    for group in batch.groups:
        for bucket, table, start, stop in group.runs.tolist():
            packed = PackedRows(table, group.keys[start:stop], group.records[start:stop])
            rows.setdefault(bucket, []).append(packed)
    deltas = []
    for i, number in enumerate(batch.buckets):
        bucket = Bucket(int(number))
        meta = book.next_meta(
            bucket,
            rows=int(batch.rows[i]),
            applied=dict(enumerate(batch.applied[i].tolist())),
            rows_offset=rows_offsets[bucket * ROWS_PARTITIONS // buckets],
            clock_ms=TimeMs(int(batch.clock_ms[i])),
        )
        deltas.append(
            BucketDelta(
                bucket=bucket,
                previous=None if whole else book.previous(bucket),
                meta=meta,
                rows=rows.get(bucket, ()),
                removed=() if whole else _removed(batch, i),
                whole=whole,
            )
        )
    return deltas


def _removed(batch: FlushBatch, i: int) -> list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint64]]]]:
    start, stop = int(batch.removed_starts[i]), int(batch.removed_starts[i + 1])
    if start == stop:
        return []
    tables = batch.removed_tables[start:stop]
    keys = batch.removed[start:stop]
    return [(int(table), keys[tables == table]) for table in np.unique(tables)]
