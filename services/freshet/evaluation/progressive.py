"""Measures of a stream by event-time window, label and segment.

Progressive validation: the predictions passed to `add` were made before the model learned the samples.
Windows close by event time. Shape letters: B samples, L labels.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from freshet.evaluation.cells import (
    KEY,
    OTHER,
    SUMS,
    TOTAL,
    Figures,
    LabelKind,
    Samples,
    Table,
    figures_of,
    table_of,
)
from freshet.types import F32, I64, U8, U64, Bool

__all__ = ["Measures"]

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
        self._waiting: list[Samples] = []
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
    ) -> None:
        """Add B samples.

        Args:
            predictions: (B, L) of all labels, or (B,) of each sample's own label.
            label: (B,) index of the sample's label.
            value, weight: (B,) value of that label, and weight.
            times_ms: (B,) event times.
            segments: value keys (B,) by segment field; a missing field counts as OTHER.
        """
        size = len(label)
        if size == 0:
            return
        own = predictions.copy() if predictions.ndim == 1 else predictions[np.arange(size), label]
        given = segments or {}
        none = np.zeros(size, np.uint64)
        columns = tuple(given.get(name, none).copy() for name in self.segments)
        self._waiting.append(
            Samples(times_ms.copy(), label.copy(), own, value.copy(), weight.copy(), columns)
        )
        self._newest_ms = max(self._newest_ms, int(times_ms.max()))
        self._waiting_count += size
        if self._waiting_count >= GROUP_SAMPLES:
            self._group()

    def finished(self) -> list[Figures]:
        """Close windows, and return the figures of those that this call closed.

        Later samples of a closed window count in `total` only.
        """
        closing = self._newest_ms - self.lateness_ms
        closing -= closing % self.window_ms
        if closing <= max(self._closed_ms, TOTAL + 2 * self.window_ms + self.lateness_ms):
            return []
        self._merge()  # before `_closed_ms` changes: samples added before this call are in time
        self._closed_ms = closing
        leaving = (self._table.keys["window"] < closing) & (self._table.keys["window"] != TOTAL)
        done = self._table.where(leaving)
        self._table = Table.merge([self._table.where(~leaving), done.moved_to(TOTAL)])
        lately = Table.merge([self._lately, done.where(done.keys["field"] == 0)])
        self._lately = lately.where(lately.keys["window"] >= closing - RECENT_WINDOWS * self.window_ms)
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

    def merge(self, other: Measures) -> None:
        """Add the sums of other measures; samples of windows that are closed here count in `total` only.

        Raises ValueError unless labels, segments and window length are equal.
        """
        if (self.labels, self.segments, self.window_ms) != (other.labels, other.segments, other.window_ms):
            raise ValueError("measures of other labels, segments or windows cannot be merged")
        self._merge()
        other._merge()
        late = other._table.keys["window"] < self._closed_ms
        added = [other._table.where(~late), other._table.where(late).moved_to(TOTAL)]
        self._table = Table.merge([self._table, *added])
        self._lately = Table.merge([self._lately, other._lately])
        self._newest_ms = max(self._newest_ms, other._newest_ms)
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
        }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore the arrays of `state`, of the shapes it returns.

        Windows of another length count in `total` only. States written before `weight_squares` existed get Σ
        w in its place, which is equal where all weights are 1. Raises ValueError if an array that `state`
        writes for these segments is missing.
        """
        missing = [name for name in self.state() if name not in state]
        sums = state.get("sums", np.empty((0, 0)))
        if sums.shape[1:] == (len(SUMS) - 1,):
            sums = np.column_stack([sums, sums[:, SUMS.index("weight")]])
        if missing or sums.shape[1:] != (len(SUMS),):
            raise ValueError(
                f"the state of measures lacks {', '.join(missing) or 'sums'}: another spec wrote it"
            )
        keys = np.empty(len(state["window"]), KEY)
        for name in ("window", "label", "field", "value"):
            keys[name] = state[name]
        self._table = Table(keys, sums, state["cell"], state["bin"], state["counts"])
        self._known = [np.array(state[f"known/{i}"]) for i in range(len(self.segments))]
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

    def _group(self) -> None:
        """Group the waiting samples into a table."""
        if not self._waiting:
            return
        samples, sizes = Samples.concat(self._waiting), [len(part.label) for part in self._waiting]
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


def _among(known: U64, values: U64) -> Bool:
    """Return the mask (B,) of values (B,) that are in `known`, which is rising and not empty."""
    found: Bool = known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    return found
