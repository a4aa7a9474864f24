"""The plan of a batch in one store group: its unique rows in order of their buckets, and their users.

N occurrences of keys, F features of the group, U and V unique rows, S floats of a row, T floats of its
optimiser state, B buckets of the model, R rows that travel beside the sums of K lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from freshet import _native
from freshet.config.spec.layout import Group
from freshet.types import F32, F64, I32, I64, U8, U32, U64

# --- Arguments of the native core: unique keys of a batch, and the slots of a row.


NativeSlot: TypeAlias = tuple[int, int, float, str, dict[str, float]]
"""(start, width, init, name of the optimiser, its parameters)."""


class UniqueKeys(Protocol):
    """Unique keys of a batch in one store group, in order of their buckets: a `Plan` or `KeyGroup`."""

    @property
    def keys(self) -> U64:
        """(U,) unique by (table, key), sorted by bucket."""

    @property
    def tables(self) -> U8:
        """(U,) table ids."""

    @property
    def bucket_starts(self) -> U32:
        """(B + 1,) where each bucket's keys start."""


# --- Lists that are pooled where their rows are. A pooled list enters a model through the sum of its rows, so
# a shard sends the sum of the rows that it has, and the client adds the sums of all shards: the operator
# `pool` of Rong et al. 2020 (distributed equivalent substitution, arXiv 1909.04823).

_Floats = TypeVar("_Floats", F32, F64)

CHUNK_FLOATS = 1 << 19
"""Floats of occurrences that are gathered at once: bounds the memory beside rows and sums."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledLists:
    """The lists of one store group, as positions among its unique rows.

    A lookup of the group yields (R + K, S): `rows`, then the sum of each list. A push has as many gradients.
    """

    rows: I32  # (R,) rows that other features use, rising
    positions: I32  # (N,) row of each occurrence, list by list; a row may repeat
    counts: U32  # (K,) occurrences of each list, at least one

    def __len__(self) -> int:
        """R + K."""
        return len(self.rows) + len(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.rows.nbytes + self.positions.nbytes + self.counts.nbytes

    def looked_up(self, rows: F32) -> F32:
        """Return (R + K, S) of a lookup's rows (U, S) float32."""
        out: F32 = np.empty((len(self), rows.shape[1]), np.float32)
        out[: len(self.rows)] = rows[self.rows]
        out[len(self.rows) :] = sum_lists(rows, self.positions, self.counts)
        return out

    def row_gradients(self, gradients: F32, rows: int) -> F32:
        """Return (rows, S) gradients of all unique rows from (R + K, S) float32."""
        out: F32 = np.zeros((rows, gradients.shape[1]), np.float32)
        out[self.rows] = gradients[: len(self.rows)]
        add_list_gradients(out, gradients[len(self.rows) :], self.positions, self.counts)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class ListsOfShard:
    """The part of a group's lists whose rows one shard has."""

    lists: PooledLists  # positions among the shard's rows
    row_places: I64  # (R',) where its rows are among the R + K of the group
    sum_places: I64  # (K',) where the sums are to which it contributes


def lists_of_shard(lists: PooledLists, places: I64 | None, rows: int) -> ListsOfShard:
    """Return the part of the lists whose rows a shard has.

    Args:
        lists: of the group.
        places: (U',) the shard's rows among the group's; None: all.
        rows: U.
    """
    beside = len(lists.rows)
    if places is None:
        return ListsOfShard(lists, np.arange(beside), np.arange(beside, len(lists)))
    local: I32 = np.full(rows, -1, np.int32)
    local[places] = np.arange(len(places), dtype=np.int32)
    positions, rows_there = local[lists.positions], local[lists.rows]
    held = positions >= 0
    of_list = np.repeat(np.arange(len(lists.counts)), lists.counts)
    counts = np.bincount(of_list[held], minlength=len(lists.counts))
    lists_there, row_places = np.flatnonzero(counts), np.flatnonzero(rows_there >= 0)
    part = PooledLists(rows_there[row_places], positions[held], counts[lists_there].astype(np.uint32))
    return ListsOfShard(part, row_places, beside + lists_there)


def sum_lists(rows: _Floats, positions: I32, counts: U32) -> _Floats:
    """Return the (K, S) sums of lists, in the precision of `rows`.

    Args:
        rows: (U, S).
        positions: (N,) row of each occurrence, list by list.
        counts: (K,) occurrences of each list.
    """
    out = np.zeros((len(counts), rows.shape[1]), rows.dtype)
    _add_runs(out, np.repeat(np.arange(len(counts)), counts), rows, positions)
    return out


def add_list_gradients(into: _Floats, gradients: _Floats, positions: I32, counts: U32) -> None:
    """Add the gradient of each list's sum to those of its rows, once per occurrence.

    Args:
        into: (U, S) gradients of the rows.
        gradients: (K, S) of the lists' sums.
        positions: (N,) row of each occurrence, list by list.
        counts: (K,) occurrences of each list.
    """
    short = positions.astype(np.uint16) if len(into) <= 1 << 16 else positions  # numpy sorts it by radix
    by_row = np.argsort(short, kind="stable")  # so that gradients add up in the order of samples
    _add_runs(into, positions[by_row], gradients, np.repeat(np.arange(len(counts)), counts)[by_row])


