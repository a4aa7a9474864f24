"""Quality of predictions: what the measures are, how they are added up over a stream, when a version may
serve.

Everything here is pure: arrays in, figures out, no clock and no I/O. Letters: B samples, L labels.
"""

from __future__ import annotations

from freshet.measures.auc import auc
from freshet.measures.descriptors import MEASURES, SOURCES, Measure, Source
from freshet.measures.figures import Figures, LabelKind
from freshet.measures.popularity import Popularity
from freshet.measures.reliability import Reliability
from freshet.measures.streaming import Measures

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
