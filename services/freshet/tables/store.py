"""The native store: rows, optimiser state and applied offsets of one shard, changed together
(PROTOCOL 2, 3, 4, 8).

U unique keys, S floats of a row, T floats of its optimiser state, N rows, P partitions, B buckets.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.config.spec.layout import Group, Layout
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.tables.bounds import NO_BOUND, Evicted, RowsBound, SsdRows, TableOptions, bounded
from freshet.tables.changes import Flushed, Published, PublishedTable
from freshet.tables.plan import KeyGroup, NativeSlot, UniqueKeys, native_slots
from freshet.tables.runs import native_parts, widths_of
from freshet.types import (
    F32,
    I64,
    RUN,
    U8,
    U32,
    U64,
    Applied,
    Bool,
    Bucket,
    OffsetRange,
    PackedRows,
    RowRuns,
    Run,
    TimeMs,
)

INDEX_BYTES = 32
"""Bytes of a row in indexes and their free space; 9 to 28 were measured with 100,000 to 3,000,000 rows of
64 bytes."""

OVERFULL = 1.05
"""Part of a table's `max_rows` from which eviction runs whole rounds: each evicts many rows, which spreads
its cost, about 0.2 s of a core for a million rows."""

_ROWS_UNREAD = -2  # result of a native lookup
_ROUNDED_BITS = {"bf16": 16, "int8": 8, "int4": 4}  # of published values
_PUBLISH, _FLUSH = 0, 1  # consumers of changes in the native core


class PushOutcome(enum.Enum):
    """Outcome of a push."""

    APPLIED = 0  # by at least one bucket; others may have applied it before
    SKIPPED = 1  # every bucket had applied it before
    REFUSED = 2  # it does not continue the applied offsets, or a bucket is not owned; nothing was changed
    UNREAD = 3  # rows of a loading bucket must be read first; nothing was changed


class RowsUnread(Unavailable):
    """A loading bucket has not read these rows yet: read the keys of `unread`, then repeat the call."""


@dataclass(frozen=True, slots=True, eq=False)
class UnreadKeys:
    """Keys of loading buckets with rows that are neither here nor known to be absent."""

    buckets: I64  # (N,)
    tables: U8  # (N,)
    keys: U64  # (N,)
    fences: I64  # (N,) fence of the claim under which each bucket loads

    def __len__(self) -> int:
        """Number of keys."""
        return len(self.keys)

    def of(self, chosen: Bool) -> UnreadKeys:
        """Return the keys chosen by (N,) bool."""
        return UnreadKeys(self.buckets[chosen], self.tables[chosen], self.keys[chosen], self.fences[chosen])


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory and rows of a store."""

    bytes: int  # of rows, indexes and sketches
    rows: Mapping[int, int]  # table id -> rows
    row_bytes: Mapping[int, int]  # table id -> bytes of its rows in memory, were all there; without indexes


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedTable:
    """Values of rows of one table, for a serving store."""

    table: int  # table id
    keys: U64  # (N,) in order of their buckets
    values: F32  # (N, S) slots of the row, no optimiser state
    touched: U32  # (N,) seconds since 1970 of event time at which training touched each row last


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts since the store's creation."""

    created: int  # rows, by lookups and pushes
    evicted: int  # rows
    not_finite: int  # row gradients dropped because they, or their squared length, were not finite
    not_admitted: int  # row gradients dropped because their key had not been seen often enough


