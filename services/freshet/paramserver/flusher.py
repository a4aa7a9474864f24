"""Publishing and flushing of a shard's changed rows (PROTOCOL 11 and 17).

A flush copies rows and offsets together, publishes the copied rows, and writes them last. The flusher also
holds retention of the log for a restart from the stored rows (PROTOCOL 12).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import ROWS_PARTITIONS, Topics, topics_of
from freshet.errors import Fenced, FreshetError, Unavailable
from freshet.log import EventLog
from freshet.observability.metrics import Metric
from freshet.observability.spans import record_rows_sends
from freshet.observability.tracing import now_ns
from freshet.paramserver.core import FlushBook
from freshet.rows.deltas import RowDelta, encode_rows
from freshet.rows.store import RowStore
from freshet.tables import Flushed, Published, Store
from freshet.types import (
    I64,
    U64,
    Append,
    Bucket,
    BucketMeta,
    BytesColumn,
    Fence,
    Flush,
    TimeMs,
    TopicPartition,
    bucket_of,
)

__all__ = ["DELTA_BYTES", "Flusher", "PublishedTo", "ShardContext", "ShardCounts", "records_of"]

# --- Changed rows as records of `<model>.rows`. Pure.


DELTA_BYTES, REMOVED_BYTES = 512 << 10, 256 << 10
"""Most bytes of rows, and of removed keys, in a record. A round of wide rows is several times the largest
record of a log (16 MiB on Kafka by default, often 1 MiB on a managed service). Their sum stays below
LEAST_TOPIC_BYTES (`freshet.config.spec.topics`)."""


def records_of(batch: Published, topic: str, fences: I64) -> list[Append]:
    """Encode changed rows as records, each of one table, partition of `rows` and fence.

    The partition follows from the bucket and is fixed (PROTOCOL 17). Rows that exceed the record size are
    split.

    Args:
        batch: the changed rows.
        topic: the topic `rows` of the model.
        fences: (B,) int64, the fence under which each bucket is owned.
    """
    records: dict[int, list[bytes]] = {}
    for part in batch.tables:
        kept, removed_at = _positions(part.keys, fences), _positions(part.removed, fences)
        for p, fence in sorted({*kept, *removed_at}):
            at = kept.get((p, fence), _EMPTY)
            keys, values = part.keys[at], part.values[at]
            removed = part.removed[removed_at.get((p, fence), _EMPTY)]
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


_EMPTY = slice(0)


def _positions(keys: U64, fences: I64) -> dict[tuple[int, int], slice | I64]:
    """{(partition of `rows`, fence): positions of its keys}.

    The positions are a slice, hence no copy, where keys are sorted and a partition's buckets have one fence;
    this is the usual case.
    """
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


log = structlog.get_logger("freshet.paramserver")

_NONE: Mapping[Bucket, BucketMeta] = {}

PUBLISH_ROWS = 50_000
"""Most rows copied out of the store at once; bounds memory, and the time for which lookups wait."""


@dataclass(slots=True)
class ShardCounts:
    """Counts of a shard since its start."""

    pushes: int = 0
    skipped: int = 0
    refused: int = 0
    fenced: int = 0
    published_rows: int = 0
    flushed_rows: int = 0
    flushes: int = 0
    flushes_failed: int = 0  # attempts; one flush may fail several times
    replaced_buckets: int = 0
    room_blocks: dict[str, int] = field(default_factory=dict)
    """{partition of samples: blocks between the log's start and a restart's replay} as of the last attempt at
    a flush (PROTOCOL 12)"""


def store_metrics(of: str) -> tuple[Metric, ...]:
    """Metrics of a shard's table and flushes, named `freshet_<of>_…`."""
    return (
        Metric(f"freshet_{of}_created_rows", "counter", "rows", "Rows created.", at="store.created"),
        Metric(
            f"freshet_{of}_dropped_rows",
            "counter",
            "rows",
            "Rows dropped from memory, evicted or removed.",
            at="store.evicted",
        ),
        Metric(
            f"freshet_{of}_not_finite_gradients",
            "counter",
            "gradients",
            "Row gradients that were not applied because they, or their squared length, were not finite; "
            "those samples did not change these rows.",
            at="store.not_finite",
        ),
        Metric(
            f"freshet_{of}_not_admitted_gradients",
            "counter",
            "gradients",
            "Row gradients that were dropped because their key had not been seen often enough (`admission` "
            "of the table).",
            at="store.not_admitted",
        ),
        Metric(
            f"freshet_{of}_replaced_buckets",
            "counter",
            "buckets",
            "Buckets that were written whole because the row store had lost or mixed writes.",
            at="shard.replaced_buckets",
        ),
    )


