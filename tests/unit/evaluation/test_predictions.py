"""Predictions by learner and sample: figures over all samples, after the first fifth, and by windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.evaluation import LabelKind, Measures, auc
from freshet.evaluation.predictions import LearnerPredictions
from tests.fixtures.effort import examples

CLICK, BUY, WATCH = LabelKind("click", False), LabelKind("buy", False), LabelKind("watch", True)


def stream(samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw predictions, labels that follow them, and times."""
    rng = np.random.default_rng(seed)
    p = rng.random(samples).astype(np.float32)
    return p, (rng.random(samples) < p).astype(np.float32), np.arange(samples) * 1_000


def logloss(p: np.ndarray, y: np.ndarray) -> float:
    q = np.clip(p.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-(y * np.log(q) + (1 - y) * np.log(1 - q)).mean())


@settings(max_examples=examples(25), deadline=None)
@given(
    samples=st.integers(1, 4_000),
    gaps=st.floats(0, 0.9),
    pieces=st.integers(1, 7),
    seed=st.integers(0, 999),
    labels=st.integers(1, 3),
)
def test_figures_are_those_of_the_samples(
    samples: int, gaps: float, pieces: int, seed: int, labels: int
) -> None:
    p, y, times = stream(samples, seed)
    rng = np.random.default_rng(seed)
    ids = np.flatnonzero(rng.random(samples * 4) >= gaps)[:samples]
    p, y, times = p[: len(ids)], y[: len(ids)], times[: len(ids)]
    kinds = [LabelKind(f"label{i}", False) for i in range(labels)]

    with LearnerPredictions(kinds) as scored:
        for part in np.array_split(rng.permutation(len(ids)), pieces):  # lanes finish in any order
            scored.add_samples(ids[part], y[part], times[part])
            scored.add_predictions("model", ids[part], p[part])
        figures = scored.figures("model")

    late = np.arange(len(ids)) >= len(ids) // 5
    for i, kind in enumerate(kinds):
        mine = ids % labels == i
        if not mine.any():
            assert kind.name not in figures.all
            continue
        for found, which in ((figures.all, mine), (figures.after_first, mine & late)):
            assert found[kind.name]["n"] == which.sum()
            if which.any():
                assert found[kind.name]["logloss"] == pytest.approx(logloss(p[which], y[which]), abs=1e-6)
                exact = auc(p[which], y[which])  # the histogram counts samples of one bin as tied
                pairs = max(1, int((y[which] > 0).sum() * (y[which] <= 0).sum()))
                few = max(0.01, 1 / pairs)  # two of these
                assert found[kind.name]["auc"] == pytest.approx(exact, abs=few, nan_ok=True)
        assert sum(window.measures["n"] for window in figures.curve[kind.name]) == mine.sum()


def test_figures_are_those_of_the_live_measures() -> None:
    p, y, times = stream(50_000)
    measures = Measures([CLICK])
    measures.add(p, np.zeros(len(p), np.uint8), y, np.ones(len(p), np.float32), times)

    with LearnerPredictions([CLICK]) as scored:
        scored.add_samples(np.arange(len(p)), y, times)
        scored.add_predictions("model", np.arange(len(p)), p)
        figures = scored.figures("model")

    assert figures.all["click"] == pytest.approx(dict(measures.total()[0].measures), rel=1e-6)


def test_windows_follow_each_other_and_hold_all_samples() -> None:
    p, y, times = stream(30_007)

    with LearnerPredictions([CLICK]) as scored:
        scored.add_samples(np.arange(len(p)), y, times)
        scored.add_predictions("model", np.arange(len(p)), p)
        curve = scored.figures("model").curve["click"]

    assert [window.first for window in curve] == [0, *(window.stop for window in curve[:-1])]
    assert curve[-1].stop == len(p)
    assert 30_007 // 5 in {window.stop for window in curve}
    assert [(w.start_ms, w.stop_ms) for w in curve] == [
        (w.first * 1_000, (w.stop - 1) * 1_000) for w in curve
    ]


@pytest.mark.parametrize("delay_rows", [1, 7, 64, 100_000])
def test_mean_is_over_the_batches_before_its_own(delay_rows: int) -> None:
    _, y, times = stream(3_001)
    label = np.arange(len(y)) % 2

    with LearnerPredictions([CLICK, BUY]) as scored:
        scored.add_samples(np.arange(len(y)), y, times)
        scored.add_means("mean", delay_rows)
        means, _, found = scored.arrays("mean")

    assert (found == label).all()
    for i in (0, 1, 64, 65, 1_000, 3_000):
        before = y[: i // delay_rows * delay_rows][label[: i // delay_rows * delay_rows] == label[i]]
        assert means[i] == pytest.approx((before.sum() + 0.5) / (len(before) + 1), rel=1e-6)


def test_numbers_have_squared_errors_and_no_auc() -> None:
    rng = np.random.default_rng(1)
    value = (rng.normal(size=5_000) * 5 + 20).astype(np.float32)
    value[7] = np.nan

    with LearnerPredictions([WATCH]) as scored:
        scored.add_samples(np.arange(len(value)), value, np.arange(len(value)))
        scored.add_predictions("model", np.arange(len(value)), np.full(len(value), 20.0, np.float32))
        scored.add_means("mean", 10)
        figures, means = scored.figures("model").all["watch"], scored.figures("mean").all["watch"]

    good = np.isfinite(value)
    assert figures["mse"] == pytest.approx(float(((value[good] - 20) ** 2).mean()), rel=1e-5)
    assert (figures["n"], figures["not_finite"]) == (4_999, 0)  # the label was not finite
    assert figures["mse"] < means["mse"] < 1.05 * figures["mse"]  # ten samples were predicted as 0
    assert "auc" not in figures


def test_pass_without_samples_has_empty_figures() -> None:
    with LearnerPredictions([CLICK]) as scored:
        scored.add_means("mean", 10)

        assert len(scored) == 0
        assert scored.figures("mean").all["click"]["n"] == 0
