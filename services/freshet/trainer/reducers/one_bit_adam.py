"""1-bit Adam (Tang et al., 2102.02888): ranks exchange signs of the momentum while the variance stands still.

Adam divides by the root of a mean of squares, which makes error feedback on the gradient diverge: the error
of one step would be squared in the next. The momentum is linear in the gradient, so its error feeds back.
Hence a *warm-up* with whole gradients and plain Adam, until the variance is steady; then the variance is
frozen, and each rank sends its part of the new momentum through `TwoPhase` with `SignCodec`.

How an Adam that exists is driven by `OneBitAdam`: `reduce` replaces the gradient g by

    g_eff = (m_new - beta1 m) / (1 - beta1)

so that the step's own m <- beta1 m + (1 - beta1) g_eff is m_new. If `reduce` returns True, the step must
leave the variance as it stands in `Moments.second`. It corrects the bias of the variance by
1 - beta2^variance_steps in any case. The caller divides its gradient by the rows of all ranks first, so that
the sum over ranks is the mean gradient.

Ours differs from the paper in these:

- Whole gradients travel in int8 with error feedback (`TwoPhase`), a quarter of the bytes. Their squares make
  the variance of values far below their group's largest larger than it is, and so their steps shorter.
- A stream drifts, so the variance is refreshed: each `refresh_steps` a whole gradient is summed and moves it,
  with the weight of the steps since the last, at most `CATCH_UP`. For a window of the variance after a jump
  of the loss (`Drift`), that happens each `ALERT_STEPS`: the variance follows as fast as Adam's own.
- Momenta are exchanged divided by the root of their variance, so as steps of weights. The paper exchanges
  them as they are: each value then errs by its group's mean, and one with a small variance steps by that
  error over its root, without bound. Where variances follow the stream, those of values that have fallen
  out of use become as small as any, and training diverged after 12,000 steps.
- A rank's part of such a step is bounded by what Adam itself steps at most, over the root of n: a value whose
  gradient has outgrown its variance would take the whole scale of its group. The rest waits for the next
  refresh, which moves the variance first.
- The paper ends the warm-up if the variance has fallen by less than 4 % in a window. It never moves after
  that. Here refreshes follow it, and on a stream it falls by 10 % and more for long, so `STEADY` is wider.
- A value whose variance is 0 has seen no gradient. It is left out of the exchange, and its gradient waits for
  the next refresh, too.

Letters: d floats of a gradient, A of them active (with a variance), n ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freshet.model import FreezesVariance
from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.group_codecs import IntegerCodec, SignCodec
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.types import F32, I64

STEADY = 0.8
"""The warm-up ends if |v_t| and |v_(t - 1/(1 - beta2))|, sums of absolute values, have at least this ratio,
the smaller to the larger."""
REFRESH_STEPS = 256
ALERT_STEPS = 16
WHOLE_PART = 16
"""The part of a window after a jump, a 16th, in which each step sums a whole gradient."""
CATCH_UP = 32
"""Steps of weight that a refresh has at most: more would make the variance as noisy as one gradient."""
EPSILON = np.float32(1e-8)
"""Adam's; it bounds the step of a value with hardly a variance."""
FAST, SLOW = 1 / 16, 1 / 512
"""Weights of a step in the two running means of the loss."""
JUMP = 1.1
"""Ratio of these means from which on the loss has jumped."""
DEVIATIONS = 4.0
"""Standard deviations of the fast mean that a jump exceeds: a step with few positives varies by a third."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Views of Adam's moments after the last step; equal on all ranks."""

    first: F32  # (d,) m
    second: F32  # (d,) v, without bias correction; reducers write it


@dataclass(frozen=True, slots=True)
class Betas:
    """Adam's decay rates."""

    first: float = 0.9
    second: float = 0.999


