"""One descriptor a measure: spec keys, documentation, metrics and console follow from these.

A measure is a function of the sums of a cell (`Cell`) and, for AUC, of its histogram. To add one: add its
descriptor here and, if it needs a sum that is not kept, its name in `cells.py` and its terms in
`grouping.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from freshet.measures.auc import auc_of_histogram, logits_of
from freshet.types import F64, I64

__all__ = ["MEASURES", "SOURCES", "Cell", "Measure", "Source"]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """What is kept of the samples of one window, label and segment. Every sum is weighted but `n`."""

    n: float  # samples
    weight: float
    predicted: float  # Σ w p
    labelled: float  # Σ w y
    loss: float  # Σ w logloss; of true/false labels
    squares: float  # Σ w (p - y)²
    absolute: float  # Σ w |p - y|
    not_finite: float  # samples whose prediction was NaN or infinite; in no other sum
    weight_squares: float  # Σ w²
    bins: I64  # (H,) rising; those of `auc.bins_of` that hold a sample
    positive: F64  # (H,) Σ w y of each bin
    negative: F64  # (H,) Σ w (1 - y)


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of quality."""

    name: str
    unit: str
    doc: str
    better: Literal["higher", "lower", "one", "none"]  # which way is good; "one": near 1
    of: Literal["logloss", "number", "any"]  # kinds of label that have it
    compute: Callable[[Cell], float]  # NaN where it is not defined


@dataclass(frozen=True, slots=True)
class Source:
    """Where the predictions come from that are measured: the key `of` of windows, metrics and summaries."""

    name: str
    doc: str


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else float("nan")


def _entropy(rate: float) -> float:
    if not 0 < rate < 1:
        return 0.0
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def _logloss(cell: Cell) -> float:
    return _ratio(cell.loss, cell.weight)


def _normalised_entropy(cell: Cell) -> float:
    return _ratio(_logloss(cell), _entropy(_ratio(cell.labelled, cell.weight)))


def _normalised_entropy_error(cell: Cell) -> float:
    """Standard error of `ne` by the delta method: the spread of each sample's pull on the quotient.

    A sample of loss l and label y pulls by (l - L) / H - L H' (y - r) / H², L being the mean loss, r the mean
    label and H its entropy. Without the second term (positives cost more, and raise H) the error of a rare
    label would be told several times too large. Losses are taken from the histogram, to within its bins;
    weights as if they did not depend on the pull, which for down-sampled negatives errs on the careful side.
    """
    loss, rate = _logloss(cell), _ratio(cell.labelled, cell.weight)
    entropy = _entropy(rate)
    if not entropy > 0:
        return float("nan")
    logits = logits_of(cell.bins)
    slope = loss / entropy**2 * np.log((1 - rate) / rate)
    of_true = (np.logaddexp(0, -logits) - loss) / entropy - slope * (1 - rate)
    of_false = (np.logaddexp(0, logits) - loss) / entropy + slope * rate
    spread = float(cell.positive @ of_true**2 + cell.negative @ of_false**2) / cell.weight
    return float(np.sqrt(spread * cell.weight_squares) / cell.weight)


MEASURES = (
    Measure("n", "samples", "samples counted", "none", "any", lambda c: c.n),
    Measure(
        "auc",
        "",
        "chance that a true sample is predicted higher than a false one",
        "higher",
        "logloss",
        lambda c: auc_of_histogram(c.positive, c.negative),
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
