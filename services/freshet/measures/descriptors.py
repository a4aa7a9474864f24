"""One descriptor a measure: spec keys, documentation, metrics and console follow from these.

A measure is a function of the sums of a cell (`Sums`) and, for AUC, of its histogram. To add one: add its
descriptor here and, if it needs a sum that is not kept, a column in `cells.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from freshet.measures.auc import auc_of_histogram
from freshet.types import F64

__all__ = ["MEASURES", "Cell", "Measure"]


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
    positive: F64  # Σ w y of each bin, in rising order of prediction
    negative: F64  # Σ w (1 - y)


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of quality."""

    name: str
    unit: str
    doc: str
    better: Literal["higher", "lower", "one", "none"]  # which way is good; "one": near 1
    of: Literal["logloss", "number", "any"]  # kinds of label that have it
    compute: Callable[[Cell], float]  # NaN where it is not defined


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
