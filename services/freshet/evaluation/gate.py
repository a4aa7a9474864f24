"""The gate: decides whether a candidate version replaces `stable`, by predictions for the same samples.

Pure: the trainer supplies the predictions (PROTOCOL 23). Shape letters: B samples, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from freshet.config.spec.model import Gate, Label, Spec
from freshet.evaluation.descriptors import PROBABILITY_FLOOR, outlier_bound, winsor_bound
from freshet.types import F32, F64, U8, Bool

NOISE = 2.0
"""Standard errors by which a figure must miss its bound before the gate holds a version. With 20 true samples
in 2,000, calibration is uncertain by 22 %: without this margin the gate would hold most versions."""


@dataclass(frozen=True, slots=True, eq=False)
class VersionPredictions:
    """Predictions of one version for the newest samples, with the samples' labels."""

    predictions: F32  # (B, L)
    label: U8  # (B,) index of the sample's label
    value: F32  # (B,)
    weight: F32  # (B,)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to promote a version, and the reason in words."""

    promote: bool
    reason: str


def judge(
    spec: Spec, candidate: VersionPredictions, stable: VersionPredictions | None, *, untrained: bool = False
) -> Verdict:
    """Compare a candidate with `stable` on the same samples (None: no version serves yet).

    The gate holds the candidate if

    - one of its predictions is not finite;
    - there are fewer samples than `serve.gate.floor`, unless there is no `stable` or it is `untrained`;
    - a label's calibration leaves the spec's bounds by more than chance, unless `stable` is as far off; or
    - its normalised entropy (for a number: mean squared error) is worse than that of `stable` by more than
      the spec allows. With fewer than `serve.gate.samples` samples of the label, the difference must exceed
      chance too.

    One sample cannot decide: outliers among a label's numbers do not count (`outlier_bound`), and of each
    class the largest hundredth of both versions' losses counts as the next smaller loss (`winsor_bound`).
    """
    wrong = int((~np.isfinite(candidate.predictions)).sum())
    if wrong:
        return Verdict(
            False, f"not finite: {wrong} of {candidate.predictions.size} predictions are NaN or infinite"
        )
    gate, samples = spec.serve.gate, len(candidate.label)
    if samples < gate.floor and stable is not None and not untrained:
        return Verdict(False, f"{samples:,} labelled samples, fewer than serve.gate.floor = {gate.floor:,}")
    good = []
    for label in spec.labels:
        mine = candidate.label == label.index
        if label.loss != "logloss":
            values = candidate.value.astype(np.float64)
            mine &= ~(np.abs(values) > outlier_bound(values[mine]))
        if not mine.any():
            continue
        now = _Head.select(candidate, label, mine)
        then = _Head.select(stable, label, mine) if stable is not None else None
        most = _bounds([head for head in (now, then) if head is not None])
        now, then = replace(now, most=most), None if then is None else replace(then, most=most)
        for violation in _violations(gate, label, now, then, enough=len(now.y) >= gate.samples):
            return Verdict(False, f"{label.name}: {violation}, on {len(now.y):,} samples")
        good.append(f"{label.name}: {now.figure(label)}, calibration {now.calibration:.3f}")
    return Verdict(True, f"{'; '.join(good)}, on {samples:,} samples")


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """Predictions, values and weights (B,) of one label's samples, by one version."""

    p: F64
    y: F64
    w: F64
    number: bool
    most: F64 | float = float("inf")  # (B,) losses are clipped to this

    @classmethod
    def select(cls, scored: VersionPredictions, label: Label, mine: Bool) -> _Head:
        p = scored.predictions[mine, label.index].astype(np.float64)
        y, w = scored.value[mine].astype(np.float64), scored.weight[mine].astype(np.float64)
        return cls(p, y, w, label.loss != "logloss")

    @property
    def losses(self) -> F64:
        """Loss (B,) of each sample: squared error of a number, else logloss."""
        if self.number:
            squares: F64 = np.minimum((self.p - self.y) ** 2, self.most)
            return squares
        q = np.clip(self.p, PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
        losses: F64 = -(self.y * np.log(q) + (1 - self.y) * np.log1p(-q))
        return np.minimum(losses, self.most)

    @property
    def loss(self) -> float:
        return float((self.w * self.losses).sum() / self.w.sum())

    @property
    def calibration(self) -> float:
        """Sum of predictions over sum of labels; infinite if no label is true, NaN where undefined."""
        predicted, labelled = float((self.w * self.p).sum()), float((self.w * self.y).sum())
        if labelled > 0:
            return predicted / labelled
        return float("inf") if labelled == 0 and predicted > 0 else float("nan")

    def is_miscalibrated(self, low: float, high: float) -> bool:
        """Return whether the calibration is outside [low, high] by more than chance.

        Chance is NOISE standard errors of the sum of labels: by the predicted probabilities, or for a number
        by its residuals.
        """
        predicted, labelled = float((self.w * self.p).sum()), float((self.w * self.y).sum())
        spread = (self.y - self.p) ** 2 if self.number else self.p * (1 - self.p)
        error = NOISE * float(np.sqrt((self.w**2 * spread).sum()))
        return predicted > high * (labelled + error) or predicted < low * (labelled - error)

    def figure(self, label: Label) -> str:
        """Return the loss as text: normalised entropy where the label has both kinds of samples."""
        if self.number:
            return f"mean squared error {self.loss:.4g}"
        rate = float((self.w * self.y).sum() / self.w.sum())
        if not 0 < rate < 1:
            return f"logloss {self.loss:.4f}"
        entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
        return f"normalised entropy {self.loss / entropy:.4f}"


def _bounds(heads: Sequence[_Head]) -> F64:
    """Return the (B,) bounds of the losses of versions, by class: labels above 0 and 0, or numbers and 0.

    One bound for both would clip nearly all losses of a rare class to those of the other: of a label that is
    true once in 200 samples, the model that spreads its predictions most would seem the best.
    """
    most = np.full(len(heads[0].y), np.inf)
    for of_class in (heads[0].y != 0, heads[0].y == 0):
        most[of_class] = winsor_bound(np.concatenate([head.losses[of_class] for head in heads]))
    return most


def _violations(gate: Gate, label: Label, now: _Head, then: _Head | None, *, enough: bool) -> Iterator[str]:
    """Yield the rules that the candidate breaks for one label, as text."""
    low, high = gate.calibration
    off = now.calibration
    if not np.isnan(off) and now.is_miscalibrated(low, high) and not _as_far_off(off, then):
        beside = "" if then is None else f" (stable's {then.calibration:.3f})"
        yield f"calibration {off:.3f} is outside {low:g} to {high:g} by more than chance{beside}"
    if then is None or not np.isfinite(then.loss):
        return
    # The label's entropy cancels in the ratio.
    worse = now.loss / then.loss - 1 if then.loss > 0 else 0.0
    if worse > gate.ne_worse and (enough or _beyond_chance(now, then)):
        yield (
            f"{now.figure(label)} is {worse:.1%} worse than stable's {then.figure(label).split()[-1]}"
            f" (allowed {gate.ne_worse:.1%})"
        )


def _as_far_off(off: float, then: _Head | None) -> bool:
    """Return whether the calibration of `stable` is off by at least as large a factor."""
    if then is None or off <= 0:
        return False
    other = then.calibration
    return not np.isnan(other) and (other <= 0 or bool(abs(np.log(other)) >= abs(np.log(off))))


def _beyond_chance(now: _Head, then: _Head) -> bool:
    """Return whether the summed difference of the samples' losses exceeds NOISE standard errors."""
    difference = now.w * (now.losses - then.losses)
    error = float(np.sqrt(((difference - difference.mean()) ** 2).sum()))
    return float(difference.sum()) > NOISE * error
