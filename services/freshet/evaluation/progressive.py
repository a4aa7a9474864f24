"""Progressive validation: measures of a stream by event-time window, label and segment.

The predictions passed to `Measures.add` were made before the model learned the samples. Windows close by
event time. Sums are kept as sorted arrays that merge (`Table`). A cell is (window, label, field, value); its
histogram over predicted logits is sparse.

Shape letters: B samples, L labels, C cells, H entries of all histograms, G groups, S sums.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.evaluation.descriptors import COARSE_BITS, MEASURES, SUMS, Cells, logits_of, terms_of
from freshet.evaluation.popularity import NEVER_AHEAD
from freshet.features.hashing import hash_text
from freshet.types import F32, F64, I64, U8, U64, Bool

# --- Grouping: numpy computes each sample's summands, the native core adds them up by cell.


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSamples:
    """B samples that are not grouped yet; each column has the shape (B,)."""

    times_ms: I64
    label: U8
    prediction: F32  # of the sample's own label
    value: F32
    weight: F32
    segments: tuple[U64, ...]  # per segment field

    @classmethod
    def concat(cls, parts: list[ScoredSamples]) -> ScoredSamples:
        """Concatenate samples in the order of the parts."""
        return cls(
            np.concatenate([s.times_ms for s in parts]),
            np.concatenate([s.label for s in parts]),
            np.concatenate([s.prediction for s in parts]),
            np.concatenate([s.value for s in parts]),
            np.concatenate([s.weight for s in parts]),
            tuple(np.concatenate(column) for column in zip(*(s.segments for s in parts), strict=True)),
        )


def table_of(samples: ScoredSamples, window: I64, number: Bool, values: Sequence[U64]) -> Table:
    """Group samples: each counts in the cell of all samples and in one cell of each segment field.

    Args:
        samples: B samples.
        window: (B,) start of each sample's window in ms.
        number: (L,) whether a label is a number.
        values: for each segment field the values with a cell of their own, rising, with OTHER.

    Returns:
        The table; histograms of segments have coarser bins (`COARSE_BITS`).
    """
    sums, bins, counts = terms_of(samples.prediction, samples.value, samples.weight, number[samples.label])
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


# --- Figures of a window, label and segment.


@dataclass(frozen=True, slots=True)
class LabelKind:
    """Name and kind of a label."""

    name: str
    number: bool  # else true/false


@dataclass(frozen=True, slots=True)
class Figures:
    """Measures of one window, label and segment."""

    start_ms: int | None  # None: since the beginning
    stop_ms: int | None
    label: str
    segment: str | None  # None: all samples
    value: int | None  # key of the segment's value; OTHER: all values beyond the first `max_values`
    measures: Mapping[str, float]  # by name of the descriptor; NaN where not defined
    reliability: Reliability | None = None  # only for all samples of a true/false label


def figures_of(
    table: Table, labels: Sequence[LabelKind], segments: Sequence[str], window_ms: int
) -> list[Figures]:
    """Compute the figures of all cells, in the order of their keys."""
    if not len(table.keys):
        return []
    number = np.array([label.number for label in labels])
    measures = measures_of(table, number)
    curves = _curves(table, ~number[table.keys["label"]] & (table.keys["field"] == 0))
    figures = []
    for i, (window, label, field, value) in enumerate(table.keys.tolist()):
        start = None if window == TOTAL else window
        figures.append(
            Figures(
                start,
                None if start is None else start + window_ms,
                labels[label].name,
                segments[field - 1] if field else None,
                value if field else None,
                measures[i],
                curves.get(i),
            )
        )
    return figures


def measures_of(table: Table, number: Bool) -> list[dict[str, float]]:
    """Compute the measures of all cells, by name, in the order of their keys.

    Args:
        table: C cells.
        number: (L,) whether a label is a number; a kind of label has the measures defined for it.
    """
    positive, negative = table.counts.T
    sums = dict(zip(SUMS, table.sums.T, strict=True))
    cells = Cells(**sums, cell=table.cell, bins=table.bin, positive=positive, negative=negative)
    computed = {measure: measure.compute(cells).tolist() for measure in MEASURES}
    names, rows = [], []
    for kind in ("logloss", "number"):
        kept = {measure.name: column for measure, column in computed.items() if measure.of in ("any", kind)}
        names.append(list(kept))
        rows.append(list(zip(*kept.values(), strict=True)))
    kinds = number[table.keys["label"]].tolist()
    return [dict(zip(names[kind], rows[kind][i], strict=True)) for i, kind in enumerate(kinds)]


def _curves(table: Table, wanted: Bool) -> Mapping[int, Reliability]:
    """Return the reliability of the cells in the mask `wanted` (C,), by the index of the cell."""
    part = table.where(wanted)
    positive, negative = part.counts.T
    curves = reliability(part.cell, part.bin, positive, negative, len(part.keys))
    return dict(zip(np.flatnonzero(wanted).tolist(), curves, strict=True))


# --- Reliability: mean prediction and mean label in few bins over logits.


MOST_BINS = 15

WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Widths of a bin in logits; a curve has the finest that gives at most `MOST_BINS` bins. Bins start at
multiples of the width, so curves of several windows can be merged at the coarsest of their widths."""

