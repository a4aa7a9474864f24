"""Reliability: what was predicted beside what came true, in few bins over logits."""

from __future__ import annotations

import numpy as np

from freshet.measures.auc import logits_of
from freshet.types import F64, I64

__all__ = ["MOST_BINS", "WIDTHS", "Reliability", "reliability"]

MOST_BINS = 15

WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Widths of a bin in logits, the finest that leaves at most `MOST_BINS` is taken. Bins start at multiples of
the width, so bins of several windows fall together in the coarsest of theirs."""

Reliability = list[list[float]]
"""[[samples' weight, mean prediction, mean label], ...] by rising prediction."""


def reliability(bins: I64, positive: F64, negative: F64) -> Reliability:
    """The reliability curve of a histogram: see `cells.Table`. Means are exact to half a histogram bin."""
    weight = positive + negative
    logits = logits_of(bins)
    for width in WIDTHS:
        kept, at = np.unique(np.floor(logits / width), return_inverse=True)
        if len(kept) <= MOST_BINS:
            break
    sums = np.bincount(at, weight), np.bincount(at, weight / (1 + np.exp(-logits))), np.bincount(at, positive)
    n, predicted, labelled = (column[sums[0] > 0] for column in sums)
    return np.column_stack([n, predicted / n, labelled / n]).tolist()  # type: ignore[no-any-return]
