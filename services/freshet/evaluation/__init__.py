"""Quality of predictions: the measures, their sums over a stream, and the gate before `stable`.

The package reads no clock. Only `predictions` does I/O, in temporary files. Shape letters: B samples, L
labels.
"""

from __future__ import annotations

from freshet.evaluation.descriptors import MEASURES, SOURCES, Measure, Source, auc
from freshet.evaluation.popularity import Popularity
from freshet.evaluation.progressive import Figures, LabelKind, Measures, Reliability

__all__ = [
    "MEASURES",
    "SOURCES",
    "Figures",
    "LabelKind",
    "Measure",
    "Measures",
    "Popularity",
    "Reliability",
    "Source",
    "auc",
]
