"""DCT for data parallelism (Gupta et al., 2010.08899): ranks send the values above a threshold alone.

The rest stays as residual, and is added to the next gradient. For a rank's addend g of the mean gradient:

    h = g + residual;  S = where |h| / (root(v) + eps) is above the threshold
    p = int8 codes of h[S] / (root(v[S]) + eps), times one scale, times root(v[S]) + eps
    residual = h - p;  m = sum of the ranks' p;  weights -= rate m / root(v), by Adam's own step

Ours differs from the paper, which selects by the gradient of each tensor, in these:

- Values are selected by the step that they make, |h| / root(v) for Adam's second moment v, over all tensors
  at once. No tensor is sent whole.
- v is not made of the sparse sums: one in two hundred steps delivers the sum of two hundred gradients. Their
  squares make v 200 times too large. Each rank keeps a decayed mean of the squares of its own gradients,

      v_i <- beta2 v_i + (1 - beta2) g_i^2

  and v is their sum over the ranks, in a byte a value (`SquareCodec`), at steps 1, 2, 4, … 256 of the
  variance, then every 256, and at flushes. In between v stands still.
- No momentum is on top: p is a sum of many gradients already. So Adam gets (m - beta1 m_before) / (1 - beta1)
  as its gradient. What momentum Adam has from steps without DCT is residual, and a flush leaves m = 0.
- The paper keeps a threshold for thousands of steps. As a gradient's scale drifts, so does the share that is
  sent. Here a servo moves the threshold at each step towards the share that is wanted; outside
  [eta / 2, 4 eta] the largest values are selected exactly.
- A rank's part of a step is at most the largest of Adam's steps without momentum, root(1 / (1 - beta2)) times
  its rate: a value can outgrow its v. The rest waits until v has been summed again, as does one without v.
- Sums need no parameter server: each rank gets the frames of all, and adds them in rank order, so the result
  is bit-identical.

Letters: d floats of a gradient, n ranks, K values sent.
"""

from __future__ import annotations

import math

import numpy as np

from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.group_codecs import SquareCodec
from freshet.trainer.reducers.one_bit_adam import EPSILON, Betas, Moments
from freshet.trainer.reducers.sparse_frame import Part, decode_frame, encode_frame, quantized
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.types import F32, I64

SHARE = 0.0045
"""eta of `train.reduce`: 4 ranks send 100 times fewer bytes than fp32 (`bench.reducers --steps 3000`)."""
GAIN, SLOWEST, FASTEST = 0.1, 0.8, 1.25
"""The servo: threshold *= clamp((share / eta)^GAIN, SLOWEST, FASTEST)."""
LEAST, MOST = 0.5, 4.0
"""Shares, in eta, outside which the values are selected exactly."""
LARGEST = 2.0**63
"""Gradients from here on count as not finite: their square, or its sum, could overflow."""
VARIANCE_EVERY = 256
"""Steps between two sums of the variance, which happen at powers of two before."""


