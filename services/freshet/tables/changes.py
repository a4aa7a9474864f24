"""What a store hands over: changed rows for the row store (`Flushed`) and for serving (`Published`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet.tables.plan import RowKeys
from freshet.types import F32, I64, U32, U64, Bool, Bucket, OffsetRange, PackedRows, RowRuns, TimeMs

__all__ = ["BucketChanges", "Flushed", "KnownPushes", "Published", "PublishedTable"]

# --- Which pushes looked-up rows know.
#
# Rows of a bucket and the offsets that it has applied change under one lock, and are read under it.
# So rows of one bucket all know the same pushes; those of another may know one more, as a push goes
# from bucket to bucket while a lookup does, and from shard to shard. Mostly all know the same.


@dataclass(frozen=True, slots=True, eq=False)
class KnownPushes:
    """Of the rows of one lookup. M moments that their buckets were read at, P partitions, B buckets of the
    model."""

    offsets: I64  # (M, P): rows of this moment know every push of samples below
    moment_of: Mapping[int, U32] = field(default_factory=dict)
    """{store group: (B,) each bucket's moment}; of account where the lookup had keys. Empty where M is 1."""
    _moments: list[list[int]] = field(init=False)  # `offsets`, for `knowing`

    def __post_init__(self) -> None:
        object.__setattr__(self, "_moments", self.offsets.tolist())

    @classmethod
    def of(cls, groups: Sequence[RowKeys], read: Sequence[I64]) -> KnownPushes:
        """From what buckets had applied, (B, P) a group, as `Store.lookup` told it with the rows."""
        asked = [np.flatnonzero(np.diff(group.bucket_starts.astype(np.int64))) for group in groups]
        if not any(len(buckets) for buckets in asked):
            return cls(np.empty((0, 1), np.int64))
        told: I64 = np.concatenate([one[buckets] for one, buckets in zip(read, asked, strict=True)])
        if (told == told[0]).all():
            return cls(told[:1])
        offsets, rest = _distinct(told)
        moment_of: dict[int, U32] = {}
        for group, one, buckets in zip(groups, read, asked, strict=True):
            moment_of[group.group] = of = np.zeros(len(one), np.uint32)
            of[buckets], rest = rest[: len(buckets)], rest[len(buckets) :]
        return cls(offsets, moment_of)

    @classmethod
    def merged(cls, groups: Sequence[int], parts: Sequence[tuple[Bool, KnownPushes]]) -> KnownPushes:
        """Of rows whose buckets (B,) lie with several shards, each of which told of its own."""
        if not parts:
            return cls(np.empty((0, 1), np.int64))
        offsets: I64 = np.concatenate([known.offsets for _, known in parts])
        if (offsets == offsets[:1]).all():
            return cls(offsets[:1])
        moment_of: dict[int, U32] = {}
        for group in groups:
            moment_of[group] = of = np.zeros(len(parts[0][0]), np.uint32)
            first = 0
            for owned, known in parts:
                told = known.moment_of.get(group)
                of[owned] = first + (0 if told is None else told[owned])
                first += len(known.offsets)
        return cls(offsets, moment_of)

    def knowing(self, ranges: Sequence[OffsetRange]) -> list[bool]:
        """(M,) whether rows of each moment know the push of these ranges. Plain numbers: it is asked for each
        batch and each push in flight, and mostly of one moment."""
        known = self.offsets.shape[1]
        return [
            all(r.partition < known and moment[r.partition] >= r.stop for r in ranges)
            for moment in self._moments
        ]


def _distinct(told: I64) -> tuple[I64, U32]:
    """The distinct rows of (N, P), and which of them each row is. There are few: numpy's `unique`, which
    sorts, takes 20 times as long for two."""
    moments = np.zeros(len(told), np.uint32)
    found: list[I64] = []
    left = np.arange(len(told))
    while len(left):
        same = (told[left] == told[left[0]]).all(axis=1)
        moments[left[same]] = len(found)
        found.append(told[left[0]])
        left = left[~same]
    return np.stack(found), moments


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
