"""Decisions of a shard's flushes without I/O: the metas to write, and the consequences of an outcome.

PROTOCOL 11: the row store compares its meta with the one that this owner wrote last. Anything but that write,
or its retry, means that the store lost or mixed writes; the bucket is then written whole.
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
    """The highest fence of the pushes of each partition. Thread-safe.

    A lower fence comes from an embedder that another one has replaced (PROTOCOL 9).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._highest: dict[int, int] = {}

    def check(self, ranges: Sequence[OffsetRange], fence: Fence) -> None:
        """Record the fence of a push; raises Fenced if one of its partitions has seen a higher one."""
        with self._lock:
            for r in ranges:
                if fence < (seen := self._highest.get(r.partition, fence)):
                    raise Fenced(
                        f"a push of partition {r.partition} carries fence {fence}, its embedder has {seen}"
                    )
            self._highest.update({r.partition: int(fence) for r in ranges})


class FlushBook:
    """The last metas known to be stored, of the owned buckets. For the flush thread only.

    B buckets of the model, P partitions of `samples`, K buckets of a flush.
    """

    def __init__(self, *, buckets: int, partitions: int) -> None:
        """Own no bucket yet."""
        self._owned: Bool = np.zeros(buckets, np.bool_)
        self._left: Bool = np.zeros(buckets, np.bool_)  # released, and not known to be served by others
        self._fences: I64 = np.zeros(buckets, np.int64)
        self._seqs: I64 = np.zeros(buckets, np.int64)  # acknowledged last
        self._sent: I64 = np.zeros(buckets, np.int64)  # highest sent
        self._applied: I64 = np.zeros((buckets, partitions), np.int64)
        self._rows_offsets: I64 = np.zeros(buckets, np.int64)
        self._clocks_ms: I64 = np.zeros(buckets, np.int64)
        self._rows: I64 = np.zeros(buckets, np.int64)

    def claimed(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        """Own buckets with the metas that the row store returned for the claim."""
        for bucket, meta in metas.items():
            self._owned[bucket], self._left[bucket] = True, False
            self._fences[bucket] = meta.fence
            self._seqs[bucket] = self._sent[bucket] = meta.seq
            self._applied[bucket] = [meta.applied.get(p, 0) for p in range(self._applied.shape[1])]
            self._rows_offsets[bucket], self._clocks_ms[bucket] = meta.rows_offset, meta.clock_ms
            self._rows[bucket] = meta.rows

    def next_flush(self, flushed: Flushed, rows_offsets: I64, *, whole: bool = False) -> Flush:
        """Return a flush of copied rows, with metas one after the last acknowledged ones.

        A retry therefore repeats its sequence numbers. A whole bucket gets an unused number: after two
        failovers a store may hold an earlier flush, and would take an equal number for this one.

        Args:
            flushed: the changed rows.
            rows_offsets: (ROWS_PARTITIONS,) int64, from which a reader of each partition of `rows` must
                follow.
            whole: the copy holds every row of each bucket, and replaces the stored ones.
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
        """Give up buckets that another shard owns; their fences are kept."""
        self._owned[buckets] = self._left[buckets] = False

    def left(self, buckets: Sequence[Bucket]) -> None:
        """Give up buckets before another shard owns them.

        The next owner replays from the stored metas, so `smallest_applied` and `smallest_rows_offset` include
        these buckets until they are `claimed` or `lost`.
        """
        self._left[buckets] |= self._owned[buckets]
        self._owned[buckets] = False

    def found_stored(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        """Lower the offsets of buckets whose stored metas are older than written, or another owner's."""
        for bucket, meta in metas.items():
            applied = [meta.applied.get(p, 0) for p in range(self._applied.shape[1])]
            self._applied[bucket] = np.minimum(self._applied[bucket], applied)
            self._rows_offsets[bucket] = min(int(self._rows_offsets[bucket]), meta.rows_offset)

    @property
    def fences(self) -> I64:
        """(B,) int64 fences under which the buckets are, or were last, owned."""
        return self._fences

    def done(self, flush: Flush, outcomes: U8) -> tuple[I64, I64]:
        """Record the outcomes of a flush.

        A bucket that was lost or claimed anew after the copy is left out.

        Args:
            flush: the flush, K buckets.
            outcomes: (K,) uint8, as `RowStore.flush` returned them.

        Returns:
            The buckets to write whole, and the buckets that another shard owns; int64.
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
        """(B,) int64 rows of each bucket in the row store, as far as this owner knows."""
        return self._rows

    @property
    def clock_ms(self) -> int:
        """Largest event time stored: the eviction clock (rule 8)."""
        return int(self._clocks_ms[self._owned].max(initial=0))

    def smallest_applied(self) -> dict[int, int]:
        """{partition: smallest stored offset}, which the log must retain (PROTOCOL 12); empty without
        buckets."""
        owned = self._applied[self._owned | self._left]
        return dict(enumerate(owned.min(axis=0).tolist())) if len(owned) else {}

    def smallest_rows_offset(self, buckets: range) -> int | None:
        """Return the smallest `rows` offset in the stored metas of these buckets; None without owned ones.

        Retention of `rows` must stay below it.
        """
        within = slice(buckets.start, buckets.stop)
        offsets = self._rows_offsets[within][(self._owned | self._left)[within]]
        return int(offsets.min()) if len(offsets) else None
