"""The comparison with Vowpal Wabbit: streams have their specs, intervals hold what they say."""

from __future__ import annotations

import numpy as np
import pytest

from bench.streams import SOURCES, SPECS
from bench.versus_vw import Difference, best, is_calibrated, main, paired, summary, verdict
from freshet.config.spec import load_spec
from freshet.evaluation import auc


@pytest.mark.parametrize("name", SOURCES)
def test_a_stream_has_a_spec_of_one_true_false_label(name: str) -> None:
    spec = load_spec(SPECS / f"{name}.toml")

    assert spec.name == name
    assert [label.loss for label in spec.labels] == ["logloss"]
    assert spec.features


def drawn(rows: int, seed: int, noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, the probabilities that they follow, and those with noise in their logits."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(size=rows)
    p = 1 / (1 + np.exp(-logit))
    noisy = 1 / (1 + np.exp(-(logit + noise * rng.normal(size=rows))))
    return (rng.random(rows) < p).astype(np.float32), p.astype(np.float32), noisy.astype(np.float32)


def test_a_clear_difference_is_beyond_its_interval() -> None:
    labels, good, bad = drawn(5_000, 0, noise=1.0)

    ranks, losses = paired(labels, good, bad, bad)

    assert ranks.value == pytest.approx(auc(good, labels) - auc(bad, labels), abs=1e-4)
    assert 0 < ranks.low < ranks.value < ranks.high
    assert losses.low < losses.value < losses.high < 0
    assert verdict(ranks, losses) == "ahead"
    assert verdict(*paired(labels, bad, good, good)) == "behind"


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    truth = paired(*(drawn(400_000, 99, noise=0.5)[i] for i in (0, 1, 2, 2)), resamples=2)[0].value

    held = 0
    for seed in range(40):
        labels, good, bad = drawn(1_000, seed, noise=0.5)
        found = paired(labels, good, bad, bad, resamples=100, seed=seed)[0]
        held += found.low <= truth <= found.high

    assert 32 <= held <= 40


def test_rows_that_are_drawn_together_widen_the_interval() -> None:
    labels, good, bad = drawn(500, 1, noise=0.5)
    many = [np.repeat(column, 20) for column in (labels, good, bad)]

    alone = paired(many[0], many[1], many[2], many[2])[0]
    together = paired(many[0], many[1], many[2], many[2], np.repeat(np.arange(500), 20))[0]

    assert together.high - together.low > 3 * (alone.high - alone.low)


def test_equal_predictions_tie() -> None:
    labels, good, _ = drawn(1_000, 2, noise=0)

    ranks, losses = paired(labels, good, good, good)

    assert (ranks, losses) == (Difference(0, 0, 0), Difference(0, 0, 0))
    assert verdict(ranks, losses) == "tie"


def test_one_bad_figure_is_behind() -> None:
    assert verdict(Difference(0.1, 0.05, 0.2), Difference(0.01, 0.001, 0.02)) == "behind"


def test_few_positives_are_calibrated_more_coarsely() -> None:
    assert is_calibrated({"calibration": 1.08}, positives=100)
    assert not is_calibrated({"calibration": 1.08}, positives=1_000)


def test_the_best_of_each_figure_is_compared_with() -> None:
    from freshet.evaluation.predictions import LearnerFigures  # noqa: PLC0415 - this test's alone

    def of(ranks: float, loss: float) -> LearnerFigures:
        return LearnerFigures({"click": {"auc": ranks, "logloss": loss}}, {}, {})

    settings = {"vw plain": of(0.6, 0.1), "vw -q ::": of(0.7, 0.2), "vw -q :: -l 1": of(0.5, 0.3)}
    learners = {"freshet": of(0.9, 0.01), "mean": of(0.9, 0.01), **settings}

    assert best(learners, "click") == ("vw -q ::", "vw plain")
    assert best(learners | {"vw plain, centred": of(0.8, 0.05)}, "click") == ("vw plain, centred",) * 2


def test_the_summary_counts_each_delay() -> None:
    found = {
        "a": {"64": {"verdict": "ahead", "calibrated": True}, "16": {"verdict": "tie", "calibrated": True}},
        "b": {"64": {"verdict": "behind", "calibrated": False}},
    }

    assert summary(found) == {
        "64": {"ahead": 1, "tie": 0, "behind": 1, "calibrated": 1},
        "16": {"ahead": 0, "tie": 1, "behind": 0, "calibrated": 1},
    }


@pytest.mark.parametrize("words", [["nowhere"], ["online-retail"]])
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)

    assert "no stream" in (told := capsys.readouterr().err) or "--retail" in told