def _add_runs(into: _Floats, targets: I32 | I64, source: _Floats, places: I32 | I64) -> None:
    """Add source[places[n]] to into[targets[n]] for each n; `targets` (N,) must not fall."""
    step = max(1, CHUNK_FLOATS // max(1, source.shape[1]))
    for first in range(0, len(targets), step):
        part = targets[first : first + step]
        starts = np.flatnonzero(np.diff(part, prepend=-1))
        into[part[starts]] += np.add.reduceat(source[places[first : first + step]], starts, axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class KeyGroup:
    """Unique keys of a batch in one store group, in order of their buckets."""

    group: int  # store group: tables of equal layout share one
    keys: U64  # (U,) unique by (table, key), sorted by bucket
    tables: U8  # (U,) table id of each key
    bucket_starts: U32  # (B + 1,) keys of bucket b are [bucket_starts[b], bucket_starts[b + 1])
    lists: PooledLists | None = field(default=None, kw_only=True)
    """Lists whose sums travel in place of their rows: only for a row service that `PoolsLists`."""

    def repeated(self, counts: U32) -> KeyGroup:
        """Return the group with each key repeated `counts` (U,) uint32 times in a row; copies.

        A push names a row's key once per gradient.
        """
        ends = np.zeros(len(counts) + 1, np.uint32)
        np.cumsum(counts, out=ends[1:])
        return KeyGroup(
            self.group,
            np.repeat(self.keys, counts),
            np.repeat(self.tables, counts),
            ends[self.bucket_starts],
        )


def native_slots(group: Group) -> list[NativeSlot]:
    """Return the slots of a group's rows, in order."""
    return [
        (s.start, s.width, float(s.init), s.optimizer.name, dict(s.optimizer.parameters)) for s in group.slots
    ]


# --- Steps of local copies of rows, equal to those of the store.


class RowSteps:
    """Optimiser steps of one store group, on rows that were looked up with their state. Thread-safe."""

    def __init__(self, group: Group) -> None:
        """Create for a group; values are float32 here, even if the group stores bf16."""
        self._native = _native.RowSteps(native_slots(group))

    @property
    def native(self) -> _native.RowSteps:
        """The native object."""
        return self._native

    def step(self, local: UniqueKeys, values: F32, states: F32, pushed: UniqueKeys, gradients: F32) -> int:
        """Step the rows of `local` that have gradients, in place, and return their number.

        The result equals a push of these gradients to the store bit by bit, if the store holds float32. A row
        with a gradient that is not finite is unchanged.

        Args:
            local: keys of the U local rows.
            values: (U, S) float32.
            states: (U, T) float32.
            pushed: keys of the V gradients.
            gradients: (V, S) float32.

        Raises:
            ValueError: the arrays' shapes do not agree.
        """
        return self._native.step(
            local.keys,
            local.tables,
            local.bucket_starts,
            values,
            states,
            pushed.keys,
            pushed.tables,
            pushed.bucket_starts,
            gradients,
        )


class Plan:
    """Unique (table, key) of a batch's occurrences, grouped by bucket.

    One per lane and store group; not thread-safe. Results are views of memory that the next `build`
    overwrites. Memory grows to the largest batch and is reused.
    """

    def __init__(self, *, tables: U8, buckets: int) -> None:
        """Create a plan for a group.

        Args:
            tables: (F,) uint8, table id of each feature of the group, in the group's order.
            buckets: number of buckets of the model; a power of two from 2 to 65536.

        Raises:
            ValueError: `buckets` is another number.
        """
        self._tables = tables
        self._native = _native.Plan(buckets)

    def build(self, keys: U64, feature_starts: U32) -> int:
        """Plan a batch and return U. The result depends on the arguments only, on every machine.

        Args:
            keys: (N,) uint64, feature by feature; 0 (`freshet.features.ABSENT_KEY`) has no row.
            feature_starts: (F + 1,) uint32; occurrences of feature f are
                [feature_starts[f], feature_starts[f + 1]).

        Raises:
            ValueError: `feature_starts` does not rise from 0 to N.
        """
        self._native.run(keys, feature_starts, self._tables)
        return self._native.unique

    @property
    def keys(self) -> U64:
        """(U,) unique keys, sorted by bucket; within a bucket in order of first occurrence."""
        return self._native.keys

    @property
    def tables(self) -> U8:
        """(U,) table id of each unique key."""
        return self._native.tables

    @property
    def positions(self) -> I32:
        """(N,) unique row of each occurrence; -1 for key 0."""
        return self._native.positions

    @property
    def bucket_starts(self) -> U32:
        """(B + 1,) unique rows of bucket b are [bucket_starts[b], bucket_starts[b + 1])."""
        return self._native.bucket_starts

    @property
    def order(self) -> U32:
        """Occurrences that have a row, sorted by unique row and position: the order of gradient sums."""
        return self._native.order

    @property
    def order_starts(self) -> U32:
        """(U + 1,) occurrences of unique row u are order[order_starts[u]:order_starts[u + 1]]."""
        return self._native.order_starts
