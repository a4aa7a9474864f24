"""Sums by window, label and segment, as sorted arrays; tables of them merge.

A cell is (window, label, field, value); its histogram is sparse. How samples become a table: `grouping.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshet.types import F64, I64, Bool

__all__ = ["KEY", "OTHER", "SUMS", "TOTAL", "Table", "summed"]

KEY = np.dtype([("window", "<i8"), ("label", "<u2"), ("field", "<u2"), ("value", "<u8")])
"""window: start in ms. field: 0 for all samples, else 1 + the segment's position. value: of the segment, 0
overall."""

TOTAL = -(1 << 62)
"""The window of everything that has left its own window: since the beginning."""

OTHER = 0
"""The segment value that stands for all values beyond the first `max_values` of a field."""

SUMS = (
    "n", "weight", "predicted", "labelled", "loss", "squares", "absolute", "not_finite", "weight_squares",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """C cells and the H entries of their histograms."""

    keys: NDArray[np.void]  # (C,) of KEY, rising
    sums: F64  # (C, len(SUMS))
    cell: I64  # (H,) index of the entry's cell, rising
    bin: I64  # (H,) rising within a cell
    counts: F64  # (H, 2): positive and negative weight

    @classmethod
    def empty(cls) -> Table:
        """No cells."""
        none = np.empty(0, np.int64)
        return cls(np.empty(0, KEY), np.empty((0, len(SUMS))), none, none, np.empty((0, 2)))

    @classmethod
    def merge(cls, tables: list[Table]) -> Table:
        """One table with the sums of all, added up in the tables' order: merging step by step is the same to
        the bit."""
        tables = [table for table in tables if len(table.keys)]
        if len(tables) < 2:
            return tables[0] if tables else cls.empty()
        shift = np.cumsum([0, *(len(t.keys) for t in tables[:-1])])
        return cls._grouped(
            np.concatenate([t.keys for t in tables]),
            np.concatenate([t.sums for t in tables]),
            np.concatenate([t.cell + s for t, s in zip(tables, shift, strict=True)]),
            np.concatenate([t.bin for t in tables]),
            np.concatenate([t.counts for t in tables]),
        )

    @classmethod
    def _grouped(cls, keys: NDArray[np.void], sums: F64, cell: I64, bins: I64, counts: F64) -> Table:
        order = np.lexsort((keys["value"], keys["field"], keys["label"], keys["window"]))
        ranked = keys[order]
        first = np.ones(len(ranked), bool)
        first[1:] = ranked[1:] != ranked[:-1]
        group = np.empty(len(keys), np.int64)
        group[order] = np.cumsum(first) - 1
        kept = ranked[first]
        code = (group[cell] << 32) + bins
        ordered = np.argsort(code, kind="stable")  # of runs that rise, a table each: it merges them
        code = code[ordered]
        fresh = np.ones(len(code), bool)
        fresh[1:] = code[1:] != code[:-1]
        code, at = code[fresh], np.cumsum(fresh) - 1
        both = summed(counts[ordered], at, len(code))
        return cls(kept, summed(sums, group, len(kept)), code >> 32, code & 0xFFFFFFFF, both)

    def where(self, mask: Bool) -> Table:
        """The cells that the mask (C,) keeps."""
        if mask.all():
            return self
        index = np.cumsum(mask) - 1
        kept = mask[self.cell]
        return Table(
            self.keys[mask], self.sums[mask], index[self.cell[kept]], self.bin[kept], self.counts[kept]
        )

    def moved_to(self, window: int) -> Table:
        """All cells in one window: added up window by window, in their order."""
        if not len(self.keys):
            return self
        keys = self.keys.copy()
        keys["window"] = window
        return self._grouped(keys, self.sums, self.cell, self.bin, self.counts)


def summed(columns: F64, group: NDArray[np.intp], groups: int) -> F64:
    """Rows of `columns` summed by group, one after the other: (groups, columns)."""
    out = np.empty((groups, columns.shape[1]))
    for i, column in enumerate(columns.T):
        out[:, i] = np.bincount(group, column, groups)
    return out
