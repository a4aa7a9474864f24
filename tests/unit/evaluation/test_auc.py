"""AUC, exact and binned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.evaluation.descriptors import auc, auc_of_histogram, bins_of, logits_of
from tests.unit.evaluation.by_sorting import coarse


def binned(p: np.ndarray, y: np.ndarray) -> float:
    bins = bins_of(p)
    size = int(bins.max()) + 1
    return auc_of_histogram(
        np.bincount(bins, y, size).astype(np.float64), np.bincount(bins, 1 - y, size).astype(np.float64)
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40))
def test_exact_auc_is_the_share_of_pairs_in_the_right_order(pairs: list[tuple[int, bool]]) -> None:
    true = [p for p, y in pairs if y]
    false = [p for p, y in pairs if not y]
    found = auc([p for p, _ in pairs], [y for _, y in pairs])
    if not true or not false:
        assert np.isnan(found)
        return
    wanted = sum((t > f) + 0.5 * (t == f) for t in true for f in false) / (len(true) * len(false))
    assert found == pytest.approx(wanted)


def test_weight_of_three_equals_three_samples() -> None:
    once = auc([0.1, 0.4, 0.3, 0.9], [0, 1, 1, 0], [1, 3, 1, 1])
    assert once == pytest.approx(auc([0.1, 0.4, 0.4, 0.4, 0.3, 0.9], [0, 1, 1, 1, 1, 0]))


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("bias", [-5.0, 0.0])
def test_error_of_binned_auc_is_below_1e_4(spread: float, bias: float) -> None:
    rng = np.random.default_rng(1)
    logit = rng.normal(size=200_000) * spread + bias
    p = (1 / (1 + np.exp(-logit))).astype(np.float32)
    y = (rng.random(len(p)) < p).astype(np.float64)
    assert abs(binned(p, y) - auc(p, y)) < 1e-4


@given(st.floats(0, 1, width=32))
def test_bins_rise_with_the_probability(p: float) -> None:
    low, high = bins_of(np.array([p, min(1.0, p + 0.01)]))
    assert 0 <= low <= high <= 40 * 512


def test_coarse_bins_of_segments_have_a_small_error() -> None:
    rng = np.random.default_rng(3)
    truth = rng.normal(-3, 1, 20_000)
    labels = rng.random(20_000) < 1 / (1 + np.exp(-truth))
    predictions = 1 / (1 + np.exp(-(truth + rng.normal(0, 0.5, 20_000))))
    bins, at = np.unique(coarse(bins_of(predictions)), return_inverse=True)
    positive = np.bincount(at, labels, len(bins)).astype(np.float64)
    negative = np.bincount(at, ~labels, len(bins)).astype(np.float64)

    assert abs(auc_of_histogram(positive, negative) - auc(predictions, labels)) < 2e-4
    assert (
        np.abs(logits_of(coarse(bins_of(predictions))) - logits_of(bins_of(predictions))).max()
        <= 1 / 64 + 1e-9
    )
