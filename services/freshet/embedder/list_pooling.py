"""Pooled lists of a batch: which lists travel as sums, and a batch in which each is one row.

To the trainer a pooled list is a list of one row, its vector, that no other sample uses; the gradient of this
row is the gradient of the vector. That is exact for models that use a list only through the sum or mean of
its rows, and do not step rows within a batch.

Letters: U unique rows of a group, N occurrences, F features of a group, B samples, R rows beside K lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet.rows.service import PoolsLists, RowService
from freshet.tables.pooled_lists import PooledLists
from freshet.types import F32, I32, I64, U32, Bool

POOLING_KINDS = ("dlrm", "deepfm", "dcnv2")
"""Kinds of models that use a list only through the sum or mean of its rows. Native kinds step rows within
batches. A class of the user may be a dense model of its own, which the embedder does not load to find out."""

LEAST_GAIN = 2
"""Rows that a list feature must have for each sum that travels in place of them."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlaces:
    """The occurrences of one store group, as `GroupInputs` has them."""

    positions: I32  # (N,)
    feature_starts: U32  # (F + 1,)
    list_ends: Sequence[U32 | None]  # per feature (B,), or None


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """A group with pooled lists."""

    lists: PooledLists
    places: GroupPlaces  # among the R + K rows
    factors: F32  # (K, 1) of the lists' sums


def pools_of(rows: RowService, kind: str, *, states: bool) -> PoolsLists | None:
    """Return the row service if it pools lists for a model of this kind, else None.

    `states`: lookups fetch optimiser states. The trainer then steps copies of rows, and needs these.
    """
    return rows if kind in POOLING_KINDS and not states and isinstance(rows, PoolsLists) else None


def pooled(places: GroupPlaces, unique: int, pools: Sequence[str | None], shards: int) -> Pooled | None:
    """Return the group with those list features pooled for which it pays; None if there is none.

    Each shard may send a sum for each list, as long as a row. It pays if these are at most 1 / LEAST_GAIN of
    the feature's unique rows.

    Args:
        places: the occurrences among the unique rows.
        unique: U.
        pools: per feature "sum" or "mean"; None for features that are no lists.
        shards: that share the buckets.
    """
    starts = places.feature_starts.tolist()
    chosen: dict[int, I64] = {}  # feature -> (B,) occurrences of each list that have a row
    beside = np.zeros(unique, np.bool_)
    for f, ends in enumerate(places.list_ends):
        own = places.positions[starts[f] : starts[f + 1]]
        if ends is not None and pools[f] is not None:
            counts = _counts(own, ends)
            if _pays(own, int(np.count_nonzero(counts)), unique, shards):
                chosen[f] = counts
                continue
        beside[own[own >= 0]] = True
    return _pooled(places, chosen, beside, pools) if chosen else None


def _counts(positions: I32, ends: U32) -> I64:
    """Return the occurrences with a row of each list."""
    held: I64 = np.zeros(len(positions) + 1, np.int64)
    np.cumsum(positions >= 0, out=held[1:])
    return np.diff(held[ends.astype(np.int64)], prepend=0)


def _pays(positions: I32, lists: int, unique: int, shards: int) -> bool:
    if not lists or LEAST_GAIN * shards * lists > len(positions):
        return False
    used = np.zeros(unique, np.bool_)
    used[positions[positions >= 0]] = True
    return LEAST_GAIN * shards * lists <= int(np.count_nonzero(used))


def _pooled(places: GroupPlaces, chosen: dict[int, I64], beside: Bool, pools: Sequence[str | None]) -> Pooled:
    rows = np.flatnonzero(beside).astype(np.int32)
    place_of: I32 = np.full(len(beside) + 1, -1, np.int32)  # the last is that of -1
    place_of[rows] = np.arange(len(rows), dtype=np.int32)
    starts, next_row = places.feature_starts.tolist(), len(rows)
    positions: list[I32] = []
    list_ends: list[U32 | None] = []
    elements: list[I32] = []
    counts: list[I64] = []
    factors: list[F32] = []
    for f, ends in enumerate(places.list_ends):
        own = places.positions[starts[f] : starts[f + 1]]
        if f not in chosen:
            positions.append(place_of[own])
            list_ends.append(ends)
            continue
        held = chosen[f] > 0
        sizes = chosen[f][held]
        positions.append(np.arange(next_row, next_row + len(sizes), dtype=np.int32))
        next_row += len(sizes)
        list_ends.append(np.cumsum(held).astype(np.uint32))
        elements.append(own[own >= 0])
        counts.append(sizes)
        mean = pools[f] == "mean"
        factors.append(np.float32(1) / sizes.astype(np.float32) if mean else np.ones(len(sizes), np.float32))
    new_starts = np.cumsum([0, *(len(p) for p in positions)], dtype=np.uint32)
    return Pooled(
        PooledLists(rows, np.concatenate(elements), np.concatenate(counts).astype(np.uint32)),
        GroupPlaces(np.concatenate(positions), new_starts, list_ends),
        np.concatenate(factors)[:, None],
    )
