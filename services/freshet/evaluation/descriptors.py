"""Descriptors of the measures, for spec keys, documentation, metrics and console; AUC; bounds on outliers.

A measure is a function of the sums and histograms of many cells (`Cells`). A new measure needs a descriptor
here and, for a sum that is not kept yet, the last of SUMS in `Cells` and its term in `terms_of`.
Shape letters: B samples, K bins of one histogram, C cells or histograms, H entries of all histograms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from freshet import _native
from freshet.types import F32, F64, I64, Bool

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


# --- Bounds on the influence of one label or one loss on a figure.

MEDIANS = 1_000.0
"""A number is an outlier beyond this many medians of the label's nonzero magnitudes. The largest sums that
people spend or watch are about a hundred medians; a wrong unit (ms for s) is a thousand."""

TRIMMED = 0.01
"""Share of the largest losses that count as the next smaller one."""

_FEWEST = 5  # fewer numbers have no meaningful median
_KEPT = 512  # newest numbers of a label that the median is over


def outlier_bound(values: F64) -> float:
    """Return the magnitude beyond which one of values (B,) is an outlier; infinite for few values."""
    magnitudes = np.abs(values)
    magnitudes = magnitudes[(magnitudes > 0) & np.isfinite(magnitudes)]
    return MEDIANS * float(np.median(magnitudes)) if len(magnitudes) >= _FEWEST else float("inf")


def winsor_bound(losses: F64) -> float:
    """Return the bound to clip losses (B,) to, so that few cannot outweigh all others.

    The largest TRIMMED of the losses, at least one, count as the next smaller one; a single loss is not
    clipped. See winsorised means, Dixon, Annals of Mathematical Statistics 31 (1960). Clipping keeps the
    order of two versions that differ in their largest losses; removing those losses would not.
    """
    if len(losses) < 2:
        return float("inf")
    trimmed = max(1, int(len(losses) * TRIMMED))
    return float(np.partition(losses, len(losses) - trimmed - 1)[len(losses) - trimmed - 1])


class Typical:
    """Filter of outliers among the numbers of one label, by its newest numbers. Not thread-safe."""

    def __init__(self) -> None:
        self._kept = np.empty(0)
        self.outliers = 0  # count

    def without_outliers(self, values: F64) -> F64:
        """Return values (B,) with NaN in place of outliers, and count these."""
        self._kept = np.concatenate([self._kept, values[(values != 0) & np.isfinite(values)]])[-_KEPT:]
        most = outlier_bound(self._kept)
        beyond = np.abs(values) > most
        if not beyond.any():
            return values
        self.outliers += int(beyond.sum())
        return np.where(beyond, np.nan, values)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Sums (C,) over the samples of each cell, weighted but for `n`, and entries (H,) of histograms."""

    n: F64  # samples
    weight: F64
    predicted: F64  # Σ w p
    labelled: F64  # Σ w y
    loss: F64  # Σ w logloss; 0 for numbers
    squares: F64  # Σ w (p - y)²
    absolute: F64  # Σ w |p - y|
    not_finite: F64  # samples with a prediction of NaN or infinity; in no other sum
    weight_squares: F64  # Σ w²
    cell: I64  # (H,) index of the entry's cell, rising
    bins: I64  # (H,) nonempty bins of `bins_of`, rising within a cell
    positive: F64  # (H,) Σ w y of each entry
    negative: F64  # (H,) Σ w (1 - y)

    def summed(self, entries: F64) -> F64:
        """Sum values (H,) of the entries by cell; returns (C,)."""
        return np.bincount(self.cell, entries, len(self.n)).astype(np.float64, copy=False)


SUMS = tuple(field.name for field in fields(Cells))[:9]

PROBABILITY_FLOOR = 1e-7
"""Logloss clips predictions to this distance from 0 and 1, so that one sample adds at most 16."""

TERM_SAMPLES = 1 << 14
"""Samples that `terms_of` computes at a time: their columns stay in the second-level cache."""


