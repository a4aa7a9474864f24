"""Samples become a table of sums: cells are numbered, so that nothing is sorted but small integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshet.measures.auc import bins_of_logits, coarse
from freshet.measures.cells import KEY, SUMS, Table, summed
from freshet.types import F32, F64, I64, U8, U64, Bool

__all__ = ["PROBABILITY_FLOOR", "Samples", "table_of"]

PROBABILITY_FLOOR = 1e-7
"""Predictions are taken to be at least this far from 0 and 1 when their logloss is added up: one mistake
costs 16."""

MOST_NUMBERS = 1 << 16
"""Cells that are numbered by counting, and sorted by radix; of more (samples of thousands of windows at
once) the numbers are sorted."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """B samples that have not been grouped yet."""

    times_ms: I64
    label: U8
    prediction: F32  # of the sample's own label
    value: F32
    weight: F32
    segments: tuple[U64, ...]  # per segment field

    @classmethod
    def concat(cls, parts: list[Samples]) -> Samples:
        """Join end to end."""
        return cls(
            np.concatenate([s.times_ms for s in parts]),
            np.concatenate([s.label for s in parts]),
            np.concatenate([s.prediction for s in parts]),
            np.concatenate([s.value for s in parts]),
            np.concatenate([s.weight for s in parts]),
            tuple(np.concatenate(column) for column in zip(*(s.segments for s in parts), strict=True)),
        )


def table_of(samples: Samples, window: I64, number: Bool, values: Sequence[U64]) -> Table:
    """Group samples: each counts once overall and once in each segment, there in coarser bins.

    Args:
        samples: B of them.
        window: (B,) each one's window.
        number: (L,) whether a label is a number.
        values: of each segment field those that are told apart, rising, OTHER among them.
    """
    keys, cells = _numbered(samples, window, len(number), values)
    sums, bins, counts = _terms(samples, number[samples.label])
    total = np.zeros((len(keys), len(SUMS)))
    for cell in cells:
        total += summed(sums, cell, len(keys))  # a cell is of one field: to all others this adds nothing
    binned = np.flatnonzero(counts.any(1))
    by_bin = binned[np.argsort(bins[binned].astype(np.uint16), kind="stable")]
    cell = cells[:, by_bin].ravel()
    order = np.argsort(cell.astype(np.uint16) if len(keys) <= MOST_NUMBERS else cell, kind="stable")
    cell, sample = cell[order], np.tile(by_bin, len(cells))[order]
    bins = np.where(keys["field"][cell] > 0, coarse(bins)[sample], bins[sample])
    first = np.ones(len(cell), bool)
    first[1:] = (cell[1:] != cell[:-1]) | (bins[1:] != bins[:-1])
    at = np.cumsum(first) - 1
    both = summed(counts[sample], at, int(first.sum()))
    return Table(keys, total, cell[first], bins[first], both)


def _numbered(
    samples: Samples, window: I64, labels: int, values: Sequence[U64]
) -> tuple[NDArray[np.void], I64]:
    """Keys (C,) of the cells that samples fall into, rising, and the place of each sample's among them, one
    row a field: (1 + segments, B)."""
    windows = np.unique(window)
    choices = np.concatenate([np.zeros(1, np.uint64), *values])
    fields = np.repeat(np.arange(1 + len(values)), [1, *map(len, values)])
    base = (np.searchsorted(windows, window) * labels + samples.label) * len(choices)
    codes = np.empty((1 + len(values), len(window)), np.int64)
    codes[0] = base
    start = 1
    for row, column, told in zip(codes[1:], samples.segments, values, strict=True):
        at = np.minimum(np.searchsorted(told, column), len(told) - 1)
        row[:] = base + start + np.where(told[at] == column, at, 0)  # OTHER is the first
        start += len(told)
    kept, cells = _ranked(codes, len(windows) * labels * len(choices))
    keys = np.empty(len(kept), KEY)
    rest, choice = np.divmod(kept, len(choices))
    keys["window"], keys["label"] = windows[rest // labels], rest % labels
    keys["field"], keys["value"] = fields[choice], choices[choice]
    return keys, cells


def _ranked(codes: I64, size: int) -> tuple[I64, I64]:
    """The codes in [0, size) that occur, rising, and each one's place among them."""
    if size > MOST_NUMBERS:
        kept, place = np.unique(codes, return_inverse=True)
        return kept, place.reshape(codes.shape)
    occurs = np.zeros(size, bool)
    occurs[codes] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[codes]


def _terms(samples: Samples, number: Bool) -> tuple[F64, I64, F64]:
    """Each sample's summands (B, len(SUMS)), its bin (B,) and its place in the histogram (B, 2); numbers
    have none."""
    p, y, w = (column.astype(np.float64) for column in (samples.prediction, samples.value, samples.weight))
    finite = np.isfinite(p) & np.isfinite(y)
    p, y, w = np.where(finite, p, 0.5), np.where(finite, y, 0.0), np.where(finite, w, 0.0)
    true_false = ~number
    q = np.clip(np.where(true_false, p, 0.5), PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    of_true, of_false = np.log(q), np.log1p(-q)
    loss = np.where(true_false, -(y * of_true + (1 - y) * of_false), 0.0)
    error = p - y
    columns = (finite, w, w * p, w * y, w * loss, w * error**2, w * np.abs(error), ~finite, w * w)
    sums, counts = np.empty((len(SUMS), len(p))), np.empty((2, len(p)))
    for row, column in zip(sums, columns, strict=True):
        row[:] = column
    counts[0], counts[1] = sums[3] * true_false, w * (1 - y) * true_false
    return sums.T, bins_of_logits(of_true - of_false), counts.T
