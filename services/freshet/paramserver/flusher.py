"""Publishing and flushing of a shard's changed rows (PROTOCOL 11 and 17).

A flush copies rows and offsets together, publishes the copied rows, and writes them last. The row store
compares its meta with the one that this owner wrote last. Anything but that write, or its retry, means that
the store lost or mixed writes; the bucket is then written whole.

The flusher also holds retention of the log for a restart from the stored rows (PROTOCOL 12).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import structlog

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Fenced, FreshetError, Unavailable
from freshet.log.topics import ModelContext
from freshet.observability.spans import record_rows_sends
from freshet.observability.tracing import now_ns
from freshet.rows.deltas import records_of
from freshet.rows.store import FlushOutcome, RowStore
from freshet.tables import Flushed, Published, Store
from freshet.types import (
    I64,
    U8,
    Bool,
    Bucket,
    BucketMeta,
    Flush,
    TopicPartition,
)
from freshet.wires.codecs import RowCodec, rows_codec
from freshet.wires.row_wire import RowWire


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
        """Lower the offsets of buckets if stored metas are older than written, or another owner's."""
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
        self._owned[fenced], self._left[fenced] = False, True  # the new owner may not hold retention yet
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


log = structlog.get_logger("freshet.paramserver")

_NONE: Mapping[Bucket, BucketMeta] = {}

PUBLISH_ROWS = 50_000
"""Most rows copied out of the store at once; bounds memory, and the time for which lookups wait."""


PART_OF_BOUND = 1 / 8
"""Part of the rows' memory that the changed rows of a flush may take where most rows are on a disk."""

EXACT_AFTER_S = 10.0
"""Rows that were published rounded are sent in fp32 once nothing has changed for so long: in the pauses of a
thin stream each row would travel twice."""


@dataclass(slots=True)
class ShardCounts:
    """Counts of a shard since its start."""

    pushes: int = 0
    skipped: int = 0
    refused: int = 0
    fenced: int = 0
    published_rows: int = 0
    published_bytes: int = 0  # of the records with them
    passed_rows: int = 0  # changed rows that were not published, since serving holds them nearly
    flushed_rows: int = 0
    flushes: int = 0
    flushes_failed: int = 0  # attempts; one flush may fail several times
    replaced_buckets: int = 0
    room_blocks: dict[str, int] = field(default_factory=dict)
    """{partition of samples: blocks between the log's start and a restart's replay} as of the last attempt at
    a flush (PROTOCOL 12)"""


@dataclass(frozen=True, slots=True)
class PublishedTo:
    """Progress of publishing: samples below `applied` are learned in the records below `rows_next`."""

    applied: Mapping[int, int]  # {partition of samples: next offset}
    rows_next: Mapping[int, int]  # {partition of rows: next offset}


