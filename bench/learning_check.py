"""The hedge beside each of its experts alone: one pass over synthetic clicks, predict-then-learn.

    python -m bench.learning_check [samples]

The truth is a factorisation machine over skewed ids, plus noise that nothing can learn; in three streams:
strong pairs, no pairs (where wide alone is best), and weak pairs under much noise. Every expert is also
trained alone, with rows of its own. Fails if the AUC of the hedge is below that of the best expert by more
than the stream allows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np

from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.evaluation import auc
from freshet.model import GroupInputs, Labels, ModelInputs, build_model
from freshet.types import F32, F64, I64
from tests.fixtures.specs import make_spec

FIELDS, CARDINALITY, DIM, BATCH = 8, 3000, 16, 256
EXPERTS = ("wide", "fm", "deep")


@dataclass(frozen=True)
class Setting:
    """A kind of truth."""

    name: str
    single: float  # deviation of an id's own effect on the log-odds
    pair: float  # deviation of the vectors whose products are the pairs' effects
    allowed: float  # how far the AUC of the hedge may be below that of the best expert


SETTINGS = (
    Setting("pairs", 0.8, 0.8, 0.005),
    Setting("no pairs", 0.4, 0.0, 0.005),
    # Here the losses of the experts over the hedge's memory of 1,000 rows differ mostly by chance.
    Setting("noise", 0.4, 0.35, 0.01),
)


class Truth:
    """A stream of ids and clicks."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.w = self.rng.normal(size=(FIELDS, CARDINALITY)) * setting.single
        self.v = self.rng.normal(size=(FIELDS, CARDINALITY, 4)) * setting.pair
        chance = 1 / np.arange(1, CARDINALITY + 1) ** 1.1
        self.chance = np.cumsum(chance / chance.sum())

    def draw(self, n: int) -> tuple[I64, F32, F64]:
        """Draw (n, FIELDS) ids, (n,) clicks, and the (n,) true chances without noise."""
        ids = np.searchsorted(self.chance, self.rng.random((n, FIELDS))).clip(max=CARDINALITY - 1)
        field = np.arange(FIELDS)
        w, v = self.w[field, ids], self.v[field, ids]
        z = w.sum(1) + 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(1) - 1.5
        p = 1 / (1 + np.exp(-z))
        noisy = 1 / (1 + np.exp(-z - self.rng.normal(size=n) * 0.5))
        return ids, (self.rng.random(n) < noisy).astype(np.float32), p


class Rows:
    """All rows of a spec with one group in one array, with the default update rules."""

    def __init__(self, spec: Spec, seed: int = 0) -> None:
        [self.group] = layout_of(spec).groups
        self.values = np.zeros((FIELDS * CARDINALITY, self.group.width), np.float32)
        vector = self.group.slot("vector")
        self.vector = slice(vector.start, vector.start + vector.width) if vector else slice(0, 0)
        shape = len(self.values), self.vector.stop - self.vector.start
        self.values[:, self.vector] = np.random.default_rng(seed).uniform(-0.01, 0.01, shape)
        self.scalars = self.group.width - (self.vector.stop - self.vector.start)
        self.scalar_squares = np.zeros((len(self.values), self.scalars), np.float32)
        self.vector_squares = np.full(len(self.values), 0.1, np.float32)

    def step(self, at: I64, gradient: F32) -> None:
        """Adagrad 0.1 on scalars, row-wise Adagrad 0.2 on vectors."""
        g = gradient[:, : self.scalars]
        self.scalar_squares[at] += g * g
        root = np.sqrt(self.scalar_squares[at]) + 1e-10
        self.values[at, : self.scalars] -= 0.1 * g / root
        g = gradient[:, self.vector]
        if g.shape[1]:
            self.vector_squares[at] += (g * g).mean(1)
            self.values[at, self.vector] -= 0.2 * g / (np.sqrt(self.vector_squares[at]) + 1e-8)[:, None]


def run(
    setting: Setting, experts: tuple[str, ...], samples: int, precision: str = "fp32"
) -> tuple[F64, F32, F64]:
    """Return progressive predictions, clicks and true chances of one pass."""
    spec = make_spec(ids=FIELDS, dims=(DIM,), experts=experts)
    model = build_model(spec, training=True, precision="bf16" if precision == "bf16" else "fp32")
    lane, rows, truth = model.lane(), Rows(spec), Truth(setting)
    starts = (np.arange(FIELDS + 1) * BATCH).astype(np.uint32)
    predictions, clicks, chances = [], [], []
    for _ in range(samples // BATCH):
        ids, y, p = truth.draw(BATCH)
        keys = (ids + np.arange(FIELDS) * CARDINALITY).T.reshape(-1)
        unique, positions = np.unique(keys, return_inverse=True)
        group = GroupInputs(rows.values[unique], positions.astype(np.int32), starts, [None] * FIELDS)
        labels = Labels(np.zeros(BATCH, np.uint8), y, np.ones(BATCH, np.float32))
        result = lane.forward_backward(ModelInputs(BATCH, [group], np.empty((BATCH, 0), np.float32), labels))
        predictions.append(result.predictions[:, 0])
        clicks.append(y)
        chances.append(p)
        rows.step(unique, result.gradients[0])
        model.step([lane])
    return np.concatenate(predictions).astype(np.float64), np.concatenate(clicks), np.concatenate(chances)


def check(setting: Setting, samples: int) -> dict[str, float]:
    """Return the AUC of the hedge, of each expert alone and of the truth, over the second half."""
    half = samples // 2
    figures: dict[str, float] = {}
    for name, experts in [("hedge", EXPERTS), *((e, (e,)) for e in EXPERTS)]:
        p, y, truth = run(setting, experts, samples)
        figures[name] = auc(p[half:], y[half:])
        figures["truth"] = auc(truth[half:], y[half:])
        if name == "hedge":
            figures["hedge_calibration"] = float(p[half:].sum() / y[half:].sum())
    p, y, _ = run(setting, EXPERTS, samples, "bf16")
    figures["hedge_bf16"] = auc(p[half:], y[half:])
    return figures


def main(samples: int) -> int:
    """Print the figures of each stream; returns the number of streams that fail."""
    failed = 0
    for setting in SETTINGS:
        figures = check(setting, samples)
        best = max(figures[e] for e in EXPERTS)
        under = best - figures["hedge"]
        failed += under > setting.allowed
        row = {"stream": setting.name, "under_best": round(under, 4), "allowed": setting.allowed}
        print(json.dumps(row | {name: round(value, 4) for name, value in figures.items()}))
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000))
