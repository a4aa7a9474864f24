"""Reliability: what was predicted beside what came true, in few bins over logits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from freshet.evaluation.auc import logits_of
from freshet.types import F64, I64, Bool

__all__ = ["MOST_BINS", "WIDTHS", "Reliability", "reliability"]

MOST_BINS = 15

WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Widths of a bin in logits, the finest that leaves at most `MOST_BINS` is taken. Bins start at multiples of
the width, so bins of several windows fall together in the coarsest of theirs."""

Reliability = list[list[float]]
"""[[samples' weight, mean prediction, mean label], ...] by rising prediction."""


def reliability(cell: I64, bins: I64, positive: F64, negative: F64, cells: int) -> list[Reliability]:
    """The reliability curve of each of many histograms: see `cells.Table`. Means are exact to half a
    histogram bin.

    Args:
        cell: (H,) index of each entry's histogram, rising. bins: (H,) rising within one.
        positive, negative: (H,) weights.
    """
    weight, logits = positive + negative, logits_of(bins)
    fresh = _fresh(cell, logits, cells)
    at = np.cumsum(fresh) - 1
    columns = weight, weight / (1 + np.exp(-logits)), positive
    n, predicted, labelled = (np.bincount(at, column, fresh.sum()) for column in columns)
    of, kept = cell[fresh], n > 0
    n, predicted, labelled, of = n[kept], predicted[kept], labelled[kept], of[kept]
    points = np.column_stack([n, predicted / n, labelled / n]).tolist()
    ends = np.searchsorted(of, np.arange(cells + 1)).tolist()
    return [points[start:stop] for start, stop in pairwise(ends)]


def _fresh(cell: I64, logits: F64, cells: int) -> Bool:
    """(H,) where a curve's bin begins: of each histogram in the finest of `WIDTHS` that leaves few enough."""
    edge = np.diff(cell, prepend=-1) != 0
    fresh: Bool = edge.copy()
    open_ = np.ones(cells, bool)
    for width in WIDTHS:
        wide = np.floor(logits / width)
        begins = edge | (np.diff(wide, prepend=0) != 0)
        fits = open_ & ((np.bincount(cell[begins], minlength=cells) <= MOST_BINS) | (width == WIDTHS[-1]))
        fresh = np.where(fits[cell], begins, fresh)
        open_ &= ~fits
    return fresh