class Flusher:
    """Publishes and flushes a shard's buckets. Thread-safe; hold `lock` to add or remove buckets."""

    def __init__(
        self,
        context: ModelContext,
        rows: RowStore,
        store: Store,
        counts: ShardCounts,
        *,
        name: str,
        alone: bool,
    ) -> None:
        """Start without buckets.

        Args:
            context: the model, its log and clock.
            rows: the row store.
            store: table of the shard.
            counts: counts to update.
            name: name of the shard.
            alone: all buckets are under one claim, and the loss of one ends the shard.
        """
        spec = context.spec
        self._spec, self._topics, self._log, self._rows = spec, context.topics, context.log, rows
        self._store, self._counts, self._clock = store, counts, context.clock
        self._alone = alone
        self.on_fenced: Callable[[Sequence[Bucket]], None] = lambda _: None
        """Called with buckets that another shard owns, unless `alone`"""
        self.pin = "-".join(filter(None, ("shard", spec.name, name)))
        self.book = FlushBook(buckets=spec.buckets, partitions=spec.partitions)
        self.lock = threading.RLock()  # for flushes and ownership changes; acquired before `_publishing`
        self._publishing = threading.Lock()
        self._writer = context.log.writer()
        self._rows_next = [0] * ROWS_PARTITIONS
        self._unanswered: Flush | None = None  # copied, and not known to be written
        self._lost_copy = False  # rows were copied as flushed, and the copy is gone
        self._replace: I64 = np.empty(0, np.int64)  # buckets to write whole before anything else
        self.wire = RowWire(context.layout.scalars)
        self._codec = rows_codec(spec.train.publish_codec)
        self._changed_s = self._clock.monotonic()  # when a row was last seen to have changed
        self._begun_s: float | None = None  # monotonic start of the unwritten flush
        self._has_owned = False  # before the first bucket, retention stays as the last process set it
        self.published = PublishedTo({}, {})

    @contextmanager
    def owning(self, metas: Mapping[Bucket, BucketMeta]) -> Iterator[None]:
        """Own claimed buckets; the body starts to serve them. Needs `lock`.

        Raises Unavailable before any bucket is owned.
        """
        rows = {p: TopicPartition(self._topics.rows, p) for p in range(ROWS_PARTITIONS)}
        ends = {p: self._log.bounds(at).end for p, at in rows.items()}
        with self._publishing:
            self.book.claimed(metas)
            self._has_owned = True
            for p, end in ends.items():
                self._rows_next[p] = max(self._rows_next[p], end)
            yield
            # A flush publishes before it writes, so the stored rows are published.
            self.published = self._published_to(self.smallest_applied())

    def publish(self) -> int:
        """Publish the rows changed so far and return their number. The records are durable on return.

        Once nothing has changed for EXACT_AFTER_S, it publishes a batch of the rows that serving may hold
        rounded, in fp32: repeated calls make serving equal to this shard.
        """
        with self._publishing:
            rows = self._publish_all()
            if not rows and self._clock.monotonic() - self._changed_s >= EXACT_AFTER_S:
                rows = self._send(self._store.collect_inexact(PUBLISH_ROWS), RowCodec.FP32)
            return rows

    def flush(self) -> None:
        """Write every loaded bucket's changed rows and its offsets, dirty or not (PROTOCOL 12).

        After a failure the next call first repeats the unanswered flush unchanged. It may be written already,
        and the store accepts a repetition as done (PROTOCOL 11).
        """
        with self.lock:
            if self._begun_s is None:
                self._begun_s = self._clock.monotonic()
            try:
                if self._unanswered is not None:
                    self.publish()
                    self._write(self._unanswered)
                if len(self._replace):
                    self._write_whole(self._replace[np.isin(self._replace, self._store.owned())])
                for buckets in self._parts():
                    self._write(self._copied(partial(self._store.collect_flush, buckets), whole=False))
            except Unavailable:
                self._counts.flushes_failed += 1
                self._measure_retention(self.book.smallest_applied())  # retention moves on during an outage
                raise
            self._begun_s = None
            self._counts.flushes += 1
            if self._has_owned:
                self.hold_retention()

    @property
    def unwritten_s(self) -> float:
        """Age of the flush that is not written yet, over all its attempts; 0 between flushes."""
        begun = self._begun_s
        return 0.0 if begun is None else self._clock.monotonic() - begun

    def smallest_applied(self) -> dict[int, int]:
        """{partition: smallest offset that a bucket has applied}; empty without buckets."""
        return {p: min(offsets) for p, offsets in self._store.applied().items() if offsets}

    def hold_retention(self, claimed: Mapping[Bucket, BucketMeta] = _NONE) -> None:
        """Hold retention at the offsets that a restart replays from and readers follow from.

        `claimed` buckets, which are about to be owned, are included.
        """
        samples = self.book.smallest_applied()
        for meta in claimed.values():
            for p, offset in meta.applied.items():
                samples[p] = min(offset, samples.get(p, offset))
        self._measure_retention(samples)
        share = self._spec.buckets // ROWS_PARTITIONS
        held = {TopicPartition(self._topics.samples, p): offset for p, offset in samples.items()}
        for p in range(ROWS_PARTITIONS):
            smallest = self.book.smallest_rows_offset(range(p * share, (p + 1) * share))
            offsets = [m.rows_offset for b, m in claimed.items() if p * share <= b < (p + 1) * share]
            if smallest is not None or offsets:
                smallest = min([*offsets, *([] if smallest is None else [smallest])])
                held[TopicPartition(self._topics.rows, p)] = smallest
        self._log.hold(self.pin, held)

    def _measure_retention(self, samples: Mapping[int, int]) -> None:
        """Update `room_blocks` by {partition: smallest stored offset}; the old figures stay if the log is
        away."""
        with suppress(Unavailable):
            found = self._log.all_bounds([TopicPartition(self._topics.samples, p) for p in samples])
            self._counts.room_blocks = {
                str(at.partition): samples[at.partition] - bounds.start for at, bounds in found.items()
            }

    # --- flush

    def _parts(self) -> Iterable[Sequence[Bucket] | None]:
        """Return the buckets of each flush: all at once, unless their changed rows need not fit in memory."""
        if (bound := self._store.memory_bound) is None:
            return [None]
        owned = self._store.owned()
        changed = self._store.pending_flush() * max(map(self._store.record_bytes, self._store.tables))
        n = min(len(owned), max(1, math.ceil(changed / (bound * PART_OF_BOUND))))
        return [owned[len(owned) * i // n : len(owned) * (i + 1) // n] for i in range(n)]

    def _write_whole(self, buckets: I64) -> None:
        """Write (K,) buckets whole.

        Those that are not written stay in `_replace`, for the next flush: one of later changes alone might be
        accepted, and their earlier copies count as flushed.
        """
        self._replace = buckets
        for part in self._whole_parts(buckets):
            self._write(self._copied(partial(self._store.collect_whole, part), whole=True))

    def _whole_parts(self, buckets: I64) -> Iterable[Sequence[Bucket]]:
        """Return (K,) buckets in parts, each of few rows if rows need not fit in memory."""
        if (bound := self._store.memory_bound) is None:
            return [buckets.tolist()]
        most = max(1, int(bound * PART_OF_BOUND) // max(map(self._store.record_bytes, self._store.tables)))
        part = np.cumsum(self.book.rows[buckets]) // most
        return [of.tolist() for of in np.split(buckets, np.flatnonzero(np.diff(part)) + 1)]

    def _copied(self, collect: Callable[[], Flushed], *, whole: bool) -> Flush:
        """Copy and publish changed rows; the flush is kept until the row store has answered."""
        with self._publishing:
            # Later deltas are at or past these offsets, so readers follow from them.
            offsets = np.array(self._rows_next, np.int64)
            if self._lost_copy:
                raise FreshetError(
                    "rows that an earlier flush had copied are lost: this process must end, so that the next "
                    "owner of its buckets replays them from the log"
                )
            try:
                flushed = collect()
                if whole:  # readers may follow `rows` from behind what this owner has published of them
                    self._store.put_back_published(flushed.runs)
            except BaseException:  # what was copied counts as flushed: no offsets may pass it
                self._lost_copy = True
                raise
            self._unanswered = self.book.next_flush(flushed, offsets, whole=whole)
            self._publish_all()
            return self._unanswered

    def _write(self, flush: Flush) -> None:
        """Write a flush; buckets that another shard owns are dropped.

        Raises:
            Unavailable: the flush is not known to be written.
            Fenced: the one claim of all buckets is lost.
        """
        again, fenced = self.book.done(flush, self._rows.flush(flush))
        self._unanswered = None
        if len(fenced) and self._alone:
            raise Fenced(f"bucket {fenced[0]} has a new owner; this shard stops")
        self.on_fenced([Bucket(b) for b in fenced.tolist()])
        if not flush.whole:
            self._counts.flushed_rows += flush.runs.rows
        elif len(again):
            raise Unavailable(f"bucket {again[0]} could not be written whole; it is tried again")
        else:
            self._counts.replaced_buckets += len(flush.buckets)
            self._replace = self._replace[~np.isin(self._replace, flush.buckets)]
        if len(again):  # the store's meta is not this owner's last (PROTOCOL 11)
            log.warning("buckets are written whole: the row store lost or mixed writes", buckets=len(again))
            self._write_whole(again)

    # --- publish

    def _publish_all(self) -> int:
        """Publish until every bucket had its turn; returns rows. Needs `_publishing`.

        Rows of samples applied before the round are then published. Rows pushed during the round may wait
        for the next one, since under load there are always more.
        """
        applied = self.smallest_applied()
        published, done = 0, self._store.drained() + self._spec.buckets
        while self._store.drained() < done:
            published += self._publish_some()
        self.published = self._published_to(applied)
        return published

    def _published_to(self, applied: Mapping[int, int]) -> PublishedTo:
        return PublishedTo(applied, dict(enumerate(self._rows_next)))

    def _publish_some(self) -> int:
        """Publish one batch of bounded size, acknowledged; returns rows. Needs `_publishing`."""
        batch = self._store.collect_publish(PUBLISH_ROWS)
        if len(batch) or batch.passed:
            self._changed_s = self._clock.monotonic()
        self._counts.passed_rows += batch.passed
        return self._send(batch, self._codec)

    def _send(self, batch: Published, codec: RowCodec) -> int:
        """Append rows, acknowledged; returns their number. Rows that were not appended count as changed."""
        appends = records_of(batch, self._topics.rows, self.book.fences, self.wire, codec)
        if appends:
            start_ns = now_ns()
            try:
                firsts = self._writer.append(appends)
            except FreshetError:
                self._store.put_back_published(batch.tables)
                raise
            for append, first in zip(appends, firsts, strict=True):
                self._rows_next[append.partition] = max(
                    self._rows_next[append.partition], first + len(append.values)
                )
            record_rows_sends(appends, firsts, start_ns)
        self._counts.published_bytes += sum(append.values.data.nbytes for append in appends)
        self._counts.published_rows += len(batch)
        return len(batch)
