"""Rows of a server that has less memory than the model: those used of late, and those the row store may lack.

A row that is not here is in the row store as it was last published, or nowhere (PROTOCOL 17). For this, time
is divided into epochs. A row has the epoch of its last delta, and is not evicted until the row store is known
to have all deltas of that epoch. Rows of few uses are evicted first (a clock with counters of two bits, as in
the store's tier on disk).

Letters: N keys, U unique keys of a request in one store group, B buckets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.layout import Layout
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import FreshetError
from freshet.inference.rows import NEVER_LATER_S, ServingTable, readable_metas
from freshet.rows.store import RowStore
from freshet.tables import UniqueKeys, UnpackedTable
from freshet.types import F32, I64, U8, U64, Bool, Bucket, BucketMeta, RowRuns, bucket_of

log = structlog.get_logger(__name__)

EPOCH_S = 0.5
"""Least seconds of an epoch."""
EPOCHS = 0xFFFF
"""Rows hold epochs modulo EPOCHS, from 1; 0 is that of rows that were read from the row store."""
MOST_CLOSED = 64
"""Epochs that the row store may lack in part and that are kept apart: later ones include earlier ones."""
EVICT_ROWS = 2_000
"""Rows examined under one hold of the lock, for which requests wait: tens of microseconds."""
SETTLED_SHARE = 1 / 4096
"""Share of the rows examined each time that the row store's offsets are read, even if none must leave: no row
may keep an epoch until half of EPOCHS are over."""
FORGET_TO = 0.9
"""Share of their bound to which keys without a row are forgotten at a time."""
_NO_KEYS: U64 = np.empty(0, np.uint64)
_NO_TABLES: U8 = np.empty(0, np.uint8)
ABSENT_BYTES = 120
"""Memory of a key that is known to have no row."""
ABSENT_SHARE = 0.1
"""Share of the memory that such keys may have."""


@dataclass(frozen=True, slots=True, eq=False)
class MissingKeys:
    """Keys of a request that are not here and not known to have no row."""

    tables: U8  # (N,) table ids
    keys: U64  # (N,)
    of: int = 0  # unique keys of the request

    def __len__(self) -> int:
        return len(self.keys)

    def chosen(self, which: Bool) -> MissingKeys:
        """Return some of the keys; `which`: (N,) bool."""
        return MissingKeys(self.tables[which], self.keys[which], self.of)

    def part(self, start: int, stop: int) -> MissingKeys:
        """Return keys [start, stop)."""
        return MissingKeys(self.tables[start:stop], self.keys[start:stop])

    @classmethod
    def concat(cls, parts: Sequence[MissingKeys]) -> MissingKeys:
        """Join the keys of several requests, each key once, rising."""
        tables: U8 = np.concatenate([_NO_TABLES, *(part.tables for part in parts)])
        keys: U64 = np.concatenate([_NO_KEYS, *(part.keys for part in parts)])
        order = np.lexsort((tables, keys))
        tables, keys = tables[order], keys[order]
        first: Bool = np.ones(len(keys), np.bool_)
        first[1:] = (tables[1:] != tables[:-1]) | (keys[1:] != keys[:-1])
        return cls(tables[first], keys[first], sum(part.of for part in parts))


class RowCache(ServingTable):
    """Rows for lookups, of which the row store has the rest.

    `lock` is held while a request is checked and scored, and while rows leave for want of memory: none does
    in between.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        buckets: int,
        partitions: int,
        seed: int,
        memory_bytes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Hold no row yet; `memory_bytes`: of rows with their indexes."""
        super().__init__(layout, buckets=buckets, partitions=partitions, seed=seed, cache=True)
        self.lock = threading.Lock()
        self._changes = threading.Lock()  # held while rows come and epochs end
        self.memory_bytes, self._buckets, self._clock = memory_bytes, buckets, clock
        self._epoch, self._closed_s = 1, clock.monotonic()
        self._epoch_used = False  # whether a row has come or gone in it
        # (epoch, (ROWS_PARTITIONS,) offsets of `rows` below which all deltas have an epoch up to it)
        self._closed: deque[tuple[int, I64]] = deque()
        # Epoch up to which the row store has the deltas of each bucket, and their offset in `rows`.
        self._clean: I64 = np.zeros(buckets, np.int64)
        self._stored: I64 = np.zeros(buckets, np.int64)
        self._partition_of = np.arange(buckets) * ROWS_PARTITIONS // buckets
        # Keys without a row, here and in the row store, and the epoch of the delta that removed it; 0: a read
        # did not find it.
        self._absent: dict[tuple[int, int], int] = {}

    # --- deltas, on the follower's thread

    @property
    def holds_all(self) -> bool:
        """False: rows are read from the row store as they are needed."""
        return False

    def import_values(self, table: int, keys: U64, values: F32, *, event_time_ms: int = 0) -> None:
        """Set rows of a delta; see `ServingTable.import_values`."""
        self.check(table, values)
        touched = np.full(len(keys), min(max(event_time_ms, 0) // 1000, NEVER_LATER_S), np.uint32)
        with self._changes:
            self._epoch_used = True
            self._rows.import_values(table, keys, values, touched=touched, epoch=_held(self._epoch))
            if self._absent:
                for key in keys.tolist():
                    self._absent.pop((table, key), None)

    def remove(self, table: int, keys: U64) -> None:
        """Remove rows of a delta; they stay known as absent until the row store has removed them, too."""
        with self._changes:
            self._epoch_used = True
            super().remove(table, keys)
            self._absent |= dict.fromkeys(((table, key) for key in keys.tolist()), self._epoch)

    def followed(self, next_offsets: Mapping[int, int]) -> None:
        """End the epoch, if it is long enough: all deltas below these offsets, and no others, are applied."""
        now_s = self._clock.monotonic()
        if now_s < self._closed_s + EPOCH_S:
            return
        self._closed_s = now_s
        if self._epoch_used:
            offsets = np.array([next_offsets.get(p, 0) for p in range(ROWS_PARTITIONS)], np.int64)
            with self._changes:
                if (
                    len(self._closed) == MOST_CLOSED
                ):  # thinner, with the oldest: a late flush may reach only that
                    self._closed = deque(list(self._closed)[::2])
                self._closed.append((self._epoch, offsets))
                self._epoch, self._epoch_used = self._epoch + 1, False

    # --- requests

    def missing(self, group: int, keys: UniqueKeys) -> MissingKeys:
        """Return which of U keys must be read before a lookup. `lock` is held."""
        absent = np.flatnonzero(self.native.absent(group, keys.keys, keys.tables, keys.bucket_starts))
        found = MissingKeys(keys.tables[absent], keys.keys[absent], len(keys.keys))
        if len(found) and self._absent:
            unknown: Bool = np.array(
                [
                    one not in self._absent
                    for one in zip(found.tables.tolist(), found.keys.tolist(), strict=True)
                ]
            )
            found = found.chosen(unknown)
        return found

    # --- reads of the row store

    def insert(self, keys: MissingKeys, runs: Sequence[RowRuns], stored: I64) -> None:
        """Insert rows that were read, unless they may be out of date: the keys then stay missing.

        A row that is here stays, since it is of a delta that came meanwhile. A key without a row has none.

        Args:
            keys: of the read, rising.
            runs: the rows found.
            stored: (B,) offset of `rows` up to which the row store had a bucket's deltas during the whole
                read; -1: of other buckets, and of those that changed meanwhile.
        """
        with self._changes:
            # Rows have left since the row store was seen to have their deltas. The read may have come before
            # that, or the row store may have lost them since (a failover).
            valid = stored >= self._stored
            found = [part for some in runs for part in self._unpacker.unpack_runs(some)]
            for part in found:
                chosen = valid[bucket_of(part.keys, self._buckets)]
                if self._absent:
                    chosen &= np.array(
                        [(part.table, key) not in self._absent for key in part.keys.tolist()], np.bool_
                    )
                self._rows.import_values(
                    part.table,
                    part.keys[chosen],
                    part.values[chosen],
                    touched=part.touched[chosen],
                    only_absent=True,
                )
            self._insert_absent(keys.chosen(valid[bucket_of(keys.keys, self._buckets)]), found)

    def _insert_absent(self, read: MissingKeys, found: Sequence[UnpackedTable]) -> None:
        """Remember keys without a row, neither found nor of a delta. `_changes` is held."""
        for table in np.unique(read.tables).tolist():
            # Rows that were found count as found: they may have been evicted again.
            stored = [part.keys for part in found if part.table == table]
            keys = np.setdiff1d(read.keys[read.tables == table], np.concatenate([*stored, _NO_KEYS]))
            starts = np.searchsorted(bucket_of(keys, self._buckets), np.arange(self._buckets + 1))
            tables = np.full(len(keys), table, np.uint8)
            absent = self.native.absent(self._group_of[table], keys, tables, starts.astype(np.uint32))
            for key in keys[absent.astype(np.bool_)].tolist():
                self._absent.setdefault((table, key), 0)

    # --- rows that leave, on the thread of `CacheEvictor`

    def stored(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        """Take note of what the row store has."""
        with self._changes:
            for bucket, meta in metas.items():
                self._stored[bucket] = max(self._stored[bucket], meta.rows_offset)
            while self._closed and (self._stored >= self._closed[0][1][self._partition_of]).all():
                self._clean[:] = self._closed.popleft()[0]
            for epoch, offsets in self._closed:
                self._clean[self._stored >= offsets[self._partition_of]] = epoch
        self._evict_some(round(SETTLED_SHARE * sum(self.rows().values())) + 1)

    def evict(self, pause: Callable[[], object] = lambda: None) -> bool:
        """Remove rows while too many bytes are in use; returns whether that was enough.

        pause: called between two holds of the lock; True: end. A thread that takes a lock again at once would
            keep out those that wait for it.
        """
        self._forget_absent()
        most = MOST_ROUNDS * (sum(self.rows().values()) + self._buckets)
        until_s = time.monotonic() + STORED_S  # then more rows may leave than now
        for _ in range(0, most, EVICT_ROWS):
            if self.native.bytes() <= self._rows_bytes():
                return True
            self._evict_some(EVICT_ROWS)
            if pause() or time.monotonic() > until_s:
                break
        return False

    def _evict_some(self, budget: int) -> None:
        with self.lock:
            # Rows hold epochs in 16 bits, enough for 32,767: a bucket that is further behind keeps all rows.
            clean = np.where(self._epoch - self._clean < EPOCHS // 2, _held(self._clean), 0)
            self.native.evict_unused(self._rows_bytes(), budget, clean.astype(np.uint16))

    def _rows_bytes(self) -> int:
        return max(0, self.memory_bytes - ABSENT_BYTES * min(len(self._absent), self._most_absent()))

    def _most_absent(self) -> int:
        return int(ABSENT_SHARE * self.memory_bytes / ABSENT_BYTES)

    def _forget_absent(self) -> None:
        """Forget the oldest keys without a row, except of removals that the row store may lack."""
        with self._changes:
            most = self._most_absent()
            if len(self._absent) <= most:
                return
            excess = len(self._absent) - int(FORGET_TO * most)
            clean, shift = self._clean.tolist(), 64 - (self._buckets.bit_length() - 1)
            old = ((t, key) for (t, key), epoch in self._absent.items() if epoch <= clean[key >> shift])
            for one in list(islice(old, excess)):
                del self._absent[one]

    @property
    def bytes_in_use(self) -> int:
        """Bytes of rows with their indexes, and of keys that are known to have none."""
        return self.native.bytes() + ABSENT_BYTES * len(self._absent)


class CacheEvictor:
    """Keeps a cache within its memory, on a thread."""

    def __init__(self, store: RowStore, cache: Callable[[], object], buckets: int) -> None:
        """`cache`: returns the present table of rows, if there is one."""
        self._store, self._cache, self._buckets = store, cache, [Bucket(b) for b in range(buckets)]
        self._was_short, self._read_at_s = False, 0.0

    def run(self, stop: threading.Event) -> None:
        """Read what the row store has, and remove rows, until `stop` is set."""
        while not stop.wait(EVICT_S):
            cache = self._cache()
            if not isinstance(cache, RowCache):
                continue
            try:
                self._round(cache, stop)
            except Exception as error:  # a bug must not end the thread, or memory would grow
                log.error("rows cannot be evicted", exc_info=error)
                stop.wait(STORED_S)

    def _round(self, cache: RowCache, stop: threading.Event) -> None:
        if time.monotonic() >= self._read_at_s:
            self._read_at_s = time.monotonic() + STORED_S
            try:
                cache.stored(readable_metas(self._store, self._buckets)[0])
            except FreshetError as error:
                log.warning("the row store's offsets cannot be read", reason=str(error))
        self._report(short=not cache.evict(lambda: stop.wait(EVICT_PAUSE_S)), cache=cache)

    def _report(self, *, short: bool, cache: RowCache) -> None:
        if short and not self._was_short:
            log.warning(
                "rows take more memory than they may: the row store may lack their last changes",
                bytes=cache.bytes_in_use,
            )
        self._was_short = short


EVICT_S = 0.02
"""Interval at which rows are removed, if too many are here."""
EVICT_PAUSE_S = 0.0005
"""Pause after the lock was held, about ten times as long as it."""
STORED_S = 1.0
"""Interval at which the row store's offsets are read."""
MOST_ROUNDS = 40
"""Rounds over all rows in which counters of uses come down to 0."""


_Epoch = TypeVar("_Epoch", int, I64)


def _held(epoch: _Epoch) -> _Epoch:
    """Return epochs as rows hold them; 0 stays 0."""
    return (
        (epoch - 1) % EPOCHS + 1 if isinstance(epoch, int) else np.where(epoch, (epoch - 1) % EPOCHS + 1, 0)
    )
