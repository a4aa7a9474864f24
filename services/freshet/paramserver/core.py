"""Decisions of a shard's flushes: which metas to write, and what an outcome means. No I/O.

Rule 11 of PROTOCOL: what is stored is compared with what this owner wrote last; anything else than the last
write, or its retry, means that the store lost or mixed writes, and the bucket is written anew, whole.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Fenced
from freshet.rows.store import FlushOutcome
from freshet.tables import Flushed
from freshet.types import I64, U8, Bool, Bucket, BucketMeta, Fence, Flush, OffsetRange

__all__ = ["FlushBook", "PushFences"]


class PushFences:
    """The highest fence that pushes of each partition have carried: a lower one is of an embedder that
    another has replaced (PROTOCOL 9). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._highest: dict[int, int] = {}

    def check(self, ranges: Sequence[OffsetRange], fence: Fence) -> None:
        """Raise Fenced if a partition has seen a higher one."""
        with self._lock:
            for r in ranges:
                if fence < (seen := self._highest.get(r.partition, fence)):
                    raise Fenced(
                        f"a push of partition {r.partition} carries fence {fence}, its embedder has {seen}"
                    )
            self._highest.update({r.partition: int(fence) for r in ranges})


class FlushBook:
    """The last metas known to be stored, of the owned buckets. Used by the flush thread only.

    B buckets of the model, P partitions of `samples`.
    """

    def __init__(self, *, buckets: int, partitions: int) -> None:
        """Own no bucket yet."""
        self._owned: Bool = np.zeros(buckets, np.bool_)
        self._left: Bool = np.zeros(buckets, np.bool_)  # not owned, and not known to be served by others
        self._fences: I64 = np.zeros(buckets, np.int64)
        self._seqs: I64 = np.zeros(buckets, np.int64)  # acknowledged last
        self._sent: I64 = np.zeros(buckets, np.int64)  # highest that went out
        self._applied: I64 = np.zeros((buckets, partitions), np.int64)
        self._rows_offsets: I64 = np.zeros(buckets, np.int64)
        self._clocks_ms: I64 = np.zeros(buckets, np.int64)
        self._rows: I64 = np.zeros(buckets, np.int64)

    def claimed(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        """Take over buckets as the row store returned them from the claim, under the fence that it wrote."""
        for bucket, meta in metas.items():
            self._owned[bucket], self._left[bucket] = True, False
            self._fences[bucket] = meta.fence
            self._seqs[bucket] = self._sent[bucket] = meta.seq
            self._applied[bucket] = [meta.applied.get(p, 0) for p in range(self._applied.shape[1])]
            self._rows_offsets[bucket], self._clocks_ms[bucket] = meta.rows_offset, meta.clock_ms
            self._rows[bucket] = meta.rows

    def next_flush(self, flushed: Flushed, rows_offsets: I64, *, whole: bool = False) -> Flush:
        """What the table copied out, with metas one after the last acknowledged ones: a retry writes the
        same. A whole bucket goes out under a number that nothing else had: after two failovers a store may
        hold what was sent before, and would take an equal number for this very write.

        Args:
            flushed:      what changed.
            rows_offsets: (ROWS_PARTITIONS,) where a reader of each partition of `rows` must follow from.
            whole:        the copy holds each bucket's every row, and replaces what is stored.
        """
        buckets = flushed.buckets
        seqs: I64 = (self._sent if whole else self._seqs)[buckets] + 1
        self._sent[buckets] = np.maximum(self._sent[buckets], seqs)
        return Flush(
            buckets=buckets,
            fences=self._fences[buckets],
            seqs=seqs,
            rows=flushed.stored,
            applied=flushed.applied,
            rows_offsets=rows_offsets[buckets * ROWS_PARTITIONS // len(self._owned)],
            clocks_ms=flushed.clock_ms,
            runs=flushed.runs,
            whole=whole,
        )

    def lost(self, buckets: Sequence[Bucket]) -> None:
        """Own them no longer: somebody else does. The fences they were owned under are remembered."""
        self._owned[buckets] = self._left[buckets] = False

    def left(self, buckets: Sequence[Bucket]) -> None:
        """Own them no longer, before anybody else does: whoever claims them replays from what is stored.
        `smallest_applied` and `smallest_rows_offset` cover that until they are `claimed` or `lost`."""
        self._left[buckets] |= self._owned[buckets]
        self._owned[buckets] = False

    def found_stored(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        """What is stored of these is older than was written, or was written by somebody else."""
        for bucket, meta in metas.items():
            applied = [meta.applied.get(p, 0) for p in range(self._applied.shape[1])]
            self._applied[bucket] = np.minimum(self._applied[bucket], applied)
            self._rows_offsets[bucket] = min(int(self._rows_offsets[bucket]), meta.rows_offset)

    @property
    def fences(self) -> I64:
        """(B,) the fence under which each bucket is, or was last, owned."""
        return self._fences

    def done(self, flush: Flush, outcomes: U8) -> tuple[I64, I64]:
        """Take note of a flush's (K,) outcomes; returns the buckets that must be written whole, and those
        that somebody else owns by now.

        A bucket that was lost, or claimed anew, since the flush was copied is none of its affair.
        """
        current = self._owned[flush.buckets] & (self._fences[flush.buckets] == flush.fences)
        kept = current & (outcomes == FlushOutcome.DONE)
        buckets = flush.buckets[kept]
        self._seqs[buckets] = flush.seqs[kept]
        self._applied[buckets] = flush.applied[kept]
        self._rows_offsets[buckets] = flush.rows_offsets[kept]
        self._clocks_ms[buckets] = flush.clocks_ms[kept]
        self._rows[buckets] = flush.rows[kept]
        again: I64 = flush.buckets[current & (outcomes == FlushOutcome.REPLACE)]
        fenced: I64 = flush.buckets[current & (outcomes == FlushOutcome.FENCED)]
        self._owned[fenced] = False
        return again, fenced

    @property
    def rows(self) -> I64:
        """(B,) rows that the row store has of each bucket, as far as this owner knows."""
        return self._rows

    @property
    def clock_ms(self) -> int:
        """Largest event time stored: the eviction clock (rule 8)."""
        return int(self._clocks_ms[self._owned].max(initial=0))

    def smallest_applied(self) -> dict[int, int]:
        """{partition: smallest stored offset}: what the log must still hold (rule 12). Empty without a
        bucket."""
        owned = self._applied[self._owned | self._left]
        return dict(enumerate(owned.min(axis=0).tolist())) if len(owned) else {}

    def smallest_rows_offset(self, buckets: range) -> int | None:
        """Smallest `rows` offset named by the stored metas of these buckets: retention of `rows` stays below
        it. None if none of them is owned, or left."""
        within = slice(buckets.start, buckets.stop)
        offsets = self._rows_offsets[within][(self._owned | self._left)[within]]
        return int(offsets.min()) if len(offsets) else None