def terms_of(prediction: F32, value: F32, weight: F32, number: Bool) -> tuple[F64, I64, F64]:
    """Return the terms (S, B) of samples (B,) in SUMS, their bins (B,), and weights as true and false (2, B).

    The weights are 0 for labels in the mask `number` (B,): these have no histogram.
    """
    size = len(prediction)
    sums, bins, counts = np.empty((len(SUMS), size)), np.empty(size, np.int64), np.empty((2, size))
    for first in range(0, size, TERM_SAMPLES):
        at = slice(first, first + TERM_SAMPLES)
        p, y, w = (column[at].astype(np.float64) for column in (prediction, value, weight))
        true_false, predicted, valued = ~number[at], np.isfinite(p), np.isfinite(y)
        finite, unpredicted = predicted & valued, valued & ~predicted
        if not finite.all():
            p, y, w = np.where(finite, p, 0.5), np.where(finite, y, 0.0), np.where(finite, w, 0.0)
        probability = p if true_false.all() else np.where(true_false, p, 0.5)
        q = np.clip(probability, PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
        of_true, of_false = np.log(q), np.log1p(-q)
        loss = -(y * of_true + (1 - y) * of_false) * true_false
        terms = finite, w, w * p, w * y, w * loss, w * (p - y) ** 2, w * abs(p - y), unpredicted, w * w
        for row, term in zip(sums, terms, strict=True):
            row[at] = term
        bins[at] = bins_of_logits(of_true - of_false)
        counts[:, at] = terms[3] * true_false, w * (1 - y) * true_false
    return sums, bins, counts


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of quality."""

    name: str
    unit: str
    doc: str
    better: Literal["higher", "lower", "one", "none"]  # the good direction; "one": near 1
    of: Literal["logloss", "number", "any"]  # kinds of label that it is defined for
    compute: Callable[[Cells], F64]  # (C,), NaN where undefined


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of the measured predictions: the key `of` of windows, metrics and summaries."""

    name: str
    doc: str


def _ratio(a: F64, b: F64) -> F64:
    quotient: F64 = np.divide(a, b, out=np.full(len(a), np.nan), where=b > 0)
    return quotient


def _entropy(rate: F64) -> F64:
    inside = (rate > 0) & (rate < 1)
    r = np.where(inside, rate, 0.5)
    entropy: F64 = np.where(inside, -r * np.log(r) - (1 - r) * np.log1p(-r), 0.0)
    return entropy


def _logloss(cells: Cells) -> F64:
    return _ratio(cells.loss, cells.weight)


def _normalised_entropy(cells: Cells) -> F64:
    return _ratio(_logloss(cells), _entropy(_ratio(cells.labelled, cells.weight)))


def _normalised_entropy_error(cells: Cells) -> F64:
    """Compute the standard error of `ne` by the delta method, from the influence of each sample.

    A sample of loss l and label y has the influence (l - L) / H - L H' (y - r) / H², where L is the mean
    loss, r the mean label and H its entropy. Without the second term the error of a rare label would be
    several times too large, as positives have larger losses and also raise H. Losses come from the histogram,
    exact to a bin. Weights count as independent of the influence, which overestimates the error for
    down-sampled negatives.
    """
    rate = _ratio(cells.labelled, cells.weight)
    entropy = _entropy(rate)
    defined = entropy > 0
    loss, rate, entropy = (np.where(defined, c, 0.5) for c in (_logloss(cells), rate, entropy))
    slope = loss / entropy**2 * np.log((1 - rate) / rate)
    logits, at = logits_of(cells.bins), cells.cell
    cost = np.log1p(np.exp(-abs(logits)))  # loss of the likelier label; the other label's is |logit| larger
    of_true, of_false = cost + np.maximum(-logits, 0), cost + np.maximum(logits, 0)
    of_true = of_true / entropy[at] - (loss / entropy + slope * (1 - rate))[at]
    of_false = of_false / entropy[at] - (loss / entropy - slope * rate)[at]
    spread = _ratio(cells.summed(cells.positive * of_true**2 + cells.negative * of_false**2), cells.weight)
    return np.where(defined, _ratio(np.sqrt(spread * cells.weight_squares), cells.weight), np.nan)


MEASURES = (
    Measure("n", "samples", "samples counted", "none", "any", lambda c: c.n),
    Measure(
        "auc",
        "",
        "probability that a true sample has a higher prediction than a false one",
        "higher",
        "logloss",
        lambda c: aucs_of_histograms(c.cell, c.positive, c.negative, len(c.n)),
    ),
    Measure("logloss", "nat", "mean negative log-likelihood of the label", "lower", "logloss", _logloss),
    Measure(
        "ne",
        "",
        "normalised entropy: logloss divided by the logloss of the window's own mean label as the prediction",
        "lower",
        "logloss",
        _normalised_entropy,
    ),
    Measure(
        "ne_error",
        "",
        "standard error of ne; the true value is within 1.96 standard errors in 95 % of windows",
        "none",
        "logloss",
        _normalised_entropy_error,
    ),
    Measure(
        "brier",
        "",
        "mean squared error of the probability; bounded, so no single sample outweighs a window",
        "lower",
        "logloss",
        lambda c: _ratio(c.squares, c.weight),
    ),
    Measure(
        "calibration",
        "",
        "sum of predictions divided by sum of labels",
        "one",
        "any",
        lambda c: _ratio(c.predicted, c.labelled),
    ),
    Measure(
        "mean_label",
        "",
        "mean label; for a true/false label, the rate of true samples",
        "none",
        "any",
        lambda c: _ratio(c.labelled, c.weight),
    ),
    Measure("mse", "label²", "mean squared error", "lower", "number", lambda c: _ratio(c.squares, c.weight)),
    Measure("mae", "label", "mean absolute error", "lower", "number", lambda c: _ratio(c.absolute, c.weight)),
    Measure(
        "not_finite",
        "samples",
        "predictions that were NaN or infinite",
        "lower",
        "any",
        lambda c: c.not_finite,
    ),
)
"""All measures, in the order in which they are shown."""

SOURCES = (
    Source("training", "predictions of the training model, each before it learned the sample"),
    Source(
        "served", "predictions logged when the items were served: the headline figures, as users saw these"
    ),
    Source("random", "served predictions of requests in random order only: these samples favour no model"),
    Source(
        "popularity",
        "a baseline that a model must beat: the item's past rate as known when the item was served, on the "
        "samples of `random` (on all samples, where the spec explores nothing); without segments",
    ),
)
"""All sources, in the order in which they are shown."""
