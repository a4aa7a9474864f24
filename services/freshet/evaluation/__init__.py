"""Quality of predictions: the measures, their sums over a stream, and the gate before `stable`.

The package reads no clock. Only `predictions` does I/O, in temporary files. Shape letters: B samples, L
labels.
"""

from __future__ import annotations

from freshet.evaluation.auc import auc
from freshet.evaluation.cells import Figures, LabelKind, Reliability
from freshet.evaluation.descriptors import MEASURES, SOURCES, Measure, Source
from freshet.evaluation.popularity import Popularity
from freshet.evaluation.progressive import Measures

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
