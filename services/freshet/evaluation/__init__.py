"""Quality of predictions: what the measures are, how they are added up over a stream, when a version may
serve.

Everything here is pure: arrays in, figures out, no clock and no I/O. Letters: B samples, L labels.
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
