"""Progressive quality: of the training model before each update, of what was predicted at serving, and of a
baseline."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.measures import SOURCES, Figures, LabelKind, Measures, Popularity
from freshet.model.inputs import Labels
from freshet.seams.batches import TrainBatch
from freshet.spec.model import Spec
from freshet.types import F32, U64, Bool

__all__ = ["Quality", "lateness_ms"]

TRAINING, SERVED, RANDOM, POPULARITY = (source.name for source in SOURCES)
RATES = "rates"
MOST_OPEN = 60
"""Windows that are held open at once; each holds a histogram for every value of every segment."""
SETTLING_MS = 1_000
"""From the moment in which a label is decided until its samples are trained on, with time to spare."""
ACTION_MS = 1
"""The least time from an item's being served to what is done with it."""
ADDED_LATER = (RANDOM, POPULARITY, RATES)
"""What versions written before these were measured do not hold: they count from then on."""


@dataclass(frozen=True, slots=True)
class Now:
    """Figures of the moment, without segments: {of: {label: {measure: value}}}."""

    summary: dict[str, Any]  # since the beginning
    lately: dict[str, Any]  # over the last windows that have closed
    open: list[dict[str, Any]]  # records of the windows that have not


class Quality:
    """Measures of every sample, by where its prediction comes from: `freshet.measures.SOURCES`.

    `add`, `finished_windows`, `summary` and `state` are the trainer's; `now` may be called from any thread.
    """

    def __init__(self, spec: Spec) -> None:
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
        self._early = np.array([spec.join.emit == "early" and label.value is None for label in spec.labels])
        self._popularity = Popularity(len(labels), int(self._waits_ms.max()))
        explore = spec.serve.explore
        self._explores = explore.policy != "none" and explore.share > 0
        self._names = [label.name for label in spec.labels]
        self._lock = threading.Lock()  # guards `_of` against `now`

    def add(self, batch: TrainBatch, predictions: F32) -> None:
        """Take note of a batch with what the model predicted before it learned from it, (B, L)."""
        labels = batch.inputs.labels
        assert labels is not None, "a batch that is trained on has labels"
        served = _own(batch, self._names, labels)
        known = ~np.isnan(served)
        random = known if batch.explored is None else known & batch.explored
        with self._lock:
            self._add(TRAINING, batch, labels, predictions, None)
            self._add(SERVED, batch, labels, served, known)
            self._add(RANDOM, batch, labels, served, random)
            if batch.items is not None:
                self._beside(batch.items, batch, labels, random if self._explores else np.ones_like(random))

    def finished_windows(self) -> list[dict[str, Any]]:
        """Windows that have closed since the last call, as records of `<model>.measures`."""
        with self._lock:
            closed = {name: measures.finished() for name, measures in self._of.items()}
        return [_record(name, figures) for name, windows in closed.items() for figures in windows]

    def summary(self) -> dict[str, Any]:
        """{of: {label: {measure: value}}} since the beginning, without segments."""
        return self.now().summary

    def now(self) -> Now:
        """How it is, for any thread."""
        with self._lock:
            views = {name: measures.view() for name, measures in self._of.items()}
        overall = {name: view.overall() for name, view in views.items()}
        return Now(
            {name: _by_label(measures.total()) for name, measures in overall.items()},
            {name: _by_label(measures.lately()) for name, measures in overall.items()},
            [_record(name, figures) for name, measures in overall.items() for figures in measures.windows()],
        )

    def segments(self) -> list[dict[str, Any]]:
        """Figures since the beginning of every segment's values."""
        return [_plain(figures) for figures in self._of[TRAINING].total() if figures.segment is not None]

    def state(self) -> dict[str, NDArray[Any]]:
        """All sums, as arrays to be saved in a version."""
        with self._lock:
            return {
                f"{name}/{key}": array
                for name, part in self._parts().items()
                for key, array in part.state().items()
            }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a version's sums."""
        for name, part in self._parts().items():
            mine = {k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(f"{name}/")}
            if mine or name not in ADDED_LATER:
                part.load_state(mine)

    def _parts(self) -> dict[str, Measures | Popularity]:
        return {**self._of, RATES: self._popularity}

    def _beside(self, items: U64, batch: TrainBatch, labels: Labels, which: Bool) -> None:
        """Score popularity on the samples that `which` (B,) keeps; it learns from all of them."""
        times_ms = batch.event_times_ms
        rate = np.full(len(batch), np.nan, np.float32)
        rate[which] = self._popularity.predict(items[which], labels.index[which], times_ms[which])
        self._add(POPULARITY, batch, labels, rate, which)
        at_once = self._early[labels.index] & (labels.value > 0)
        known_ms = times_ms + np.where(at_once, ACTION_MS, self._waits_ms[labels.index])
        self._popularity.add(items, labels.index, labels.value, labels.weight, known_ms)

    def _add(
        self, name: str, batch: TrainBatch, labels: Labels, predictions: F32, which: Bool | None
    ) -> None:
        """Add the samples that `which` (B,) keeps; None: all of them."""
        if which is not None and not which.any():
            return
        kept = slice(None) if which is None or which.all() else which
        self._of[name].add(
            predictions[kept],
            labels.index[kept],
            labels.value[kept],
            labels.weight[kept],
            batch.event_times_ms[kept],
            {segment: values[kept] for segment, values in batch.segments.items()},
        )


def lateness_ms(spec: Spec) -> int:
    """How far event time passes the end of a window of measures before the window closes.

    Until then its last negatives are decided: they come when the longest label's window and grace are over,
    while event time goes on with the first positives (`early`) or with the shortest label. Of labels that
    take longer than `MOST_OPEN` windows a window tells what was decided by then; totals have all.
    """
    decided = [label.window_ms + spec.join.grace_ms for label in spec.labels]
    ahead = max(decided) - (0 if spec.join.emit == "early" else min(decided))
    window_ms = spec.train.measure_window_ms
    return max(window_ms, min(ahead + SETTLING_MS, MOST_OPEN * window_ms))


def _by_label(figures: Sequence[Figures]) -> dict[str, dict[str, float]]:
    return {f.label: dict(f.measures) for f in figures}


def _own(batch: TrainBatch, names: Sequence[str], labels: Labels) -> F32:
    """(B,) what was served for each sample's own label, NaN where nothing was logged."""
    if not batch.served:
        return np.full(len(batch), np.nan, np.float32)
    served = np.stack([batch.served[name] for name in names])
    own: F32 = served[labels.index, np.arange(len(batch))]
    return own


def _record(of: str, figures: Figures) -> dict[str, Any]:
    return {"v": 1, "kind": "window", "of": of, **_plain(figures)}


def _plain(figures: Figures) -> dict[str, Any]:
    """As a record; by hand, since a replay closes thousands of windows a second."""
    return {
        "start_ms": figures.start_ms,
        "stop_ms": figures.stop_ms,
        "label": figures.label,
        "segment": figures.segment,
        "value": figures.value,
        "measures": dict(figures.measures),
        **({} if figures.reliability is None else {"reliability": figures.reliability}),
    }
