"""From the sums of cells to figures: what is told of a window, label and segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from freshet.evaluation.cells import SUMS, TOTAL, Table
from freshet.evaluation.descriptors import MEASURES, Cells, Measure
from freshet.evaluation.reliability import Reliability, reliability
from freshet.types import Bool

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
    if not len(table.keys):
        return []
    positive, negative = table.counts.T
    sums = dict(zip(SUMS, table.sums.T, strict=True))
    cells = Cells(**sums, cell=table.cell, bins=table.bin, positive=positive, negative=negative)
    computed = {measure: measure.compute(cells).tolist() for measure in MEASURES}
    by_kind = [_rows(computed, of) for of in ("logloss", "number")]
    number = np.array([label.number for label in labels])[table.keys["label"]]
    curves = _curves(table, ~number & (table.keys["field"] == 0))
    figures = []
    for i, (window, label, field, value) in enumerate(table.keys.tolist()):
        names, rows = by_kind[labels[label].number]
        start = None if window == TOTAL else window
        figures.append(
            Figures(
                start,
                None if start is None else start + window_ms,
                labels[label].name,
                segments[field - 1] if field else None,
                value if field else None,
                dict(zip(names, rows[i], strict=True)),
                curves.get(i),
            )
        )
    return figures


def _rows(
    computed: Mapping[Measure, list[float]], of: str
) -> tuple[Sequence[str], Sequence[tuple[float, ...]]]:
    """Names of the measures that a kind of label has, and the C cells' values of these."""
    kept = {measure.name: column for measure, column in computed.items() if measure.of in ("any", of)}
    return list(kept), list(zip(*kept.values(), strict=True))


def _curves(table: Table, wanted: Bool) -> Mapping[int, Reliability]:
    """Reliability of the cells that `wanted` (C,) names, by their index."""
    part = table.where(wanted)
    positive, negative = part.counts.T
    curves = reliability(part.cell, part.bin, positive, negative, len(part.keys))
    return dict(zip(np.flatnonzero(wanted).tolist(), curves, strict=True))
