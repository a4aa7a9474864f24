"""AdaQuantFL (Jhunjhunwala et al., 2102.04487): fewer bits while the loss is high, more as it falls.

A quantiser with s levels rounds |x| / scale to one of 0 … s at random, so that the expectation is x (QSGD,
Alistarh et al., 1610.02132). s follows the running logloss f: s = ceil(s_0 root(f_0 / f)), at least
`LEAST_LEVELS`, at most `MOST_LEVELS`. A code takes ceil(log2(s + 1)) bits and a sign.

Ours differs from the paper in these:

- The scale is the largest absolute value of a group of 256, over s, not the Euclidean norm of all values: an
  error of at most 1 / s of the largest value, where the paper's variance grows with the root of d.
- It starts with more levels (`FIRST_LEVELS`). f_0 is the mean of the first `SPAN` steps, as one is noise.
- What is rounded off is fed back (`two_phase`): a group's residual stays below twice its largest gradient.
- When the loss rises, s falls again.

Letters: G groups, S floats of a group, s levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.group_codecs import HEAD_BYTES, heads_of
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.types import F32, U8

LEAST_LEVELS, MOST_LEVELS = 2, 127
FIRST_LEVELS = 8
"""s_0. The paper's 2 is for sums of many local steps. For the gradient of each step, 3 bits cost an AUC of
0.001 and 4 bits 0.0007 where 5 bits cost nothing (`bench.reducers`)."""
SPAN = 64
"""Steps of f_0 and of the running logloss, whose newest step has a weight of 1 / SPAN."""
LARGEST = 2.0**126
"""Values from here on count as not finite: code × scale could overflow."""
TINY = float(np.finfo(np.float32).tiny)


class LevelCodec:
    """A `GroupCodec` of `levels` levels and random rounding; `levels` may change between two steps."""

    group = 256

    def __init__(self, seed: int, levels: int = FIRST_LEVELS) -> None:
        """`seed`: as of `seed_rounding`."""
        self.levels = levels
        self.seed_rounding(seed)

    def seed_rounding(self, seed: int) -> None:
        """Seed the random numbers; ranks have different seeds, so that their errors are independent."""
        self._random = np.random.Generator(np.random.SFC64(seed))

    @property
    def bits(self) -> int:
        """Bits of a value: of its level, and of its sign."""
        return self.levels.bit_length() + 1

    @property
    def group_bytes(self) -> int:
        """Bytes of an encoded group."""
        return HEAD_BYTES + self.group * self.bits // 8

    def encode(self, values: F32, real: int) -> U8:
        """Encode (G, S) values as (G, group_bytes) bytes; zeros of padding change no scale."""
        largest = np.abs(values).max(axis=1, keepdims=True)
        finite = largest < LARGEST
        scales = np.where(finite & (largest < TINY), 0, largest / np.float32(self.levels)).astype("<f4")
        steady = finite & (scales > 0)
        scaled = np.divide(values, scales, out=np.zeros_like(values), where=steady)
        codes = np.floor(scaled + self._random.random(values.shape, np.float32))
        codes = np.where(steady, codes, 0).clip(-self.levels, self.levels).astype(np.int16)
        packed = np.empty((len(values), self.group_bytes), np.uint8)
        heads = np.where(finite, scales, np.float32(np.nan)).astype("<f4")
        packed[:, :HEAD_BYTES] = heads.view(np.uint8)
        packed[:, HEAD_BYTES:] = _pack((codes + self.levels).astype(np.uint8), self.bits)
        return packed

    def decode(self, packed: U8) -> F32:
        """Decode (G, group_bytes) bytes as (G, S) values."""
        codes = _unpack(packed[:, HEAD_BYTES:], self.bits)
        values: F32 = (codes.astype(np.float32) - np.float32(self.levels)) * heads_of(packed)
        return values


def _pack(codes: U8, bits: int) -> U8:
    """Return (G, S bits / 8) bytes of (G, S) codes below 2^bits, the first in the lowest bits."""
    words = np.zeros((len(codes), codes.shape[1] // 8), "<u8")
    for i in range(8):
        words |= codes[:, i::8].astype(np.uint64) << np.uint64(bits * i)
    eights = words.view(np.uint8).reshape(*words.shape, 8)
    return eights[:, :, :bits].reshape(len(codes), words.shape[1] * bits)


def _unpack(packed: U8, bits: int) -> U8:
    """Return the (G, S) codes of (G, S bits / 8) bytes."""
    count = packed.shape[1] // bits
    eights = np.zeros((len(packed), count, 8), np.uint8)
    eights[:, :, :bits] = packed.reshape(len(packed), count, bits)
    words = eights.view("<u8")[:, :, 0]
    codes = np.empty((len(packed), 8 * count), np.uint8)
    for i in range(8):
        codes[:, i::8] = (words >> np.uint64(bits * i)) & np.uint64((1 << bits) - 1)
    return codes


def levels_for(first_loss: float, loss: float) -> int:
    """Return s for a running logloss, given that of the first steps."""
    ratio = math.sqrt(first_loss / loss) if loss > 0 else math.inf
    return int(min(max(math.ceil(min(FIRST_LEVELS * ratio, MOST_LEVELS)), LEAST_LEVELS), MOST_LEVELS))


class AdaptiveLevels(TwoPhase):
    """A `Reducer` whose levels follow the loss."""

    def __init__(self, size: int) -> None:
        """`size`: d."""
        self.levels = LevelCodec(0)
        self.first_loss = self.running = 0.0  # f_0 and f
        self.losses = 0  # observed
        super().__init__(self.levels, size)

    def observe(self, loss: float) -> None:
        """Take the mean loss of the last step over all ranks, equal on all, and set the levels for it.

        One that is not finite or above 0 is left out.
        """
        if not 0.0 < loss < math.inf:
            return
        self.losses += 1
        self.running += (loss - self.running) / min(self.losses, SPAN)
        if self.losses == SPAN:
            self.first_loss = self.running
        self._set_levels()

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return f_0, the running logloss and their number of steps."""
        return {"losses": np.array([self.first_loss, self.running, self.losses])}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load what `state` returned, and forget residuals."""
        self.first_loss, self.running, losses = state["losses"].tolist()
        self.losses = int(losses)
        self._set_levels()
        self.reset()

    def _set_levels(self) -> None:
        known = self.losses >= SPAN
        self.levels.levels = levels_for(self.first_loss, self.running) if known else FIRST_LEVELS

    def _settle(self, group: Collectives) -> Sequence[int]:
        if self._place != (group.rank, group.size):
            self.levels.seed_rounding(group.rank)
        return super()._settle(group)
