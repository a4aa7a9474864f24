"""What the native store copied out, as the row store's deltas. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from freshet.paramserver.core import FlushBook
from freshet.spec.topics import ROWS_PARTITIONS
from freshet.tables import Flushed
from freshet.types import BucketDelta

__all__ = ["deltas_of"]


def deltas_of(
    flushed: Flushed, book: FlushBook, rows_offsets: Sequence[int], buckets: int, *, whole: bool = False
) -> list[BucketDelta]:
    """One delta a bucket, with the meta that it brings the bucket to.

    Args:
        rows_offsets: (ROWS_PARTITIONS,) where a reader of each partition of `rows` must follow from.
        buckets:      of the model.
        whole:        the copy holds each bucket's every row, and replaces what is stored.
    """
    deltas = []
    for changes in flushed:
        meta = book.next_meta(
            changes.bucket,
            rows=changes.stored,
            applied=changes.applied,
            rows_offset=rows_offsets[changes.bucket * ROWS_PARTITIONS // buckets],
            clock_ms=changes.clock_ms,
        )
        deltas.append(
            BucketDelta(
                bucket=changes.bucket,
                previous=None if whole else book.previous(changes.bucket),
                meta=meta,
                rows=changes.rows,
                removed=() if whole else changes.removed,
                whole=whole,
            )
        )
    return deltas
