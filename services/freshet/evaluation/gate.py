"""The gate: may a candidate version take `stable`'s place? Decided on what both predict for the same newest
samples.

Pure; the trainer brings the predictions (PROTOCOL 23). Letters: B samples, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from freshet.config.spec.model import Gate, Label, Spec
from freshet.evaluation.cells import PROBABILITY_FLOOR
from freshet.evaluation.descriptors import largest_usual, winsorised
from freshet.types import F32, F64, U8

__all__ = ["Scored", "Verdict", "judge"]

NOISE = 2.0
"""Standard errors by which few samples may mislead: a figure must be wrong by more than this before it
holds a version. Twenty true samples of 2,000 leave calibration uncertain by 22 %; without this most
versions would be held."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What a version predicts for the newest samples."""

    predictions: F32  # (B, L)
    label: U8  # (B,) label that each sample teaches
    value: F32  # (B,)
    weight: F32  # (B,)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to promote, and why or why not, for people."""

    promote: bool
    reason: str


def judge(spec: Spec, candidate: Scored, stable: Scored | None, *, untrained: bool = False) -> Verdict:
    """Judge a candidate against `stable` on the same samples (None: nothing serves yet).

    It is held if a prediction is not finite; if a label's mean prediction over its mean label leaves the
    spec's bounds by more than chance, unless `stable` is as far off; or if its normalised entropy (for a
    number: mean squared error) is worse than `stable`'s by more than the spec's share. With fewer samples
    of a label than the spec asks for, that last difference must exceed chance too. With fewer samples than
    `serve.gate.floor` it is held, unless `stable` is `untrained`: the initial weights know nothing.

    One sample cannot decide. A number that is an outlier among the label's others is left out
    (`largest_usual`), and of the losses of both versions the largest hundredth counts as the next smaller one
    (`winsorised`).
    """
    wrong = int((~np.isfinite(candidate.predictions)).sum())
    if wrong:
        return Verdict(
            False, f"not finite: {wrong} of {candidate.predictions.size} predictions are NaN or infinite"
        )
    gate, samples = spec.serve.gate, len(candidate.label)
    if samples < gate.floor and stable is not None and not untrained:
        return Verdict(
            False, f"{samples:,} labelled samples to judge by, fewer than serve.gate.floor = {gate.floor:,}"
        )
    good = []
    for label in spec.labels:
        mine = candidate.label == label.index
        if label.loss != "logloss":
            values = candidate.value.astype(np.float64)
            mine &= ~(np.abs(values) > largest_usual(values[mine]))
        if not mine.any():
            continue
        now = _Head.of(candidate, label, mine)
        then = _Head.of(stable, label, mine) if stable is not None else None
        most = winsorised(np.concatenate([head.losses for head in (now, then) if head is not None]))
        now, then = replace(now, most=most), None if then is None else replace(then, most=most)
        for complaint in _complaints(gate, label, now, then, enough=len(now.y) >= gate.samples):
            return Verdict(False, f"{label.name}: {complaint}, on {len(now.y):,} samples")
        good.append(f"{label.name}: {now.figure(label)}, calibration {now.calibration:.3f}")
    return Verdict(True, f"{'; '.join(good)}, on {samples:,} samples")


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """One label's predictions and labels of one version."""

    p: F64
    y: F64
    w: F64
    number: bool
    most: float = float("inf")  # a sample's loss counts as this at most

    @classmethod
    def of(cls, scored: Scored, label: Label, mine: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> _Head:
        p = scored.predictions[mine, label.index].astype(np.float64)
        y, w = scored.value[mine].astype(np.float64), scored.weight[mine].astype(np.float64)
        return cls(p, y, w, label.loss != "logloss")

    @property
    def losses(self) -> F64:
        """Each sample's loss: squared error of a number, else logloss."""
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
        """Sum of predictions over sum of labels; infinite without a label, NaN where that is not defined."""
        predicted, labelled = float((self.w * self.p).sum()), float((self.w * self.y).sum())
        if labelled > 0:
            return predicted / labelled
        return float("inf") if labelled == 0 and predicted > 0 else float("nan")

    def leaves(self, low: float, high: float) -> bool:
        """Whether the calibration is outside [low, high] by more than chance.

        Chance is the standard error of the sum of labels: as the predictions themselves would have it, or for
        a number by its residuals.
        """
        predicted, labelled = float((self.w * self.p).sum()), float((self.w * self.y).sum())
        spread = (self.y - self.p) ** 2 if self.number else self.p * (1 - self.p)
        error = NOISE * float(np.sqrt((self.w**2 * spread).sum()))
        return predicted > high * (labelled + error) or predicted < low * (labelled - error)

    def figure(self, label: Label) -> str:
        """The loss as people read it."""
        if self.number:
            return f"mean squared error {self.loss:.4g}"
        rate = float((self.w * self.y).sum() / self.w.sum())
        if not 0 < rate < 1:
            return f"logloss {self.loss:.4f}"
        entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
        return f"normalised entropy {self.loss / entropy:.4f}"


def _complaints(gate: Gate, label: Label, now: _Head, then: _Head | None, *, enough: bool) -> Iterator[str]:
    low, high = gate.calibration
    off = now.calibration
    if not np.isnan(off) and now.leaves(low, high) and not _as_far_off(off, then):
        yield f"calibration {off:.3f} is outside {low:g} to {high:g}"
    if then is None or not np.isfinite(then.loss):
        return
    worse = (
        now.loss / then.loss - 1 if then.loss > 0 else 0.0
    )  # the entropy of the label cancels in the ratio
    if worse > gate.ne_worse and (enough or _beyond_chance(now, then)):
        yield (
            f"{now.figure(label)} is {worse:.1%} worse than stable's {then.figure(label).split()[-1]}"
            f" (allowed {gate.ne_worse:.1%})"
        )


def _as_far_off(off: float, then: _Head | None) -> bool:
    """Whether `stable` predicts too much or too little by at least as large a factor."""
    if then is None or off <= 0:
        return False
    other = then.calibration
    return not np.isnan(other) and (other <= 0 or bool(abs(np.log(other)) >= abs(np.log(off))))


def _beyond_chance(now: _Head, then: _Head) -> bool:
    """Whether the mean difference of losses, sample by sample, exceeds its standard error NOISE times."""
    difference = now.w * (now.losses - then.losses)
    error = float(np.sqrt(((difference - difference.mean()) ** 2).sum()))
    return float(difference.sum()) > NOISE * error
