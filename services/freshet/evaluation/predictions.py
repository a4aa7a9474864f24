"""Predictions of several learners for the samples of one pass, and the figures of each: over all samples,
after the first fifth, and by windows of equal numbers of samples.

Where the first fifth ends is known only when the pass has ended, so predictions are kept until then: in
unnamed files (13 bytes a sample, and 4 more a learner), not in memory. Letters: B samples, L labels, C
cells, which are a window and a label each, E edges of W windows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from freshet.evaluation.auc import bins_of_logits
from freshet.evaluation.cells import PROBABILITY_FLOOR, LabelKind
from freshet.evaluation.descriptors import MEASURES, Cells
from freshet.types import F32, F64, I64, U8, Bool

__all__ = ["FIRST_SHARE", "Curve", "LearnerFigures", "Scored"]

FIRST_SHARE = 0.2
"""The share of a pass that `after_first` leaves out: a new model begins with nothing, and a model that has
been live for a while is judged by the rest."""

WINDOW_SAMPLES = 500
"""A window of the curve has at least this many samples, unless the pass has fewer."""

MOST_WINDOWS = 50
BLOCK = 1 << 18
"""Samples that are read at once."""

SLICE = 1 << 14
"""Samples that are added up at once: what that takes stays in the cache."""

BINS = int(bins_of_logits(np.array([np.inf]))[0]) + 1
FIRST_ROOM = 1 << 16


@dataclass(frozen=True, slots=True)
class Curve:
    """One window of the curve of a label."""

    first: int  # the window has samples [first, stop) of the pass, in its order
    stop: int
    start_ms: int  # event times of the first and the last of them
    stop_ms: int
    measures: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """As an object of `--json`."""
        return {
            "first": self.first,
            "stop": self.stop,
            "start_ms": self.start_ms,
            "stop_ms": self.stop_ms,
            "measures": dict(self.measures),
        }


@dataclass(frozen=True, slots=True)
class LearnerFigures:
    """How well one learner predicted, by label."""

    all: Mapping[str, Mapping[str, float]]  # label -> measure -> value
    after_first: Mapping[str, Mapping[str, float]]  # the same without the first fifth of the pass
    curve: Mapping[str, Sequence[Curve]]  # label -> windows of equal numbers of samples, in order

    def as_json(self) -> dict[str, Any]:
        """As an object of `--json`."""
        return {
            "labels": {name: dict(values) for name, values in self.all.items()},
            "after_first_fifth": {name: dict(values) for name, values in self.after_first.items()},
            "curve": {name: [window.as_json() for window in curve] for name, curve in self.curve.items()},
        }


class Scored:
    """Predictions by learner and sample. Single-threaded; close it.

    A sample is named by its id: the row of the file times L, plus the index of its label. Ids may come in
    any order, and need not be without gaps.
    """

    def __init__(self, labels: Sequence[LabelKind]) -> None:
        self.labels = tuple(labels)
        self._values, self._times_ms = _Column(np.float32), _Column(np.int64)
        self._known = _Column(np.bool_)
        self._predictions: dict[str, _Column] = {}
        self._predicted: dict[str, set[int]] = {}  # learner -> indexes of the labels that it predicts
        self._end = 0  # beyond the largest id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete what is kept."""
        for column in (self._values, self._times_ms, self._known, *self._predictions.values()):
            column.close()

    @property
    def learners(self) -> Sequence[str]:
        """Names of the learners, in the order in which they first came."""
        return list(self._predictions)

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(self._known.read(first, stop))) for first, stop in self._blocks())

    def add_samples(self, ids: I64, values: F32, times_ms: I64) -> None:
        """Take in B samples: ids, labels' values and event times, each (B,)."""
        if len(ids):
            self._end = max(self._end, int(ids.max()) + 1)
            self._values.write(ids, values)
            self._times_ms.write(ids, times_ms)
            self._known.write(ids, np.ones(len(ids), bool))

    def add_predictions(self, learner: str, ids: I64, predictions: F32) -> None:
        """Take in what a learner predicted for samples before their labels taught it: ids, predictions
        (B,)."""
        column = self._column_of(learner)
        if len(ids):
            column.write(ids, predictions)
            self._predicted[learner].update(
                np.unique(ids % len(self.labels)).tolist() if len(self.labels) > 1 else [0]
            )

    def add_means(self, learner: str, delay_rows: int) -> None:
        """Add a learner that predicts each label's mean over the samples before the sample's batch of
        `delay_rows`; 0.5 (a label that is a number: 0) before the first."""
        count, total = np.zeros(len(self.labels)), np.zeros(len(self.labels))
        number = np.array([label.number for label in self.labels])
        size = max(1, BLOCK // delay_rows) * delay_rows
        column = self._column_of(learner)
        self._predicted[learner].update(range(len(self.labels)))
        for ids in self._ids(size):
            values = self._values.read_at(ids).astype(np.float64)
            label = ids % len(self.labels)
            means = np.empty(len(ids), np.float32)
            batch = np.arange(len(ids)) // delay_rows * delay_rows  # where each sample's batch begins
            for index in range(len(self.labels)):
                mine = np.flatnonzero(label == index)
                good = np.isfinite(values[mine])
                before = np.searchsorted(mine, batch[mine])  # of this label's samples, in earlier batches
                counts = count[index] + np.concatenate([[0], np.cumsum(good)])
                sums = total[index] + np.concatenate([[0.0], np.cumsum(np.where(good, values[mine], 0.0))])
                if number[index]:
                    means[mine] = sums[before] / np.maximum(counts[before], 1)
                else:
                    means[mine] = (sums[before] + 0.5) / (counts[before] + 1)
                count[index], total[index] = counts[-1], sums[-1]
            column.write(ids, means)

    def figures(self, learner: str) -> LearnerFigures:
        """Figures of one learner, of the labels that it predicts. Raises KeyError for an unknown learner."""
        column, labels = self._predictions[learner], len(self.labels)
        samples = len(self)
        edges, later = _edges(samples)
        cells = [_Sums() for _ in range((len(edges) - 1) * labels)]
        times_ms = np.zeros((len(edges) - 1, 2), np.int64)
        at = 0
        for ids in self._ids(BLOCK):
            predictions, values = column.read_at(ids), self._values.read_at(ids)
            when = self._times_ms.read_at(ids)
            for window in range(len(edges) - 1):
                first, stop = (int(np.clip(edge - at, 0, len(ids))) for edge in edges[window : window + 2])
                if first == stop:
                    continue
                if first + at == edges[window]:
                    times_ms[window, 0] = when[first]
                times_ms[window, 1] = when[stop - 1]
                own = slice(first, stop)
                for index, label in enumerate(self.labels):
                    mine = ids[own] % labels == index if labels > 1 else slice(None)
                    cells[window * labels + index].add(predictions[own][mine], values[own][mine], label)
            at += len(ids)
        return self._figures(self._predicted[learner], cells, edges, times_ms, later)

    def arrays(self, learner: str) -> tuple[F32, F32, U8]:
        """All of one learner in memory, in the order of the pass: predictions, values and the labels'
        indexes, (B,) each. Raises KeyError for a learner that there is not."""
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
        """Ids of the samples, rising, `size` at a time."""
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

    def _figures(
        self, predicted: set[int], cells: Sequence[_Sums], edges: Sequence[int], times_ms: I64, later: int
    ) -> LearnerFigures:
        labels = len(self.labels)
        windows = len(edges) - 1
        every, after = {}, {}
        curve: dict[str, list[Curve]] = {}
        for index, label in enumerate(self.labels):
            if index not in predicted:
                continue
            mine = [cells[window * labels + index] for window in range(windows)]
            measured = _measured(mine, label)
            every[label.name], after[label.name] = _measured(
                [_Sums.joined(mine), _Sums.joined(mine[later:])], label
            )
            curve[label.name] = [
                Curve(edges[w], edges[w + 1], int(times_ms[w, 0]), int(times_ms[w, 1]), measured[w])
                for w in range(windows)
            ]
        return LearnerFigures(every, after, curve)


def _edges(samples: int) -> tuple[list[int], int]:
    """Edges (E,) of the windows of a pass, rising from 0 to `samples`, and the first window after the first
    fifth: the fifth ends at an edge, after `samples // 5` samples."""
    cut = int(samples * FIRST_SHARE)
    windows = max(1, min(MOST_WINDOWS, samples // WINDOW_SAMPLES))
    first = max(1, round(windows * FIRST_SHARE)) if cut else 0
    rest = max(1, windows - first)
    before = [cut * i // first for i in range(first)] if first else []
    return [*before, *(cut + (samples - cut) * i // rest for i in range(rest)), samples], first


class _Sums:
    """Sums and histogram of one cell, as `Cells` takes them; every sample weighs 1."""

    def __init__(self) -> None:
        self.n = self.not_finite = 0
        self.predicted = self.labelled = self.loss = self.squares = self.absolute = 0.0
        self.counts = np.zeros((2, 0))  # (2, BINS) of all and of true samples, once there is one

    def add(self, predictions: F32, values: F32, label: LabelKind) -> None:
        """Add samples: predictions and values (B,)."""
        for first in range(0, len(predictions), SLICE):
            own = slice(first, first + SLICE)
            self._add(predictions[own], values[own], label)

    def _add(self, predictions: F32, values: F32, label: LabelKind) -> None:
        p, y = predictions.astype(np.float64), values.astype(np.float64)
        finite: Bool = np.isfinite(p + y)
        if not finite.all():
            self.not_finite += len(finite) - int(np.count_nonzero(finite))
            p, y = p[finite], y[finite]
        error = p - y
        self.n += len(p)
        self.predicted += float(p.sum())
        self.labelled += float(y.sum())
        self.squares += float((error * error).sum())
        self.absolute += float(np.abs(error).sum())
        if label.number or not len(p):
            return
        np.clip(p, PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR, out=p)
        of_true, of_false = np.log(p), np.log(1 - p)
        logits = of_true - of_false
        self.loss -= float((y * logits + of_false).sum())
        bins = bins_of_logits(logits)
        if not self.counts.size:
            self.counts = np.zeros((2, BINS))
        self.counts[0] += np.bincount(bins, minlength=BINS)
        self.counts[1] += np.bincount(bins, y, minlength=BINS)

    def histogram(self) -> tuple[I64, F64, F64]:
        """Bins that hold a sample, rising, and the true and the false samples of each, (H,)."""
        if not self.counts.size:
            return np.empty(0, np.int64), np.empty(0), np.empty(0)
        every, positive = self.counts
        used = np.flatnonzero(every)
        return used, positive[used], every[used] - positive[used]

    @classmethod
    def joined(cls, parts: Sequence[_Sums]) -> _Sums:
        """The sums of all parts."""
        whole = cls()
        for part in parts:
            for name in ("n", "not_finite", "predicted", "labelled", "loss", "squares", "absolute"):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
            if part.counts.size:
                whole.counts = whole.counts + part.counts if whole.counts.size else part.counts
        return whole


def _measured(sums: Sequence[_Sums], label: LabelKind) -> list[dict[str, float]]:
    """The measures of each cell of one label."""

    def column(name: str) -> F64:
        return np.array([getattr(part, name) for part in sums], np.float64)

    bins, positive, negative = zip(*(part.histogram() for part in sums), strict=True)
    cells = Cells(
        n=column("n"),
        weight=column("n"),
        predicted=column("predicted"),
        labelled=column("labelled"),
        loss=column("loss"),
        squares=column("squares"),
        absolute=column("absolute"),
        not_finite=column("not_finite"),
        weight_squares=column("n"),
        cell=np.repeat(np.arange(len(sums)), [len(part) for part in bins]),
        bins=np.concatenate(bins),
        positive=np.concatenate(positive),
        negative=np.concatenate(negative),
    )
    kind = "number" if label.number else "logloss"
    computed = {m.name: m.compute(cells).tolist() for m in MEASURES if m.of in ("any", kind)}
    return [{name: values[i] for name, values in computed.items()} for i in range(len(sums))]


class _Column:
    """A number a sample in an unnamed file that is mapped into memory and grows; what was not written is
    0."""

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
        """The numbers of the samples [first, stop)."""
        self._grow(stop)
        assert self._map is not None
        return np.array(self._map[first:stop])

    def read_at(self, ids: I64) -> NDArray[Any]:
        """(B,) the numbers of rising, distinct ids (B,)."""
        block = self.read(int(ids[0]), int(ids[-1]) + 1)
        return block if len(block) == len(ids) else block[ids - ids[0]]

    def close(self) -> None:
        self._map = None
        self._file.close()

    def _grow(self, room: int) -> None:
        held = 0 if self._map is None else len(self._map)
        if room > held:
            held = max(room, 2 * held, FIRST_ROOM)
            self._map = None
            self._file.truncate(held * self._dtype.itemsize)
            self._map = np.memmap(self._file, self._dtype, "r+", shape=(held,))
