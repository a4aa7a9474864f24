"""Sums by window, label and segment, as sorted arrays: samples become a table, tables merge.

A cell is (window, label, field, value); its histogram is sparse. Adding is cheap because nothing is grouped
until many samples have come together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshet.measures.auc import bins_of
from freshet.types import F64, I64, U64, Bool

__all__ = ["KEY", "SUMS", "Samples", "Table"]

KEY = np.dtype([("window", "<i8"), ("label", "<u2"), ("field", "<u2"), ("value", "<u8")])
"""window: start in ms. field: 0 for all samples, else 1 + the segment's position. value: of the segment, 0
overall."""

SUMS = (
    "n", "weight", "predicted", "labelled", "loss", "squares", "absolute", "not_finite", "weight_squares",
)  # fmt: skip

PROBABILITY_FLOOR = 1e-7
"""Predictions are taken to be at least this far from 0 and 1 when their logloss is added up: one mistake
costs 16."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """B samples that have not been grouped yet."""

    window: I64
    label: NDArray[np.uint16]
    number: Bool  # whether the label is a number
    prediction: F64
    value: F64
    weight: F64
    segments: tuple[U64, ...]  # per segment field

    @classmethod
    def concat(cls, parts: list[Samples]) -> Samples:
        """Join end to end."""
        return cls(
            np.concatenate([s.window for s in parts]),
            np.concatenate([s.label for s in parts]),
            np.concatenate([s.number for s in parts]),
            np.concatenate([s.prediction for s in parts]),
            np.concatenate([s.value for s in parts]),
            np.concatenate([s.weight for s in parts]),
            tuple(np.concatenate(column) for column in zip(*(s.segments for s in parts), strict=True)),
        )


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
    def of(cls, samples: Samples) -> Table:
        """Group samples: each counts once overall and once in each segment."""
        size = len(samples.window)
        sums, bins, counts = _terms(samples)
        keys = np.zeros((1 + len(samples.segments)) * size, KEY)
        for field, values in enumerate((np.zeros(size, np.uint64), *samples.segments)):
            part = keys[field * size : (field + 1) * size]
            part["window"], part["label"], part["field"], part["value"] = (
                samples.window,
                samples.label,
                field,
                values,
            )
        fields = 1 + len(samples.segments)
        binned = np.flatnonzero(counts.any(1))
        entries = (np.arange(fields)[:, None] * size + binned).ravel()
        return cls._grouped(
            keys,
            np.tile(sums, (fields, 1)),
            entries,
            np.tile(bins[binned], fields),
            np.tile(counts[binned], (fields, 1)),
        )

    @classmethod
    def merge(cls, tables: list[Table]) -> Table:
        """One table with the sums of all."""
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
        total = _summed(sums, group, len(kept))
        code, at = np.unique(group[cell] * (1 << 32) + bins, return_inverse=True)
        both = _summed(counts, at, len(code))
        return cls(kept, total, code >> 32, code & 0xFFFFFFFF, both)

    def where(self, mask: Bool) -> Table:
        """The cells that the mask (C,) keeps."""
        index = np.cumsum(mask) - 1
        kept = mask[self.cell]
        return Table(
            self.keys[mask], self.sums[mask], index[self.cell[kept]], self.bin[kept], self.counts[kept]
        )

    def moved_to(self, window: int) -> Table:
        """All cells in one window."""
        keys = self.keys.copy()
        keys["window"] = window
        return Table.merge([Table(keys, self.sums, self.cell, self.bin, self.counts)])


def _terms(samples: Samples) -> tuple[F64, I64, F64]:
    """Each sample's summands (B, len(SUMS)), its bin (B,) and its place in the histogram (B, 2); numbers
    have none."""
    p, y, w = samples.prediction, samples.value, samples.weight
    finite = np.isfinite(p) & np.isfinite(y)
    p, y, w = np.where(finite, p, 0.5), np.where(finite, y, 0.0), np.where(finite, w, 0.0)
    true_false = ~samples.number
    q = np.clip(np.where(true_false, p, 0.5), PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    loss = np.where(true_false, -(y * np.log(q) + (1 - y) * np.log1p(-q)), 0.0)
    sums = np.stack(
        [finite * 1.0, w, w * p, w * y, w * loss, w * (p - y) ** 2, w * np.abs(p - y), ~finite * 1.0, w * w],
        1,
    )
    counts = np.stack([w * y, w * (1 - y)], 1) * true_false[:, None]
    return sums, bins_of(q), counts


def _summed(columns: F64, group: NDArray[np.intp], groups: int) -> F64:
    """Rows of `columns` summed by group: (groups, columns)."""
    out = np.empty((groups, columns.shape[1]))
    for i, column in enumerate(columns.T):
        out[:, i] = np.bincount(group, column, groups)
    return out
