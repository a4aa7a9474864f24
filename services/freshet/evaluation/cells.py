"""Sums by window, label and segment, as sorted arrays; tables of them merge.

A cell is (window, label, field, value); its histogram is sparse. How samples become a table: `grouping.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.evaluation.auc import COARSE_BITS, bins_of_logits, logits_of
from freshet.evaluation.descriptors import MEASURES, Cells, Measure
from freshet.types import F32, F64, I64, U8, U64, Bool

__all__ = [
    "KEY",
    "MOST_BINS",
    "OTHER",
    "PROBABILITY_FLOOR",
    "SUMS",
    "TOTAL",
    "WIDTHS",
    "Figures",
    "LabelKind",
    "Reliability",
    "Samples",
    "Table",
    "figures_of",
    "reliability",
    "summed",
    "table_of",
]

# --- Samples become a table of sums: what each adds is computed here, what falls together is added
# natively.


PROBABILITY_FLOOR = 1e-7
"""Predictions are taken to be at least this far from 0 and 1 when their logloss is added up: one mistake
costs 16."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """B samples that have not been grouped yet."""

    times_ms: I64
    label: U8
    prediction: F32  # of the sample's own label
    value: F32
    weight: F32
    segments: tuple[U64, ...]  # per segment field

    @classmethod
    def concat(cls, parts: list[Samples]) -> Samples:
        """Join end to end."""
        return cls(
            np.concatenate([s.times_ms for s in parts]),
            np.concatenate([s.label for s in parts]),
            np.concatenate([s.prediction for s in parts]),
            np.concatenate([s.value for s in parts]),
            np.concatenate([s.weight for s in parts]),
            tuple(np.concatenate(column) for column in zip(*(s.segments for s in parts), strict=True)),
        )


def table_of(samples: Samples, window: I64, number: Bool, values: Sequence[U64]) -> Table:
    """Group samples: each counts once overall and once in each segment, there in coarser bins.

    Args:
        samples: B of them.
        window: (B,) each one's window.
        number: (L,) whether a label is a number.
        values: of each segment field those that are told apart, rising, OTHER among them.
    """
    sums, bins, counts = _terms(samples, number[samples.label])
    segments = list(zip(samples.segments, values, strict=True))
    windows, codes, added, cell, bin_, both = _native.group_samples(
        window, samples.label, len(number), segments, sums, bins, counts, COARSE_BITS
    )
    choices = np.concatenate([np.zeros(1, np.uint64), *values])
    fields = np.repeat(np.arange(1 + len(values)), [1, *map(len, values)])
    keys = np.empty(len(codes), KEY)
    rest, choice = np.divmod(codes.astype(np.int64), len(choices))
    keys["window"], keys["label"] = windows[rest // len(number)], rest % len(number)
    keys["field"], keys["value"] = fields[choice], choices[choice]
    return Table(keys, added, cell, bin_, both)


def _terms(samples: Samples, number: Bool) -> tuple[F64, I64, F64]:
    """Each sample's summands (len(SUMS), B), its bin (B,) and what it adds to a histogram (2, B): nothing
    if its label is a number."""
    p, y, w = (column.astype(np.float64) for column in (samples.prediction, samples.value, samples.weight))
    finite = np.isfinite(p) & np.isfinite(y)
    p, y, w = np.where(finite, p, 0.5), np.where(finite, y, 0.0), np.where(finite, w, 0.0)
    true_false = ~number
    q = np.clip(np.where(true_false, p, 0.5), PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    of_true, of_false = np.log(q), np.log1p(-q)
    loss = np.where(true_false, -(y * of_true + (1 - y) * of_false), 0.0)
    error = p - y
    columns = (finite, w, w * p, w * y, w * loss, w * error**2, w * np.abs(error), ~finite, w * w)
    sums, counts = np.empty((len(SUMS), len(p))), np.empty((2, len(p)))
    for row, column in zip(sums, columns, strict=True):
        row[:] = column
    counts[0], counts[1] = sums[3] * true_false, w * (1 - y) * true_false
    return sums, bins_of_logits(of_true - of_false), counts


# --- From the sums of cells to figures: what is told of a window, label and segment.


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


# --- Reliability: what was predicted beside what came true, in few bins over logits.


MOST_BINS = 15

WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Widths of a bin in logits, the finest that leaves at most `MOST_BINS` is taken. Bins start at multiples of
the width, so bins of several windows fall together in the coarsest of theirs."""

Reliability = list[list[float]]
"""[[samples' weight, mean prediction, mean label], ...] by rising prediction."""