@dataclass(frozen=True, slots=True)
class PublishedTo:
    """Progress of publishing: samples below `applied` are learned in the records below `rows_next`."""

    applied: Mapping[int, int]  # {partition of samples: next offset}
    rows_next: Mapping[int, int]  # {partition of rows: next offset}


@dataclass(frozen=True, slots=True)
class ShardContext:
    """Model, stores and time of a shard."""

    spec: Spec
    spec_hash: str
    log: EventLog
    rows: RowStore
    clock: Clock = SYSTEM_CLOCK

    @property
    def topics(self) -> Topics:
        """Topics of the model."""
        return topics_of(self.spec)


class Flusher:
    """Publishes and flushes a shard's buckets. Thread-safe; hold `lock` to add or remove buckets."""

    def __init__(
        self,
        context: ShardContext,
        store: Store,
        counts: ShardCounts,
        *,
        name: str,
        alone: bool,
        drop: Callable[[Sequence[Bucket]], None],
    ) -> None:
        """Start without buckets.

        Args:
            context: model and stores.
            store: table of the shard.
            counts: counts to update.
            name: name of the shard.
            alone: all buckets are under one claim, and the loss of one ends the shard.
            drop: called with buckets that another shard owns, unless `alone`.
        """
        spec = context.spec
        self._spec, self._topics, self._log, self._rows = spec, context.topics, context.log, context.rows
        self._store, self._counts, self._clock = store, counts, context.clock
        self._alone, self._drop = alone, drop
        self._hold_name = "-".join(filter(None, ("shard", spec.name, name)))
        self.book = FlushBook(buckets=spec.buckets, partitions=spec.partitions)
        self.lock = threading.RLock()  # for flushes and ownership changes; acquired before `_publishing`
        self._publishing = threading.Lock()
        self._writer = context.log.writer()
        self._rows_next = [0] * ROWS_PARTITIONS
        self._unanswered: Flush | None = None  # copied, and not known to be written
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
        """Publish the rows changed so far and return their number. The records are durable on return."""
        with self._publishing:
            return self._publish_all()

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
                self._write(self._copied(self._store.collect_flush, whole=False))
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
        self._log.hold(self._hold_name, held)

    def _measure_retention(self, samples: Mapping[int, int]) -> None:
        """Update `room_blocks` by {partition: smallest stored offset}; the old figures stay if the log is
        away."""
        with suppress(Unavailable):
            found = self._log.all_bounds([TopicPartition(self._topics.samples, p) for p in samples])
            self._counts.room_blocks = {
                str(at.partition): samples[at.partition] - bounds.start for at, bounds in found.items()
            }

    # --- flush

    def _copied(self, collect: Callable[[], Flushed], *, whole: bool) -> Flush:
        """Copy and publish changed rows; the flush is kept until the row store has answered."""
        with self._publishing:
            # Later deltas are at or past these offsets, so readers follow from them.
            offsets = np.array(self._rows_next, np.int64)
            self._unanswered = self.book.next_flush(collect(), offsets, whole=whole)
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
        self._drop([Bucket(b) for b in fenced.tolist()])
        if not flush.whole:
            self._counts.flushed_rows += flush.runs.rows
        elif len(again):
            raise Unavailable(f"bucket {again[0]} could not be written whole; it is tried again")
        else:
            self._counts.replaced_buckets += len(flush.buckets)
        if len(again):  # the store's meta is not this owner's last (PROTOCOL 11)
            log.warning("buckets are written whole: the row store lost or mixed writes", buckets=len(again))
            self._write(self._copied(lambda: self._store.collect_whole(again.tolist()), whole=True))

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
        appends = records_of(batch, self._topics.rows, self.book.fences)
        if appends:
            start_ns = now_ns()
            try:
                firsts = self._writer.append(appends)
            except FreshetError:
                self._store.put_back_published(batch)
                raise
            for append, first in zip(appends, firsts, strict=True):
                self._rows_next[append.partition] = max(
                    self._rows_next[append.partition], first + len(append.values)
                )
            record_rows_sends(appends, firsts, start_ns)
        self._counts.published_rows += len(batch)
        return len(batch)
