"""Following rows: a bucket's rows from the row store, then every delta from the offset its meta names
(PROTOCOL 17)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from freshet.errors import Corrupt, DataLost, FreshetError, Mismatch, Unavailable
from freshet.inference.core import BucketView, explain
from freshet.inference.tracing import followed
from freshet.seams.eventlog import EventLog, Reader
from freshet.seams.rowstore import RowStore
from freshet.spec.topics import ROWS_PARTITIONS
from freshet.tracing import active
from freshet.types import F32, U64, Bucket, Records, RowRuns, TopicPartition
from freshet.wire.rows import decode_rows

__all__ = ["RowFollower", "RowSink", "RowsState"]

log = structlog.get_logger(__name__)

POLL_RECORDS = 500
BUCKETS_AT_ONCE = 64
RETRY_S = 0.5


class RowSink(Protocol):
    """A table of rows for serving: values only, no optimiser state. Reads may go on while it is written."""

    def import_runs(self, runs: RowRuns) -> None:
        """Take rows as the row store keeps them."""

    def import_values(self, table: int, keys: U64, values: F32, *, event_time_ms: int = 0) -> object:
        """Set rows whole: (N,) keys, (N, S) values that have learned from events up to this time."""

    def remove(self, table: int, keys: U64) -> object:
        """Forget rows; unknown keys are no error."""


@dataclass(frozen=True, slots=True)
class RowsState:
    """How far the rows served have come."""

    sink: RowSink | None  # None until the row store was read and the log followed to its end
    event_time_ms: int  # newest event time that a served row has learned from; 0: none known
    next: Mapping[int, int] = field(default_factory=dict)  # {partition of `rows`: next offset}
    corrupt: int = 0  # deltas that could not be read and were left out
    reason: str = "the row store has not been read yet"  # why nothing is served


class RowFollower:
    """Keeps one table of rows up to date, on a thread of its own. `state` may be read from any thread."""

    def __init__(
        self,
        log_: EventLog,
        store: RowStore,
        topic: str,
        make_sink: Callable[[], RowSink],
        *,
        spec_hash: str,
        wait_s: float,
    ) -> None:
        self._log, self._store, self._topic, self._make_sink = log_, store, topic, make_sink
        self._spec_hash, self._wait_s = spec_hash, wait_s
        self.state = RowsState(None, 0)

    def run(self, stop: threading.Event) -> None:
        """Follow until told to stop. What is away for a while is tried again; what was served stays
        served. The row store is read anew only where the log cannot be followed from where it was left."""
        while not stop.is_set():
            try:
                self._follow(stop)
            except (Unavailable, DataLost) as error:
                log.warning("rows cannot be followed, starting over", reason=str(error))
                self._say(f"rows cannot be followed: {error}")
                stop.wait(RETRY_S)
            except FreshetError as error:
                log.error("rows cannot be served", reason=str(error))
                self._say(str(error))
                stop.wait(RETRY_S)
            except Exception as error:  # a fault of ours: what is served must not stand still unnoticed
                log.error("following rows failed, starting over", exc_info=error)
                self._say(f"following rows failed: {explain(error)}")
                stop.wait(RETRY_S)

    def _say(self, reason: str) -> None:
        old = self.state
        self.state = RowsState(old.sink, old.event_time_ms, old.next, old.corrupt, reason)

    def _follow(self, stop: threading.Event) -> None:
        identity = self._store.identity()
        if identity is None:
            self._say("the model has not been created yet: start its trainer")
            stop.wait(self._wait_s)
            return
        if identity.spec_hash != self._spec_hash:
            raise Mismatch(
                f"the row store belongs to spec {identity.spec_hash[:12]}, this server to "
                f"{self._spec_hash[:12]}; start it with the spec of the store"
            )
        table = _Table(self._make_sink(), BucketView(identity.buckets), corrupt=self.state.corrupt)
        self._bootstrap(table, stop)
        while not stop.is_set():
            try:
                self._read(table, stop)
            except Unavailable as error:  # what was read holds, and the log goes on from there
                log.warning("rows cannot be followed, tried again", reason=str(error))
                self._say(f"rows cannot be followed: {error}")
                stop.wait(RETRY_S)

    def _bootstrap(self, table: _Table, stop: threading.Event) -> None:
        """Read every bucket; then `table.next` says where to follow each partition of `rows` from."""
        buckets = table.view.buckets
        for first in range(0, buckets, BUCKETS_AT_ONCE):
            if stop.is_set():
                return
            group = [Bucket(b) for b in range(first, min(first + BUCKETS_AT_ONCE, buckets))]
            for bucket, meta in self._store.metas(group).items():  # before the rows, from the same store
                table.view.scanned(bucket, meta.fence, meta.rows_offset)
                partition = bucket * ROWS_PARTITIONS // buckets
                table.next[partition] = min(table.next.get(partition, meta.rows_offset), meta.rows_offset)
                table.clock_ms = max(table.clock_ms, meta.clock_ms)
            for runs in self._store.scan(group):
                table.sink.import_runs(runs)

    def _read(self, table: _Table, stop: threading.Event) -> None:
        """Follow the log from where the table is; it serves from the moment it has reached the log's end."""
        reader = self._log.reader()
        try:
            reader.assign({TopicPartition(self._topic, p): offset for p, offset in table.next.items()})
            ends = {p: self._log.bounds(TopicPartition(self._topic, p)).end for p in table.next}
            self._apply(reader, table, ends, stop)
        finally:
            reader.close()

    def _apply(self, reader: Reader, table: _Table, ends: Mapping[int, int], stop: threading.Event) -> None:
        """Apply deltas as they come."""
        caught_up = False
        while not stop.is_set():
            if not caught_up and all(table.next[p] >= end for p, end in ends.items()):
                caught_up = True
                log.info("rows are served", rows_next=dict(table.next))
            if caught_up:
                self.state = RowsState(table.sink, table.clock_ms, dict(table.next), table.corrupt, "")
            for partition, records in reader.poll(POLL_RECORDS, self._wait_s):
                tracer = active()
                began_ns = 0 if tracer is None else tracer.now_ns()
                table.apply(partition, records)
                if tracer is not None:
                    followed(tracer, partition.topic, partition.partition, records.offsets, began_ns)
                table.next[partition.partition] = records.next_offset


