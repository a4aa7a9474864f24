"""Measures of a stream over event-time windows, per label, overall and by segment.

Progressive validation: the predictions given to `add` were made before the model learned from the samples.
Pure: windows close by the event times seen.
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
"""Samples are grouped when this many have come: grouping costs about 0.3 µs each, more where
there are few."""

MERGE_ENTRIES = 1 << 16
"""Groups are merged into the table when a figure is asked for, or when together they are as large as the
table, and at least this large (2 MB): each entry is then merged about once a doubling."""

RECENT_WINDOWS = 10
"""Windows that `lately` sums up: how good predictions are now, the first ones of a model's life forgotten."""


class Measures:
    """Sums of predictions and labels; single-threaded."""

    def __init__(
        self,
        labels: Sequence[LabelKind],
        segments: Sequence[str] = (),
        *,
        window_ms: int = 60_000,
        lateness_ms: int | None = None,
        max_values: int = 100,
    ) -> None:
        """`lateness_ms` (default: a window): how far event time passes a window's end before it closes.

        Of each segment field the first `max_values` values seen are told apart.
        """
        self.labels, self.segments, self.window_ms = tuple(labels), tuple(segments), window_ms
        self.lateness_ms = window_ms if lateness_ms is None else lateness_ms
        self.max_values = max_values
        self._number = np.array([label.number for label in labels])
        self._table = Table.empty()
        self._fresh: list[Table] = []  # groups of samples that are to be merged into the table, in order
        self._waiting: list[Samples] = []
        self._waiting_count = 0
        self._known = [np.empty(0, np.uint64) for _ in segments]
        self._newest_ms = TOTAL
        self._closed_ms = TOTAL  # windows that start before this have been given out
        self._lately = Table.empty()  # the last RECENT_WINDOWS of these, without segments

    def add(
        self,
        predictions: F32,
        label: U8,
        value: F32,
        weight: F32,
        times_ms: I64,
        segments: Mapping[str, U64] | None = None,
    ) -> None:
        """Take in B samples.

        Args:
            predictions: (B, L) of every head, of which the sample's own label counts; or (B,) of that label.
            label: (B,) position of the sample's label. value, weight: (B,). times_ms: (B,) event times.
            segments: value keys (B,) of each segment field; a field left out counts as OTHER.
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
        """Figures of the windows that have closed since the last call; each is given out once.

        Samples that come for a closed window still count in `total`.
        """
        closing = self._newest_ms - self.lateness_ms
        closing -= closing % self.window_ms
        if closing <= max(self._closed_ms, TOTAL + 2 * self.window_ms + self.lateness_ms):
            return []
        self._merge()  # before the windows close: what came until now was in time
        self._closed_ms = closing
        leaving = (self._table.keys["window"] < closing) & (self._table.keys["window"] != TOTAL)
        done = self._table.where(leaving)
        self._table = Table.merge([self._table.where(~leaving), done.moved_to(TOTAL)])
        lately = Table.merge([self._lately, done.where(done.keys["field"] == 0)])
        self._lately = lately.where(lately.keys["window"] >= closing - RECENT_WINDOWS * self.window_ms)
        return self._figures(done)

    def windows(self) -> list[Figures]:
        """Figures so far of the windows that are still open."""
        self._merge()
        return self._figures(self._table.where(self._table.keys["window"] != TOTAL))

    def total(self) -> list[Figures]:
        """Figures since the beginning, open windows included."""
        self._merge()
        return self._figures(self._table.moved_to(TOTAL))

    def lately(self) -> list[Figures]:
        """Figures of the last RECENT_WINDOWS windows that have closed, together and without segments.

        They begin anew with each process: no state holds them.
        """
        return self._figures(self._lately.moved_to(TOTAL))

    def view(self) -> Self:
        """What has been added so far, for another thread to work on; cheap, as samples and tables are
        shared: nothing changes them."""
        view = copy.copy(self)
        view._waiting, view._fresh, view._known = list(self._waiting), list(self._fresh), list(self._known)
        return view

    def overall(self) -> Self:
        """The same without segments, whose figures are many times quicker to come by."""
        overall = self.view()
        overall._table, *overall._fresh = (
            table.where(table.keys["field"] == 0) for table in (self._table, *self._fresh)
        )
        overall._waiting = [replace(samples, segments=()) for samples in self._waiting]
        return overall

    def merge(self, other: Measures) -> None:
        """Add another's sums, of the same labels and segments; its open windows become open here, but for
        those that have been given out."""
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
        """Empty ones that tell apart what these do, and close no windows: of samples that are counted
        elsewhere and merged into these later."""
        beside = self.view()
        beside._table, beside._lately = Table.empty(), Table.empty()
        beside._waiting, beside._waiting_count, beside._fresh = [], 0, []
        return beside

    def state(self) -> dict[str, NDArray[Any]]:
        """All of it as arrays; independent of later changes."""
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
        """Go on from a saved state. Windows of another length than now are counted in `total` only.

        A state written before `weight_squares` were kept has Σ w in their place: the same where all weights
        are 1. Raises ValueError if it does not hold what `state` writes for these segments.
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

    def _told_apart(self, field: int, column: U64, sizes: Sequence[int]) -> U64:
        """The values of a field that are told apart, OTHER among them, once those of the additions of these
        sizes are known: of each addition's new ones the smallest, while there is room."""
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
        """Group the samples that wait."""
        if not self._waiting:
            return
        samples, sizes = Samples.concat(self._waiting), [len(part.label) for part in self._waiting]
        values = [self._told_apart(i, column, sizes) for i, column in enumerate(samples.segments)]
        window = samples.times_ms - samples.times_ms % self.window_ms
        window[window < self._closed_ms] = TOTAL
        self._fresh.append(table_of(samples, window, self._number, values))
        self._waiting, self._waiting_count = [], 0
        if sum(len(table.cell) for table in self._fresh) > max(len(self._table.cell), MERGE_ENTRIES):
            self._merge()

    def _merge(self) -> None:
        """Group, and have all in one table."""
        self._group()
        if self._fresh:
            self._table, self._fresh = Table.merge([self._table, *self._fresh]), []

    def _figures(self, table: Table) -> list[Figures]:
        return figures_of(table, self.labels, self.segments, self.window_ms)


def _among(known: U64, values: U64) -> Bool:
    """(B,) whether each value is one of `known`, which rises and is not empty."""
    found: Bool = known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    return found