def reliability(cell: I64, bins: I64, positive: F64, negative: F64, cells: int) -> list[Reliability]:
    """The reliability curve of each of many histograms: see `cells.Table`. Means are exact to half a
    histogram bin.

    Args:
        cell: (H,) index of each entry's histogram, rising. bins: (H,) rising within one.
        positive, negative: (H,) weights.
    """
    weight, logits = positive + negative, logits_of(bins)
    fresh = _fresh(cell, logits, cells)
    at = np.cumsum(fresh) - 1
    columns = weight, weight / (1 + np.exp(-logits)), positive
    n, predicted, labelled = (np.bincount(at, column, fresh.sum()) for column in columns)
    of, kept = cell[fresh], n > 0
    n, predicted, labelled, of = n[kept], predicted[kept], labelled[kept], of[kept]
    points = np.column_stack([n, predicted / n, labelled / n]).tolist()
    ends = np.searchsorted(of, np.arange(cells + 1)).tolist()
    return [points[start:stop] for start, stop in pairwise(ends)]


def _fresh(cell: I64, logits: F64, cells: int) -> Bool:
    """(H,) where a curve's bin begins: of each histogram in the finest of `WIDTHS` that leaves few enough."""
    edge = np.diff(cell, prepend=-1) != 0
    fresh: Bool = edge.copy()
    open_ = np.ones(cells, bool)
    for width in WIDTHS:
        wide = np.floor(logits / width)
        begins = edge | (np.diff(wide, prepend=0) != 0)
        fits = open_ & ((np.bincount(cell[begins], minlength=cells) <= MOST_BINS) | (width == WIDTHS[-1]))
        fresh = np.where(fits[cell], begins, fresh)
        open_ &= ~fits
    return fresh


KEY = np.dtype([("window", "<i8"), ("label", "<u2"), ("field", "<u2"), ("value", "<u8")])
"""window: start in ms. field: 0 for all samples, else 1 + the segment's position. value: of the segment, 0
overall."""

TOTAL = -(1 << 62)
"""The window of everything that has left its own window: since the beginning."""

OTHER = 0
"""The segment value that stands for all values beyond the first `max_values` of a field."""

SUMS = (
    "n", "weight", "predicted", "labelled", "loss", "squares", "absolute", "not_finite", "weight_squares",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """C cells and the H entries of their histograms."""

    keys: NDArray[np.void]  # (C,) of KEY, rising
    sums: F64  # (C, len(SUMS))
    cell: I64  # (H,) index of the entry's cell, rising
    bin: I64  # (H,) rising within a cell
    counts: F64  # (H, 2): positive and negative weight

    @classmethod
    def empty(cls) -> Table:
        """No cells."""
        none = np.empty(0, np.int64)
        return cls(np.empty(0, KEY), np.empty((0, len(SUMS))), none, none, np.empty((0, 2)))

    @classmethod
    def merge(cls, tables: list[Table]) -> Table:
        """One table with the sums of all, added up in the tables' order: merging step by step is the same to
        the bit."""
        tables = [table for table in tables if len(table.keys)]
        if len(tables) < 2:
            return tables[0] if tables else cls.empty()
        shift = np.cumsum([0, *(len(t.keys) for t in tables[:-1])])
        return cls._grouped(
            np.concatenate([t.keys for t in tables]),
            np.concatenate([t.sums for t in tables]),
            np.concatenate([t.cell + s for t, s in zip(tables, shift, strict=True)]),
            np.concatenate([t.bin for t in tables]),
            np.concatenate([t.counts for t in tables]),
        )

    @classmethod
    def _grouped(cls, keys: NDArray[np.void], sums: F64, cell: I64, bins: I64, counts: F64) -> Table:
        order = np.lexsort((keys["value"], keys["field"], keys["label"], keys["window"]))
        ranked = keys[order]
        first = np.ones(len(ranked), bool)
        first[1:] = ranked[1:] != ranked[:-1]
        group = np.empty(len(keys), np.int64)
        group[order] = np.cumsum(first) - 1
        kept = ranked[first]
        code = (group[cell] << 32) + bins
        ordered = np.argsort(code, kind="stable")  # of runs that rise, a table each: it merges them
        code = code[ordered]
        fresh = np.ones(len(code), bool)
        fresh[1:] = code[1:] != code[:-1]
        code, at = code[fresh], np.cumsum(fresh) - 1
        both = summed(counts[ordered], at, len(code))
        return cls(kept, summed(sums, group, len(kept)), code >> 32, code & 0xFFFFFFFF, both)

    def where(self, mask: Bool) -> Table:
        """The cells that the mask (C,) keeps."""
        if mask.all():
            return self
        index = np.cumsum(mask) - 1
        kept = mask[self.cell]
        return Table(
            self.keys[mask], self.sums[mask], index[self.cell[kept]], self.bin[kept], self.counts[kept]
        )

    def moved_to(self, window: int) -> Table:
        """All cells in one window: added up window by window, in their order."""
        if not len(self.keys):
            return self
        keys = self.keys.copy()
        keys["window"] = window
        return self._grouped(keys, self.sums, self.cell, self.bin, self.counts)


def summed(columns: F64, group: NDArray[np.intp], groups: int) -> F64:
    """Rows of `columns` summed by group, one after the other: (groups, columns)."""
    out = np.empty((groups, columns.shape[1]))
    for i, column in enumerate(columns.T):
        out[:, i] = np.bincount(group, column, groups)
    return out
