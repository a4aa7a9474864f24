"""The reducer that sends every gradient whole."""

from __future__ import annotations

import numpy as np

from freshet.trainer.reducers import Collectives
from freshet.types import F32

__all__ = ["PlainReducer"]


class PlainReducer:
    """A `Reducer` without residual: every step delivers the whole sum, so every step is a flush point."""

    def __init__(self) -> None:
        self._size = 0

    def reduce(self, group: Collectives, gradient: F32) -> None:
        """Sum the (d,) gradient over the ranks in place. Raises RankLost."""
        self._size = len(gradient)
        group.reduce([gradient])

    def flush(self, group: Collectives) -> F32:
        """Return (d,) zeros, without a message: `reduce` has delivered all."""
        return np.zeros(self._size, np.float32)

    def reset(self) -> None:
        """Do nothing: there is no residual."""
