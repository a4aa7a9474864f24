"""The plan of a batch in one store group: its unique rows in order of their buckets, and who uses them."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from freshet import _native
from freshet.config.spec.layout import Group
from freshet.types import F32, I32, U8, U32, U64

__all__ = ["NativeSlot", "Plan", "RowKeys", "RowSteps", "native_slots"]

# --- What the native core is told: unique keys of a batch, and the slots of a row.


NativeSlot: TypeAlias = tuple[int, int, float, str, dict[str, float]]
"""Start, width, init, name of the optimiser, its parameters."""


class RowKeys(Protocol):
    """Unique keys of a batch in one store group, in order of their buckets: `seams.rowservice.KeyGroup`."""

    @property
    def group(self) -> int:
        """Store group."""

    @property
    def keys(self) -> U64:
        """(U,) unique by (table, key), sorted by bucket."""

    @property
    def tables(self) -> U8:
        """(U,) table ids."""

    @property
    def bucket_starts(self) -> U32:
        """(buckets + 1,) where each bucket's keys start."""


def native_slots(group: Group) -> list[NativeSlot]:
    """The slots of a group's rows, in order."""
    return [
        (s.start, s.width, float(s.init), s.optimizer.name, dict(s.optimizer.parameters)) for s in group.slots
    ]


# --- Rows that were looked up with their optimiser state, stepped by their holder as the store will step
# its own.


class RowSteps:
    """Of one store group. Any thread may use it.

    Letters: U rows, S floats of a row, T floats of its optimiser state.
    """

    def __init__(self, group: Group) -> None:
        """Values are float32 here, also of a group that holds them in bf16."""
        self._native = _native.RowSteps(native_slots(group))

    @property
    def native(self) -> _native.RowSteps:
        """What native code steps by."""
        return self._native

    @property
    def state_floats(self) -> int:
        """T."""
        return self._native.state_floats

    def step(self, mine: RowKeys, values: F32, states: F32, theirs: RowKeys, gradients: F32) -> int:
        """Step those of my rows (U, S), with states (U, T), that `gradients` (V, S) are of; returns how many.

        As a push of these gradients steps them in the store, to the bit where that holds float32; a row whose
        gradient is not finite stays as it is. Raises ValueError for arrays that do not fit each other.
        """
        return self._native.step(
            mine.keys,
            mine.tables,
            mine.bucket_starts,
            values,
            states,
            theirs.keys,
            theirs.tables,
            theirs.bucket_starts,
            gradients,
        )


class Plan:
    """Unique (table, key) of a batch's occurrences, grouped by bucket.

    One per lane and store group; not thread-safe. Results are views of memory that the plan owns and `build`
    overwrites: copy what must outlive the next batch. No allocation once the largest batch has been seen.

    Letters: N occurrences, F features of the group, U unique rows.
    """

    def __init__(self, *, tables: U8, buckets: int) -> None:
        """Plan batches of a group.

        Args:
            tables: (F,) table id of each feature of the group, in the group's order.
            buckets: of the model; a power of two from 2 to 65536.

        Raises ValueError for other bucket counts.
        """
        self._tables = tables
        self._native = _native.Plan(buckets)

    def build(self, keys: U64, feature_starts: U32) -> int:
        """Plan a batch; returns U. Equal input gives equal output, on every machine.

        Args:
            keys: (N,) feature-major; 0 (`freshet.features.ABSENT_KEY`) makes no row.
            feature_starts: (F + 1,) occurrences of feature f are [feature_starts[f], feature_starts[f + 1]).

        Raises ValueError if `feature_starts` does not rise from 0 to N.
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
        """(buckets + 1,) unique rows of bucket b are [bucket_starts[b], bucket_starts[b + 1])."""
        return self._native.bucket_starts

    @property
    def order(self) -> U32:
        """Occurrences that have a row, by unique row, rising within each: the order of gradient sums."""
        return self._native.order

    @property
    def order_starts(self) -> U32:
        """(U + 1,) occurrences of unique row u are order[order_starts[u]:order_starts[u + 1]]."""
        return self._native.order_starts
