"""Reducers: how ranks sum their dense gradients, and how much of each is sent in a step.

Here are their protocols, and the reducer that sends whole gradients.

A reducer that sends less than a whole gradient keeps the rest as residual (error feedback): what step t
does not deliver, a later step does. Two rules make this exact (PROTOCOL 14, 15):

- A *flush* sums the residuals of all ranks without compression and empties them. Its result is the *carry*,
  equal on all ranks, part of the dense state, and added to the next step's sum. Versions are written, and
  ranks join or leave, only right after a flush, so neither loses any part of a gradient.
- A rank that is lost without a flush takes its residual along. The others go back to the dense state of the
  last flush and train on the same samples again.

Letters: d floats of a gradient, n ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from freshet.types import F32, F64, U8

__all__ = ["ChoosesCodec", "Collectives", "ObservesLoss", "PlainReducer", "Reducer"]


class Collectives(Protocol):
    """What a reducer needs of a process group. All ranks make the same calls in the same order.

    Each raises RankLost if a rank does not answer.
    """

    rank: int
    size: int

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        """Sum each (N,) array over the ranks in place; the result is bit-identical on all ranks."""

    def all_to_all(self, parts: Sequence[U8], sizes: Sequence[int] | None = None) -> list[U8]:
        """Send part j, (N_j,) bytes, to rank j; returns the part that each rank sent to this one.

        `sizes`: the (n,) lengths of the parts for this rank. Ranks that do not know them all pass None; they
        are exchanged first then, which is one more message to wait for.
        """

    def all_gather(self, part: U8, sizes: Sequence[int] | None = None) -> list[U8]:
        """Return the (N_i,) bytes of every rank in rank order; lengths may differ.

        `sizes`: the (n,) lengths of all ranks' parts, or None as for `all_to_all`.
        """


class Reducer(Protocol):
    """Sums one gradient a step over the ranks. One thread at a time uses it."""

    def reduce(self, group: Collectives, gradient: F32) -> None:
        """Replace this rank's (d,) gradient by the sum over the ranks, as far as this step delivers it.

        The result is bit-identical on all ranks. A value that is not finite reaches the sum, and no residual.
        Raises RankLost; residuals are then void, and the caller calls `reset`.
        """

    def flush(self, group: Collectives) -> F32:
        """Return the (d,) sum over the ranks of all that `reduce` has not delivered, and forget it.

        Bit-identical on all ranks. Raises RankLost as `reduce` does.
        """

    def reset(self) -> None:
        """Forget residuals: the dense state goes back to one at which there were none."""


@runtime_checkable
class ObservesLoss(Protocol):
    """A `Reducer` that follows the loss."""

    def observe(self, loss: float) -> None:
        """Take the mean loss of the last step over all ranks, equal on all."""


@runtime_checkable
class ChoosesCodec(Protocol):
    """A `Reducer` that changes its codec, at flushes only."""

    reason: str  # of the choice

    @property
    def codec(self) -> str:
        """The codec in use."""

    @property
    def flush_due(self) -> bool:
        """Whether rank 0 wants a flush, to change it."""


class PlainReducer:
    """The `Reducer` that sends every gradient whole.

    It has no residual: every step delivers the whole sum, so every step is a flush point.
    """

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