class Drift:
    """Two running means of the logloss; a jump is a fast mean far above the slow one, beyond chance.

    A jump is the sign that the stream has changed and old statistics mislead. All ranks give the same losses,
    so all see the same jumps.
    """

    def __init__(self) -> None:
        self.fast = self.slow = 0.0  # no loss yet
        self.variance = 0.0  # of the loss of a step

    def observe(self, loss: float) -> None:
        """Add the mean loss of a step over all ranks; one that is not finite or above 0 is left out."""
        if not 0.0 < loss < float("inf"):
            return
        if not self.slow:
            self.fast = self.slow = loss
        self.variance += SLOW * ((loss - self.slow) ** 2 - self.variance)
        self.fast += FAST * (loss - self.fast)
        self.slow += SLOW * (loss - self.slow)

    def take_jump(self) -> bool:
        """Return whether the loss has jumped; the level after it is then the usual one."""
        deviation = math.sqrt(self.variance * FAST / (2 - FAST))  # of an exponentially weighted mean
        jumped = self.fast > max(JUMP * self.slow, self.slow + DEVIATIONS * deviation)
        if jumped:
            self.slow = self.fast
        return jumped


def finite_squares(gradient: F32) -> F32:
    """Return the (N,) squares of an (N,) gradient; 0 where not finite, as the model steps."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(gradient)
    squares[~np.isfinite(squares)] = 0
    return squares


class OneBitAdam:
    """Sums gradients for an Adam that lets its variance be frozen. One thread at a time uses it."""

    carry_weight = 1.0  # momentum keeps what a carry adds to it

    def __init__(
        self,
        size: int,
        betas: Betas | None = None,
        *,
        warmup_steps: int = 0,
        refresh_steps: int = REFRESH_STEPS,
    ) -> None:
        """Prepare for a gradient of `size` floats, d.

        Args:
            size: d.
            betas: Adam's.
            warmup_steps: steps before which the warm-up does not end: those of the learning rate's warm-up.
            refresh_steps: steps between two refreshes of the variance.
        """
        self.size, self.betas = size, betas or Betas()
        self.warmup_steps, self.refresh_steps = warmup_steps, refresh_steps
        self.drift = Drift()
        self.steps = 0
        self.variance_steps = 0  # of the variance, for its bias correction
        self.frozen = False
        self._window = round(1 / (1 - self.betas.second))
        self._norms: deque[float] = deque(maxlen=self._window + 1)
        self._refreshed = 0  # steps since the variance changed
        self._alert = 0  # steps for which it is refreshed more often
        # The largest of Adam's steps, over its rate: that of a value whose first gradient comes late.
        self._largest = (1 - self.betas.first) / math.sqrt(1 - self.betas.second)
        self._pending: F32 = np.zeros(size, np.float32)  # gradient that is left out of the exchange
        self._active: I64 = np.empty(0, np.int64)
        self._exchange = TwoPhase(SignCodec(), 0)
        self._sums = TwoPhase(IntegerCodec(8), size)  # of whole gradients

    def observe(self, loss: float) -> None:
        """Take the mean loss of the last step over all ranks, equal on all."""
        self.drift.observe(loss)

    def reduce(self, group: Collectives, gradient: F32, moments: Moments) -> bool:
        """Replace this rank's addend of the (d,) mean gradient by what Adam is to step with.

        Bit-identical on all ranks. A value that is not finite reaches it, and no residual. Returns whether
        the step must leave the variance as it is.

        Raises RankLost; residuals are then void, and the caller calls `load_state` with those of the state
        that it goes back to.
        """
        self.steps += 1
        jumped = self.drift.take_jump()
        if not self.frozen and self._is_steady(moments):
            self._freeze(moments)
        if not self.frozen:
            self._sums.reduce(group, gradient)
            self.variance_steps += 1
            return False
        self._refreshed += 1
        self._alert = self._window if jumped else max(self._alert - 1, 0)
        if self._refreshed >= self._interval():
            before = self._scaling(moments)
            self._refresh(group, gradient, moments)
            if np.array_equal(np.flatnonzero(moments.second > 0), self._active):
                self._exchange.rescale(self._scaling(moments) / before)
            else:
                self._deliver(group, gradient, before)
                self._activate(moments)
        else:
            self._compress(group, gradient, moments)
        return True

    def flush(self, group: Collectives, moments: Moments) -> F32:
        """Return the (d,) sum over the ranks of all that `reduce` has not delivered, and forget it.

        In units of the mean gradient. It belongs into the next step, which leaves the variance as it is.
        Values that had no variance get it from this sum, as it would be divided by epsilon else.

        Raises RankLost as `reduce` does.
        """
        rest = self._pending + self._sums.undelivered(group)
        if self.frozen:
            rest[self._active] += self._undelivered(group, self._scaling(moments))
        self.reset()
        group.reduce([rest])
        if self.frozen:
            fresh = np.where(moments.second > 0, np.float32(0), rest)
            if fresh.any():
                moments.second[:] += (1 - self._kept()) * finite_squares(fresh)
                self._activate(moments)
        return rest

    def reset(self) -> None:
        """Forget residuals."""
        self._pending.fill(0)
        self._exchange.reset()
        self._sums.reset()

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return all that ranks must have equal, for the dense state, right after a flush.

        The active values are bits; their scaling follows from the moments.
        """
        active = np.zeros(self.size, np.bool_)
        active[self._active] = True
        counts = [self.steps, self.variance_steps, self._refreshed, self._alert, self.frozen]
        return {
            "counts": np.array(counts, np.int64),
            "norms": np.array(self._norms, np.float64),
            "losses": np.array([self.drift.fast, self.drift.slow], np.float64),
            "loss_variance": np.array([self.drift.variance], np.float64),
            "active": np.packbits(active),
        }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load what `state` returned, and forget residuals."""
        self.steps, self.variance_steps, self._refreshed, self._alert, frozen = state["counts"].tolist()
        self.frozen = bool(frozen)
        self._norms.clear()
        self._norms.extend(state["norms"].tolist())
        self.drift.fast, self.drift.slow = state["losses"].tolist()
        variance = state.get("loss_variance")  # states of earlier releases have none
        self.drift.variance = 0.0 if variance is None else float(variance[0])
        self._active = np.flatnonzero(np.unpackbits(state["active"], count=self.size))
        self._exchange = TwoPhase(SignCodec(), len(self._active))
        self.reset()

    def _interval(self) -> int:
        """Return the steps between two refreshes of the variance now."""
        if not self._alert:
            return self.refresh_steps
        since = self._window - self._alert  # the last jump
        return 1 if since < self._window // WHOLE_PART else min(ALERT_STEPS, self.refresh_steps)

    def _is_steady(self, moments: Moments) -> bool:
        """Add the norm of the variance of the last step; return whether it is as it was a window ago."""
        if not self.variance_steps:
            return False
        whole = float(np.abs(moments.second).sum(dtype=np.float64))
        self._norms.append(whole / (1 - self.betas.second**self.variance_steps))
        if len(self._norms) <= self._window or self.steps <= self.warmup_steps:
            return False
        before, now = self._norms[0], self._norms[-1]
        finite = math.isfinite(before) and math.isfinite(now)
        return finite and 0.0 < STEADY * max(before, now) <= min(before, now)

    def _freeze(self, moments: Moments) -> None:
        self.frozen, self._refreshed = True, 0
        self._norms.clear()
        self._activate(moments)

    def _activate(self, moments: Moments) -> None:
        """Exchange the values that have a variance from now on; nothing is undelivered."""
        self._active = np.flatnonzero(moments.second > 0)
        self._exchange = TwoPhase(SignCodec(), len(self._active))

    def _scaling(self, moments: Moments) -> F32:
        """Return the (A,) factors that make momenta steps of weights."""
        scaling: F32 = np.float32(1) / (np.sqrt(moments.second[self._active]) + EPSILON)
        return scaling

    def _compress(self, group: Collectives, gradient: F32, moments: Moments) -> None:
        """Exchange signs of the momentum; the gradient becomes g_eff."""
        decay, scaling = np.float32(self.betas.first), self._scaling(moments)
        before = moments.first[self._active] * decay
        part = (before / np.float32(group.size) + gradient[self._active] * (1 - decay)) * scaling
        gradient[self._active] = 0
        if not np.isfinite(gradient).all():
            part[:1] = np.nan  # so that all ranks see it
        else:
            self._pending += gradient
        most = np.float32(self._largest / math.sqrt(group.size))
        beyond = np.flatnonzero((np.abs(part) > most) & np.isfinite(part))
        bounded = np.clip(part[beyond], -most, most)
        self._pending[self._active[beyond]] += (part[beyond] - bounded) / (scaling[beyond] * (1 - decay))
        part[beyond] = bounded
        self._exchange.reduce(group, part)
        gradient.fill(0)
        gradient[self._active] = (part / scaling - before) / (1 - decay)

    def _refresh(self, group: Collectives, gradient: F32, moments: Moments) -> None:
        """Sum the whole gradient, and move the variance by its square."""
        gradient += self._pending
        self._pending.fill(0)
        self._sums.reduce(group, gradient)
        kept = self._kept()
        moments.second[:] = kept * moments.second + (1 - kept) * finite_squares(gradient)
        self.variance_steps += min(self._refreshed, CATCH_UP)
        self._refreshed = 0

    def _kept(self) -> np.float32:
        """Return the weight of the variance as it stands if it is refreshed now."""
        return np.float32(self.betas.second ** min(max(self._refreshed, 1), CATCH_UP))

    def _deliver(self, group: Collectives, gradient: F32, scaling: F32) -> None:
        """Add all that is undelivered, in units of `scaling`, to a summed gradient; no residual is left."""
        rest = self._undelivered(group, scaling)
        self._exchange.reset()
        group.reduce([rest])
        gradient[self._active] += rest

    def _undelivered(self, group: Collectives, scaling: F32) -> F32:
        """Return this rank's part of the residual of active values, in units of the gradient."""
        rest: F32 = self._exchange.undelivered(group) / (scaling * np.float32(1 - self.betas.first))
        return rest


