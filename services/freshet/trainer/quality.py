"""Progressive measures of the training model, of the served predictions, and of a baseline.

Letters: B samples, L labels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freshet.batches.stream import TrainBatch
from freshet.clock import Clock
from freshet.config.spec.model import Spec
from freshet.evaluation import SOURCES, Figures, LabelKind, Measures, Popularity
from freshet.evaluation.descriptors import Typical
from freshet.evaluation.popularity import NEVER_AHEAD, Tally
from freshet.model.inputs import Labels
from freshet.types import F32, I64, U64, Bool

TRAINING, SERVED, RANDOM, POPULARITY = (source.name for source in SOURCES)
RATES = "rates"
TOGETHER_ROWS = 4_096
"""Rows to count in one call: a batch of 256 costs 160 µs, nearly all of it per call."""
MOST_WAITING = 65_536
"""The most rows that wait to be counted: 200 ms of training at full speed."""
MOST_OPEN = 60
"""The most open windows; each holds a histogram for every value of every segment."""
SETTLING_MS = 1_000
"""An upper bound of the time from the decision of a label until its samples are trained on."""
ACTION_MS = 1
"""The least time between an impression and an action on it."""


@dataclass(frozen=True, slots=True)
class Now:
    """Present figures without segments, as {source: {label: {measure: value}}}."""

    summary: dict[str, Any]  # since the beginning
    lately: dict[str, Any]  # of the last closed windows
    open: list[dict[str, Any]]  # records of the open windows


class PredictionRecorder(Protocol):
    """Receives every sample with its predictions; a backtest stores them."""

    def add_samples(self, ids: I64, values: F32, times_ms: I64) -> None:
        """Add samples: (B,) ids, values of their labels, and event times."""

    def add_predictions(self, learner: str, ids: I64, predictions: F32) -> None:
        """Add (B,) predictions of the model (`training`) or the baseline (`popularity`)."""


class Quality:
    """Measures of every sample, by the source of its prediction (`freshet.evaluation.SOURCES`).

    Lanes call `add` and `state` in step with the dense weights; the other methods are thread-safe.

    With several ranks (`share`) a rank accumulates its own samples separately. `increment` returns them, and
    `merge` adds the increments of all ranks, so that every rank has the figures of all.
    """

    def __init__(self, spec: Spec, clock: Clock | None = None) -> None:
        self.recorder: PredictionRecorder | None = None
        """Called under the lock, by one thread at a time."""
        labels = [LabelKind(label.name, label.loss != "logloss") for label in spec.labels]
        window_ms = spec.train.measure_window_ms
        self._of = {
            name: Measures(
                labels,
                () if name == POPULARITY else spec.train.segments,
                window_ms=window_ms,
                lateness_ms=lateness_ms(spec),
            )
            for name in (TRAINING, SERVED, RANDOM, POPULARITY)
        }
        self._waits_ms = np.array([label.window_ms + spec.join.grace_ms for label in spec.labels])
        self._early = np.array([spec.join.is_early(label) for label in spec.labels])
        soonest_ms = 0 if self._early.any() else int(self._waits_ms.min())
        self._clock, self._ahead_ms = clock, spec.join.max_ahead_ms - soonest_ms  # None: a backtest
        self._popularity = Popularity(len(labels), int(self._waits_ms.max()))
        explore = spec.serve.explore
        self._explores = explore.policy != "none" and explore.share > 0
        self._names = [label.name for label in spec.labels]
        self._typical = {label.index: Typical() for label in spec.labels if label.loss != "logloss"}
        self._own: dict[str, Measures] | None = None  # of this rank, not yet sent; None: there are no others
        self._tallies: list[Tally] = []  # of this rank, not yet sent
        self._lock = threading.Lock()  # guards all but `_waiting`; acquired before `_adding`
        self._adding = threading.Lock()  # guards `_waiting` and `_waiting_rows`
        self._waiting: list[tuple[TrainBatch, F32]] = []
        self._waiting_rows = 0

    def add(self, batch: TrainBatch, predictions: F32) -> int:
        """Queue a batch with the model's (B, L) predictions from before it was learned.

        `count` or the next read of a figure counts the queued batches together; from MOST_WAITING rows on
        this call does. Returns the rows that were queued.
        """
        with self._adding:
            self._waiting.append((batch, predictions))
            self._waiting_rows += len(batch)
            waiting = self._waiting_rows
        if waiting >= MOST_WAITING:
            self.count()
        return waiting

    def count(self) -> None:
        """Count the queued batches."""
        with self._lock:
            self._count()

    def share(self, shared: bool) -> None:
        """Set whether this is one of several ranks; samples accumulated separately are kept."""
        with self._lock:
            self._count()
            if shared:
                self._own = self._own or self._beside_all()
            elif self._own is not None:
                own, self._own = self._own, None
                for name, measures in own.items():
                    self._of[name].merge(measures, self._latest_ms())
                self._take_tallies(self._tallies)
                self._tallies = []

    def increment(self) -> dict[str, NDArray[Any]]:
        """Return the measures of this rank since the last call as arrays; empty if there are none."""
        with self._lock:
            self._count()
            if self._own is None or not (self._tallies or any(m.windows() for m in self._own.values())):
                return {}
            arrays = {
                f"{name}/{key}": array for name, m in self._own.items() for key, array in m.state().items()
            }
            if self._tallies:
                arrays |= _arrays(Tally.join(self._tallies))
            self._own, self._tallies = self._beside_all(), []
            return arrays

    def merge(self, increments: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        """Add the increments of all ranks, in rank order: every rank gets the same sums.

        The arrays have the shapes and dtypes that `increment` returned.
        """
        with self._lock:
            for arrays in increments:
                for name, measures in self._of.items():
                    mine = {k[len(name) + 1 :]: v for k, v in arrays.items() if k.startswith(f"{name}/")}
                    if mine:
                        added = measures.beside()
                        added.load_state(mine)
                        measures.merge(added, self._latest_ms())
                if f"{RATES}/at" in arrays:
                    self._take_tallies([_tally(arrays)])

    def finished_windows(self) -> list[dict[str, Any]]:
        """Return the windows closed since the last call, as records of `<model>.measures`."""
        with self._lock:
            self._count()
            closed = {name: measures.finished() for name, measures in self._of.items()}
        return [_record(name, figures) for name, windows in closed.items() for figures in windows]

    @property
    def outliers(self) -> int:
        """Values of labels that this process excluded as outliers."""
        return sum(typical.outliers for typical in self._typical.values())

    def summary(self) -> dict[str, Any]:
        """Return {source: {label: {measure: value}}} since the beginning, without segments."""
        return self.now().summary

    def now(self) -> Now:
        """Return the present figures."""
        with self._lock:
            self._count()
            views = {name: measures.view() for name, measures in self._of.items()}
        overall = {name: view.overall() for name, view in views.items()}
        return Now(
            {name: _by_label(measures.total()) for name, measures in overall.items()},
            {name: _by_label(measures.lately()) for name, measures in overall.items()},
            [_record(name, figures) for name, measures in overall.items() for figures in measures.windows()],
        )

    def segments(self) -> list[dict[str, Any]]:
        """Return the figures of every segment since the beginning."""
        with self._lock:
            self._count()
            return [_plain(figures) for figures in self._of[TRAINING].total() if figures.segment is not None]

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all sums as the arrays of a version."""
        with self._lock:
            self._count()
            return {
                f"{name}/{key}": array
                for name, part in self._parts().items()
                for key, array in part.state().items()
            }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load the sums of a version, with the shapes and dtypes that `state` returned."""
        for name, part in self._parts().items():
            part.load_state({k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(f"{name}/")})

    def _parts(self) -> dict[str, Measures | Popularity]:
        return {**self._of, RATES: self._popularity}

    def _beside(self, part: _Seen, which: Bool) -> None:
        """Score the baseline on the samples of the mask `which` (B,); it learns from all samples."""
        labels, times_ms, items = part.labels, part.times_ms, part.items
        assert items is not None
        rate = np.full(len(times_ms), np.nan, np.float32)
        at_once = self._early[labels.index] & (labels.value > 0)
        known_ms = times_ms + np.where(at_once, ACTION_MS, self._waits_ms[labels.index])
        counted = np.isfinite(labels.value)
        wanted = which if self.recorder is None else np.ones_like(which)
        first = 0
        for last in part.ends:  # the baseline predicts each batch before it learns from it
            at = first + np.flatnonzero(wanted[first:last])
            rate[at] = self._popularity.predict(items[at], labels.index[at], times_ms[at])
            known = first + np.flatnonzero(counted[first:last])
            first = last
            if not len(known):
                continue
            tally = self._popularity.tally(
                items[known], labels.index[known], labels.value[known], labels.weight[known], known_ms[known]
            )
            if self._own is None:
                self._take_tallies([tally])
            else:
                self._tallies.append(tally)
        if self.recorder is not None:
            self.recorder.add_predictions(POPULARITY, part.sample_ids, rate)
        self._add(POPULARITY, [part], [(rate, which)])

    def _beside_all(self) -> dict[str, Measures]:
        return {name: measures.beside() for name, measures in self._of.items()}

    def _take_tallies(self, tallies: Sequence[Tally]) -> None:
        for tally in tallies:
            self._popularity.take(tally, self._latest_ms() + int(self._waits_ms.max()))

    def _latest_ms(self) -> int:
        """Return the latest time of an impression with a label that can be decided by now."""
        return NEVER_AHEAD if self._clock is None else self._clock.now_ms() + self._ahead_ms

    def _count(self) -> None:
        """Count the queued batches. The caller holds the lock."""
        with self._adding:
            waiting, self._waiting, self._waiting_rows = self._waiting, [], 0
        if not waiting:
            return
        seen = [self._usual(_Seen.of(batch, predictions, self._names)) for batch, predictions in waiting]
        self._add(TRAINING, seen, [(part.predictions, None) for part in seen])
        if self.recorder is not None:
            for part in seen:
                labels, rows = part.labels, np.arange(len(part.sample_ids))
                self.recorder.add_samples(part.sample_ids, labels.value, part.times_ms)
                self.recorder.add_predictions(TRAINING, part.sample_ids, part.predictions[rows, labels.index])
        self._add(SERVED, seen, [(part.served, part.known) for part in seen])
        self._add(RANDOM, seen, [(part.served, part.random) for part in seen])
        for part in seen:
            if part.items is not None:
                self._beside(part, part.random if self._explores else np.ones_like(part.random))

    def _usual(self, part: _Seen) -> _Seen:
        """Replace outliers of each label by NaN, which measures exclude.

        One outlier would dominate the sums since the beginning for ever.
        """
        value = part.labels.value
        for index, typical in self._typical.items():
            mine = np.flatnonzero(part.labels.index == index)
            if len(mine):
                own = value[mine].astype(np.float64)
                usual = typical.without_outliers(own)
                if usual is not own:
                    value = value.copy()
                    value[mine] = usual
        return part if value is part.labels.value else replace(part, labels=replace(part.labels, value=value))

    def _add(self, name: str, seen: Sequence[_Seen], predicted: Sequence[tuple[F32, Bool | None]]) -> None:
        """Add the samples of each batch that its mask (B,) selects; None selects all."""
        kept = [
            (part, prediction, which)
            for part, (prediction, which) in zip(seen, predicted, strict=True)
            if which is None or which.any()
        ]
        if not kept:
            return

        def joined(pick: Callable[[_Seen], NDArray[Any]]) -> NDArray[Any]:
            return np.concatenate([_of(pick(part), which) for part, _, which in kept])

        (self._own or self._of)[name].add(
            np.concatenate([_of(prediction, which) for _, prediction, which in kept]),
            joined(lambda part: part.labels.index),
            joined(lambda part: part.labels.value),
            joined(lambda part: part.labels.weight),
            joined(lambda part: part.times_ms),
            {segment: joined(_segment(segment)) for segment in kept[0][0].segments},
            self._latest_ms(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The columns of a batch that measures need."""

    sample_ids: I64  # (B,)
    predictions: F32  # (B, L)
    labels: Labels
    times_ms: I64  # (B,)
    segments: Mapping[str, U64]
    served: F32  # (B,) served prediction for each sample's own label; NaN: none was logged
    known: Bool  # (B,) whether one was logged
    random: Bool  # (B,) whether one was logged and its order was random, if the log says so
    items: U64 | None
    ends: Sequence[int]  # ends of the batches that it consists of

    @classmethod
    def of(cls, batch: TrainBatch, predictions: F32, names: Sequence[str]) -> _Seen:
        labels = batch.inputs.labels
        assert labels is not None, "a batch that is trained on has labels"
        served = _own(batch, names, labels)
        known = ~np.isnan(served)
        random = known if batch.explored is None else known & batch.explored
        return cls(
            batch.sample_ids,
            predictions,
            labels,
            batch.event_times_ms,
            batch.segments,
            served,
            known,
            random,
            batch.items,
            [len(batch)] if batch.ends is None else batch.ends.tolist(),
        )


