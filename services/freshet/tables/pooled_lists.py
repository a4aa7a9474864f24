"""Lists that are pooled where their rows are: the sum of a list's rows, and its gradient back to them.

A pooled list enters a model through the sum of its rows, so a shard can send the sum of the rows that it has,
and the client add the sums of all shards: the operator `pool` of Rong et al. 2020 (distributed equivalent
substitution, arXiv 1909.04823).

Letters: U unique rows, S floats of a row, R rows that travel beside lists, K lists, N occurrences in lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from freshet.types import F32, F64, I32, I64, U32

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
