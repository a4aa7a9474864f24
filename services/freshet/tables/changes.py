"""Changes of a store: rows for the row store (`Flushed`) and for serving (`Published`).

M moments at which buckets were read, P partitions, B buckets of the model, K buckets of a flush, N rows,
R removed keys, S floats of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet.tables.plan import KeyGroup
from freshet.types import F32, I64, U32, U64, Bool, Bucket, OffsetRange, PackedRows, RowRuns, TimeMs

# --- The pushes that looked-up rows contain.
#
# Rows of a bucket and its applied offsets change, and are read, under one lock, so all rows of a bucket
# contain the same pushes. Rows of another bucket may contain one more, since a push proceeds from bucket
# to bucket and from shard to shard while a lookup does. Usually all rows contain the same pushes.


@dataclass(frozen=True, slots=True, eq=False)
class KnownPushes:
    """The pushes that the rows of one lookup contain."""

    offsets: I64  # (M, P): rows read at this moment contain every push of samples below
    moment_of: Mapping[int, U32] = field(default_factory=dict)
    """{store group: (B,) each bucket's moment}; valid for buckets with keys. Empty if M is 1."""
    _moments: list[list[int]] = field(init=False)  # `offsets`, for `knowing`

    def __post_init__(self) -> None:
        object.__setattr__(self, "_moments", self.offsets.tolist())

    @classmethod
    def of(cls, groups: Sequence[KeyGroup], read: Sequence[I64]) -> KnownPushes:
        """Create from the applied offsets that `Store.lookup` read with the rows: (B, P) int64 a group."""
        looked_up = [np.flatnonzero(np.diff(group.bucket_starts.astype(np.int64))) for group in groups]
        if not any(len(buckets) for buckets in looked_up):
            return cls(np.empty((0, 1), np.int64))
        applied: I64 = np.concatenate([one[buckets] for one, buckets in zip(read, looked_up, strict=True)])
        if (applied == applied[0]).all():
            return cls(applied[:1])
        offsets, rest = _distinct(applied)
        moment_of: dict[int, U32] = {}
        for group, one, buckets in zip(groups, read, looked_up, strict=True):
            moment_of[group.group] = of = np.zeros(len(one), np.uint32)
            of[buckets], rest = rest[: len(buckets)], rest[len(buckets) :]
        return cls(offsets, moment_of)

    @classmethod
    def merged(cls, groups: Sequence[int], parts: Sequence[tuple[Bool, KnownPushes]]) -> KnownPushes:
        """Merge those of several shards, each with its owned buckets (B,) bool."""
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
                moments = known.moment_of.get(group)
                of[owned] = first + (0 if moments is None else moments[owned])
                first += len(known.offsets)
        return cls(offsets, moment_of)

    def knowing(self, ranges: Sequence[OffsetRange]) -> list[bool]:
        """Return for each of the M moments whether its rows contain the push of these ranges.

        Uses Python integers: it is called for each batch and each push in flight, usually with M = 1.
        """
        known = self.offsets.shape[1]
        return [
            all(r.partition < known and moment[r.partition] >= r.stop for r in ranges)
            for moment in self._moments
        ]


def _distinct(applied: I64) -> tuple[I64, U32]:
    """Return the distinct rows of (N, P), and the index of each row in them.

    There are few of them: `numpy.unique`, which sorts, takes 20 times as long for two.
    """
    moments = np.zeros(len(applied), np.uint32)
    found: list[I64] = []
    left = np.arange(len(applied))
    while len(left):
        same = (applied[left] == applied[left[0]]).all(axis=1)
        moments[left[same]] = len(found)
        found.append(applied[left[0]])
        left = left[~same]
    return np.stack(found), moments


@dataclass(frozen=True, slots=True, eq=False)
class BucketChanges:
    """One bucket's part of a flush; for tests and tools."""

    bucket: Bucket
    applied: dict[int, int]  # {partition: next offset} as of these rows
    clock_ms: TimeMs  # largest event time applied
    stored: int  # rows in the row store after the flush: `BucketMeta.rows`
    rows: tuple[PackedRows, ...]
    removed: tuple[tuple[int, U64], ...]  # (table id, keys) evicted since the last flush


@dataclass(frozen=True, slots=True, eq=False)
class Flushed:
    """Changes of K buckets since their last flush; each bucket copied under one hold of its lock.

    The caller must keep it until it is known to be written, since the store holds no other copy.
    """

    buckets: I64  # (K,) rising
    applied: I64  # (K, P) next offset of each partition, as of these rows
    clock_ms: I64  # (K,) largest event time applied
    stored: I64  # (K,) rows in the row store after the flush: `BucketMeta.rows`
    runs: RowRuns

    def __len__(self) -> int:
        """Number of changed rows, without removals."""
        return self.runs.rows

    def __iter__(self) -> Iterator[BucketChanges]:
        """Yield the buckets one by one, changed or not; for tests and tools."""
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
    removed: U64  # (R,) evicted keys, none of them in `keys`
    group: int = 0  # store group of the table


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """Changes since the last publish, up to a bound."""

    tables: tuple[PublishedTable, ...]
    clock_ms: TimeMs  # largest event time applied anywhere in the store
    pending: int  # changed rows still to be published
    passed: int = 0  # changed rows that serving holds nearly, and are left out

    def __len__(self) -> int:
        """Number of changed rows, without removals."""
        return sum(len(part.keys) for part in self.tables)