class Store:
    """All store groups of one shard. Thread-safe; calls release the GIL.

    A new store owns all buckets at offset 0, or none; `set_applied` and `drop_bucket` change that. Initial
    values of an absent row depend on (seed, table, key) only; see `initial_stream` in the native core. With
    `serving` the store has values only: no optimiser state and no pushes; rows come by `import_values`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        buckets: int,
        partitions: int,
        seed: int,
        options: Mapping[int, TableOptions] | None = None,
        serving: bool = False,
        changes: bool = True,
        owned: bool = True,
    ) -> None:
        """Create an empty store.

        Args:
            layout: groups with their slots, optimisers and precision.
            buckets: number of buckets of the model; a power of two from 2 to 65536.
            partitions: number of partitions of `samples`; pushes name them 0..partitions - 1.
            seed: seed of initial values.
            options: {table id: limits of its rows}; other tables have none.
            serving: values only.
            changes: record changes for `collect_publish` and `collect_flush`; otherwise both have no rows,
                and eviction does not wait for flushes. A serving store records none.
            owned: own every bucket at offset 0 from the start; otherwise none until `set_applied`.
        """
        self.layout, self.buckets, self.partitions = layout, buckets, partitions
        given = options or {}
        self._native = _native.Store(
            [_native_group(group) for group in layout.groups],
            [
                (table, o.ttl_ms or 0, o.max_rows or 0, o.admission)
                for table, o in ((t, given.get(t, TableOptions())) for g in layout.groups for t in g.tables)
            ],
            buckets,
            partitions,
            seed & 0xFFFF_FFFF_FFFF_FFFF,
            serving,
            changes,
            changes,
            owned,
        )
        self.memory_bound: int | None = None
        """Bytes of memory beyond which rows move to a local disk; None: they do not."""
        self._group_of = {table: group.index for group in layout.groups for table in group.tables}
        self.max_rows = {table: given[table].max_rows for table in self._group_of if table in given}
        self._widths = widths_of({table: self.record_bytes(table) for table in self._group_of})

    @classmethod
    def of(
        cls,
        spec: Spec,
        layout: Layout,
        *,
        serving: bool = False,
        changes: bool = True,
        owned: bool = True,
        bound: RowsBound = NO_BOUND,
    ) -> Store:
        """Create the store of a spec.

        Args:
            spec: the model.
            layout: its layout.
            serving: as in `Store`, like the next two.
            changes: see `Store`.
            owned: see `Store`.
            bound: without a folder for rows beyond it, tables without `max_rows` share its bytes evenly after
                the maximum of the others.

        Raises ConfigError if the folder cannot hold rows, or rows are published rounded: what serving holds
        of a row is known in memory only.
        """
        options = {t.id: TableOptions(t.ttl_ms, t.admission, t.max_rows) for t in spec.tables}
        if bound.bytes and not bound.ssd_folder:
            sized = cls(layout, buckets=2, partitions=1, seed=0)
            sized._round_published(spec)
            sizes = {table: sized.resident_bytes(table) + INDEX_BYTES for table in sized.tables}
            options = bounded(options, sizes, bound.bytes)
        store = cls(
            layout,
            buckets=spec.buckets,
            partitions=spec.partitions,
            seed=spec.model.seed,
            options=options,
            serving=serving,
            changes=changes,
            owned=owned,
        )
        store._round_published(spec)
        if bound.ssd_folder:
            if spec.train.publish_codec != "fp32":
                raise ConfigError(
                    "spec",
                    "train.publish_codec",
                    spec.train.publish_codec,
                    "fp32 where rows move to a local disk (SSD_FOLDER)",
                    "what serving holds of rows that were rounded is known in memory only",
                )
            store.keep_on_disk(bound)
        return store

    def keep_on_disk(self, bound: RowsBound) -> None:
        """Keep rows beyond a bound of memory on a local disk; called before there are rows.

        Raises ConfigError if the bound's folder cannot hold rows.
        """
        try:
            self._native.keep_cold(bound.ssd_folder, bound.bytes, bound.ssd_bytes)
        except ValueError as error:
            expected = "a folder on a local disk with asynchronous I/O"
            raise ConfigError("environment", "SSD_FOLDER", bound.ssd_folder, expected, str(error)) from error
        self.memory_bound = bound.bytes

    def _round_published(self, spec: Spec) -> None:
        if bits := _ROUNDED_BITS.get(spec.train.publish_codec):
            self._native.round_published(bits, self.layout.scalars)

    @property
    def native(self) -> _native.Store:
        """The native object, for native code that uses it itself."""
        return self._native

    # --- a batch

    def lookup(
        self,
        group: int,
        keys: UniqueKeys,
        out: F32,
        *,
        create: bool = True,
        found: U8 | None = None,
        touched: U32 | None = None,
        states: F32 | None = None,
        known: I64 | None = None,
    ) -> None:
        """Write each key's slots into `out`, and optionally more of its row.

        An absent row yields zeros, or with `create` its initial values; `create` also creates the row if the
        table admits the key. A row that was only looked up is not flushed or published, as it can be created
        again.

        Args:
            group: store group.
            keys: its keys.
            out: (U, S) float32, written.
            create: initialise and create absent rows.
            found: (U,) uint8, set to 1 for existing rows and 0 for absent ones; of a serving store with rows
                on disk to PERHAPS_ON_DISK for those that may be there, which are read by `fetch` alone.
            touched: (U,) uint32, set to the seconds since 1970 of event time at which training, by a lookup
                or a step, touched each row last; 0 for absent rows.
            states: (U, T) float32, set to the optimiser state; of an absent row to its initial state, or
                zeros where `out` is zero.
            known: (B, P) int64, set to the offsets that each bucket with keys had applied, under the lock
                under which its rows were read.

        Raises:
            ValueError: keys are not sorted by bucket or of another group, or shapes do not agree.
            RowsUnread: a bucket is loading, and rows must be read first; `out` is incomplete.
            Unavailable: a bucket is not owned; `out` is incomplete.
        """
        beside = (found, touched, states) if known is None else (found, touched, states, known)
        missing = self._native.lookup(group, keys.keys, keys.tables, keys.bucket_starts, out, create, *beside)
        if missing == _ROWS_UNREAD:
            raise RowsUnread("a bucket is loading and has not read all of these rows yet")
        if missing >= 0:
            raise Unavailable(f"bucket {missing} is not owned by this shard; send the lookup to its owner")

    def push(
        self,
        ranges: Sequence[OffsetRange],
        clock_ms: int,
        groups: Sequence[KeyGroup],
        gradients: Sequence[F32],
        *,
        owned: Bool | None = None,
    ) -> PushOutcome:
        """Step rows by their gradients and advance the offsets of every owned bucket.

        All buckets are checked before any is changed. A bucket applies the push if all its offsets are at
        `start`, and has applied it before if all are at or past `stop`; otherwise the push is refused. An
        absent row is created if its table admits the key. A row with a gradient that is not finite is
        unchanged and counted.

        Args:
            ranges: offset ranges of the batch, at most one a partition.
            clock_ms: largest event time of the batch.
            groups: keys of each store group.
            gradients: (G, S) float32 for each group, one for each key of the group, which may repeat.
            owned: (B,) bool; change only these buckets, and refuse the push if one is not owned.

        Returns:
            The outcome. UNREAD: read the rows of `unread`, then push again.

        Raises:
            ValueError: a partition is unknown or has two ranges, there is no range, or keys as in `lookup`.
        """
        spans = np.array([(r.partition, r.start, r.stop) for r in ranges], np.int64).reshape(-1, 3)
        parts = [
            (k.group, k.keys, k.tables, k.bucket_starts, g) for k, g in zip(groups, gradients, strict=True)
        ]
        named = None if owned is None else owned.view(np.uint8)
        return PushOutcome(self._native.push(spans, clock_ms, parts, named))

    # --- buckets

    def applied(self) -> dict[int, list[int]]:
        """Return {partition: the distinct offsets that owned buckets have applied up to, rising}."""
        return {p: sorted(offsets) for p, offsets in enumerate(self._native.applied())}

    def applied_of(self, bucket: int) -> dict[int, int]:
        """Return {partition: next offset} of one bucket."""
        return dict(enumerate(self._native.applied_of(bucket).tolist()))

    def set_applied(self, bucket: int, applied: Applied, clock_ms: int) -> None:
        """Own a bucket from these offsets on (absent partitions: 0); recovery calls it after its import.

        Raises ValueError for unknown partitions.
        """
        self._native.set_applied(bucket, self._offsets(bucket, applied), clock_ms)

    def _offsets(self, bucket: int, applied: Applied) -> I64:
        unknown = sorted(p for p in applied if not 0 <= p < self.partitions)
        if unknown:
            raise ValueError(
                f"expected partitions below {self.partitions}, found {unknown} (bucket {bucket})"
            )
        return np.array([applied.get(p, 0) for p in range(self.partitions)], np.int64)

    def drop_bucket(self, bucket: int) -> None:
        """Remove a bucket with its rows, and free their memory."""
        self._native.drop_bucket(bucket)

    def owned(self) -> list[Bucket]:
        """Return the owned buckets, rising."""
        return [Bucket(b) for b in self._native.held()]

    # --- buckets that are served while they load

    def begin_loading(self, bucket: int, applied: Applied, clock_ms: int, fence: int) -> None:
        """Own an empty bucket from these offsets on; the claim with `fence` found its rows stored.

        Until `finish_loading` a missing row is unread, not absent; the bucket is not flushed, and none of its
        rows are evicted. Raises ValueError if it has rows.
        """
        self._native.begin_loading(bucket, self._offsets(bucket, applied), clock_ms, fence)

    def unread(self, groups: Sequence[KeyGroup]) -> UnreadKeys:
        """Return the keys that must be read from the row store before a lookup or push."""
        parts = [(k.group, k.keys, k.tables, k.bucket_starts) for k in groups]
        return UnreadKeys(*self._native.unread(parts))

    def import_unread(self, runs: RowRuns, fence: int) -> None:
        """Import stored rows into buckets that load under `fence`, unless a row is here already.

        A row that is here may have changed since it was read, and is kept. Raises Corrupt as `import_runs`.
        """
        try:
            self._native.import_unread(*native_parts(runs), fence)
        except ValueError as error:
            raise Corrupt(f"packed rows cannot be imported: {error}") from error

    def settle(self, read: UnreadKeys, fence: int) -> None:
        """Mark keys as absent, except those of rows imported by `import_unread`."""
        self._native.settle(read.buckets, read.tables, read.keys, fence)

    def finish_loading(self, bucket: int, fence: int) -> bool:
        """End loading after all rows were imported: missing rows are absent from then on.

        False if the bucket no longer loads under this fence.
        """
        return self._native.finish_loading(bucket, fence)

    # --- rows on a local disk

    def fetch(self, groups: Sequence[KeyGroup]) -> None:
        """Bring the rows of a later batch from disk into memory, so that its lookup need not wait for them.

        Raises OSError if the disk cannot be read, or is not as it was written.
        """
        if self.memory_bound is not None:
            for k in groups:
                self._native.fetch(k.group, k.keys, k.tables, k.bucket_starts)

    def ssd_rows(self) -> SsdRows:
        """Return what is on the local disk."""
        return SsdRows(**self._native.cold_counts())

    # --- flush and publish

    def collect_flush(self, buckets: Iterable[int] | None = None) -> Flushed:
        """Copy the changes since the last flush of these buckets (None: all owned), and mark them flushed.

        A bucket's rows, removals, offsets and clock are copied under one hold of its lock. Unchanged buckets
        are included, because their offsets must advance (PROTOCOL 12); buckets that load or are not owned are
        left out.
        """
        return self._collect(buckets, whole=False)

    def collect_whole(self, buckets: Iterable[int]) -> Flushed:
        """Copy all rows of these buckets that ever changed, for a flush that replaces the stored ones."""
        return self._collect(buckets, whole=True)

    def _collect(self, of: Iterable[int] | None, *, whole: bool) -> Flushed:
        chosen = self._native.held() if of is None else sorted(of)
        buckets, applied, clock_ms, stored, directory, body = self._native.collect_flush(chosen, whole)
        return Flushed(buckets, applied, clock_ms, stored, RowRuns(directory.view(RUN), body, self._widths))

    def collect_publish(self, max_rows: int) -> Published:
        """Copy up to `max_rows` rows changed since they were published, and their buckets' removed keys.

        Each call continues after the last one, so that all buckets have their turn.
        """
        return self._published(*self._native.collect_publish(max_rows))

    def collect_inexact(self, max_rows: int) -> Published:
        """Copy up to `max_rows` rows that serving may hold rounded, to be sent as they are.

        These are rows that were last published in a lossy `train.publish_codec`, or passed over, and rows
        read from the row store, which does not know what their former owner has published. Each call
        continues after the last one. A row that fails to be sent goes to `put_back_published`.
        """
        return self._published(*self._native.collect_inexact(max_rows))

    def _published(
        self, tables: Sequence[tuple[int, U64, F32, U64]], clock_ms: int, pending: int, passed: int
    ) -> Published:
        parts = (PublishedTable(*part, group=self._group_of[part[0]]) for part in tables)
        return Published(tuple(parts), TimeMs(clock_ms), pending, passed)

    def inexact(self) -> int:
        """Return the number of rows that serving may hold rounded; 0 if rows are published in fp32."""
        return self._native.inexact()

    def drained(self) -> int:
        """Return how many times a bucket was published completely since the store's creation, in turn.

        After an increase by `buckets`, every row changed before has been copied.
        """
        return self._native.drained()

    def put_back_published(self, parts: Iterable[PublishedTable | Run]) -> None:
        """Mark rows and removals as changed again: of a failed publish, or that serving may lack."""
        for part in parts:
            self._native.put_back_published(part.table, part.keys, part.removed)

    def pending_publish(self) -> int:
        """Return the number of changed rows not published yet."""
        return self._native.pending(_PUBLISH)

    def pending_flush(self) -> int:
        """Return the number of changed rows not collected for a flush yet."""
        return self._native.pending(_FLUSH)

    # --- rows of whole buckets, as the row store has them

    def import_runs(self, runs: RowRuns) -> None:
        """Import rows, replacing rows that are here; they count as stored, not as changed.

        All are checked before any is imported. Raises Corrupt if a row is malformed.
        """
        try:
            self._native.import_runs(*native_parts(runs))
        except ValueError as error:
            raise Corrupt(f"packed rows cannot be imported: {error}") from error

    def unpack_runs(self, runs: RowRuns) -> list[UnpackedTable]:
        """Decode the values of packed rows for a serving store. Raises Corrupt as `import_runs`."""
        try:
            return [UnpackedTable(*part) for part in self._native.unpack_runs(*native_parts(runs))]
        except ValueError as error:
            raise Corrupt(f"packed rows cannot be read: {error}") from error

    # --- rows by key, in any order

    def import_rows(self, rows: PackedRows) -> None:
        """Import rows of one table as `import_runs`. Raises Corrupt if a row is malformed."""
        try:
            self._native.import_rows(rows.table, rows.keys, rows.records)
        except ValueError as error:
            raise Corrupt(f"packed rows cannot be imported: {error}") from error

    def export_rows(self, table: int, keys: U64) -> tuple[Bool, PackedRows]:
        """Return (found (N,) bool, rows) of keys (N,) uint64 as packed rows; zeros where not found."""
        found, records = self._native.export_rows(table, keys)
        return found.view(np.bool_), PackedRows(table, keys, records)

    def import_values(
        self,
        table: int,
        keys: U64,
        values: F32,
        *,
        clock_ms: int = 0,
        touched: U32 | None = None,
    ) -> None:
        """Set values of rows in a serving store.

        Args:
            table: table id.
            keys: (N,) uint64.
            values: (N, S) float32.
            clock_ms: event time of the rows, and from then on the time at which lookups touch rows. 0:
                lookups touch none.
            touched: (N,) uint32, seconds since 1970 at which training touched each row, if `clock_ms` is 0.
        """
        self._native.import_values(table, keys, values, clock_ms, touched)

    def remove(self, table: int, keys: U64) -> int:
        """Remove rows of keys (N,) uint64, to be flushed and published; returns how many existed."""
        return self._native.remove(table, keys)

    def evict(self, now_event_ms: int, budget: int | None = None) -> Evicted:
        """Evict rows not touched within their table's `ttl_ms`, and the least recently used above `max_rows`.

        Each call continues after the last one and examines about `budget` rows (None: all), with a bucket's
        lock held. Rows with unflushed changes stay. Ages are in seconds, beyond 68 minutes with an error of
        0.4 %; rows of equal age are evicted in any order.
        """
        return Evicted(*self._native.evict(now_event_ms, 1 << 62 if budget is None else budget))

    def make_room(self, now_event_ms: int, budget: int) -> None:
        """Evict about `budget` rows' worth of a round, or whole rounds while a table is OVERFULL."""
        if not self._overfull():
            self.evict(now_event_ms, budget)
        for _ in range(2):  # the first may only complete a round that began below the limit
            if self._overfull():
                self.evict(now_event_ms)

    def _overfull(self) -> bool:
        return any(most and self._native.rows(t) > OVERFULL * most for t, most in self.max_rows.items())

    # --- figures

    @property
    def tables(self) -> list[int]:
        """Table ids, rising."""
        return sorted(self._group_of)

    @property
    def memory_bytes(self) -> int:
        """`Memory.bytes` alone; cheap enough for every lookup."""
        return self._native.bytes()

    def rows(self) -> dict[int, int]:
        """Return {table id: rows}."""
        return {table: self._native.rows(table) for table in self.tables}

    def memory(self) -> Memory:
        """Return the memory and rows of the store."""
        rows = self.rows()
        resident = {table: n * self.resident_bytes(table) for table, n in rows.items()}
        return Memory(self.memory_bytes, rows, resident)

    def evicted(self) -> dict[int, int]:
        """Return {table id: rows evicted since the store's creation}."""
        return {table: self._native.evicted(table) for table in self.tables}

    def counts(self) -> Counts:
        """Return the counts since the store's creation."""
        return Counts(*self._native.counts())

    def resident_bytes(self, table: int) -> int:
        """Return the bytes of a row of this table in memory with its state, without its share of indexes."""
        return self._native.record_bytes(self._group_of[table])

    def record_bytes(self, table: int) -> int:
        """Return the bytes of a packed row of this table. Raises KeyError for an unknown table."""
        return self._native.packed_bytes(self._group_of[table])


def _native_group(group: Group) -> tuple[list[int], list[NativeSlot], bool]:
    half = group.precision == "bf16" and group.slots[-1].name == "vector"
    return list(group.tables), native_slots(group), half
