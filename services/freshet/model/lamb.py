"""Rates of tensors by LAMB (You et al., 1904.00962): each tensor's step is as large as its weights are.

    c = |w| / |u|, within [C_LEAST, C_MOST]; 1 where a norm is 0
    w <- w - rate c u,  for u Adam's update with bias correction

There is no weight decay. For 1-bit LAMB (Li et al., 2104.06069), a step that leaves Adam's variance as it is
takes a running mean of c instead, times a factor from the reducer. The bounds are the defaults of the
authors' code in DeepSpeed, C_DECAY a constant of it.

Letters: d weights, T tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freshet.types import F32, F64

C_LEAST, C_MOST, C_DECAY = 0.01, 10.0, 0.9


class TrustRatios:
    """The factors of the rates of a model's tensors. Norms are summed in one order, whatever the threads."""

    def __init__(self, ends: Sequence[int]) -> None:
        """`ends`: (T,) where each tensor ends among d weights, rising, the last at d."""
        self.ends = list(ends)
        self.mean: F64 = np.zeros(len(ends))  # of c; 0 before the first step
        self.factors: F64 = np.ones(len(ends))  # by 1-bit LAMB, for steps that leave the variance

    def of_step(self, weights: F32, update: F32, *, frozen: bool) -> F64:
        """Return the (T,) factors of the rate for a step by a (d,) update of (d,) weights.

        `frozen`: the step leaves the variance as it is.
        """
        if frozen and self.mean.all():
            return self.mean * self.factors
        size, step = self._norms(weights), self._norms(update)
        known = (size > 0) & (step > 0)
        ratios = np.divide(size, step, out=np.ones_like(size), where=known)
        ratios = np.where(known, np.clip(ratios, C_LEAST, C_MOST), 1.0)
        before = np.where(self.mean > 0, self.mean, ratios)
        self.mean = C_DECAY * before + (1 - C_DECAY) * ratios
        return ratios

    def _norms(self, values: F32) -> F64:
        """Return the (T,) Euclidean norms of the tensors of (d,) values."""
        squares = np.square(values, dtype=np.float64)
        norms: F64 = np.sqrt(np.add.reduceat(squares, [0, *self.ends[:-1]]))
        return norms
