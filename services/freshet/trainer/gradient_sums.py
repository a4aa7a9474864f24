"""Sums of dense gradients over ranks, and the part of them that no step has used yet (PROTOCOL 14).

Letters: d floats of a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Mismatch
from freshet.model import Lane
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.reducers import Reducer
from freshet.trainer.reducers.plain import PlainReducer
from freshet.types import F32, F64

__all__ = ["CARRY", "SUMS", "GradientSums", "SharesState"]

SUMS = "reduce/"
"""Prefix of the state of reducers and their carry, in versions and in the state that ranks send."""

CARRY = "reduce/carry"
"""Name of the carry; absent while it is zero."""


@runtime_checkable
class SharesState(Protocol):
    """A `Reducer` with state besides residuals that must be equal on all ranks: a part of the dense state."""

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return copies of the arrays. Called right after a flush."""

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load the state of this or another rank, and forget residuals."""


@dataclass
class GradientSums:
    """The reducer of a rank and its carry. One thread at a time uses it.

    Float32 buffers of a lane are its gradient and go through the reducer; float64 buffers are small and are
    always summed whole.
    """

    reducer: Reducer = field(default_factory=PlainReducer)
    carry: F32 | None = None  # (d,) result of the last flush, which the next step adds; None: zeros
    _owed: bool = field(default=False, init=False)  # the reducer may hold residuals

    @property
    def lossy(self) -> bool:
        """Whether a step may deliver less than the whole sum, so that not every step is a flush point."""
        return not isinstance(self.reducer, PlainReducer)

    def reduce(self, group: ProcessGroup | None, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Sum the gradients of lanes and ranks; returns the lanes that hold the sums for the step.

        A rank that steps alone (`group` None) keeps its lanes, which the step itself sums, unless there is a
        carry. The step must have a weighted row: a model drops the sums of a step without one.

        Raises:
            RankLost: a rank did not answer; the sums are void.
            Mismatch: the carry is of another model.
        """
        if group is None and self.carry is None:
            return lanes
        first, *others = lanes
        for lane in others:
            first.merge(lane)
        buffers = first.reduce_buffers()
        if group is not None and not self.lossy:
            group.reduce(buffers)  # all buffers in one call, so that their messages overlap
        if (group is not None and self.lossy) or self.carry is not None:
            large = [cast(F32, buffer) for buffer in buffers if buffer.dtype == np.float32]
            gradient = large[0] if len(large) == 1 else _joined(large)
            if group is not None and self.lossy:
                self._reduce_lossy(group, buffers, gradient)
            self._add_carry(gradient)
            if len(large) > 1:
                _split(gradient, large)
        return [first]

    def flush(self, group: ProcessGroup) -> None:
        """Move the residuals of all ranks to the carry, which is equal on all of them then.

        Raises RankLost: residuals and carry are void; load the state of the last flush point.
        """
        if not self._owed:
            return
        flushed = self.reducer.flush(group)
        total = flushed if self.carry is None else self.carry + flushed
        self.carry = total if total.any() else None
        self._owed = False

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the carry unless it is zero, and the reducer's own state. At a flush point only."""
        state: dict[str, NDArray[Any]] = {} if self.carry is None else {CARRY: self.carry.copy()}
        if isinstance(self.reducer, SharesState):
            state |= {self._prefix + name: array for name, array in self.reducer.state().items()}
        return state

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load the state of a flush point, among other arrays: there are no residuals.

        Without arrays of this reducer, as in a version of another one, its own state stays as it is.
        """
        self.carry, self._owed = state.get(CARRY), False
        self.reducer.reset()
        own = {
            name.removeprefix(self._prefix): a for name, a in state.items() if name.startswith(self._prefix)
        }
        if own and isinstance(self.reducer, SharesState):
            self.reducer.load_state(own)

    @property
    def _prefix(self) -> str:
        return f"{SUMS}{type(self.reducer).__name__}/"

    def _reduce_lossy(self, group: ProcessGroup, buffers: Sequence[F32 | F64], gradient: F32) -> None:
        small = [buffer for buffer in buffers if buffer.dtype != np.float32]
        if small:
            group.reduce(small)
        if len(gradient):
            self._owed = True
            self.reducer.reduce(group, gradient)

    def _add_carry(self, gradient: F32) -> None:
        if self.carry is None:
            return
        if self.carry.shape != gradient.shape:
            raise Mismatch(
                f"the version's carry has shape {self.carry.shape}, a gradient of this spec has"
                f" {gradient.shape}: it was written by another spec"
            )
        gradient += self.carry
        self.carry = None


def _joined(parts: Sequence[F32]) -> F32:
    """Return the (d,) copy of all parts together."""
    return np.concatenate([*parts, np.empty(0, np.float32)], dtype=np.float32)


def _split(whole: F32, parts: Sequence[F32]) -> None:
    """Copy the (d,) array to the parts, in their order."""
    at = 0
    for part in parts:
        part[:] = whole[at : at + len(part)]
        at += len(part)
