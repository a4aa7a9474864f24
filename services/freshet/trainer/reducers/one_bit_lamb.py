"""1-bit LAMB (Li et al., 2104.06069): tensors keep rates of their own while the variance stands still.

LAMB multiplies the rate of a tensor by its weights' norm over its update's. With a frozen variance and a
momentum of signs that ratio means little. A mean of the last ratios takes its place (`TrustRatios`), times a
factor that follows the variance by a second one, which the reducer keeps from the gradients it reconstructs:

    v_fresh <- beta2 v_fresh + (1 - beta2) g_eff^2
    r = max over the tensor of (root(v) + eps) / (root(v_fresh) + eps), in [R_LEAST, R_MOST] and within
        R_CHANGE of the last r, which starts with 1

The momentum goes through `OneBitAdam`, which scales it by the value, where the authors do it by the tensor.
The constants are those of the authors' code in DeepSpeed.

Letters: d floats of a gradient, T tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.model import FreezesVariance
from freshet.model.lamb import TrustRatios
from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.one_bit_adam import (
    EPSILON,
    REFRESH_STEPS,
    Betas,
    Moments,
    MomentumReducer,
    OneBitAdam,
    finite_squares,
)
from freshet.types import F32, F64

R_LEAST, R_MOST, R_CHANGE = 0.5, 4.0, 0.1


class OneBitLamb(OneBitAdam):
    """Sums gradients as `OneBitAdam`, and keeps r. One thread at a time uses it."""

    def __init__(
        self,
        ends: Sequence[int],
        betas: Betas | None = None,
        *,
        warmup_steps: int = 0,
        refresh_steps: int = REFRESH_STEPS,
    ) -> None:
        """`ends`: (T,) where each tensor ends, rising, the last at d; the others as for `OneBitAdam`."""
        super().__init__(ends[-1], betas, warmup_steps=warmup_steps, refresh_steps=refresh_steps)
        self.ends = list(ends)
        self.factors: F64 = np.ones(len(ends))  # r
        self._fresh: F32 = np.zeros(ends[-1], np.float32)  # v_fresh, while the variance is frozen

    def reduce(self, group: Collectives, gradient: F32, moments: Moments) -> bool:
        """As `OneBitAdam.reduce`; where it returns True, `factors` are those of the step."""
        if not self.frozen:
            self._fresh[:] = moments.second  # as it stands if this step freezes it
        frozen = super().reduce(group, gradient, moments)
        if frozen:
            self._follow(gradient, moments)
        return frozen

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return all that ranks must have equal, for the dense state, right after a flush."""
        return {**super().state(), "factors": self.factors.copy(), "fresh": self._fresh.copy()}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load what `state` returned, and forget residuals."""
        super().load_state(state)
        self.factors, self._fresh = state["factors"].copy(), state["fresh"].copy()

    def _follow(self, gradient: F32, moments: Moments) -> None:
        """Move the fresh variance by the (d,) gradient of a step, and r by it."""
        newcomers = (self._fresh == 0) & (moments.second > 0)
        self._fresh[newcomers] = moments.second[newcomers]
        decay = np.float32(self.betas.second)
        self._fresh *= decay
        self._fresh += (1 - decay) * finite_squares(gradient)
        with np.errstate(invalid="ignore"):
            quotients = (np.sqrt(moments.second) + EPSILON) / (np.sqrt(self._fresh) + EPSILON)
        quotients[moments.second == 0] = 0  # values that have seen no gradient
        largest = np.maximum.reduceat(quotients, [0, *self.ends[:-1]]).astype(np.float64)
        bounded = np.clip(largest, R_LEAST, R_MOST)
        self.factors = np.clip(bounded, (1 - R_CHANGE) * self.factors, (1 + R_CHANGE) * self.factors)


class LambReducer(MomentumReducer):
    """1-bit LAMB as a `Reducer`: as `MomentumReducer`, and the model's ratios take the factors."""

    def __init__(self, lamb: OneBitLamb, model: FreezesVariance, trust: TrustRatios) -> None:
        super().__init__(lamb, model)
        self._lamb, self._trust = lamb, trust

    def reduce(self, group: Collectives, gradient: F32) -> None:
        """Replace this rank's addend of the (d,) mean gradient by what Adam is to step with.

        Raises RankLost; the moments are then void too.
        """
        super().reduce(group, gradient)
        self._trust.factors = self._lamb.factors

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load what `state` returned, and forget residuals."""
        super().load_state(state)
        self._trust.factors = self._lamb.factors
