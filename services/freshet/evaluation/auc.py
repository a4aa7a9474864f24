"""The area under the ROC curve, exactly and from a histogram over logits; the histogram's bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from freshet import _native
from freshet.types import F32, F64, I64

__all__ = [
    "BIN_WIDTH",
    "COARSE_BITS",
    "auc",
    "auc_of_histogram",
    "aucs_of_histograms",
    "bins_of",
    "bins_of_logits",
    "logits_of",
]

BIN_WIDTH = 1.0 / 512
"""Width of a bin in logits. Samples of a bin count as tied, which costs at most half the share of (true,
false) pairs that fall into one bin, and far less in fact: on predictions spread over one logit or more the
error is under 1e-4."""

LARGEST_LOGIT = 20.0
"""Predictions beyond p = 1 ± 2e-9 share the outermost bins: float32 holds no finer ones near 1."""


def auc(predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Exact AUC of B predictions against labels in [0, 1]; ties count half. NaN if all labels are equal.

    For offline use: it sorts.
    """
    p = np.asarray(predictions, np.float64)
    y = np.asarray(labels, np.float64)
    w = np.ones_like(p) if weights is None else np.asarray(weights, np.float64)
    _, group = np.unique(p, return_inverse=True)
    positive: F64 = np.bincount(group, w * y).astype(np.float64)
    negative: F64 = np.bincount(group, w * (1 - y)).astype(np.float64)
    return auc_of_histogram(positive, negative)


def auc_of_histogram(positive: F64, negative: F64) -> float:
    """AUC where samples of one bin are tied; bins in rising order of prediction. NaN without both kinds."""
    return float(aucs_of_histograms(np.zeros(len(positive), np.int64), positive, negative, 1)[0])


def aucs_of_histograms(cell: I64, positive: F64, negative: F64, cells: int) -> F64:
    """(cells,) AUC of many histograms at once: `cell` (H,) is the index of each entry's, rising."""
    starts = np.searchsorted(cell, np.arange(cells + 1))
    out = np.empty(cells)
    _native.aucs(starts, np.ascontiguousarray(positive), np.ascontiguousarray(negative), out)
    return out


def bins_of(probabilities: F32 | F64) -> I64:
    """Bin of each probability, by its logit; finite input."""
    p = np.clip(probabilities.astype(np.float64), 1e-12, 1 - 1e-12)
    return bins_of_logits(np.log(p) - np.log1p(-p))


def bins_of_logits(logits: F64) -> I64:
    """Bin of each logit: from 0 to 20480, so that 16 bits hold it."""
    inside = np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT)
    bins: I64 = np.floor((inside + LARGEST_LOGIT) / BIN_WIDTH).astype(np.int64)
    return bins


COARSE_BITS = 4
"""Segments, of which there are many and whose samples are few, have bins of 1/32 logit: each stands for its
middle."""


def logits_of(bins: I64) -> F64:
    """Logit in the middle of each bin: that of its samples to within half a `BIN_WIDTH`."""
    logits: F64 = (bins.astype(np.float64) + 0.5) * BIN_WIDTH - LARGEST_LOGIT
    return logits
