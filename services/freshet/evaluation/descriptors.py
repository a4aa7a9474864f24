"""One descriptor a measure: spec keys, documentation, metrics and console follow from these.

A measure is a function of the sums of many cells at once (`Cells`) and, for AUC, of their histograms. To add
one: add its descriptor here and, if it needs a sum that is not kept, its name in `cells.py` and its terms in
`grouping.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from freshet.evaluation.auc import aucs_of_histograms, logits_of
from freshet.types import F64, I64

__all__ = [
    "MEASURES",
    "MEDIANS",
    "SOURCES",
    "TRIMMED",
    "Cells",
    "Measure",
    "Source",
    "Typical",
    "largest_usual",
    "winsorised",
]

# --- Bounds on what one value can do to a figure: labels far from all others, losses far above all
# others.
#
# Letters: B samples.


MEDIANS = 1_000.0
"""A number is left out beyond this many medians of the label's other numbers (of their magnitudes, zeros left
out). The top of what people spend or watch is a hundred medians; a wrong unit (ms for s) is a thousand."""

TRIMMED = 0.01
"""Share of the largest losses that count as the next smaller one."""

_FEWEST = 5  # numbers whose median means something
_KEPT = 512  # numbers of a label whose median is taken


def largest_usual(values: F64) -> float:
    """The magnitude beyond which a number is an outlier among `values` (B,); infinite if they are too few to
    tell."""
    magnitudes = np.abs(values)
    magnitudes = magnitudes[(magnitudes > 0) & np.isfinite(magnitudes)]
    return MEDIANS * float(np.median(magnitudes)) if len(magnitudes) >= _FEWEST else float("inf")


def winsorised(losses: F64) -> float:
    """The magnitude to which losses (B,) are clipped, so that a few cannot outweigh all others: the largest
    TRIMMED of them, but at least one, count as the next smaller one. Infinite for a single loss.

    Source: winsorised means, Dixon, Annals of Mathematical Statistics 31 (1960). Clipping, and not leaving
    out, keeps the order of two versions where their largest losses differ.
    """
    if len(losses) < 2:
        return float("inf")
    trimmed = max(1, int(len(losses) * TRIMMED))
    return float(np.partition(losses, len(losses) - trimmed - 1)[len(losses) - trimmed - 1])


class Typical:
    """The newest numbers of one label, by which the next ones are judged. Used by one thread at a time."""

    def __init__(self) -> None:
        self._kept = np.empty(0)
        self.outliers = 0  # so far

    def without_outliers(self, values: F64) -> F64:
        """Return (B,) values with NaN in place of outliers, which are counted."""
        self._kept = np.concatenate([self._kept, values[(values != 0) & np.isfinite(values)]])[-_KEPT:]
        most = largest_usual(self._kept)
        beyond = np.abs(values) > most
        if not beyond.any():
            return values
        self.outliers += int(beyond.sum())
        return np.where(beyond, np.nan, values)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """What is kept of the samples of C cells (window, label and segment), and the H entries of their
    histograms. Every sum is weighted but `n`, and (C,)."""

    n: F64  # samples
    weight: F64
    predicted: F64  # Σ w p
    labelled: F64  # Σ w y
    loss: F64  # Σ w logloss; of true/false labels
    squares: F64  # Σ w (p - y)²
    absolute: F64  # Σ w |p - y|
    not_finite: F64  # samples whose prediction was NaN or infinite; in no other sum
    weight_squares: F64  # Σ w²
    cell: I64  # (H,) index of the entry's cell, rising
    bins: I64  # (H,) rising within a cell; those of `auc.bins_of` that hold a sample
    positive: F64  # (H,) Σ w y of each entry
    negative: F64  # (H,) Σ w (1 - y)

    def summed(self, entries: F64) -> F64:
        """(C,) sums of something of each entry, (H,)."""
        return np.bincount(self.cell, entries, len(self.n)).astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of quality."""

    name: str
    unit: str
    doc: str
    better: Literal["higher", "lower", "one", "none"]  # which way is good; "one": near 1
    of: Literal["logloss", "number", "any"]  # kinds of label that have it
    compute: Callable[[Cells], F64]  # (C,), NaN where it is not defined


@dataclass(frozen=True, slots=True)
class Source:
    """Where the predictions come from that are measured: the key `of` of windows, metrics and summaries."""

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
    """Standard error of `ne` by the delta method: the spread of each sample's pull on the quotient.

    A sample of loss l and label y pulls by (l - L) / H - L H' (y - r) / H², L being the mean loss, r the mean
    label and H its entropy. Without the second term (positives cost more, and raise H) the error of a rare
    label would be told several times too large. Losses are taken from the histogram, to within its bins;
    weights as if they did not depend on the pull, which for down-sampled negatives errs on the careful side.
    """
    rate = _ratio(cells.labelled, cells.weight)
    entropy = _entropy(rate)
    defined = entropy > 0
    loss, rate, entropy = (np.where(defined, c, 0.5) for c in (_logloss(cells), rate, entropy))
    slope = loss / entropy**2 * np.log((1 - rate) / rate)
    logits, at = logits_of(cells.bins), cells.cell
    cost = np.log1p(np.exp(-np.abs(logits)))  # of the likelier label; the other's is |logit| more
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
        "chance that a true sample is predicted higher than a false one",
        "higher",
        "logloss",
        lambda c: aucs_of_histograms(c.cell, c.positive, c.negative, len(c.n)),
    ),
    Measure("logloss", "nat", "mean negative log-likelihood of the label", "lower", "logloss", _logloss),
    Measure(
        "ne",
        "",
        "normalised entropy: logloss divided by that of always predicting the window's own mean label",
        "lower",
        "logloss",
        _normalised_entropy,
    ),
    Measure(
        "ne_error",
        "",
        "standard error of ne; 1.96 of them either way hold the true value in 95 % of windows",
        "none",
        "logloss",
        _normalised_entropy_error,
    ),
    Measure(
        "brier",
        "",
        "mean squared error of the probability: bounded, so that no single mistake outweighs a window",
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
        "mean label: the rate of true ones",
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
    Source("training", "made by the training model before each sample was trained on"),
    Source("served", "logged when it was served: the headline, as it is what users saw"),
    Source("random", "served, of requests in random order only: the samples that favour no model"),
    Source(
        "popularity",
        "a baseline that a model must beat: the past rate of its item as it was known when the item was "
        "served, on the samples of `random` (where the spec explores nothing, on all); without segments",
    ),
)
"""All sources, in the order in which they are shown."""
