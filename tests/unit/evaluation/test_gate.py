"""Verdicts of the gate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from freshet.evaluation.gate import VersionPredictions, judge
from tests.fixtures.specs import make_spec

SPEC = make_spec()
FEW = replace(SPEC, serve=replace(SPEC.serve, gate=replace(SPEC.serve.gate, floor=0)))


def scored(
    n: int = 2000, *, factor: float = 1.0, noise: float = 0.0, rate: float = 0.3, seed: int = 0
) -> VersionPredictions:
    """Return predictions that are right but for a factor and noise; labels depend on the seed only."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(size=n) + np.log(rate / (1 - rate))
    y = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    p = np.clip(factor / (1 + np.exp(-logit - noise * rng.normal(size=n))), 0, 1)
    return VersionPredictions(p[:, None].astype(np.float32), np.zeros(n, np.uint8), y, np.ones(n, np.float32))


def test_candidate_equal_to_stable_is_promoted_with_figures() -> None:
    verdict = judge(SPEC, scored(), scored())
    assert verdict.promote
    assert verdict.reason.startswith("y0: normalised entropy 0.")
    assert verdict.reason.endswith("on 2,000 samples")


def test_a_prediction_that_is_not_finite_holds_a_version() -> None:
    candidate = scored()
    candidate.predictions[7] = np.nan
    verdict = judge(SPEC, candidate, None)
    assert not verdict.promote
    assert verdict.reason == "not finite: 1 of 2000 predictions are NaN or infinite"


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_calibration_outside_the_bounds_holds_a_version(factor: float) -> None:
    verdict = judge(SPEC, scored(factor=factor), scored())
    assert not verdict.promote
    assert "outside 0.9 to 1.1" in verdict.reason


def test_better_calibration_than_stable_is_promoted() -> None:
    assert judge(SPEC, scored(factor=1.3), scored(factor=1.5)).promote


def test_calibration_on_few_true_samples_is_not_trusted() -> None:
    assert judge(SPEC, scored(200, factor=1.25, rate=0.03), None).promote


def test_normalised_entropy_above_the_limit_holds_a_version() -> None:
    verdict = judge(SPEC, scored(noise=0.5), scored())
    assert not verdict.promote
    assert "worse than stable's 0." in verdict.reason
    assert "(allowed 1.0%)" in verdict.reason


def test_the_better_version_of_a_rare_label_is_promoted() -> None:
    """With one bound of losses for both classes, nearly all true samples would count as false ones do."""
    good = [scored(50_000, rate=0.003, seed=seed) for seed in range(3)]
    noisy = [scored(50_000, rate=0.003, noise=1.0, factor=0.65, seed=seed) for seed in range(3)]
    for one, other in zip(good, noisy, strict=True):
        assert 0.9 < float(other.predictions.sum() / one.predictions.sum()) < 1.1
        verdict = judge(SPEC, other, one)
        assert not verdict.promote, verdict.reason
        assert "worse than stable's" in verdict.reason
        assert judge(SPEC, one, other).promote


def test_the_allowed_difference_comes_from_the_spec() -> None:
    gate = replace(SPEC.serve.gate, ne_worse=10.0, calibration=(0.0, 10.0))
    spec = replace(SPEC, serve=replace(SPEC.serve, gate=gate))
    assert judge(spec, scored(noise=0.5), scored()).promote


def test_rare_label_is_judged_by_its_own_samples() -> None:
    spec = make_spec(losses=("logloss", "logloss"))
    rare = (np.arange(2000) < 60).astype(np.uint8)

    def both(seed: int, noise: float) -> VersionPredictions:
        """Return predictions that are right for the first label, and noisy for the second."""
        first, second = scored(seed=seed), scored(noise=noise, seed=seed)
        return replace(first, predictions=np.hstack([first.predictions, second.predictions]), label=rare)

    worse = [judge(spec, both(s, 0.3), both(s, 0.0)) for s in range(20)]

    assert sum(v.promote for v in worse) >= 15


def test_difference_within_chance_on_few_samples_is_promoted() -> None:
    worse = [judge(FEW, scored(60, noise=0.3, seed=s), scored(60, seed=s)) for s in range(20)]
    assert sum(v.promote for v in worse) >= 15


@pytest.mark.parametrize("n", [0, 1, 99])
def test_fewer_samples_than_the_floor_hold_a_version(n: int) -> None:
    verdict = judge(SPEC, scored(n), scored(n))
    assert not verdict.promote
    assert verdict.reason == f"{n} labelled samples, fewer than serve.gate.floor = 100"


