"""What leaves a shard: changed rows, published for serving and flushed to the row store (PROTOCOL 11 and 17).

A flush copies rows and offsets together, publishes what it copied, and only then writes it. What the log must
still hold for whoever starts from what is stored is held here, too (PROTOCOL 12).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import structlog

from freshet.clock import Clock
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import ROWS_PARTITIONS, Topics
from freshet.errors import Fenced, FreshetError, Unavailable
from freshet.log import EventLog
from freshet.observability.metrics import Metric, Reading
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

__all__ = ["DELTA_BYTES", "Flusher", "PublishedTo", "ShardCounts", "records_of"]

# --- Changed rows as records of `<model>.rows`. Pure.


DELTA_BYTES, REMOVED_BYTES = 512 << 10, 256 << 10
"""Of rows in a record, and of removed keys: a round of wide rows is several times what a log takes as one
record (16 MiB on Kafka by default, and often no more than 1 MiB on a managed service). Together they
stay below LEAST_TOPIC_BYTES (`freshet.config.spec.topics`)."""


def records_of(batch: Published, topic: str, fences: I64) -> list[Append]:
    """Records of a table, a partition of `rows` and a fence each, several where they would be too long; the
    partition follows from the bucket and is fixed (PROTOCOL 17). `fences` (B,) are those under which each
    bucket is owned."""
    records: dict[int, list[bytes]] = {}
    for part in batch.tables:
        kept, gone = _places(part.keys, fences), _places(part.removed, fences)
        for p, fence in sorted({*kept, *gone}):
            keys, values = (
                part.keys[kept.get((p, fence), _PUBLISHED_ROWS_NONE)],
                part.values[kept.get((p, fence), _PUBLISHED_ROWS_NONE)],
            )
            removed = part.removed[gone.get((p, fence), _PUBLISHED_ROWS_NONE)]
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


_PUBLISHED_ROWS_NONE = slice(0)


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


log = structlog.get_logger("freshet.paramserver")

_NONE: Mapping[Bucket, BucketMeta] = {}

PUBLISH_ROWS = 50_000
"""Rows copied out of the store at once; bounds the memory of a publish and the time that others wait for
it."""


@dataclass(slots=True)
class ShardCounts:
    """What the shard has done since it started."""

    pushes: int = 0
    skipped: int = 0
    refused: int = 0
    fenced: int = 0
    published_rows: int = 0
    flushed_rows: int = 0
    flushes: int = 0
    flushes_failed: int = 0  # of one flush as many as it was tried in vain
    replaced_buckets: int = 0
    room_blocks: dict[str, int] = field(default_factory=dict)
    """{partition of samples: blocks between the log's start and what a restart replays} as of the last flush,
    or the last attempt at one (PROTOCOL 12)"""


def store_metrics(of: str) -> tuple[Metric, ...]:
    """What a shard's table and its flushes count, as `freshet_<of>_…`."""
    return (
        Metric(f"freshet_{of}_created_rows", "counter", "rows", "Rows that came into being."),
        Metric(
            f"freshet_{of}_dropped_rows",
            "counter",
            "rows",
            "Rows dropped from memory, evicted or removed.",
        ),
        Metric(
            f"freshet_{of}_not_finite_gradients",
            "counter",
            "gradients",
            "Gradients of rows that were not applied because they, or their squared length, were not finite: "
            "those samples taught these rows nothing.",
        ),
        Metric(
            f"freshet_{of}_not_admitted_gradients",
            "counter",
            "gradients",
            "Gradients of rows that were dropped because their key had not been seen often enough "
            "(`admission` of the table).",
        ),
        Metric(
            f"freshet_{of}_replaced_buckets",
            "counter",
            "buckets",
            "Buckets that were written whole because the row store had lost or mixed writes.",
        ),
    )


def store_readings(of: str, counts: Mapping[str, int], replaced_buckets: int) -> dict[str, Reading]:
    """Readings of `store_metrics`; `counts` are those of `tables.Counts`."""
    return {
        f"freshet_{of}_created_rows": counts["created"],
        f"freshet_{of}_dropped_rows": counts["evicted"],
        f"freshet_{of}_not_finite_gradients": counts["not_finite"],
        f"freshet_{of}_not_admitted_gradients": counts["not_admitted"],
        f"freshet_{of}_replaced_buckets": replaced_buckets,
    }


@dataclass(frozen=True, slots=True)
class PublishedTo:
    """What serving can know: rows have learned from every sample below `applied` in the records below
    `rows_next`."""

    applied: Mapping[int, int]  # {partition of samples: next offset}
    rows_next: Mapping[int, int]  # {partition of rows: next offset}


class Flusher:
    """Publishes and flushes a shard's buckets. Thread-safe; `lock` is held while buckets come or go."""

    def __init__(
        self,
        spec: Spec,
        topics: Topics,
        log: EventLog,
        rows: RowStore,
        store: Store,
        counts: ShardCounts,
        clock: Clock,
        *,
        name: str,
        alone: bool,
        drop: Callable[[Sequence[Bucket]], None],
    ) -> None:
        """Own no bucket yet.

        Args:
            name: of the shard among others.
            alone: all buckets are under one claim; losing one ends the shard, and is not for `drop`.
            drop: told of buckets that turn out to be somebody else's.
        """
        self._spec, self._topics, self._log, self._rows, self._store = spec, topics, log, rows, store
        self._counts, self._clock, self._alone, self._drop = counts, clock, alone, drop
        self._hold_name = "-".join(filter(None, ("shard", spec.name, name)))
        self.book = FlushBook(buckets=spec.buckets, partitions=spec.partitions)
        self.lock = threading.RLock()  # flushes, and changes of what is owned; before `_publishing`
        self._publishing = threading.Lock()
        self._writer = log.writer()
        self._rows_next = [0] * ROWS_PARTITIONS
        self._unanswered: Flush | None = None  # sent, or about to be; of the thread that flushes
        self._begun_s: float | None = None  # when the flush began that is not written yet, monotonic
        self._has_taken = False  # a bucket; until then the log is held for what an earlier life left
        self.published = PublishedTo({}, {})

    @contextmanager
    def taking(self, metas: Mapping[Bucket, BucketMeta]) -> Iterator[None]:
        """Own claimed buckets, which are served within. Raises Unavailable before that. Under `lock`."""
        rows = {p: TopicPartition(self._topics.rows, p) for p in range(ROWS_PARTITIONS)}
        ends = {p: self._log.bounds(at).end for p, at in rows.items()}
        with self._publishing:
            self.book.claimed(metas)
            self._has_taken = True
            for p, end in ends.items():
                self._rows_next[p] = max(self._rows_next[p], end)
            yield
            # A flush publishes before it writes, so what is stored is published.
            self.published = self._published_to(self.smallest_applied())

    def publish(self) -> int:
        """Publish the rows that have changed so far; returns how many. Durable when it returns."""
        with self._publishing:
            return self._publish_all()

    def flush(self) -> None:
        """Write every loaded bucket's changed rows and its offsets, dirty or not (PROTOCOL 12).

        After a failure the next call first sends what was not answered, unchanged: whether it was written
        nobody knows, and a store that has it takes its repetition for done (PROTOCOL 11).
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
                self._measure_room(self.book.smallest_applied())  # retention moves on meanwhile
                raise
            self._begun_s = None
            self._counts.flushes += 1
            if self._has_taken:
                self.hold_retention()

    @property
    def unwritten_s(self) -> float:
        """For how long there has been a flush that is not written, tried once or often; 0 between flushes."""
        begun = self._begun_s
        return 0.0 if begun is None else self._clock.monotonic() - begun

    def smallest_applied(self) -> dict[int, int]:
        """{partition: smallest offset that a bucket has applied}; of none where no bucket is held."""
        return {p: min(offsets) for p, offsets in self._store.applied().items() if offsets}

    def hold_retention(self, claimed: Mapping[Bucket, BucketMeta] = _NONE) -> None:
        """Retention passes neither what a restart must replay nor what a reader must follow from; `claimed`:
        of these buckets, too, which are about to be owned."""
        samples = self.book.smallest_applied()
        for meta in claimed.values():
            for p, offset in meta.applied.items():
                samples[p] = min(offset, samples.get(p, offset))
        self._measure_room(samples)
        share = self._spec.buckets // ROWS_PARTITIONS
        held = {TopicPartition(self._topics.samples, p): offset for p, offset in samples.items()}
        for p in range(ROWS_PARTITIONS):
            smallest = self.book.smallest_rows_offset(range(p * share, (p + 1) * share))
            offsets = [m.rows_offset for b, m in claimed.items() if p * share <= b < (p + 1) * share]
            if smallest is not None or offsets:
                smallest = min([*offsets, *([] if smallest is None else [smallest])])
                held[TopicPartition(self._topics.rows, p)] = smallest
        self._log.hold(self._hold_name, held)

    def _measure_room(self, samples: Mapping[int, int]) -> None:
        """Of {partition: smallest offset in the row store}. A figure for operators: what was written is
        written, also where it cannot be had."""
        with suppress(Unavailable):
            found = self._log.all_bounds([TopicPartition(self._topics.samples, p) for p in samples])
            self._counts.room_blocks = {
                str(at.partition): samples[at.partition] - bounds.start for at, bounds in found.items()
            }

    # --- flush

    def _copied(self, collect: Callable[[], Flushed], *, whole: bool) -> Flush:
        """Copy what is to be written, and publish it. It is kept until the row store has answered."""
        with self._publishing:
            # Whatever a later delta holds must be at or past these offsets: readers follow from them.
            offsets = np.array(self._rows_next, np.int64)
            self._unanswered = self.book.next_flush(collect(), offsets, whole=whole)
            self._publish_all()
            return self._unanswered

    def _write(self, flush: Flush) -> None:
        """Send what was copied. Raises Unavailable if it is not known to be written, Fenced if the one claim
        of all buckets is lost; a shard among others drops the buckets that it has lost."""
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
        if len(again):  # the store holds something else than this owner wrote last (PROTOCOL 11)
            log.warning("buckets are written whole: the row store lost or mixed writes", buckets=len(again))
            self._write(self._copied(lambda: self._store.collect_whole(again.tolist()), whole=True))

    # --- publish

    def _publish_all(self) -> int:
        """All pieces of a round; returns rows. Under the lock.

        What is applied when the round starts has marked its rows by then, so the round, or one before it,
        has appended them all once every bucket had its turn. A round does not wait for what is pushed
        meanwhile: under load there is always more.
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
        """One bounded piece of publishing, acknowledged; returns rows. Under the lock."""
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
