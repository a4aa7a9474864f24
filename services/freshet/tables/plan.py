"""The plan of a batch in one store group: its unique rows in order of their buckets, and their users.

N occurrences of keys, F features of the group, U and V unique rows, S floats of a row, T floats of its
optimiser state, B buckets of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from freshet import _native
from freshet.config.spec.layout import Group
from freshet.tables.pooled_lists import PooledLists
from freshet.types import F32, I32, U8, U32, U64

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

    @property
    def state_floats(self) -> int:
        """Floats of a row's optimiser state (T)."""
        return self._native.state_floats

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
