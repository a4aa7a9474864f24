"""What a store hands over: changed rows for the row store (`Flushed`) and for serving (`Published`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from freshet.types import F32, I64, U64, Bucket, PackedRows, RowRuns, TimeMs

__all__ = ["BucketChanges", "Flushed", "Published", "PublishedTable"]


@dataclass(frozen=True, slots=True, eq=False)
class BucketChanges:
    """One bucket's part of a flush, taken apart; for tests and tools."""

    bucket: Bucket
    applied: dict[int, int]  # {partition: next offset} as of these rows
    clock_ms: TimeMs  # largest event time applied
    stored: int  # rows that the row store holds once this is written: `BucketMeta.rows`
    rows: tuple[PackedRows, ...]
    removed: tuple[tuple[int, U64], ...]  # (table id, keys) evicted since the last flush


@dataclass(frozen=True, slots=True, eq=False)
class Flushed:
    """What changed in K buckets since they were last flushed; each copied under one hold of its lock.

    Whoever writes it keeps it until it is known to be written: the store has forgotten it.
    """

    buckets: I64  # (K,) rising
    applied: I64  # (K, P) next offset of each partition, as of these rows
    clock_ms: I64  # (K,) largest event time applied
    stored: I64  # (K,) rows that the row store holds once this is written: `BucketMeta.rows`
    runs: RowRuns

    def __len__(self) -> int:
        """Changed rows, removals not counted."""
        return self.runs.rows

    def __iter__(self) -> Iterator[BucketChanges]:
        """The buckets one by one, changed or not; for tests and tools."""
        for i, bucket in enumerate(self.buckets.tolist()):
            runs = list(self.runs.of_buckets(bucket, bucket + 1))
            yield BucketChanges(
                Bucket(bucket),
                dict(enumerate(self.applied[i].tolist())),
                TimeMs(int(self.clock_ms[i])),
                int(self.stored[i]),
                tuple(PackedRows(run.table, run.keys, run.records) for run in runs if len(run.keys)),
                tuple((run.table, run.removed) for run in runs if len(run.removed)),
            )


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
