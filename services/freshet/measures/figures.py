"""From the sums of cells to figures: what is told of a window, label and segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from freshet.measures.cells import SUMS, TOTAL, Table
from freshet.measures.descriptors import MEASURES, Cell
from freshet.measures.reliability import Reliability, reliability

__all__ = ["Figures", "LabelKind", "figures_of"]


@dataclass(frozen=True, slots=True)
class LabelKind:
    """What the measures must know of a label."""

    name: str
    number: bool  # not true/false


@dataclass(frozen=True, slots=True)
class Figures:
    """Measures of one window, label and segment."""

    start_ms: int | None  # of the window; None: since the beginning
    stop_ms: int | None
    label: str
    segment: str | None  # None: all samples
    value: int | None  # the segment's value key; OTHER: values beyond those told apart
    measures: Mapping[str, float]  # by name of the descriptor; NaN where not defined
    reliability: Reliability | None = None  # of all samples of a true/false label


def figures_of(
    table: Table, labels: Sequence[LabelKind], segments: Sequence[str], window_ms: int
) -> list[Figures]:
    """Figures of every cell, in the order of their keys."""
    starts = np.searchsorted(table.cell, np.arange(len(table.keys) + 1))
    figures = []
    for i, key in enumerate(table.keys):
        part = slice(starts[i], starts[i + 1])
        positive, negative = table.counts[part].T
        sums = dict(zip(SUMS, table.sums[i].tolist(), strict=True))
        cell = Cell(**sums, bins=table.bin[part], positive=positive, negative=negative)
        label = labels[int(key["label"])]
        start = None if key["window"] == TOTAL else int(key["window"])
        field = int(key["field"])
        figures.append(
            Figures(
                start,
                None if start is None else start + window_ms,
                label.name,
                segments[field - 1] if field else None,
                int(key["value"]) if field else None,
                {
                    m.name: m.compute(cell)
                    for m in MEASURES
                    if m.of in ("any", "number" if label.number else "logloss")
                },
                None if field or label.number else reliability(cell.bins, positive, negative),
            )
        )
    return figures
