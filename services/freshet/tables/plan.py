"""The plan of a batch in one store group: its unique rows in order of their buckets, and who uses them."""

from __future__ import annotations

from freshet import _native
from freshet.types import I32, U8, U32, U64

__all__ = ["Plan"]


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
