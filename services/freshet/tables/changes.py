"""What a store hands over: changed rows for the row store (`Flushed`) and for serving (`Published`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from freshet.types import F32, I64, U8, U64, Bucket, PackedRows, TimeMs

__all__ = ["BucketChanges", "Flushed", "Published", "PublishedTable", "RowColumns"]


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """Packed rows of one store group, bucket after bucket and table after table within it."""

    keys: U64  # (N,)
    records: U8  # (N, record_bytes)
    runs: I64  # (R, 4) bucket, table, start, stop: rows [start, stop) are that bucket's and table's


@dataclass(frozen=True, slots=True, eq=False)
class BucketChanges:
    """One bucket's part of a flush; with a fence and a sequence it is a `BucketDelta`."""

    bucket: Bucket
    applied: dict[int, int]  # {partition: next offset} as of these rows
    clock_ms: TimeMs  # largest event time applied
    stored: int  # rows that the row store holds once this is written: `BucketMeta.rows`
    rows: tuple[PackedRows, ...]
    removed: tuple[tuple[int, U64], ...]  # (table id, keys) evicted since the last flush


@dataclass(frozen=True, slots=True, eq=False)
class Flushed:
    """What changed in some buckets since they were last flushed; each copied under one hold of its lock.

    Iterate for the buckets one by one. If writing fails, give it back: `Store.put_back`.
    """

    buckets: tuple[Bucket, ...]
    applied: I64  # (buckets, partitions)
    clock_ms: I64  # (buckets,)
    stored: I64  # (buckets,)
    groups: Sequence[RowColumns]
    removed_keys: U64
    removed_tables: U8
    removed_starts: I64  # (buckets + 1,) removals of bucket i are [removed_starts[i], removed_starts[i + 1])

    def __len__(self) -> int:
        """Changed rows, removals not counted."""
        return sum(len(group.keys) for group in self.groups)

    def __iter__(self) -> Iterator[BucketChanges]:
        """The buckets in the order in which they were asked for, changed or not."""
        runs: dict[int, list[PackedRows]] = {}
        for group in self.groups:
            for bucket, table, start, stop in group.runs.tolist():
                part = PackedRows(table, group.keys[start:stop], group.records[start:stop])
                runs.setdefault(bucket, []).append(part)
        for i, bucket in enumerate(self.buckets):
            yield BucketChanges(
                bucket,
                dict(enumerate(self.applied[i].tolist())),
                TimeMs(int(self.clock_ms[i])),
                int(self.stored[i]),
                tuple(runs.get(bucket, ())),
                self._removed(i),
            )

    def _removed(self, i: int) -> tuple[tuple[int, U64], ...]:
        start, stop = self.removed_starts[i : i + 2].tolist()
        if start == stop:
            return ()
        keys, tables = self.removed_keys[start:stop], self.removed_tables[start:stop]
        return tuple((int(t), keys[tables == t]) for t in np.unique(tables))


@dataclass(frozen=True, slots=True, eq=False)
class PublishedTable:
    """Changed and evicted rows of one table, as serving needs them."""

    table: int  # table id
    keys: U64  # (N,) in order of their buckets
    values: F32  # (N, S) slots of the row, no optimiser state
    removed: U64  # (R,) evicted; none of them is in `keys`


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """What changed since the last publish, up to a bound."""

    tables: tuple[PublishedTable, ...]
    clock_ms: TimeMs  # largest event time applied anywhere in the store
    pending: int  # changed rows still to be published

    def __len__(self) -> int:
        """Changed rows, removals not counted."""
        return sum(len(part.keys) for part in self.tables)