Reliability = list[list[float]]
"""[[samples' weight, mean prediction, mean label], ...] by rising prediction."""


def reliability(cell: I64, bins: I64, positive: F64, negative: F64, cells: int) -> list[Reliability]:
    """Compute the reliability curve of each histogram; means are exact to half a histogram bin.

    Args:
        cell: (H,) index of each entry's histogram, rising.
        bins: (H,) bins, rising within a histogram.
        positive, negative: (H,) weight of true and of false samples.
        cells: number of histograms.
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
    """Return the mask (H,) of entries that begin a bin of their curve, at the finest width that fits."""
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
"""window: start in ms. field: 0 for all samples, else 1 + the segment field's position. value: the segment's
value, 0 for all samples."""

TOTAL = -(1 << 62)
"""The window of all samples of closed windows."""

OTHER = 0
"""The segment value that stands for all values beyond the first `max_values` of a field."""


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
        """Return a table without cells."""
        none = np.empty(0, np.int64)
        return cls(np.empty(0, KEY), np.empty((0, len(SUMS))), none, none, np.empty((0, 2)))

    @classmethod
    def zeros(cls, windows: int, labels: int) -> Table:
        """Return a table with a cell without samples for each label in the windows 0, 1, …"""
        keys = np.zeros(windows * labels, KEY)
        keys["window"], keys["label"] = np.divmod(np.arange(windows * labels), labels)
        none = np.empty(0, np.int64)
        return cls(keys, np.zeros((len(keys), len(SUMS))), none, none, np.empty((0, 2)))

    @classmethod
    def merge(cls, tables: list[Table]) -> Table:
        """Add tables up, in their order: merging step by step gives the same bits."""
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
        ordered = np.argsort(code, kind="stable")  # timsort: merges the tables' sorted runs
        code = code[ordered]
        fresh = np.ones(len(code), bool)
        fresh[1:] = code[1:] != code[:-1]
        code, at = code[fresh], np.cumsum(fresh) - 1
        both = sum_by_group(counts[ordered], at, len(code))
        return cls(kept, sum_by_group(sums, group, len(kept)), code >> 32, code & 0xFFFFFFFF, both)

    def where(self, mask: Bool) -> Table:
        """Return the cells in the mask (C,)."""
        if mask.all():
            return self
        index = np.cumsum(mask) - 1
        kept = mask[self.cell]
        return Table(
            self.keys[mask], self.sums[mask], index[self.cell[kept]], self.bin[kept], self.counts[kept]
        )

    def of_fields(self, fields: Sequence[int | None]) -> Table:
        """Return the cells of these fields, numbered by their positions; None is a field without cells."""
        new = {field: i for i, field in enumerate(fields) if field is not None}
        kept = self.where(np.isin(self.keys["field"], list(new)))
        keys = kept.keys.copy()
        keys["field"] = [new[field] for field in kept.keys["field"].tolist()]
        return self._grouped(keys, kept.sums, kept.cell, kept.bin, kept.counts)

    def moved_to(self, window: int) -> Table:
        """Add all windows up into one, in their order."""
        if not len(self.keys):
            return self
        keys = self.keys.copy()
        keys["window"] = window
        return self._grouped(keys, self.sums, self.cell, self.bin, self.counts)


def sum_by_group(columns: F64, group: NDArray[np.intp], groups: int) -> F64:
    """Sum the rows of `columns` (B, S) by group (B,), in their order; returns (G, S)."""
    out = np.empty((groups, columns.shape[1]))
    for i, column in enumerate(columns.T):
        out[:, i] = np.bincount(group, column, groups)
    return out


GROUP_SAMPLES = 1 << 15
"""Samples grouped at a time: grouping takes about 0.3 µs for each, and more in small groups."""

MERGE_ENTRIES = 1 << 16
"""Groups merge into the table before a figure is computed, or once they have as many entries as the table and
at least this many (2 MB): an entry then merges about once each time the table doubles."""

RECENT_WINDOWS = 10
"""Windows that `lately` sums up: the present quality, without the first predictions of a new model."""


class Measures:
    """Sums of predictions and labels by window, label and segment. Not thread-safe."""

    def __init__(
        self,
        labels: Sequence[LabelKind],
        segments: Sequence[str] = (),
        *,
        window_ms: int = 60_000,
        lateness_ms: int | None = None,
        max_values: int = 100,
    ) -> None:
        """Create measures without samples.

        Args:
            labels: name and kind of each label.
            segments: names of the segment fields.
            window_ms: length of a window in event time.
            lateness_ms: event time between a window's end and its close; a window's length by default.
            max_values: the first values of a segment field that have cells of their own; others count as
                OTHER.
        """
        self.labels, self.segments, self.window_ms = tuple(labels), tuple(segments), window_ms
        self.lateness_ms = window_ms if lateness_ms is None else lateness_ms
        self.max_values = max_values
        self._number = np.array([label.number for label in labels])
        self._table = Table.empty()
        self._fresh: list[Table] = []  # groups to merge into the table, in order
        self._waiting: list[ScoredSamples] = []
        self._waiting_count = 0
        self._known = [np.empty(0, np.uint64) for _ in segments]
        self._newest_ms = TOTAL
        self._closed_ms = TOTAL  # windows that start before this are closed
        self._lately = Table.empty()  # the last RECENT_WINDOWS closed windows, without segments

    def add(
        self,
        predictions: F32,
        label: U8,
        value: F32,
        weight: F32,
        times_ms: I64,
        segments: Mapping[str, U64] | None = None,
        latest_ms: int = NEVER_AHEAD,
    ) -> None:
        """Add B samples; those of closed windows count in `total` only.

        Args:
            predictions: (B, L) of all labels, or (B,) of each sample's own label.
            label: (B,) index of the sample's label.
            value, weight: (B,) value of that label, and weight.
            times_ms: (B,) event times.
            segments: value keys (B,) by segment field; a missing field counts as OTHER.
            latest_ms: latest possible time of a sample; where later windows are closed, older ones reopen.
        """
        size = len(label)
        if size == 0:
            return
        own = predictions.copy() if predictions.ndim == 1 else predictions[np.arange(size), label]
        given = segments or {}
        none = np.zeros(size, np.uint64)
        columns = tuple(given.get(name, none).copy() for name in self.segments)
        self._waiting.append(
            ScoredSamples(times_ms.copy(), label.copy(), own, value.copy(), weight.copy(), columns)
        )
        self._follow(int(times_ms.max()), latest_ms)
        self._waiting_count += size
        if self._waiting_count >= GROUP_SAMPLES:
            self._group()

    def finished(self) -> list[Figures]:
        """Close windows, and return the figures of those that this call closed.

        Windows after the newest sample are of a clock that ran ahead, and close too.
        """
        closing = self._newest_ms - self.lateness_ms
        closing -= closing % self.window_ms
        if closing <= max(self._closed_ms, TOTAL + 2 * self.window_ms + self.lateness_ms):
            return []
        self._merge()  # before `_closed_ms` changes: samples added before this call are in time
        self._closed_ms = closing
        window = self._table.keys["window"]
        leaving = ((window < closing) | (window > self._newest_ms)) & (window != TOTAL)
        done = self._table.where(leaving)
        self._table = Table.merge([self._table.where(~leaving), done.moved_to(TOTAL)])
        lately = Table.merge([self._lately, done.where(done.keys["field"] == 0)])
        age_ms = closing - lately.keys["window"]
        self._lately = lately.where((age_ms > 0) & (age_ms <= RECENT_WINDOWS * self.window_ms))
        return self._figures(done)

    def windows(self) -> list[Figures]:
        """Return the figures of the open windows."""
        self._merge()
        return self._figures(self._table.where(self._table.keys["window"] != TOTAL))

    def total(self) -> list[Figures]:
        """Return the figures of all samples, with those of open windows."""
        self._merge()
        return self._figures(self._table.moved_to(TOTAL))

    def lately(self) -> list[Figures]:
        """Return the figures of the last RECENT_WINDOWS closed windows together, without segments.

        `state` does not hold them, so they begin anew with each process.
        """
        return self._figures(self._lately.moved_to(TOTAL))

    def view(self) -> Self:
        """Return a cheap copy for another thread; both share samples and tables, which are immutable."""
        view = copy.copy(self)
        view._waiting, view._fresh, view._known = list(self._waiting), list(self._fresh), list(self._known)
        return view

    def overall(self) -> Self:
        """Return a copy without segments; its figures take a small part of the time."""
        overall = self.view()
        overall._table, *overall._fresh = (
            table.where(table.keys["field"] == 0) for table in (self._table, *self._fresh)
        )
        overall._waiting = [replace(samples, segments=()) for samples in self._waiting]
        return overall

    def merge(self, other: Measures, latest_ms: int = NEVER_AHEAD) -> None:
        """Add the sums of other measures; samples of closed windows, and `latest_ms`, count as for `add`.

        Raises ValueError unless labels, segments and window length are equal.
        """
        if (self.labels, self.segments, self.window_ms) != (other.labels, other.segments, other.window_ms):
            raise ValueError("measures of other labels, segments or windows cannot be merged")
        self._merge()
        other._merge()
        if len(other._table.keys):  # else its times are those with which it began
            self._follow(other._newest_ms, latest_ms)
        late = other._table.keys["window"] < self._closed_ms
        added = [other._table.where(~late), other._table.where(late).moved_to(TOTAL)]
        self._table = Table.merge([self._table, *added])
        self._lately = Table.merge([self._lately, other._lately])
        self._known = [np.union1d(a, b) for a, b in zip(self._known, other._known, strict=True)]

    def beside(self) -> Self:
        """Return empty measures with the same known segment values, for samples to merge into these later."""
        empty = self.view()
        empty._table, empty._lately = Table.empty(), Table.empty()
        empty._waiting, empty._waiting_count, empty._fresh = [], 0, []
        return empty

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of all sums, as arrays."""
        self._merge()
        table = self._table
        known = {f"known/{i}": values.copy() for i, values in enumerate(self._known)}
        return known | {
            "window": table.keys["window"].copy(),
            "label": table.keys["label"].astype(np.int64),
            "field": table.keys["field"].astype(np.int64),
            "value": table.keys["value"].copy(),
            "sums": table.sums.copy(),
            "cell": table.cell.copy(),
            "bin": table.bin.copy(),
            "counts": table.counts.copy(),
            "times": np.array([self._newest_ms, self._closed_ms, self.window_ms], np.int64),
            "segments": _hashed(self.segments),
        }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore the arrays of `state`, of the shapes it returns.

        Windows of another length count in `total` only; segments that the state lacks begin without samples,
        and those of the state that are not measured any more are left out. States written before `segments`
        existed have other segments if there are more or fewer. Raises ValueError if an array that `state`
        writes is missing.
        """
        stored = [name for name in state if name.startswith("known/")]
        same = _hashed(self.segments) if len(stored) == len(self.segments) else _hashed(())
        places = {h: i for i, h in enumerate(state.get("segments", same).tolist()) if f"known/{i}" in state}
        own = [places.get(h) for h in _hashed(self.segments).tolist()]
        missing = [n for n in self.state() if n not in state and n != "segments" and n[:6] != "known/"]
        sums = state.get("sums", np.empty((0, 0)))
        if missing or sums.shape[1:] != (len(SUMS),):
            raise ValueError(
                f"the state of measures lacks {', '.join(missing) or 'sums'}: another spec wrote it"
            )
        keys = np.empty(len(state["window"]), KEY)
        for name in ("window", "label", "field", "value"):
            keys[name] = state[name]
        table = Table(keys, sums, state["cell"], state["bin"], state["counts"])
        self._table = table.of_fields([0, *(None if i is None else i + 1 for i in own)])
        self._known = [np.array(state[f"known/{i}"] if i is not None else [], np.uint64) for i in own]
        self._newest_ms, self._closed_ms, window_ms = (int(t) for t in state["times"])
        if window_ms != self.window_ms:
            self._table = self._table.moved_to(TOTAL)
        self._waiting, self._waiting_count, self._fresh = [], 0, []

    def _learn_values(self, field: int, column: U64, sizes: Sequence[int]) -> U64:
        """Add new values of a segment field, up to `max_values`; return all known ones, rising, with OTHER.

        `column` (B,) joins the calls of `add`, of these sizes; each call adds its smallest new values.
        """
        known = self._known[field]
        start = 0
        for size in sizes if len(known) < self.max_values else ():
            values = column[start : start + size]
            start += size
            fresh = values if not len(known) else values[~_among(known, values)]
            if len(fresh):
                known = np.union1d(known, np.unique(fresh)[: self.max_values - len(known)])
        self._known[field] = known
        return known if OTHER in known[:1] else np.concatenate([np.array([OTHER], np.uint64), known])

    def _follow(self, newest_ms: int, latest_ms: int) -> None:
        """Follow added samples, of which the newest has the time `newest_ms`; see `add`."""
        if newest_ms < self._closed_ms and self._closed_ms > latest_ms:
            self._newest_ms, self._closed_ms = newest_ms, newest_ms - newest_ms % self.window_ms
        self._newest_ms = max(self._newest_ms, newest_ms)

    def _group(self) -> None:
        """Group the waiting samples into a table."""
        if not self._waiting:
            return
        samples, sizes = ScoredSamples.concat(self._waiting), [len(part.label) for part in self._waiting]
        values = [self._learn_values(i, column, sizes) for i, column in enumerate(samples.segments)]
        window = samples.times_ms - samples.times_ms % self.window_ms
        window[window < self._closed_ms] = TOTAL
        self._fresh.append(table_of(samples, window, self._number, values))
        self._waiting, self._waiting_count = [], 0
        if sum(len(table.cell) for table in self._fresh) > max(len(self._table.cell), MERGE_ENTRIES):
            self._merge()

    def _merge(self) -> None:
        """Merge all samples into the one table."""
        self._group()
        if self._fresh:
            self._table, self._fresh = Table.merge([self._table, *self._fresh]), []

    def _figures(self, table: Table) -> list[Figures]:
        return figures_of(table, self.labels, self.segments, self.window_ms)


def _hashed(segments: Sequence[str]) -> U64:
    """Return (F,) hashes of the names of segment fields."""
    return np.array([hash_text(name) for name in segments], np.uint64)


def _among(known: U64, values: U64) -> Bool:
    """Return the mask (B,) of values (B,) that are in `known`, which is rising and not empty."""
    found: Bool = known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    return found
