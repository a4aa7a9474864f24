"""Predictions of several learners over one pass, and their figures: over all, after a fifth, by windows.

The end of the first fifth is known only after the pass, so predictions stay in unnamed files until then: 13
bytes a sample, and 4 more for each learner. Shape letters: B samples, L labels, E
edges of W windows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from freshet.evaluation.progressive import LabelKind, ScoredSamples, Table, measures_of, table_of
from freshet.types import F32, I64, U8

FIRST_SHARE = 0.2
"""Share of a pass that `after_first` excludes: the rest shows a model that has trained for a while."""

WINDOW_SAMPLES = 500
"""A window of the curve has at least this many samples, unless the pass has fewer."""

MOST_WINDOWS = 50
BLOCK = 1 << 18
"""Samples read at a time."""

FIRST_CAPACITY = 1 << 16
"""Samples that a new column's file has space for."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One window of a label's curve: the samples [first, stop) of the pass."""

    first: int
    stop: int
    start_ms: int  # event times of the first and the last sample
    stop_ms: int
    measures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LearnerFigures:
    """Figures of one learner, by label."""

    all: Mapping[str, Mapping[str, float]]  # label -> measure -> value
    after_first: Mapping[str, Mapping[str, float]]  # without the first fifth of the pass
    curve: Mapping[str, Sequence[Curve]]  # label -> windows of equal numbers of samples, in order

    def as_json(self) -> dict[str, Any]:
        """Return the object for `--json`."""
        return {
            "labels": {name: dict(values) for name, values in self.all.items()},
            "after_first_fifth": {name: dict(values) for name, values in self.after_first.items()},
            "curve": {name: [asdict(window) for window in curve] for name, curve in self.curve.items()},
        }


class LearnerPredictions:
    """Predictions by learner and sample. Not thread-safe, but for `figures`; close it after use.

    The id of a sample is the row of the file times L, plus the index of its label. Ids may come in any order
    and have gaps.
    """

    def __init__(self, labels: Sequence[LabelKind]) -> None:
        self.labels = tuple(labels)
        self._values, self._times_ms = _Column(np.float32), _Column(np.int64)
        self._known = _Column(np.bool_)
        self._predictions: dict[str, _Column] = {}
        self._predicted: dict[str, set[int]] = {}  # learner -> indexes of the labels that it predicts
        self._end = 0  # largest id + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete the files."""
        for column in (self._values, self._times_ms, self._known, *self._predictions.values()):
            column.close()

    @property
    def learners(self) -> Sequence[str]:
        """Names of the learners, in the order of their first predictions."""
        return list(self._predictions)

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(self._known.read(first, stop))) for first, stop in self._blocks())

    def add_samples(self, ids: I64, values: F32, times_ms: I64) -> None:
        """Add samples: ids (B,), values of their labels (B,) and event times (B,).

        Raises OSError if the temporary disk is full, as all methods that add.
        """
        if len(ids):
            self._end = max(self._end, int(ids.max()) + 1)
            self._values.write(ids, values)
            self._times_ms.write(ids, times_ms)
            self._known.write(ids, np.ones(len(ids), bool))

    def add_predictions(self, learner: str, ids: I64, predictions: F32) -> None:
        """Add a learner's predictions (B,) for samples `ids` (B,), made before it learned them."""
        column = self._column_of(learner)
        if len(ids):
            column.write(ids, predictions)
            labels = np.unique(ids % len(self.labels)).tolist() if len(self.labels) > 1 else [0]
            self._predicted[learner].update(labels)

    def add_means(self, learner: str, delay_rows: int) -> None:
        """Add a learner that predicts a label's mean over all samples before the current batch.

        A batch has `delay_rows` samples. Before the first sample the prediction is 0 for a number, else 0.5.
        """
        count, total = np.zeros(len(self.labels)), np.zeros(len(self.labels))
        number = np.array([label.number for label in self.labels])
        size = max(1, BLOCK // delay_rows) * delay_rows
        column = self._column_of(learner)
        self._predicted[learner].update(range(len(self.labels)))
        for ids in self._ids(size):
            values = self._values.read_at(ids).astype(np.float64)
            label = ids % len(self.labels)
            means = np.empty(len(ids), np.float32)
            batch = np.arange(len(ids)) // delay_rows * delay_rows  # start of each sample's batch
            for index in range(len(self.labels)):
                mine = np.flatnonzero(label == index)
                good = np.isfinite(values[mine])
                seen = np.concatenate([[0], np.cumsum(label == index)])
                before = seen[batch[mine]]  # count of this label's samples in earlier batches
                counts = count[index] + np.concatenate([[0], np.cumsum(good)])
                sums = total[index] + np.concatenate([[0.0], np.cumsum(np.where(good, values[mine], 0.0))])
                if number[index]:
                    means[mine] = sums[before] / np.maximum(counts[before], 1)
                else:
                    means[mine] = (sums[before] + 0.5) / (counts[before] + 1)
                count[index], total[index] = counts[-1], sums[-1]
            column.write(ids, means)

    def figures(self, learner: str) -> LearnerFigures:
        """Compute a learner's figures for the labels that it predicts. Raises KeyError if it is unknown."""
        column, predicted = self._predictions[learner], self._predicted[learner]
        edges, later = _edges(len(self))
        windows = len(edges) - 1
        number = np.array([label.number for label in self.labels])
        times_ms = np.zeros((windows, 2), np.int64)  # of each window's first and last sample
        tables = [Table.zeros(windows, len(self.labels))]
        at = 0
        for ids in self._ids(BLOCK):
            window = np.repeat(np.arange(windows), np.diff(np.clip(edges, at, at + len(ids))))
            when, label = self._times_ms.read_at(ids), (ids % len(self.labels)).astype(np.uint8)
            ones = np.ones(len(ids), np.float32)
            samples = ScoredSamples(when, label, column.read_at(ids), self._values.read_at(ids), ones, ())
            tables.append(table_of(samples, window, number, ()))
            begins = np.flatnonzero(np.diff(window, prepend=-1))
            begun = begins[np.isin(begins + at, edges)]
            times_ms[window[begun], 0] = when[begun]
            times_ms[window[begins], 1] = when[np.append(begins[1:], len(window)) - 1]
            at += len(ids)
        table = Table.merge(tables)
        whole = measures_of(table.moved_to(0), number)
        after = measures_of(table.where(table.keys["window"] >= later).moved_to(0), number)
        by_window = measures_of(table, number)  # window by window, each with all labels
        spans = [(first, last) for first, last in times_ms.tolist()]
        learned = [(i, label.name) for i, label in enumerate(self.labels) if i in predicted]
        curves = {
            name: [
                Curve(first, stop, *span, by_window[w * len(self.labels) + i])
                for w, (first, stop, span) in enumerate(zip(edges, edges[1:], spans, strict=False))
            ]
            for i, name in learned
        }
        return LearnerFigures(
            {name: whole[i] for i, name in learned}, {name: after[i] for i, name in learned}, curves
        )

    def arrays(self, learner: str) -> tuple[F32, F32, U8]:
        """Return a learner's predictions, values and label indexes, (B,) each, in the order of the pass.

        Raises KeyError if the learner is unknown.
        """
        column = self._predictions[learner]
        blocks = [(column.read_at(ids), self._values.read_at(ids), ids) for ids in self._ids(BLOCK)]
        if not blocks:
            return np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.uint8)
        predictions, values, ids = (np.concatenate(part) for part in zip(*blocks, strict=True))
        return predictions, values, (ids % len(self.labels)).astype(np.uint8)

    def _column_of(self, learner: str) -> _Column:
        if learner not in self._predictions:
            self._predictions[learner], self._predicted[learner] = _Column(np.float32), set()
        return self._predictions[learner]

    def _blocks(self) -> Iterator[tuple[int, int]]:
        return ((first, min(first + BLOCK, self._end)) for first in range(0, self._end, BLOCK))

    def _ids(self, size: int) -> Iterator[I64]:
        """Yield the ids of the samples, rising, `size` at a time."""
        waiting, held = list[I64](), 0
        for first, stop in self._blocks():
            found = first + np.flatnonzero(self._known.read(first, stop))
            waiting.append(found)
            held += len(found)
            while held >= size:
                joined = np.concatenate(waiting)
                yield joined[:size]
                waiting, held = [joined[size:]], held - size
        if held:
            yield np.concatenate(waiting)