def test_untrained_stable_is_replaced_below_the_floor() -> None:
    assert judge(SPEC, scored(0), scored(0), untrained=True).promote
    assert judge(SPEC, scored(0), None).promote


NUMBER = make_spec(losses=("huber",))


@pytest.mark.parametrize("extreme", [1e18, -1e18, 1e30, 3e38])
@pytest.mark.parametrize("times", [1, 3, 15])
def test_few_extreme_labels_do_not_promote_a_bad_version(extreme: float, times: int) -> None:
    rng = np.random.default_rng(0)
    y = (rng.normal(size=2000) * 5 + 30).astype(np.float32)
    wrong = y.copy()
    wrong[rng.choice(2000, times, replace=False)] = extreme

    def number(error: float, factor: float = 1.0) -> VersionPredictions:
        p = (factor * y + rng.normal(size=2000) * error)[:, None].astype(np.float32)
        return VersionPredictions(p, np.zeros(2000, np.uint8), wrong, np.ones(2000, np.float32))

    assert judge(NUMBER, number(1.0), number(1.0)).promote
    assert not judge(NUMBER, number(8.0), number(1.0)).promote
    assert not judge(NUMBER, number(60.0), number(1.0)).promote


def test_a_number_that_is_rarely_nonzero_is_judged_by_both() -> None:
    """With one bound for both classes, errors of 15 at the 20 numbers count as those of zeros do."""
    rng = np.random.default_rng(0)
    y = np.where(np.arange(20_000) < 20, 30, 0).astype(np.float32)
    sign = np.where(np.arange(20_000) % 2, 1, -1)
    right = y + rng.normal(size=20_000)

    def number(error: float) -> VersionPredictions:
        p = (right + np.where(y > 0, error * sign, 0))[:, None].astype(np.float32)
        return VersionPredictions(p, np.zeros(20_000, np.uint8), y, np.ones(20_000, np.float32))

    verdict = judge(NUMBER, number(15.0), number(0.0))
    assert not verdict.promote
    assert "worse than stable's" in verdict.reason
    assert judge(NUMBER, number(0.0), number(15.0)).promote


@pytest.mark.parametrize("extreme", [0.0, 1.0])
def test_few_certain_and_wrong_predictions_do_not_hold_a_version(extreme: float) -> None:
    candidate, stable = scored(noise=0.0), scored(noise=0.2)
    sure = np.flatnonzero(candidate.value != extreme)[:3]
    candidate.predictions[sure] = extreme
    assert judge(SPEC, candidate, stable).promote


def test_a_number_is_judged_by_its_squared_error() -> None:
    spec = make_spec(losses=("huber",))
    rng = np.random.default_rng(0)
    y = (rng.normal(size=3000) * 5 + 30).astype(np.float32)

    def number(error: float) -> VersionPredictions:
        p = (y + rng.normal(size=3000) * error)[:, None].astype(np.float32)
        return VersionPredictions(p, np.zeros(3000, np.uint8), y, np.ones(3000, np.float32))

    assert judge(spec, number(1.0), number(2.0)).promote
    verdict = judge(spec, number(2.0), number(1.0))
    assert not verdict.promote
    assert "mean squared error" in verdict.reason


def test_one_bad_label_of_two_holds_a_version() -> None:
    spec = make_spec(losses=("logloss", "logloss"))
    good, bad = scored(), scored(factor=1.5)
    both = VersionPredictions(
        np.concatenate([np.tile(good.predictions, 2), np.tile(bad.predictions, 2)]),
        np.repeat(np.array([0, 1], np.uint8), 2000),
        np.concatenate([good.value, bad.value]),
        np.ones(4000, np.float32),
    )
    verdict = judge(spec, both, None)
    assert not verdict.promote
    assert verdict.reason.startswith("y1: calibration")


def test_the_reason_has_the_calibration_of_stable() -> None:
    stable = scored()
    of_stable = float(stable.predictions.sum() / stable.value.sum())
    assert f"by more than chance (stable's {of_stable:.3f})" in judge(SPEC, scored(factor=1.5), stable).reason


def test_infinite_calibration_holds_a_version() -> None:
    candidate = replace(scored(), value=np.zeros(2000, np.float32))
    verdict = judge(SPEC, candidate, None)
    assert not verdict.promote
    assert "calibration inf" in verdict.reason
