"""A jump of the running logloss: the sign that the stream has changed and old statistics mislead."""

from __future__ import annotations

import math

FAST, SLOW = 1 / 16, 1 / 512
"""Weights of a step in the two running means."""
JUMP = 1.1
"""Ratio of the means from which on it is a jump."""
DEVIATIONS = 4.0
"""Standard deviations of the fast mean that a jump exceeds: a step with few positives varies by a third."""


class Drift:
    """Two running means of the loss; a jump is a fast mean far above the slow one, beyond chance.

    All ranks give the same losses, so all see the same jumps.
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
