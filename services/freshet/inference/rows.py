"""The follower of rows: it reads the row store, then applies deltas from the offset of each bucket's meta.

See PROTOCOL 17. Damage costs only the damaged rows: a damaged delta is skipped, a row that is not finite
keeps its former value, and of a damaged bucket the intact pages are read. Rows of its other pages serve as
never learned until a delta contains them; `RowsState.damaged` counts them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import structlog

from freshet.config.settings import Inference as Settings
from freshet.config.spec.identity import explain_defaults
from freshet.config.spec.layout import Layout
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import (
    ConfigError,
    Corrupt,
    DataLost,
    FreshetError,
    Mismatch,
    Unavailable,
    first_line,
)
from freshet.inference.row_reads import Unread, unread_of
from freshet.log import EventLog, Reader
from freshet.observability.skipped_state import skip
from freshet.observability.spans import record_rows_applied
from freshet.observability.tracing import now_ns
from freshet.rows.deltas import decode_rows
from freshet.rows.store import RowStore, TellsDamage
from freshet.tables import NO_BOUND, RowsBound, SsdRows, Store, UniqueKeys
from freshet.tables.runs import sound_runs
from freshet.types import (
    F32,
    I64,
    U8,
    U32,
    U64,
    Bool,
    Bucket,
    BucketMeta,
    Fence,
    Records,
    RowRuns,
    TopicPartition,
    bucket_of,
)

SSD_FOLDER, MEMORY_BYTES = "FRESHET_INFERENCE_SSD_FOLDER", "FRESHET_INFERENCE_MEMORY_BYTES"


def rows_bound(settings: Settings) -> RowsBound:
    """Return the memory of a server's rows, and where they go beyond it.

    Raises ConfigError if one of memory and folder is set without the other.
    """
    folder, most = settings.ssd_folder, settings.memory_bytes
    if folder and not most:
        raise ConfigError("environment", MEMORY_BYTES, most, f"bytes beyond which rows go to {SSD_FOLDER}")
    if most and not folder:
        raise ConfigError(
            "environment", SSD_FOLDER, folder, f"a folder on a local disk for rows beyond {MEMORY_BYTES}"
        )
    return RowsBound(most, folder, settings.ssd_bytes)


NEVER_LATER_S = 0xFFFFFFFF
"""Latest second that a row can hold, in 2106."""


class ServingTable:
    """Rows for lookups, which may run during writes. One thread writes.

    Rows beyond a bound of memory are on a local disk: a lookup reports keys that may have one there as
    PERHAPS_ON_DISK, and `fetch` reads them.
    """

    def __init__(
        self, layout: Layout, *, buckets: int, partitions: int, seed: int, bound: RowsBound = NO_BOUND
    ) -> None:
        """Hold no row yet. Raises ConfigError if the bound's folder cannot hold rows."""

        def store(*, serving: bool) -> Store:
            return Store(
                layout, buckets=buckets, partitions=partitions, seed=seed, serving=serving, changes=False
            )

        self._layout = layout
        self._buckets = buckets
        self._rows = store(serving=True)
        if bound.ssd_folder:
            self._rows.keep_on_disk(bound)
        self.native = self._rows.native  # for native code that scores with it
        self._unpacker = store(serving=False)  # empty: it only unpacks rows
        self._group_of = {table: group.index for group in layout.groups for table in group.tables}

    def lookup(
        self,
        group: int,
        keys: UniqueKeys,
        out: F32,
        *,
        create: bool = False,
        found: U8 | None = None,
        touched: U32 | None = None,
    ) -> None:
        """Write the rows of U keys into `out` (U, S) float32, zeros if missing; see `Store.lookup`."""
        self._rows.lookup(group, keys, out, create=create, found=found, touched=touched)

    def import_runs(self, runs: RowRuns) -> None:
        """Import rows in the row store's format. Raises Corrupt if they do not fit the spec."""
        for part in self._unpacker.unpack_runs(runs):
            self._rows.import_values(part.table, part.keys, part.values, touched=part.touched)

    def import_sound(self, runs: RowRuns) -> int:
        """Import the valid rows of runs that `import_runs` refuses; return the number of the others."""
        sound, reasons = sound_runs(runs, self._unpacker.unpack_runs)
        self.import_runs(sound)
        return len(reasons)

    def import_values(self, table: int, keys: U64, values: F32, *, event_time_ms: int = 0) -> None:
        """Set rows: (N,) uint64 keys, (N, S) float32 values that learned from events up to this time.

        Raises Corrupt if the table is unknown or has another width.
        """
        group = self._group_of.get(table)
        if group is None or values.shape[1] != self._layout.groups[group].width:
            raise Corrupt(
                f"a delta of table {table} with {values.shape[1]} floats a row does not fit the spec"
            )
        touched = np.full(len(keys), min(max(event_time_ms, 0) // 1000, NEVER_LATER_S), np.uint32)
        self._rows.import_values(table, keys, values, touched=touched)

    def remove(self, table: int, keys: U64) -> None:
        """Remove the rows of (N,) uint64 keys, if any. Raises Corrupt if the table is unknown."""
        if table not in self._group_of:
            raise Corrupt(f"removals of table {table}, which the spec does not have")
        self._rows.remove(table, keys)

    def fetch(self, keys: Unread) -> Unread:
        """Read rows from disk into memory; returns the keys that have none.

        Raises OSError if the disk cannot be read, or is not as it was written.
        """
        absent = set[tuple[int, int]]()
        for group in self._layout.groups:
            mine = sorted((key, table) for table, key in keys if self._group_of[table] == group.index)
            if not mine:
                continue
            numbers = np.array([key for key, _ in mine], np.uint64)
            tables = np.array([table for _, table in mine], np.uint8)
            starts = np.searchsorted(bucket_of(numbers, self._buckets), np.arange(self._buckets + 1))
            here = self.native.fetch(group.index, numbers, tables, starts.astype(np.uint32))
            absent |= unread_of(tables[here == 0], numbers[here == 0])
        return frozenset(absent)

    def check_disk(self) -> None:
        """Raise DataLost if rows on disk could not be read or written, or are not as they were written."""
        try:
            self.native.check_cold()
        except OSError as error:
            raise DataLost(f"rows on the local disk are lost: {error}") from error

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows in memory with their indexes."""
        return self._rows.memory_bytes

    def ssd_rows(self) -> SsdRows:
        """Return what is on the local disk."""
        return self._rows.ssd_rows()

    def rows(self) -> dict[int, int]:
        """Return {table id: number of rows}."""
        return dict(self._rows.memory().rows)


log = structlog.get_logger(__name__)

POLL_RECORDS = 500
BUCKETS_AT_ONCE = 64
RETRY_S = 0.5
LONGEST_RETRY_S = 60.0
"""Bound of the backoff while rows are lost each time that they are read anew: a disk that is broken."""

RECHECK_S = 60.0
"""Interval at which damaged buckets are read again: their shard may have rewritten them."""

MOST_DAMAGED = 0.5
"""Bound of the share of damaged buckets; above it the store belongs to another model, or fails."""


class RowSink(Protocol):
    """A table of rows for serving, without optimiser state. Readers may run during writes.

    Letters: N keys, S floats of a row.
    """

    def import_runs(self, runs: RowRuns) -> None:
        """Import rows in the row store's format. Raises Corrupt if they do not fit the spec."""

    def import_sound(self, runs: RowRuns) -> int:
        """Import the valid rows of runs that `import_runs` refuses; return the number of the others."""

    def import_values(self, table: int, keys: U64, values: F32, *, event_time_ms: int = 0) -> object:
        """Set rows: (N,) uint64 keys, (N, S) float32 values that learned from events up to this time."""

    def remove(self, table: int, keys: U64) -> object:
        """Remove the rows of (N,) uint64 keys; unknown keys are no error."""

    def check_disk(self) -> None:
        """Raise DataLost if rows of the table are lost."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Unreadable rows of one bucket of the row store."""

    rows: int  # rows of its meta that were not read
    reason: str


class _Readable(Exception):
    """All damaged buckets can be read again."""


@dataclass(frozen=True, slots=True)
class RowsState:
    """A snapshot of the rows served."""

    sink: RowSink | None  # None until the row store and the log were read to the end
    event_time_ms: int  # newest event time that a served row has learned from; 0: none
    next: Mapping[int, int] = field(default_factory=dict)  # {partition of `rows`: next offset}
    corrupt: int = 0  # damaged deltas that were skipped
    not_finite: int = 0  # rows that were skipped because a value was not finite
    damaged: Mapping[int, Damage] = field(default_factory=dict)  # by bucket, at the store's last read
    reason: str = "the row store has not been read yet"  # problem with the rows; "": none


class RowFollower:
    """Updates a table of rows on a thread. `state` may be read from any thread."""

    def __init__(
        self,
        log_: EventLog,
        store: RowStore,
        topic: str,
        make_sink: Callable[[], RowSink],
        *,
        spec_hash: str,
        wait_s: float,
        recheck_s: float = RECHECK_S,
        control: str | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            wait_s: longest poll of the log.
            recheck_s: interval at which damaged buckets are read again.
            control: topic that defines fences by its offsets: a delta with a fence beyond its end is damaged.
        """
        self._recheck_s = recheck_s
        self._control = None if control is None else TopicPartition(control, 0)
        self._log, self._store, self._topic, self._make_sink = log_, store, topic, make_sink
        self._spec_hash, self._wait_s = spec_hash, wait_s
        self.state = RowsState(None, 0)

    def run(self, stop: threading.Event) -> None:
        """Follow until `stop` is set, and retry after errors; the last table stays served.

        The row store is read again only if the log cannot be followed from the table's offsets.
        """
        pause_s = RETRY_S
        while not stop.is_set():
            began_s = time.monotonic()
            try:
                self._follow(stop)
            except _Readable:
                log.info("damaged buckets are readable, rows are read again", buckets=len(self.state.damaged))
            except (Unavailable, DataLost, Corrupt) as error:
                log.warning("rows cannot be followed, starting over", reason=str(error))
                self._report(f"rows cannot be followed: {error}")
                again = not isinstance(error, Unavailable) and time.monotonic() < began_s + LONGEST_RETRY_S
                pause_s = min(2 * pause_s, LONGEST_RETRY_S) if again else RETRY_S
                stop.wait(pause_s)
            except FreshetError as error:
                log.error("rows cannot be served", reason=str(error))
                self._report(str(error))
                stop.wait(RETRY_S)
            except Exception as error:  # a bug must not end the thread, or rows would age
                log.error("following rows failed, starting over", exc_info=error)
                self._report(f"following rows failed: {first_line(error)}")
                stop.wait(RETRY_S)

    def _end_of_fences(self) -> int:
        """Return an upper bound of all fences."""
        return 1 << 63 if self._control is None else self._log.bounds(self._control).end

    def _report(self, reason: str) -> None:
        old = self.state
        self.state = replace(old, reason=reason)

    def _follow(self, stop: threading.Event) -> None:
        identity = self._store.identity()
        if identity is None:
            self._report("the model has not been created yet: start its trainer")
            stop.wait(self._wait_s)
            return
        if identity.spec_hash != self._spec_hash:
            raise Mismatch(
                f"the row store belongs to spec {identity.spec_hash[:12]}, this server to "
                f"{self._spec_hash[:12]}\n"
                + (
                    explain_defaults(self._spec_hash, identity.spec_hash)
                    or "  start it with the spec of the store"
                )
            )
        corrupt, not_finite = self.state.corrupt, self.state.not_finite  # not the state: it has the old table
        table = FollowedTable(
            self._make_sink(), BucketView(identity.buckets), corrupt, not_finite, self._end_of_fences
        )
        self._bootstrap(table, stop)
        while not stop.is_set():
            try:
                self._read(table, stop)
            except Unavailable as error:  # the table stays valid: continue from its offsets
                log.warning("rows cannot be followed, retrying", reason=str(error))
                self._report(f"rows cannot be followed: {error}")
                stop.wait(RETRY_S)

    def _bootstrap(self, table: FollowedTable, stop: threading.Event) -> None:
        """Read every bucket, and set `table.next` to the offsets to follow `rows` from.

        Raises Corrupt if more than MOST_DAMAGED of the buckets are damaged, DataLost if the local disk fails.
        """
        buckets = table.view.buckets
        for first in range(0, buckets, BUCKETS_AT_ONCE):
            if stop.is_set():
                return
            group = [Bucket(b) for b in range(first, min(first + BUCKETS_AT_ONCE, buckets))]
            metas = self._metas(group, table)  # before the rows, from the same store
            for bucket, meta in metas.items():
                # A claim that a failover loses must not hide what the owner before goes on to publish.
                fence = meta.fence if meta.writer is None else meta.writer
                table.view.scanned(bucket, fence, meta.rows_offset)
                table.follow_from(bucket, meta.rows_offset)
                table.clock_ms = max(table.clock_ms, meta.clock_ms)
            try:
                for runs in self._store.scan(group):
                    table.sink.import_runs(runs)
            except Corrupt:
                for bucket in group:
                    self._bootstrap_alone(bucket, metas.get(bucket), table)
            table.sink.check_disk()  # rows that cannot leave memory would fill it
        if len(table.damaged) > MOST_DAMAGED * buckets:
            worst, damage = next(iter(table.damaged.items()))
            raise Corrupt(
                f"{len(table.damaged)} of {buckets} buckets of the row store cannot be read, bucket {worst} "
                f"first: {damage.reason}"
            )
        for number, damage in table.damaged.items():
            # The log may still contain the damaged rows: a delta has whole rows, and the last one counts.
            table.view.scanned(number, -1, 0)
            at = TopicPartition(self._topic, number * ROWS_PARTITIONS // buckets)
            table.follow_from(number, self._log.bounds(at).start)
            skip("row_page", f"bucket {number} of the row store", damage.reason, max(damage.rows, 1))

    def _metas(self, group: Sequence[Bucket], table: FollowedTable) -> Mapping[Bucket, BucketMeta]:
        """Return the readable metas, and record the other buckets as damaged."""
        try:
            return self._store.metas(group)
        except Corrupt:
            found: dict[Bucket, BucketMeta] = {}
            for bucket in group:
                try:
                    found.update(self._store.metas([bucket]))
                except Corrupt as error:
                    table.damaged[bucket] = Damage(0, str(error))
            return found

    def _bootstrap_alone(self, bucket: Bucket, meta: BucketMeta | None, table: FollowedTable) -> None:
        """Read the intact pages of one bucket."""
        try:
            for runs in self._store.scan([bucket]):
                table.sink.import_runs(runs)
            return
        except Corrupt as error:
            reasons = [str(error)]
        rows, wrong = 0, 0
        if isinstance(self._store, TellsDamage):
            try:
                sound = self._store.scan_sound(bucket)
                reasons = [*sound.damage] or reasons
                wrong = table.sink.import_sound(sound.runs)
                rows = sound.runs.rows - wrong
            except Corrupt as error:
                reasons = [str(error)]
        table.not_finite += wrong
        missing = max((meta.rows if meta is not None else 0) - rows, wrong)
        table.damaged[bucket] = Damage(missing, "; ".join(reasons)[:1000])

    def _check_damage(self, table: FollowedTable) -> None:
        """Raises _Readable if all damaged buckets can be read again.

        They are not imported into the present table: the store is behind the deltas applied since.
        """
        if not table.damaged or time.monotonic() < table.recheck_at_s:
            return
        table.recheck_at_s = time.monotonic() + self._recheck_s
        try:
            damaged = [Bucket(b) for b in table.damaged]
            self._store.metas(damaged)
            sink = self._make_sink()
            for runs in self._store.scan(damaged):
                sink.import_runs(runs)
        except (FreshetError, OSError):
            return
        raise _Readable

    def _read(self, table: FollowedTable, stop: threading.Event) -> None:
        """Follow the log from the table's offsets; serve the table once it has reached the log's end."""
        reader = self._log.reader()
        try:
            reader.assign({TopicPartition(self._topic, p): offset for p, offset in table.next.items()})
            ends = {p: self._log.bounds(TopicPartition(self._topic, p)).end for p in table.next}
            self._apply(reader, table, ends, stop)
        finally:
            reader.close()

    def _apply(
        self, reader: Reader, table: FollowedTable, ends: Mapping[int, int], stop: threading.Event
    ) -> None:
        """Apply deltas until `stop` is set."""
        caught_up = False
        while not stop.is_set():
            if not caught_up and all(table.next[p] >= end for p, end in ends.items()):
                caught_up = True
                log.info("rows are served", rows_next=dict(table.next))
            table.sink.check_disk()
            if caught_up:
                self.state = table.state()
                self._check_damage(table)
            for partition, records in reader.poll(POLL_RECORDS, self._wait_s):
                start_ns = now_ns()
                table.apply(partition, records)
                record_rows_applied(partition.topic, partition.partition, records.offsets, start_ns)
                table.next[partition.partition] = records.next_offset


@dataclass(slots=True)
class FollowedTable:
    """A table of rows with the state of its buckets."""

    sink: RowSink
    view: BucketView
    corrupt: int
    not_finite: int
    end_of_fences: Callable[[], int]
    fence_below: int = 0  # last result of `end_of_fences`
    clock_ms: int = 0
    next: dict[int, int] = field(default_factory=dict)
    damaged: dict[int, Damage] = field(default_factory=dict)
    recheck_at_s: float = field(default_factory=time.monotonic)

    def state(self) -> RowsState:
        """Return a snapshot."""
        reason = ""
        if self.damaged:
            rows = sum(damage.rows for damage in self.damaged.values())
            bucket, first = next(iter(self.damaged.items()))
            reason = (
                f"{rows} rows of {len(self.damaged)} damaged buckets of the row store are not served, "
                f"bucket {bucket} "
                f"first: {first.reason}"
            )
        damaged = dict(self.damaged)
        return RowsState(
            self.sink, self.clock_ms, dict(self.next), self.corrupt, self.not_finite, damaged, reason
        )

    def follow_from(self, bucket: int, offset: int) -> None:
        """Lower the offset from which a bucket's partition of `rows` is followed."""
        partition = bucket * ROWS_PARTITIONS // self.view.buckets
        self.next[partition] = min(self.next.get(partition, offset), offset)

    def apply(self, at: TopicPartition, records: Records) -> None:
        """Apply deltas in order; count and skip damaged ones."""
        for offset, record in zip(records.offsets.tolist(), records.values, strict=True):
            if not record:  # a tombstone
                continue
            where = f"{at} at offset {offset}"
            try:
                self._apply_delta(offset, record, where)
            except Corrupt as error:
                self.corrupt += 1
                skip("row_delta", where, str(error))

    def _apply_delta(self, offset: int, record: bytes, where: str) -> None:
        delta = decode_rows(record)
        if delta.fence >= self.fence_below:  # a head has no checksum; a wrong high fence would persist
            self.fence_below = self.end_of_fences()
            if delta.fence >= self.fence_below:
                raise Corrupt(f"row delta: expected a fence below {self.fence_below}, found {delta.fence}")
        wanted, time_ms = self.view.wanted(offset, delta.fence, delta.keys), delta.event_time_ms
        with np.errstate(all="ignore"):  # one pass; rows are checked only if the sum is not finite
            total = float(delta.values.sum())
        if not math.isfinite(total):
            finite = np.isfinite(delta.values).all(1)
            wrong = int((~finite).sum())
            if wrong:
                self.not_finite += wrong
                skip("row_value", where, f"{wrong} rows of table {delta.table} are not finite", wrong)
            wanted &= finite
        if wanted.all():
            self.sink.import_values(delta.table, delta.keys, delta.values, event_time_ms=time_ms)
        elif wanted.any():
            keys, values = delta.keys[wanted], delta.values[wanted]
            self.sink.import_values(delta.table, keys, values, event_time_ms=time_ms)
        gone = self.view.wanted(offset, delta.fence, delta.removed)
        if gone.any():
            self.sink.remove(delta.table, delta.removed[gone])
        self.clock_ms = max(self.clock_ms, delta.event_time_ms)


@dataclass(slots=True, eq=False)
class BucketView:
    """Fences and offsets by bucket, which decide whether a delta applies (PROTOCOL 17)."""

    buckets: int
    fences: I64 = field(init=False)  # highest fence seen
    offsets: I64 = field(init=False)  # the scanned row store contained all deltas below

    def __post_init__(self) -> None:
        self.fences = np.full(self.buckets, -1, np.int64)
        self.offsets = np.zeros(self.buckets, np.int64)

    def scanned(self, bucket: int, fence: int, rows_offset: int) -> None:
        """Record the meta of a bucket that was read from the row store; the meta is read first."""
        self.fences[bucket] = fence
        self.offsets[bucket] = rows_offset

    def wanted(self, offset: int, fence: Fence, keys: U64) -> Bool:
        """Select the (N,) uint64 keys of a delta that apply: (N,) bool; record the fence.

        Keys do not apply if their bucket has seen a higher fence, or its scan contains the delta.
        """
        buckets = bucket_of(keys, self.buckets)
        current = self.fences[buckets] <= fence
        np.maximum.at(self.fences, buckets, fence)
        return current & (offset >= self.offsets[buckets])
