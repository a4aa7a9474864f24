"""Decisions of a shard's flushes: which meta to write, and what an outcome means. No I/O.

Rule 11 of PROTOCOL: what is stored is compared with what this owner wrote last; anything else than the last
write, or its retry, means that the store lost or mixed writes, and the bucket is written anew, whole.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from freshet.seams.rowstore import FlushOutcome
from freshet.types import Applied, Bucket, BucketMeta, Fence, TimeMs

__all__ = ["AfterFlush", "FlushBook"]


class AfterFlush(enum.Enum):
    """What the shard does with a bucket after a flush."""

    KEEP = "keep"  # stored; forget the copy
    AGAIN_WHOLE = "again whole"  # write everything the bucket holds
    DROP = "drop"  # somebody else owns it


@dataclass(slots=True)
class FlushBook:
    """The last meta known to be stored, for each owned bucket.

    Used by the flush thread only.
    """

    fence: Fence
    stored: dict[Bucket, BucketMeta] = field(default_factory=dict)

    def claimed(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        """Take over buckets as the row store returned them from the claim."""
        self.stored.update(metas)

    def next_meta(
        self, bucket: Bucket, *, rows: int, applied: Applied, rows_offset: int, clock_ms: TimeMs
    ) -> BucketMeta:
        """The meta of the bucket's next flush: one more than the last acknowledged one."""
        return BucketMeta(
            fence=self.fence,
            seq=self.stored[bucket].seq + 1,
            rows=rows,
            applied=dict(applied),
            rows_offset=rows_offset,
            clock_ms=clock_ms,
        )

    def previous(self, bucket: Bucket) -> BucketMeta:
        """What this owner believes to be stored."""
        return replace(self.stored[bucket], fence=self.fence)

    def done(self, bucket: Bucket, meta: BucketMeta, outcome: FlushOutcome) -> AfterFlush:
        """Take note of an outcome; says what to do with the bucket."""
        if outcome is FlushOutcome.DONE:
            self.stored[bucket] = meta
            return AfterFlush.KEEP
        if outcome is FlushOutcome.REPLACE:
            return AfterFlush.AGAIN_WHOLE
        self.stored.pop(bucket, None)
        return AfterFlush.DROP

    def smallest_applied(self, partitions: int) -> dict[int, int]:
        """{partition: smallest stored offset}: what the log must still hold (rule 12)."""
        metas = self.stored.values()
        return {p: min((m.applied.get(p, 0) for m in metas), default=0) for p in range(partitions)}

    def smallest_rows_offset(self, buckets: range) -> int:
        """Smallest `rows` offset named by the stored metas of these buckets: retention of `rows` stays below
        it."""
        return min(
            (self.stored[Bucket(b)].rows_offset for b in buckets if Bucket(b) in self.stored), default=0
        )
