"""State of a model's heads and dense columns outside the network: biases, scales of numbers, running means.

The rules are those of the native hedge (`hedge.cpp`, `hedge_start.hpp`), for models that torch runs. Letters:
B samples, L labels, D dense columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from freshet.model.inputs import Labels
from freshet.types import F32, F64, U64, Bool

__all__ = ["Heads", "Sums", "he_uniform", "uniform"]

# --- Initial dense weights that are equal everywhere: the generator is written out here.


_STEP = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, stream: int, n: int) -> U64:
    """n 64-bit words: splitmix64 (Steele et al. 2014), begun at mix(seed) + mix(stream + 1)."""
    start = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    start = start + _mix(np.array([stream + 1], np.uint64))
    with np.errstate(over="ignore"):
        return _mix(start + _STEP * np.arange(1, n + 1, dtype=np.uint64))


def he_uniform(seed: int, stream: int, shape: tuple[int, int]) -> F32:
    """(K, N) weights uniform in ±√(6 / K): He et al. 2015, eq. 10, as a uniform of equal variance."""
    words = uniform(seed, stream, shape[0] * shape[1])
    unit = (words >> np.uint64(40)).astype(np.float64) / float(1 << 23) - 1.0  # 24 bits: exact in fp32
    weights: F32 = (unit * np.sqrt(6.0 / shape[0])).astype(np.float32).reshape(shape)
    return weights


def _mix(x: U64) -> U64:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


VARIANCE_FLOOR = 1e-12

STANDARD_LIMIT = 10.0
"""Standardised numbers are clamped to this many deviations."""


class Sums:
    """A lane's sums since the last step in one flat array (views into it), additive over lanes and ranks."""

    def __init__(self, labels: int, dense: int) -> None:
        self.all = np.zeros(1 + 4 * labels + 3 * dense)
        self.label = self.all[1 : 1 + 3 * labels].reshape(labels, 3)  # rows, Σ y, Σ y²
        self.gradient = self.all[1 + 3 * labels : 1 + 4 * labels]  # Σ of the loss's gradient at the logits
        self.dense = self.all[1 + 4 * labels :].reshape(dense, 3)  # n, Σ d, Σ d², d from the running mean

    @property
    def rows(self) -> float:
        """Weighted rows."""
        return float(self.label[:, 0].sum())


@dataclass(slots=True, eq=False)
class Heads:
    """What is kept for each label and dense column."""

    number: Bool  # (L,) whether the label is a number
    standard: Bool  # (D,) whether the column is standardised
    bias_lr: float
    bias: F64 = field(init=False)
    squares: F64 = field(init=False)  # Adagrad's accumulators of the biases
    started: F64 = field(init=False)  # 1 where the bias has its starting value
    scale: F64 = field(init=False)  # of a number: predictions are scale · z
    label_sums: F64 = field(init=False)  # (L, 3) until started
    dense: F64 = field(init=False)  # (D, 3): count, mean, Σ (x - mean)²

    def __post_init__(self) -> None:
        labels = len(self.number)
        self.bias, self.squares, self.started = np.zeros((3, labels))
        self.scale, self.label_sums = np.ones(labels), np.zeros((labels, 3))
        self.dense = np.zeros((len(self.standard), 3))

    def standards(self) -> tuple[F64, F64]:
        """(D,) means and 1 / deviation; a column not seen twice reads 0."""
        count, mean, squares = self.dense.T
        deviation = np.sqrt(squares / np.maximum(count, 1) + VARIANCE_FLOOR)
        return np.ascontiguousarray(mean), np.where(count > 1, 1 / deviation, 0.0)

    def count(self, labels: Labels) -> F64:
        """(L, 3) sums of a batch: rows, Σ y, Σ y², weighted."""
        w, y = labels.weight.astype(np.float64), labels.value.astype(np.float64)
        columns = [np.bincount(labels.index, x, len(self.number)) for x in (w, w * y, w * y * y)]
        return np.stack(columns, 1).astype(np.float64)

    def count_dense(self, dense: F32, into: F64) -> None:
        """Add a batch's dense numbers to the sums (D, 3)."""
        away = np.where(np.isfinite(dense), dense - self.dense[:, 1], 0.0)
        columns = np.stack([np.isfinite(dense).sum(0), away.sum(0), (away**2).sum(0)], 1)
        into += columns * self.standard[:, None]

    def learning(self, seen: F64) -> tuple[F64, F64, Bool]:
        """(bias, scale, whether it teaches), each (L,), that a batch of these sums learns with.

        A label not yet started takes starting values: the log-odds of its rows, with half a true and half a
        false row added; or for a number the mean, in deviations. A number whose values were all equal
        waits.
        """
        bias, scale, teaches = self.bias.copy(), self.scale.copy(), np.ones(len(self.bias), bool)
        for i in np.flatnonzero(self.started == 0):
            n, total, squares = self.label_sums[i] + seen[i]
            if n <= 0:
                teaches[i] = not self.number[i]
            elif not self.number[i]:
                bias[i] = np.log((total + 0.5) / (n - total + 0.5))
            else:
                mean = total / n
                variance = squares / n - mean * mean
                teaches[i] = variance > 1e-12 * (mean * mean + 1e-12)
                scale[i] = np.sqrt(variance) if teaches[i] else 1.0
                bias[i] = mean / scale[i]
        return bias, scale, teaches

    def step(self, sums: Sums) -> None:
        """Start labels seen for the first time, step the biases of the others, merge the dense columns'
        sums."""
        bias, scale, teaches = self.learning(sums.label)
        seen = sums.label[:, 0] > 0
        fresh = seen & (self.started == 0)
        old = seen & (self.started > 0) & (sums.gradient != 0)
        self.label_sums[fresh] += sums.label[fresh]
        self.bias[fresh], self.scale[fresh], self.started[fresh] = bias[fresh], scale[fresh], teaches[fresh]
        self.squares[old] += sums.gradient[old] ** 2
        self.bias[old] -= self.bias_lr * sums.gradient[old] / np.sqrt(self.squares[old])
        for column, (n, total, squares) in zip(self.dense, sums.dense, strict=True):
            if n > 0:  # Chan et al. 1979
                away, all_n = total / n, column[0] + n
                column[2] += squares - total * away + away * away * column[0] * n / all_n
                column[1] += away * n / all_n
                column[0] = all_n

    def predict(self, logits: F32) -> F32:
        """(B, L) logits without biases → probabilities, or numbers."""
        z = logits + self.bias
        with np.errstate(over="ignore"):
            p = np.where(self.number, z * self.scale, 1 / (1 + np.exp(-z)))
        return p.astype(np.float32)