class Dct:
    """Sums gradients for an Adam that lets its variance be frozen. One thread at a time uses it."""

    frozen = True  # no step moves the variance: `reduce` and `flush` do

    def __init__(
        self,
        size: int,
        betas: Betas | None = None,
        *,
        share: float = SHARE,
        variance_every: int = VARIANCE_EVERY,
    ) -> None:
        """`size`: d; `betas`: Adam's; `share`: eta; `variance_every`: steps between sums of the variance."""
        self.size, self.betas, self.share, self.variance_every = size, betas or Betas(), share, variance_every
        self.variance_steps = 0  # that `Moments.second` contains
        self.threshold = 0.0
        self.residual: F32 = np.zeros(size, np.float32)
        self._squares: F32 = np.zeros(size, np.float32)  # v_i
        self._roots: F32 | None = None  # root(v) + eps, infinite where v is 0; None: v may be another's
        self._waits = np.zeros(size, np.bool_)  # for the next sum of the variance
        self._unsummed = 0  # steps since the last one
        self._sums = TwoPhase(SquareCodec(), size)

    @property
    def correction(self) -> float:
        """By what Adam divides the momentum of the step that `reduce` was for: 1 - beta1^steps."""
        return 1 - self.betas.first ** (self.variance_steps + self._unsummed)

    @property
    def carry_weight(self) -> float:
        """The factor of a carry that the step adds, as the next step's momentum has nothing of it."""
        return self.correction / (1 - self.betas.first)

    def reduce(self, group: Collectives, gradient: F32, moments: Moments) -> bool:
        """Replace this rank's addend of the (d,) mean gradient by what Adam is to step with.

        Bit-identical on all ranks. A value that is not finite, or beyond 2^63, becomes NaN; its residual
        stays as it was. Returns True: the step must leave the variance as it is.

        Raises:
            RankLost: a rank does not answer; residuals and moments are void, so call `reset`.
            Corrupt: a rank sent bytes that are no frame of such a gradient.
        """
        roots = self._begin(group, moments) if self._roots is None else self._roots
        broken = np.flatnonzero(~(np.abs(gradient) < LARGEST))
        gradient[broken] = 0
        kept = np.float32(self.betas.second)
        self._squares *= kept
        self._squares += (1 - kept) * np.square(gradient)
        self._unsummed += 1
        if self._is_variance_due():
            roots = self._sum_variance(group, moments)
        self.residual += gradient
        frames = group.all_gather(encode_frame(self._part(roots, broken), self.size))
        gradient.fill(0)
        for frame in frames:
            part = decode_frame(frame, self.size)
            gradient[part.indexes] += part.values() * roots[part.indexes]
        gradient *= np.float32(self.correction)
        gradient -= np.float32(self.betas.first) * moments.first
        gradient /= np.float32(1 - self.betas.first)
        return True

    def flush(self, group: Collectives, moments: Moments) -> F32:
        """Return the (d,) sum over the ranks of all that `reduce` has not delivered, and forget it.

        In units of the mean gradient. It sums the variance first, and leaves no momentum: all of it has been
        delivered. Raises RankLost as `reduce` does.
        """
        if self._unsummed:
            self._sum_variance(group, moments)
        rest = self.residual.copy()
        self.reset()
        group.reduce([rest])
        moments.first.fill(0)
        return rest

    def reset(self) -> None:
        """Forget residuals and squares; the threshold stays, as it is no part of a gradient."""
        self.residual.fill(0)
        self._roots, self._unsummed = None, 0

    def _begin(self, group: Collectives, moments: Moments) -> F32:
        """Take this rank's part of the moments, as all ranks do; returns the (d,) roots."""
        self._squares[:] = moments.second / np.float32(group.size)
        undelivered = self.betas.first / (1 - self.betas.first) / group.size
        self.residual += np.float32(undelivered) * moments.first
        return self._root(moments)

    def _root(self, moments: Moments) -> F32:
        roots: F32 = np.where(moments.second > 0, np.sqrt(moments.second) + EPSILON, np.float32(np.inf))
        self._roots = roots
        self._waits.fill(False)
        return roots

    def _is_variance_due(self) -> bool:
        step = self.variance_steps + self._unsummed
        return step & (step - 1) == 0 if step <= self.variance_every else step % self.variance_every == 0

    def _sum_variance(self, group: Collectives, moments: Moments) -> F32:
        """Move the variance to the sum of the ranks' squares; returns the (d,) roots."""
        total = self._squares.copy()
        self._sums.reset()  # what the last sum rounded is no part of this one
        self._sums.reduce(group, total)
        np.copyto(moments.second, total, where=~np.isnan(total))
        self.variance_steps += self._unsummed
        self._unsummed = 0
        return self._root(moments)

    def _part(self, roots: F32, broken: I64) -> Part:
        """Select and round what is sent of the residual, and take it from there."""
        with np.errstate(over="ignore"):
            scaled = self.residual / roots
        sizes = np.abs(scaled)
        sizes[self._waits] = 0
        sizes[broken] = 0
        chosen = self._select(sizes)
        bias = 1 - self.betas.second**self.variance_steps
        most = np.float32(1 / math.sqrt((1 - self.betas.second) * bias))
        self._waits[chosen[sizes[chosen] > most]] = True
        scaled[broken] = np.nan
        indexes = np.union1d(chosen, broken)
        part = quantized(scaled[indexes].clip(-most, most), indexes)
        self.residual[chosen] -= (part.values() * roots[indexes])[np.isin(indexes, chosen)]
        return part

    def _select(self, sizes: F32) -> I64:
        """Return the rising indexes of the values of (d,) absolute `sizes` to send; move the threshold."""
        wanted = max(self.share * len(sizes), 1.0)
        chosen = np.flatnonzero(sizes > self.threshold)
        if LEAST * wanted <= len(chosen) <= MOST * wanted:
            self.threshold *= min(max((len(chosen) / wanted) ** GAIN, SLOWEST), FASTEST)
            return chosen
        largest = np.argpartition(sizes, len(sizes) - round(wanted))[len(sizes) - round(wanted) :]
        self.threshold = float(sizes[largest].min())
        exact: I64 = np.sort(largest[sizes[largest] > 0])
        return exact
