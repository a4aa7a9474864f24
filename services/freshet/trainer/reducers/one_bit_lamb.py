"""1-bit LAMB (Li et al., 2104.06069): layers keep rates of their own while the variance stands still.

LAMB multiplies the rate of a layer by |w| / |u|, its weights' norm over its update's. With a frozen variance
and a momentum of signs that ratio means little, so it is taken from the warm-up, and follows the variance by
a second one that the reducer keeps from the gradients it reconstructs:

    warm-up:  c = clip(|w| / |u|, C_LEAST, C_MOST);  c_bar <- C_DECAY c_bar + (1 - C_DECAY) c;  rate x c
    frozen:   v_fresh <- beta2 v_fresh + (1 - beta2) g_eff^2
              r = max over the layer of (root(v) + eps) / (root(v_fresh) + eps), in [R_LEAST, R_MOST] and
              within R_CHANGE of the last r;  rate x c_bar x r

c_bar starts with the first c, r with 1. An Adam that takes a rate for each layer is the whole optimiser: u
is its update, with bias correction. There is no weight decay. The momentum goes through `OneBitAdam`, which
scales it by the value, where the authors do it by the layer. The constants are those of the authors' code in
DeepSpeed, and c's bounds those of its defaults.

Letters: d floats of a gradient, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.one_bit_adam import REFRESH_STEPS, Betas, Moments, OneBitAdam
from freshet.types import F32, F64

C_LEAST, C_MOST, C_DECAY = 0.01, 10.0, 0.9
R_LEAST, R_MOST, R_CHANGE = 0.5, 4.0, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class LambStep:
    """How the step is to be made, besides the gradient; equal on all ranks."""

    frozen: bool  # leave the variance as it is
    rates: F64  # (L,) factors of the learning rate


class OneBitLamb:
    """Sums gradients and scales the rates of layers. One thread at a time uses it."""

    def __init__(
        self,
        layers: Sequence[int],
        betas: Betas | None = None,
        *,
        epsilon: float = 1e-8,
        warmup_steps: int = 0,
        refresh_steps: int = REFRESH_STEPS,
    ) -> None:
        """`layers`: (L,) where each layer ends, rising, the last at d; the others as for `OneBitAdam`."""
        self.layers, self.epsilon = list(layers), epsilon
        self.momentum = OneBitAdam(layers[-1], betas, warmup_steps=warmup_steps, refresh_steps=refresh_steps)
        self.ratios: F64 = np.ones(len(layers))  # c_bar
        self.changes: F64 = np.ones(len(layers))  # r
        self.fresh: F32 = np.zeros(layers[-1], np.float32)  # v_fresh, while the variance is frozen

    def observe(self, loss: float) -> None:
        """Take the mean loss of the last step over all ranks, equal on all."""
        self.momentum.observe(loss)

    def reduce(self, group: Collectives, gradient: F32, moments: Moments, weights: F32) -> LambStep:
        """Replace this rank's addend of the (d,) mean gradient by what Adam is to step with.

        `weights`: (d,), as after the last step. Raises RankLost as `OneBitAdam.reduce` does.
        """
        was_frozen = self.momentum.frozen
        frozen = self.momentum.reduce(group, gradient, moments)
        if not frozen:
            return LambStep(frozen, self._warm_rates(gradient, moments, weights))
        if not was_frozen:
            self.fresh[:] = moments.second
        return LambStep(frozen, self._frozen_rates(gradient, moments))

    def flush(self, group: Collectives, moments: Moments) -> F32:
        """Return the (d,) sum of all that is undelivered, and forget it; as `OneBitAdam.flush`.

        Raises RankLost if a rank does not answer.
        """
        return self.momentum.flush(group, moments)

    def reset(self) -> None:
        """Forget residuals."""
        self.momentum.reset()

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return all that ranks must have equal, for the dense state, right after a flush."""
        return {
            **self.momentum.state(),
            "ratios": self.ratios.copy(),
            "changes": self.changes.copy(),
            "fresh": self.fresh.copy(),
        }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load what `state` returned, and forget residuals."""
        self.momentum.load_state(state)
        self.ratios, self.changes = state["ratios"].copy(), state["changes"].copy()
        self.fresh = state["fresh"].copy()

    def _warm_rates(self, gradient: F32, moments: Moments, weights: F32) -> F64:
        """Return (L,) LAMB's ratios for the step that Adam is to make with a (d,) gradient."""
        betas, step = self.momentum.betas, self.momentum.steps
        first = (betas.first * moments.first + (1 - betas.first) * gradient) / (1 - betas.first**step)
        second = betas.second * moments.second + (1 - betas.second) * np.square(gradient)
        root = np.sqrt(second / (1 - betas.second**self.momentum.variance_steps))
        update = self._norms(first / (root + self.epsilon))
        size = self._norms(weights)
        known = (size > 0) & (update > 0)
        ratios = np.clip(np.divide(size, update, out=np.ones_like(size), where=known), C_LEAST, C_MOST)
        ratios = np.where(known, ratios, 1.0)
        if self.momentum.steps == 1:
            self.ratios = ratios
        self.ratios = C_DECAY * self.ratios + (1 - C_DECAY) * ratios
        return ratios

    def _frozen_rates(self, gradient: F32, moments: Moments) -> F64:
        """Return (L,) c_bar x r, after a (d,) gradient has moved the fresh variance."""
        decay = np.float32(self.momentum.betas.second)
        newcomers = (self.fresh == 0) & (moments.second > 0)
        self.fresh[newcomers] = moments.second[newcomers]
        self.fresh *= decay
        self.fresh += (1 - decay) * np.square(gradient)
        with np.errstate(invalid="ignore"):
            quotients = (np.sqrt(moments.second) + self.epsilon) / (np.sqrt(self.fresh) + self.epsilon)
        quotients[moments.second == 0] = 0  # values that have seen no gradient
        largest: F64 = np.maximum.reduceat(quotients, [0, *self.layers[:-1]]).astype(np.float64)
        bounded = np.clip(largest, R_LEAST, R_MOST)
        self.changes = np.clip(bounded, (1 - R_CHANGE) * self.changes, (1 + R_CHANGE) * self.changes)
        return self.ratios * self.changes

    def _norms(self, values: F32 | F64) -> F64:
        """Return the (L,) Euclidean norms of the layers of (d,) values."""
        squares = np.square(values, dtype=np.float64)
        norms: F64 = np.sqrt(np.add.reduceat(squares, [0, *self.layers[:-1]]))
        return norms