def _arrays(tally: Tally) -> dict[str, NDArray[Any]]:
    return {
        f"{RATES}/at": tally.at,
        f"{RATES}/sums": tally.sums,
        f"{RATES}/overall": tally.overall,
        f"{RATES}/clock": np.array([tally.clock_ms]),
    }


def _tally(arrays: Mapping[str, NDArray[Any]]) -> Tally:
    at, sums, overall, clock = (arrays[f"{RATES}/{name}"] for name in ("at", "sums", "overall", "clock"))
    return Tally(at, sums, overall, int(clock[0]))


def _segment(name: str) -> Callable[[_Seen], NDArray[Any]]:
    return lambda part: part.segments[name]


def _of(column: NDArray[Any], which: Bool | None) -> NDArray[Any]:
    """Select the samples of a mask (B,) from a column (B,) or (B, L); None selects all."""
    return column if which is None else column[which]


def lateness_ms(spec: Spec) -> int:
    """Return the event time in ms between the end of a window of measures and its closing.

    By then its last negatives are decided: they follow the window and grace of the longest label, while the
    first positives (`early`) or the shortest label advance event time. For labels that take longer than
    MOST_OPEN windows, a window contains the labels decided by then; totals contain all.
    """
    decided = [label.window_ms + spec.join.grace_ms for label in spec.labels]
    ahead = max(decided) - (0 if spec.join.emit == "early" else min(decided))
    window_ms = spec.train.measure_window_ms
    return max(window_ms, min(ahead + SETTLING_MS, MOST_OPEN * window_ms))


def _by_label(figures: Sequence[Figures]) -> dict[str, dict[str, float]]:
    return {f.label: dict(f.measures) for f in figures}


def _own(batch: TrainBatch, names: Sequence[str], labels: Labels) -> F32:
    """Return the (B,) served prediction for each sample's own label; NaN: none was logged."""
    if not batch.served:
        return np.full(len(batch), np.nan, np.float32)
    served = np.stack([batch.served[name] for name in names])
    own: F32 = served[labels.index, np.arange(len(batch))]
    return own


def _record(of: str, figures: Figures) -> dict[str, Any]:
    return {"v": 1, "kind": "window", "of": of, **_plain(figures)}


def _plain(figures: Figures) -> dict[str, Any]:
    """Build a record field by field, since a replay closes thousands of windows a second."""
    return {
        "start_ms": figures.start_ms,
        "stop_ms": figures.stop_ms,
        "label": figures.label,
        "segment": figures.segment,
        "value": figures.value,
        "measures": dict(figures.measures),
        **({} if figures.reliability is None else {"reliability": figures.reliability}),
    }