class SumsForAdam(Protocol):
    """Sums gradients by the moments of an Adam: `OneBitAdam`, `OneBitLamb`, `Dct`."""

    frozen: bool  # whether the next step leaves the variance as it is
    variance_steps: int  # of the variance, for its bias correction

    @property
    def carry_weight(self) -> float:
        """The factor of a carry that the step adds to what `reduce` has made of the gradient."""

    def reduce(self, group: Collectives, gradient: F32, moments: Moments) -> bool:
        """Replace this rank's addend of the (d,) mean gradient by what Adam is to step with.

        Returns whether the step must leave the variance as it is. Raises RankLost.
        """

    def flush(self, group: Collectives, moments: Moments) -> F32:
        """Return the (d,) sum over the ranks of all that `reduce` has not delivered. Raises RankLost."""

    def reset(self) -> None:
        """Forget residuals."""


class MomentsReducer:
    """A `Reducer` of mean gradients, on the moments of a model.

    `GradientSums` divides gradients by the rows of all ranks. What this delivers is for the next step of the
    model, which leaves the variance as it is once it is frozen. The model counts the steps of the variance,
    because those of a rank alone move it too.
    """

    def __init__(self, core: SumsForAdam, model: FreezesVariance) -> None:
        self.core, self._model = core, model

    def reduce(self, group: Collectives, gradient: F32) -> None:
        """Replace this rank's addend of the (d,) mean gradient by what Adam is to step with.

        Raises RankLost; the moments are then void too.
        """
        self.core.variance_steps = self._model.variance_steps
        if self.core.reduce(group, gradient, Moments(*self._model.moments())):
            self._model.variance_steps = self.core.variance_steps
            self._model.freeze_variance()

    def flush(self, group: Collectives) -> F32:
        """Return the (d,) sum over the ranks of all that `reduce` has not delivered, and forget it.

        Raises RankLost; the moments are then void too.
        """
        self.core.variance_steps = self._model.variance_steps
        rest = self.core.flush(group, Moments(*self._model.moments()))
        self._model.variance_steps = self.core.variance_steps
        return rest

    def reset(self) -> None:
        """Forget residuals."""
        self.core.reset()


class MomentumReducer(MomentsReducer):
    """1-bit Adam as a `Reducer`."""

    def __init__(self, momentum: OneBitAdam, model: FreezesVariance) -> None:
        super().__init__(momentum, model)
        self.momentum = momentum

    def observe(self, loss: float) -> None:
        """Take the mean loss of the last step over all ranks, equal on all."""
        self.momentum.observe(loss)

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return all that ranks must have equal, right after a flush."""
        return self.momentum.state()

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load what `state` returned, and forget residuals."""
        self.momentum.load_state(state)