@dataclass(slots=True)
class _Table:
    """A table of rows on its way to being served, and what is known of its buckets."""

    sink: RowSink
    view: BucketView
    corrupt: int
    clock_ms: int = 0
    next: dict[int, int] = field(default_factory=dict)

    def apply(self, at: TopicPartition, records: Records) -> None:
        """Take deltas in the log's order; one that cannot be read is counted and left out."""
        for offset, record in zip(records.offsets.tolist(), records.values, strict=True):
            try:
                self._take(offset, record)
            except Corrupt as error:
                where = {"topic": at.topic, "partition": at.partition, "offset": offset}
                log.error("row delta left out", **where, reason=str(error))
                self.corrupt += 1

    def _take(self, offset: int, record: bytes) -> None:
        delta = decode_rows(record)
        wanted, time_ms = self.view.wanted(offset, delta.fence, delta.keys), delta.event_time_ms
        if wanted.all():
            self.sink.import_values(delta.table, delta.keys, delta.values, event_time_ms=time_ms)
        elif wanted.any():
            keys, values = delta.keys[wanted], delta.values[wanted]
            self.sink.import_values(delta.table, keys, values, event_time_ms=time_ms)
        gone = self.view.wanted(offset, delta.fence, delta.removed)
        if gone.any():
            self.sink.remove(delta.table, delta.removed[gone])
        self.clock_ms = max(self.clock_ms, delta.event_time_ms)
