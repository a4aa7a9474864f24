"""Thresholds on what an embedder would send: the largest values of each sample, at a hidden cut or of rows.

    python -m bench.hidden_cut [--steps 6000] [--seeds 3] [--quick] [--json]

The stream and the MLP are those of `bench.reducers`, trained by one process in batches of 256; a replaced id
is a new one, with a new row. Cases, each with the AUC beside no threshold, of all samples and of *cold*
ones, of which at least two of the eight ids came fewer than COLD times before:

- `cut_5pct`: DCT for model parallelism (2010.08899): the embedder computes the first dense layer, and sends
  of its 128 outputs after the ReLU the largest of each sample; gradients travel back for the same places.
- `rows_10pct`: the largest tenth of a sample's 64 embedding floats. What was not sent learns nothing.

`bytes` are those of a sample both ways: each value as int8 with a scale a sample and a byte of place, the
gradient without places. `int8_rows` are rows and gradients as they travel now: int8, each distinct row of a
batch once, with a position of two bytes for each id; without keys.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import numpy as np

from bench.reducers import DIM, FIELDS, HIDDEN, IDS, LEARNED_AT, Adam, Model, Stream
from bench.report import Figures, command
from bench.rounds import interval_95
from freshet.evaluation import auc
from freshet.types import F32, I64
from freshet.wires.codecs import RowCodec, format_for

BATCH = 256
COLD = 8

Cut = tuple[str, float]
"""Where (`cut`, `rows` or nowhere), and the share of values that is sent."""
CASES: Mapping[str, Cut] = {
    "int8_rows": ("", 1.0),
    "cut_25pct": ("cut", 0.25),
    "cut_10pct": ("cut", 0.1),
    "cut_5pct": ("cut", 0.05),
    "rows_25pct": ("rows", 0.25),
    "rows_10pct": ("rows", 0.1),
}


class NewIds(Stream):
    """A stream that records which ids were replaced."""

    def __init__(self, seed: int, samples: int, steps: int) -> None:
        super().__init__(seed, samples, steps)
        self.replaced = np.zeros((FIELDS, IDS), bool)

    def _replace_ids(self) -> None:
        before = self.effects.copy()
        super()._replace_ids()
        self.replaced |= before != self.effects


class CutModel(Model):
    """The model with a threshold between its embedder and the rest."""

    def __init__(self, cut: Cut, seed: int) -> None:
        super().__init__(1)
        self.where, self.share = cut
        self.fresh = np.random.default_rng(seed)

    def forget(self, replaced: I64) -> None:
        """Give ids, by their places in the table, rows as new ids have."""
        self.rows[replaced] = self.fresh.normal(0, 0.05, (len(replaced), DIM))
        self.squares[replaced] = 0.01

    def learn(self, ids: I64, numbers: F32, clicks: F32) -> tuple[F32, F32]:
        """Return (B,) predictions and the (1, d) gradient; step the embeddings."""
        keys = (ids + IDS * np.arange(FIELDS)).reshape(-1)
        rows = self.rows[keys].reshape(len(ids), -1)
        sent_rows = largest(rows, self.share) if self.where == "rows" else np.ones_like(rows, bool)
        x = np.concatenate([rows * sent_rows, numbers], axis=1)
        tensors = [
            part.reshape(shape)
            for part, shape in zip(np.split(self.weights, self.ends[:-1]), self.shapes, strict=True)
        ]
        layers = list(zip(tensors[0::2], tensors[1::2], strict=True))
        inputs, passed = [], []
        for i, (weight, bias) in enumerate(layers):
            inputs.append(x)
            x = x @ weight + bias
            if i < len(HIDDEN):
                on = x > 0
                if i == 0 and self.where == "cut":
                    on &= largest(np.maximum(x, 0), self.share)
                passed.append(on)
                x = x * on
        predictions: F32 = 1 / (1 + np.exp(-x[:, 0]))
        delta = ((predictions - clicks) / np.float32(len(ids)))[:, None]
        gradients: list[F32] = []
        for i in reversed(range(len(layers))):
            gradients[:0] = [(inputs[i].T @ delta).reshape(-1), delta.sum(axis=0)]
            delta = delta @ layers[i][0].T * (passed[i - 1] if i else 1)
        self._step_rows(keys, (delta[:, : FIELDS * DIM] * sent_rows).reshape(-1, DIM))
        return predictions, np.concatenate(gradients)[None]


def largest(values: F32, share: float) -> np.ndarray:
    """Return the (B, W) places of the largest absolute values of each row, a share of W."""
    count = kept(values.shape[1], share)
    least = np.partition(np.abs(values), -count, axis=1)[:, -count, None]
    found: np.ndarray = np.abs(values) >= least
    return found


def kept(width: int, share: float) -> int:
    """Return how many of `width` values are sent."""
    return max(1, math.ceil(width * share))


def bytes_of(cut: Cut, distinct: float) -> float:
    """Return the bytes of a sample both ways, of a batch with so many distinct rows a sample."""
    where, share = cut
    if not where:
        row = format_for(RowCodec.INT8, DIM, 0).row_bytes
        return distinct * 2 * row + 2 * FIELDS
    count = kept(HIDDEN[0] if where == "cut" else FIELDS * DIM, share)
    return 2 * (2 + count) + count


def run(cut: Cut, seed: int, steps: int) -> Figures:
    """Train on one stream; returns bytes and AUC."""
    model, stream = CutModel(cut, seed), NewIds(seed, BATCH, steps)
    adam = Adam(model.ends[-1], model.ends, model.weights)
    seen = np.zeros(FIELDS * IDS, np.int64)
    scored: list[tuple[F32, F32, np.ndarray]] = []
    distinct = 0
    for _ in range(steps):
        ids, numbers, clicks = stream.next_batch()
        new = np.flatnonzero(stream.replaced.reshape(-1))
        model.forget(new)
        seen[new] = 0
        stream.replaced[:] = False
        keys = ids + IDS * np.arange(FIELDS)
        cold = (seen[keys] < COLD).sum(axis=1) >= 2
        predictions, gradients = model.learn(ids, numbers, clicks)
        np.add.at(seen, keys.reshape(-1), 1)
        adam.step(gradients[0], False, adam.steps + 1)
        distinct += len(np.unique(keys))
        scored.append((predictions, clicks, cold))
    predictions, clicks, cold = (
        np.concatenate(part) for part in zip(*scored[int(LEARNED_AT * steps) :], strict=True)
    )
    return {
        "bytes": bytes_of(cut, distinct / steps / BATCH),
        "auc": auc(predictions, clicks),
        "auc_cold": auc(predictions[cold], clicks[cold]),
        "cold_share": float(cold.mean()),
    }


def measure(quick: bool = False, steps: int = 0, seeds: int = 0) -> Figures:
    """Measure all cases."""
    steps, seeds = steps or (500 if quick else 6000), seeds or (1 if quick else 3)
    found = {name: [run(cut, seed, steps) for seed in range(1, seeds + 1)] for name, cut in CASES.items()}
    base = found["int8_rows"]
    figures: Figures = {}
    for name, ones in found.items():
        figures[name] = {key: statistics.mean(one[key] for one in ones) for key in ones[0]}
        for key in ("auc", "auc_cold"):
            off = [one[key] - whole[key] for one, whole in zip(ones, base, strict=True)]
            figures[name][f"d_{key}"] = statistics.mean(off)
            if len(off) > 1:
                figures[name][f"d_{key}_95"] = interval_95(off)
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
