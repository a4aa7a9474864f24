"""Samples become a table of sums: what each adds is computed here, what falls together is added natively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.evaluation.auc import COARSE_BITS, bins_of_logits
from freshet.evaluation.cells import KEY, SUMS, Table
from freshet.types import F32, F64, I64, U8, U64, Bool

__all__ = ["PROBABILITY_FLOOR", "Samples", "table_of"]

PROBABILITY_FLOOR = 1e-7
"""Predictions are taken to be at least this far from 0 and 1 when their logloss is added up: one mistake
costs 16."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """B samples that have not been grouped yet."""

    times_ms: I64
    label: U8
    prediction: F32  # of the sample's own label
    value: F32
    weight: F32
    segments: tuple[U64, ...]  # per segment field

    @classmethod
    def concat(cls, parts: list[Samples]) -> Samples:
        """Join end to end."""
        return cls(
            np.concatenate([s.times_ms for s in parts]),
            np.concatenate([s.label for s in parts]),
            np.concatenate([s.prediction for s in parts]),
            np.concatenate([s.value for s in parts]),
            np.concatenate([s.weight for s in parts]),
            tuple(np.concatenate(column) for column in zip(*(s.segments for s in parts), strict=True)),
        )


def table_of(samples: Samples, window: I64, number: Bool, values: Sequence[U64]) -> Table:
    """Group samples: each counts once overall and once in each segment, there in coarser bins.

    Args:
        samples: B of them.
        window: (B,) each one's window.
        number: (L,) whether a label is a number.
        values: of each segment field those that are told apart, rising, OTHER among them.
    """
    sums, bins, counts = _terms(samples, number[samples.label])
    segments = list(zip(samples.segments, values, strict=True))
    windows, codes, added, cell, bin_, both = _native.group_samples(
        window, samples.label, len(number), segments, sums, bins, counts, COARSE_BITS
    )
    choices = np.concatenate([np.zeros(1, np.uint64), *values])
    fields = np.repeat(np.arange(1 + len(values)), [1, *map(len, values)])
    keys = np.empty(len(codes), KEY)
    rest, choice = np.divmod(codes.astype(np.int64), len(choices))
    keys["window"], keys["label"] = windows[rest // len(number)], rest % len(number)
    keys["field"], keys["value"] = fields[choice], choices[choice]
    return Table(keys, added, cell, bin_, both)


def _terms(samples: Samples, number: Bool) -> tuple[F64, I64, F64]:
    """Each sample's summands (len(SUMS), B), its bin (B,) and what it adds to a histogram (2, B): nothing
    if its label is a number."""
    p, y, w = (column.astype(np.float64) for column in (samples.prediction, samples.value, samples.weight))
    finite = np.isfinite(p) & np.isfinite(y)
    p, y, w = np.where(finite, p, 0.5), np.where(finite, y, 0.0), np.where(finite, w, 0.0)
    true_false = ~number
    q = np.clip(np.where(true_false, p, 0.5), PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    of_true, of_false = np.log(q), np.log1p(-q)
    loss = np.where(true_false, -(y * of_true + (1 - y) * of_false), 0.0)
    error = p - y
    columns = (finite, w, w * p, w * y, w * loss, w * error**2, w * np.abs(error), ~finite, w * w)
    sums, counts = np.empty((len(SUMS), len(p))), np.empty((2, len(p)))
    for row, column in zip(sums, columns, strict=True):
        row[:] = column
    counts[0], counts[1] = sums[3] * true_false, w * (1 - y) * true_false
    return sums, bins_of_logits(of_true - of_false), counts
