"""Figures of many cells at once equal those of each cell alone."""

from __future__ import annotations

import numpy as np
import pytest

from freshet.evaluation import LabelKind, Measures
from freshet.evaluation.descriptors import aucs_of_histograms


def samples(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    return {
        "predictions": rng.beta(0.5, 4.0, size).astype(np.float32),
        "label": rng.integers(0, 2, size).astype(np.uint8),
        "value": (rng.uniform(size=size) < 0.3).astype(np.float32),
        "weight": rng.lognormal(0.0, 3.0, size).astype(np.float32),
    }


def measure(parts: list[tuple[dict[str, np.ndarray], int]]) -> Measures:
    measures = Measures([LabelKind("click", False), LabelKind("price", True)], ["shop"], window_ms=1_000)
    for part, window in parts:
        times = np.full(len(part["label"]), window * 1_000, np.int64)
        segments = {"shop": part["label"].astype(np.uint64) + 1}
        measures.add(
            part["predictions"], part["label"], part["value"], part["weight"], times, segments=segments
        )
    return measures


def test_figures_of_a_window_do_not_depend_on_other_windows() -> None:
    rng = np.random.default_rng(7)
    parts = [(samples(rng, size), window) for window, size in enumerate([1, 300, 2, 40_000, 5, 17])]
    parts[2][0]["weight"][:] = 1e12  # must not affect other windows
    together = measure(parts).windows()

    alone = [figures for part in parts for figures in measure([part]).windows()]

    assert len(together) == len(alone) == 20
    for one, other in zip(together, alone, strict=True):
        assert (one.start_ms, one.label, one.segment, one.value) == (
            other.start_ms,
            other.label,
            other.segment,
            other.value,
        )
        assert one.measures == pytest.approx(other.measures, rel=1e-12, nan_ok=True)
        assert (one.reliability is None) == (other.reliability is None)
        for point, alike in zip(one.reliability or (), other.reliability or (), strict=True):
            assert point == pytest.approx(alike, rel=1e-12)


def test_a_histogram_without_entries_or_of_one_kind_has_no_auc() -> None:
    cell = np.array([1, 1, 3], np.int64)
    positive, negative = np.array([1.0, 0.0, 2.0]), np.array([0.0, 1.0, 0.0])

    found = aucs_of_histograms(cell, positive, negative, 5)

    np.testing.assert_array_equal(found, [np.nan, 0.0, np.nan, np.nan, np.nan])
