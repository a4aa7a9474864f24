"""Area under the ROC curve, exact or from histograms over logits, and the bins of these histograms.

Shape letters: B samples, K bins of one histogram, H entries of many sparse histograms, C histograms.
"""

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
"""Width of a bin in logits. Samples of one bin count as tied, so the error is at most half the share of
(true, false) pairs that fall into one bin. For predictions that spread over one logit or more it is below
1e-4."""

LARGEST_LOGIT = 20.0
"""Predictions within 2e-9 of 0 or 1 share the outermost bins: float32 is no finer than that near 1."""


def auc(predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Compute the exact AUC of predictions (B,) for labels (B,) in [0, 1], with weights (B,), by sorting.

    Ties count half. Returns NaN if all labels are 0 or all are 1.
    """
    p = np.asarray(predictions, np.float64)
    y = np.asarray(labels, np.float64)
    w = np.ones_like(p) if weights is None else np.asarray(weights, np.float64)
    _, group = np.unique(p, return_inverse=True)
    positive: F64 = np.bincount(group, w * y).astype(np.float64)
    negative: F64 = np.bincount(group, w * (1 - y)).astype(np.float64)
    return auc_of_histogram(positive, negative)


def auc_of_histogram(positive: F64, negative: F64) -> float:
    """Compute the AUC of one histogram: weights (K,) of true and of false samples, by rising prediction.

    Samples of one bin are tied. Returns NaN unless both kinds have weight.
    """
    return float(aucs_of_histograms(np.zeros(len(positive), np.int64), positive, negative, 1)[0])


def aucs_of_histograms(cell: I64, positive: F64, negative: F64, cells: int) -> F64:
    """Compute the AUC of many histograms.

    Args:
        cell: (H,) index of each entry's histogram, rising.
        positive, negative: (H,) weight of true and of false samples, by rising prediction in a histogram.
        cells: number of histograms, C.

    Returns:
        (C,) AUC; NaN where a histogram has only one kind of sample.
    """
    starts = np.searchsorted(cell, np.arange(cells + 1))
    out = np.empty(cells)
    _native.aucs(starts, np.ascontiguousarray(positive), np.ascontiguousarray(negative), out)
    return out


def bins_of(probabilities: F32 | F64) -> I64:
    """Return the bins (B,) of finite probabilities (B,), by their logits."""
    p = np.clip(probabilities.astype(np.float64), 1e-12, 1 - 1e-12)
    return bins_of_logits(np.log(p) - np.log1p(-p))


def bins_of_logits(logits: F64) -> I64:
    """Return the bins (B,) of logits (B,): 0 to 20480, which fits 16 bits."""
    inside = np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT)
    bins: I64 = np.floor((inside + LARGEST_LOGIT) / BIN_WIDTH).astype(np.int64)
    return bins


COARSE_BITS = 4
"""Segments merge 2**COARSE_BITS bins, to 1/32 logit: they are many, and each has few samples."""


def logits_of(bins: I64) -> F64:
    """Return the logits (B,) in the middle of bins (B,)."""
    logits: F64 = (bins.astype(np.float64) + 0.5) * BIN_WIDTH - LARGEST_LOGIT
    return logits
