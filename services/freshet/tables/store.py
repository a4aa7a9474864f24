"""Rows, optimiser state and applied offsets of one shard of a model, changed together
(PROTOCOL 2, 3, 4, 8)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from freshet import _native
from freshet.config.spec.layout import Group, Layout
from freshet.config.spec.model import Spec
from freshet.errors import Corrupt, Unavailable
from freshet.tables.changes import Flushed, Published, PublishedTable
from freshet.tables.plan import NativeSlot, RowKeys, native_slots
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
    TimeMs,
)

__all__ = [
    "Evicted",
    "Memory",
    "PushOutcome",
    "RowsUnread",
    "Store",
    "TableOptions",
    "UnpackedTable",
    "UnreadKeys",
]

INDEX_BYTES = 32
"""Of a row beside the row itself, in indexes and room to grow: 9 to 28 were measured with 100,000 to
3,000,000 rows of 64 bytes."""

LEAST_ROWS = 10_000
"""That a table may have, however little memory there is."""

OVERFULL = 1.05
"""Part of a table's `max_rows` from which eviction does not wait: a round over all rows then makes room for
many, so that its cost (about 0.2 s of a core for a million rows) is spread."""

_ROWS_UNREAD = -2  # as a native lookup says it
_PUBLISH, _FLUSH = 0, 1  # consumers, as the native core numbers them


class PushOutcome(enum.Enum):
    """What became of a push."""

    APPLIED = 0  # by at least one bucket; others may have had it
    SKIPPED = 1  # every bucket had it already
    REFUSED = (
        2  # it does not continue what is applied, or holds rows of buckets not held; nothing was touched
    )
    UNREAD = 3  # it holds rows of a loading bucket that must be read first; nothing was touched


class RowsUnread(Unavailable):
    """A loading bucket does not know yet whether there is such a row: read what `unread` names, and ask
    again."""


@dataclass(frozen=True, slots=True, eq=False)
class UnreadKeys:
    """Keys of loading buckets of which memory knows nothing yet."""

    buckets: I64  # (N,)
    tables: U8  # (N,)
    keys: U64  # (N,)
    fences: I64  # (N,) of the claim that each bucket is loaded under

    def __len__(self) -> int:
        """How many keys."""
        return len(self.keys)

    def of(self, chosen: Bool) -> UnreadKeys:
        """The chosen (N,) ones."""
        return UnreadKeys(self.buckets[chosen], self.tables[chosen], self.keys[chosen], self.fences[chosen])


@dataclass(frozen=True, slots=True)
class TableOptions:
    """When rows of a table come and go."""

    ttl_ms: int | None = None  # evicted when not touched for this long of event time, in whole seconds
    admission: int = (
        1  # lookups for training (batches) in which a key is seen before it gets a row; at most 255
    )
    max_rows: int | None = None  # above it the least recently used are evicted


@dataclass(frozen=True, slots=True)
class Evicted:
    """Progress of an eviction."""

    examined: int  # rows looked at
    evicted: int
    finished: bool  # a round over all buckets is complete


@dataclass(frozen=True, slots=True)
class Memory:
    """What a store holds."""

    bytes: int  # handed out to rows, indexes and sketches
    rows: Mapping[int, int]  # table id -> rows
    row_bytes: Mapping[int, int]  # table id -> bytes of its rows; indexes and room to grow are not counted


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedTable:
    """Rows of one table, as a serving store takes them."""

    table: int  # table id
    keys: U64  # (N,) in order of their buckets
    values: F32  # (N, S) slots of the row, no optimiser state
    touched: U32  # (N,) seconds since 1970, in event time, at which training had touched each


@dataclass(frozen=True, slots=True)
class Counts:
    """Events since the store was made."""

    created: int  # rows, by lookups and pushes
    evicted: int
    not_finite: (
        int  # gradients of rows that were not applied because they, or their squared length, were not finite
    )
    not_admitted: int  # gradients of rows dropped because their key had not been seen often enough


class Store:
    """All store groups of one shard. Thread-safe; calls run on the caller's thread, the GIL released.

    A new store holds all buckets at offset 0, or none (`set_applied` and `drop_bucket` change that). An
    absent row's initial values are a function of (seed, table, key) alone: see `initial_stream` in the native
    core. With `serving` it holds values only: no optimiser state, no pushes, rows come by `import_values`.

    Letters: U keys, S floats of a row, N rows, P partitions.
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
        publish: bool = True,
        flush: bool = True,
        held: bool = True,
    ) -> None:
        """Make an empty store.

        Args:
            layout: groups with their slots, optimisers and precision.
            buckets: of the model; a power of two from 2 to 65536.
            partitions: of `samples`; pushes name them 0..partitions - 1.
            seed: of initial values.
            options: table id -> when its rows come and go; others keep all.
            serving: values only.
            publish: keep lists for `collect_publish`; without them it yields nothing.
            flush: keep lists for `collect_flush`; without them it yields no rows, and eviction waits for
                none.
            held: hold every bucket from the start, at offset 0; without it none until `set_applied`.
        """
        self.layout, self.buckets, self.partitions, self.serving = layout, buckets, partitions, serving
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
            publish,
            flush,
            held,
        )
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
        publish: bool = True,
        flush: bool = True,
        held: bool = True,
        most_bytes: int = 0,
    ) -> Store:
        """The store that a spec describes.

        Args:
            most_bytes: tables without a `max_rows` of their own share so many bytes evenly, less what the
                others may take: each is bounded by its share. 0: they are not bounded.
        """
        options = {t.id: TableOptions(t.ttl_ms, t.admission, t.max_rows) for t in spec.tables}
        if most_bytes:
            sized = cls(layout, buckets=2, partitions=1, seed=0)
            sizes = {table: sized.resident_bytes(table) + INDEX_BYTES for table in sized.tables}
            options = _bounded(options, sizes, most_bytes)
        return cls(
            layout,
            buckets=spec.buckets,
            partitions=spec.partitions,
            seed=spec.model.seed,
            options=options,
            serving=serving,
            publish=publish,
            flush=flush,
            held=held,
        )

    @property
    def native(self) -> _native.Store:
        """The native store, for native code that works on it batch after batch."""
        return self._native

    # --- a batch

    def lookup(
        self,
        group: int,
        keys: U64,
        tables: U8,
        bucket_starts: U32,
        out: F32,
        *,
        create: bool = True,
        found: U8 | None = None,
        touched: U32 | None = None,
        states: F32 | None = None,
        known: I64 | None = None,
    ) -> None:
        """Write each key's slots into `out` (U, S), and whether it had a row into `found` (U,), if given.

        `touched` (U,), if given: seconds since 1970, in event time, at which each row had been touched last;
        0 where there was none. Training touches rows that it looks up or steps. `states` (U, T), if given:
        their optimiser state; of an absent row what a new one starts with, or zeros where `out` has zeros.

        `known` (buckets, partitions), if given: what each bucket had applied as its rows were read, under one
        lock; written for buckets that have keys.

        Absent rows: with `create` their initial values, and a row comes into being if the table admits the
        key; without it zeros. A row that is only looked up is not flushed or published: it can be made again.

        Raises:
            ValueError: keys are not sorted by bucket, or of another group, or shapes do not agree.
            RowsUnread: a bucket is being loaded, and rows must be read first; `out` is unfinished.
            Unavailable: a bucket is not held; `out` is unfinished.
        """
        beside = (found, touched, states) if known is None else (found, touched, states, known)
        missing = self._native.lookup(group, keys, tables, bucket_starts, out, create, *beside)
        if missing == _ROWS_UNREAD:
            raise RowsUnread("a bucket is being loaded, and does not know all of these keys yet")
        if missing >= 0:
            raise Unavailable(f"bucket {missing} is not held by this shard; look up at its owner's")

    def push(
        self,
        ranges: Sequence[OffsetRange],
        clock_ms: int,
        groups: Sequence[RowKeys],
        gradients: Sequence[F32],
        *,
        owned: Bool | None = None,
    ) -> PushOutcome:
        """Step rows by their summed gradients (U, S) and advance the offsets of every held bucket.

        All buckets are checked before any is touched: one applies if all its offsets are at `start`, has had
        the push if all are at or past `stop`; anything else refuses it. An absent row is created. A row whose
        gradient is not finite stays as it is and is counted. `clock_ms`: largest event time of the batch.
        `owned` (buckets,): touch these alone, and refuse the push if one of them is not held.
        UNREAD: rows of buckets that are being loaded must be read first (`unread`), then push again.

        Raises ValueError: unknown partition, no range, two ranges of a partition, or keys as in `lookup`.
        """
        spans = np.array([(r.partition, r.start, r.stop) for r in ranges], np.int64).reshape(-1, 3)
        parts = [
            (k.group, k.keys, k.tables, k.bucket_starts, g) for k, g in zip(groups, gradients, strict=True)
        ]
        named = None if owned is None else owned.view(np.uint8)
        return PushOutcome(self._native.push(spans, clock_ms, parts, named))

    # --- buckets

    def applied(self) -> dict[int, list[int]]:
        """{partition: the distinct offsets that held buckets have applied up to, rising}."""
        return {p: sorted(offsets) for p, offsets in enumerate(self._native.applied())}

    def applied_of(self, bucket: int) -> dict[int, int]:
        """{partition: next offset} of one bucket."""
        return dict(enumerate(self._native.applied_of(bucket).tolist()))

    def clock_of(self, bucket: int) -> TimeMs:
        """Largest event time applied by one bucket."""
        return TimeMs(self._native.clock_of(bucket))

    def set_applied(self, bucket: int, applied: Applied, clock_ms: int) -> None:
        """Hold a bucket from these offsets on (absent partitions: 0); recovery calls it after `import_rows`.

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
        """Forget a bucket's rows and hold it no longer; its memory is given back."""
        self._native.drop_bucket(bucket)

    def held(self) -> list[Bucket]:
        """The buckets held, rising."""
        return [Bucket(b) for b in self._native.held()]

    # --- buckets that answer while they are loaded

    def begin_loading(self, bucket: int, applied: Applied, clock_ms: int, fence: int) -> None:
        """Hold an empty bucket from these offsets on, whose rows are in the row store as the claim with
        `fence` found them.

        Until `finish_loading` a row that is not here counts as unread, not as absent; the bucket is neither
        flushed nor evicted from. Raises ValueError if it has rows.
        """
        self._native.begin_loading(bucket, self._offsets(bucket, applied), clock_ms, fence)

    def unread(self, groups: Sequence[RowKeys]) -> UnreadKeys:
        """Which of these keys must be read from the row store before they can be looked up or pushed."""
        parts = [(k.group, k.keys, k.tables, k.bucket_starts) for k in groups]
        return UnreadKeys(*self._native.unread(parts))

    def import_unread(self, runs: RowRuns, fence: int) -> None:
        """Take stored rows of which nothing is known here, in buckets that are loaded under `fence`.

        A row that is here may have learned since it was read, and stays. Raises Corrupt as `import_runs`.
        """
        try:
            self._native.import_unread(*native_parts(runs), fence)
        except ValueError as error:
            raise Corrupt(f"packed rows cannot be imported: {error}") from error

    def settle(self, read: UnreadKeys, fence: int) -> None:
        """What the row store had of these keys has been imported: the others are absent from now on."""
        self._native.settle(read.buckets, read.tables, read.keys, fence)

    def finish_loading(self, bucket: int, fence: int) -> bool:
        """All rows have been imported: what is not here is absent. False if the bucket is not being loaded
        under this fence any more."""
        return self._native.finish_loading(bucket, fence)

    # --- flush and publish

    def collect_flush(self, buckets: Iterable[int] | None = None) -> Flushed:
        """What changed since the last flush of these buckets (all held ones), which are then clean.

        A bucket's rows, removals, offsets and clock are copied under one hold of its lock. Buckets without
        changes are there too: their offsets must not age (PROTOCOL 12). Those that are being loaded, not
        held, or were dropped a moment ago, are left out.
        """
        return self._collect(buckets, whole=False)

    def collect_whole(self, buckets: Iterable[int]) -> Flushed:
        """All rows of these buckets that were ever changed, for a flush that replaces what is stored."""
        return self._collect(buckets, whole=True)

    def _collect(self, of: Iterable[int] | None, *, whole: bool) -> Flushed:
        chosen = self._native.held() if of is None else sorted(of)
        buckets, applied, clock_ms, stored, directory, body = self._native.collect_flush(chosen, whole)
        return Flushed(buckets, applied, clock_ms, stored, RowRuns(directory.view(RUN), body, self._widths))

    def collect_publish(self, max_rows: int) -> Published:
        """Up to `max_rows` rows changed since they were last published, and their buckets' removed keys.

        Goes on where it stopped last time, so that no bucket starves.
        """
        tables, clock_ms, pending = self._native.collect_publish(max_rows)
        return Published(tuple(PublishedTable(*part) for part in tables), TimeMs(clock_ms), pending)

    def drained(self) -> int:
        """Buckets that `collect_publish` has left without changed rows, in turn, since the store was made.

        Once it has grown by `buckets`, every row that was changed before has been handed out.
        """
        return self._native.drained()

    def put_back_published(self, published: Published) -> None:
        """A publish failed: its rows, as they then are, and its removals will be in a later one."""
        for part in published.tables:
            self._native.put_back_published(part.table, part.keys, part.removed)

    def pending_publish(self) -> int:
        """Changed rows not yet published."""
        return self._native.pending(_PUBLISH)

    def pending_flush(self) -> int:
        """Changed rows not yet collected for a flush."""
        return self._native.pending(_FLUSH)

    # --- rows of whole buckets, as the row store has them

    def import_runs(self, runs: RowRuns) -> None:
        """Take rows over those that are here; they count as stored, not as changed.

        All are checked before any is taken. Raises Corrupt naming the row and what is wrong with it.
        """
        try:
            self._native.import_runs(*native_parts(runs))
        except ValueError as error:
            raise Corrupt(f"packed rows cannot be imported: {error}") from error

    def unpack_runs(self, runs: RowRuns) -> list[UnpackedTable]:
        """Values of packed rows, for a serving store; nothing is stored here. Raises Corrupt as
        `import_runs`."""
        try:
            return [UnpackedTable(*part) for part in self._native.unpack_runs(*native_parts(runs))]
        except ValueError as error:
            raise Corrupt(f"packed rows cannot be read: {error}") from error

    # --- rows by key, in any order

    def import_rows(self, rows: PackedRows) -> None:
        """Take rows as the row store has them, over rows that are here; they count as stored, not as changed.

        All are checked before any is taken. Raises Corrupt naming the row and what is wrong with it.
        """
        try:
            self._native.import_rows(rows.table, rows.keys, rows.records)
        except ValueError as error:
            raise Corrupt(f"packed rows cannot be imported: {error}") from error

    def export_rows(self, table: int, keys: U64) -> tuple[Bool, PackedRows]:
        """(found (N,), rows; zeros where not found), packed as the row store keeps them."""
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
        only_absent: bool = False,
    ) -> int:
        """Set rows' values (N, S) in a serving store; returns how many were written.

        `clock_ms` is their event time, and from then on that at which lookups touch rows: what
        least-recently-used means here. Without it lookups touch nothing, and `touched` (N,), in seconds, says
        when training had touched each row. With `only_absent` rows that are here stay as they are: a
        read-through must not undo a delta (PROTOCOL 17).
        """
        return self._native.import_values(table, keys, values, only_absent, clock_ms, touched)

    def remove(self, table: int, keys: U64) -> int:
        """Remove rows, dirty or not; flush and publish will report them. Returns how many there were."""
        return self._native.remove(table, keys)

    def evict(self, now_event_ms: int, budget: int | None = None) -> Evicted:
        """Evict rows not touched within their table's `ttl_ms`, and the least recently used above `max_rows`.

        Called by the owner's maintenance thread; a bucket's lock is held while its rows are examined. Goes on
        where it stopped, examining about `budget` rows more (all). Rows not flushed stay: flush first. Ages
        are in seconds, beyond 68 minutes with an error of 0.4 %; rows of one age go in any order.
        """
        return Evicted(*self._native.evict(now_event_ms, 1 << 62 if budget is None else budget))

    def make_room(self, now_event_ms: int, budget: int) -> None:
        """Evict, as `evict` does, a piece of a round; while a table is OVERFULL whole rounds, so that a flood
        of new rows is evicted as fast as it comes."""
        if not self._overfull():
            self.evict(now_event_ms, budget)
        for _ in range(2):  # the first may be the rest of a round that began before there were too many
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
        """`Memory.bytes` alone: cheap enough for every lookup."""
        return self._native.bytes()

    def rows(self) -> dict[int, int]:
        """{table id: rows held}."""
        return {table: self._native.rows(table) for table in self.tables}

    def memory(self) -> Memory:
        """What the store holds now."""
        rows = {table: self._native.rows(table) for table in self.tables}
        return Memory(
            self.memory_bytes,
            rows,
            {table: n * self.resident_bytes(table) for table, n in rows.items()},
        )

    def evicted(self) -> dict[int, int]:
        """{table id: rows evicted since the store was made}."""
        return {table: self._native.evicted(table) for table in self.tables}

    def counts(self) -> Counts:
        """Events since the store was made."""
        return Counts(*self._native.counts())

    def resident_bytes(self, table: int) -> int:
        """Bytes of a row of this table in memory, with its state; its share of the index not counted."""
        return self._native.record_bytes(self._group_of[table])

    def record_bytes(self, table: int) -> int:
        """Bytes of a packed row of this table. Raises KeyError for an unknown one."""
        return self._native.packed_bytes(self._group_of[table])


def _bounded(
    options: Mapping[int, TableOptions], sizes: Mapping[int, int], most_bytes: int
) -> dict[int, TableOptions]:
    """Options with a bound for every table. `sizes`: bytes of a row of each."""
    open_ = [table for table in sizes if options.get(table, TableOptions()).max_rows is None]
    taken = sum((o.max_rows or 0) * sizes[table] for table, o in options.items() if table in sizes)
    share = max(most_bytes - taken, most_bytes // 10) // max(1, len(open_))
    bounded = dict(options)
    for table in open_:
        rows = max(LEAST_ROWS, share // sizes[table])
        bounded[table] = replace(options.get(table, TableOptions()), max_rows=rows)
    return bounded


def _native_group(group: Group) -> tuple[list[int], list[NativeSlot], bool]:
    half = group.precision == "bf16" and group.slots[-1].name == "vector"
    return list(group.tables), native_slots(group), half
