"""Progressive quality: of the training model before each update, and of what was predicted at serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.measures import Figures, LabelKind, Measures
from freshet.seams.batches import TrainBatch
from freshet.spec.model import Spec
from freshet.types import F32

__all__ = ["Quality"]

SERVED = "served"
TRAINING = "training"


class Quality:
    """Measures of every sample before it is trained on, and of what was logged when it was served.

    The headline is what was served, where the served events hold it: it is what users saw. Used by one
    thread.
    """

    def __init__(self, spec: Spec) -> None:
        labels = [LabelKind(label.name, label.loss != "logloss") for label in spec.labels]
        segments = spec.train.segments
        window_ms = spec.train.measure_window_ms
        self._of = {
            TRAINING: Measures(labels, segments, window_ms=window_ms),
            SERVED: Measures(labels, segments, window_ms=window_ms),
        }
        self._names = [label.name for label in spec.labels]

    def add(self, batch: TrainBatch, predictions: F32) -> None:
        """Take note of a batch with what the model predicted before it learned from it, (B, L)."""
        self._add(TRAINING, batch, predictions, np.ones(len(batch), np.bool_))
        if not batch.served:
            return
        served = np.column_stack([batch.served[name] for name in self._names]).astype(np.float32)
        labels = batch.inputs.labels
        assert labels is not None, "a batch that is trained on has labels"
        known = ~np.isnan(served[np.arange(len(batch)), labels.index])
        if known.any():
            self._add(SERVED, batch, served, known)

    def finished_windows(self) -> list[dict[str, Any]]:
        """Windows that have closed since the last call, as records of `<model>.measures`."""
        return [
            {"v": 1, "kind": "window", "of": name, **_plain(figures)}
            for name, measures in self._of.items()
            for figures in measures.finished()
        ]

    def summary(self) -> dict[str, Any]:
        """{training or served: {label: {measure: value}}} since the beginning, without segments."""
        return {
            name: {f.label: dict(f.measures) for f in measures.total() if f.segment is None}
            for name, measures in self._of.items()
        }

    def segments(self) -> list[dict[str, Any]]:
        """Figures since the beginning of every segment's values."""
        return [_plain(figures) for figures in self._of[TRAINING].total() if figures.segment is not None]

    def state(self) -> dict[str, NDArray[Any]]:
        """All sums, as arrays to be saved in a version."""
        return {f"{name}/{key}": array for name, m in self._of.items() for key, array in m.state().items()}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a version's sums."""
        for name, measures in self._of.items():
            prefix = f"{name}/"
            measures.load_state({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})

    def _add(self, name: str, batch: TrainBatch, predictions: F32, which: NDArray[np.bool_]) -> None:
        labels = batch.inputs.labels
        assert labels is not None, "a batch that is trained on has labels"
        self._of[name].add(
            predictions[which],
            labels.index[which],
            labels.value[which],
            labels.weight[which],
            batch.event_times_ms[which],
            {segment: values[which] for segment, values in batch.segments.items()},
        )


def _plain(figures: Figures) -> dict[str, Any]:
    """As a record; by hand, since a replay closes thousands of windows a second."""
    return {
        "start_ms": figures.start_ms,
        "stop_ms": figures.stop_ms,
        "label": figures.label,
        "segment": figures.segment,
        "value": figures.value,
        "measures": dict(figures.measures),
    }