def _edges(samples: int) -> tuple[list[int], int]:
    """Return the edges (E,) of the windows of a pass, and the first window after the first fifth.

    The first fifth ends at an edge, after `samples // 5` samples.
    """
    cut = int(samples * FIRST_SHARE)
    windows = max(1, min(MOST_WINDOWS, samples // WINDOW_SAMPLES))
    first = max(1, round(windows * FIRST_SHARE)) if cut else 0
    rest = max(1, windows - first)
    before = [cut * i // first for i in range(first)] if first else []
    return [*before, *(cut + (samples - cut) * i // rest for i in range(rest)), samples], first


class _Column:
    """One number for each sample id, in an unnamed memory-mapped file that grows; 0 where not written."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(prefix="freshet-scored-")  # noqa: SIM115 - `close` closes it
        self._map: NDArray[Any] | None = None

    def write(self, ids: I64, numbers: NDArray[Any]) -> None:
        """Write the numbers (B,) of the samples `ids` (B,)."""
        self._grow(int(ids.max()) + 1)
        assert self._map is not None
        first, count = int(ids[0]), len(ids)
        if int(ids[-1]) - first == count - 1 and (count < 3 or (np.diff(ids) == 1).all()):
            self._map[first : first + count] = numbers
        else:
            self._map[ids] = numbers

    def read(self, first: int, stop: int) -> NDArray[Any]:
        """Return the numbers of the samples [first, stop), as (stop - first,)."""
        self._grow(stop)
        assert self._map is not None
        return np.array(self._map[first:stop])

    def read_at(self, ids: I64) -> NDArray[Any]:
        """Return the numbers (B,) of rising, distinct ids (B,)."""
        block = self.read(int(ids[0]), int(ids[-1]) + 1)
        return block if len(block) == len(ids) else block[ids - ids[0]]

    def close(self) -> None:
        self._map = None
        self._file.close()

    def _grow(self, capacity: int) -> None:
        mapped = 0 if self._map is None else len(self._map)
        if capacity > mapped:
            mapped = max(capacity, 2 * mapped, FIRST_CAPACITY)
            # A write to a hole of a mapped file on a full disk would end the process by SIGBUS.
            os.posix_fallocate(self._file.fileno(), 0, mapped * self._dtype.itemsize)
            self._map = np.memmap(self._file, self._dtype, "r+", shape=(mapped,))
