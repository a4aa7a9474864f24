"""Sums of dense gradients over ranks, and the part of them that no step has used yet (PROTOCOL 14).

Letters: d floats of a gradient.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Mismatch
from freshet.model import FreezesVariance, Lane, StepResult
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.reducers import ChoosesCodec, ObservesLoss, PlainReducer, Reducer
from freshet.trainer.reducers.one_bit_adam import MomentsReducer
from freshet.types import F32, F64, U8
from freshet.wires.row_wire import RowCounts

__all__ = ["CARRY", "MEAN_CARRY", "SUMS", "CountingCollectives", "GradientSums", "SharesState", "ring_bytes"]

SUMS = "reduce/"
"""Prefix of the state of reducers and their carry, in versions and in the state that ranks send."""

CARRY = "reduce/carry"
"""Name of the carry; absent while it is zero."""

MEAN_CARRY = "reduce/mean_carry"
"""Name of a carry of 1-bit Adam or DCT: a step adds it to the mean gradient, and leaves the variance as it is
(1-bit Adam: after the warm-up)."""


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
    adam: FreezesVariance | None = None  # the model, if it has one
    name: str = "fp32"  # of the reducer, as `train.reduce` has it
    carry_of_mean: bool = field(default=False, init=False)  # see MEAN_CARRY
    counts: dict[str, RowCounts] = field(default_factory=dict, init=False)
    """By codec what this rank sent; `rows`: sums, and averagings; `bytes_raw`: what whole arrays would have
    been; `encode_s`: to encode and to decode. Bytes of a sum of whole arrays are counted as those of a ring,
    2 (n - 1) / n of them."""
    _owed: bool = field(default=False, init=False)  # the reducer may hold residuals

    @property
    def lossy(self) -> bool:
        """Whether a step may deliver less than the whole sum, so that not every step is a flush point."""
        return not isinstance(self.reducer, PlainReducer)

    @property
    def codec(self) -> str:
        """The codec in use."""
        return self.reducer.codec if isinstance(self.reducer, ChoosesCodec) else self.name

    @property
    def choice(self) -> Mapping[str, str]:
        """The codec in use, and why."""
        why = self.reducer.reason if isinstance(self.reducer, ChoosesCodec) else "as set"
        return {"codec": self.codec, "why": why}

    @property
    def flush_due(self) -> bool:
        """Whether rank 0 wants a flush, to change its codec, and there may be something to flush."""
        return self._owed and isinstance(self.reducer, ChoosesCodec) and self.reducer.flush_due

    def reduce(
        self, group: ProcessGroup | None, lanes: Sequence[Lane], results: Sequence[StepResult] = ()
    ) -> Sequence[Lane]:
        """Sum the gradients of lanes and ranks; returns the lanes that hold the sums for the step.

        A rank that steps alone (`group` None) keeps its lanes, which the step itself sums, unless there is a
        carry. The step must have a weighted row: a model drops the sums of a step without one. `results` are
        those of this rank's batches, whose losses some reducers follow.

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
            size = sum(buffer.nbytes for buffer in buffers if buffer.dtype == np.float32)
            sent = ring_bytes(size, group.size)
            self.count(self.codec, sent, sent, 0.0)
        if (group is not None and self.lossy) or self.carry is not None:
            large = [cast(F32, buffer) for buffer in buffers if buffer.dtype == np.float32]
            gradient = large[0] if len(large) == 1 else _joined(large)
            if group is not None and self.lossy:
                self._reduce_lossy(group, first, buffers, gradient, results)
            core = self.reducer.core if group and isinstance(self.reducer, MomentsReducer) else None
            self._add_carry(gradient, first, core.carry_weight if core else 1.0)
            if len(large) > 1:
                _split(gradient, large)
        return [first]

    def flush(self, group: ProcessGroup) -> None:
        """Move the residuals of all ranks to the carry, which is equal on all of them then.

        Raises RankLost: residuals and carry are void; load the state of the last flush point.
        """
        if not self._owed:
            return
        counted, codec = CountingCollectives(group), self.codec
        flushed = self.reducer.flush(counted)
        self.counts.setdefault(codec, RowCounts()).bytes_wire += counted.sent
        total = flushed if self.carry is None else self.carry + flushed
        self.carry = total if total.any() else None
        self.carry_of_mean = isinstance(self.reducer, MomentsReducer)
        self._owed = False

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the carry unless it is zero, and the reducer's own state. At a flush point only."""
        name = MEAN_CARRY if self.carry_of_mean else CARRY
        state: dict[str, NDArray[Any]] = {} if self.carry is None else {name: self.carry.copy()}
        if isinstance(self.reducer, SharesState):
            state |= {self._prefix + name: array for name, array in self.reducer.state().items()}
        return state

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load the state of a flush point, among other arrays: there are no residuals.

        Without arrays of this reducer, as in a version of another one, its own state stays as it is.
        """
        self.carry_of_mean = MEAN_CARRY in state
        self.carry, self._owed = state.get(MEAN_CARRY if self.carry_of_mean else CARRY), False
        self.reducer.reset()
        own = {
            name.removeprefix(self._prefix): a for name, a in state.items() if name.startswith(self._prefix)
        }
        if own and isinstance(self.reducer, SharesState):
            self.reducer.load_state(own)

    def count(self, codec: str, raw: int, sent: int, coding_s: float) -> None:
        """Count a sum or an averaging in `counts`: bytes as float32, bytes sent, seconds."""
        counts = self.counts.setdefault(codec, RowCounts())
        counts.rows += 1
        counts.bytes_raw += raw
        counts.bytes_wire += sent
        counts.encode_s += coding_s

    @property
    def _prefix(self) -> str:
        return f"{SUMS}{type(self.reducer).__name__}/"

    def _reduce_lossy(
        self,
        group: ProcessGroup,
        lane: Lane,
        buffers: Sequence[F32 | F64],
        gradient: F32,
        results: Sequence[StepResult],
    ) -> None:
        small = [buffer for buffer in buffers if buffer.dtype != np.float32]
        loss = _loss_and_rows(results)
        if isinstance(self.reducer, ObservesLoss):
            small.append(loss)
        if small:
            group.reduce(small)
        if not len(gradient):
            return
        self._owed = True
        rows = self._rows(lane) if isinstance(self.reducer, MomentsReducer) else None
        if rows is not None:
            gradient /= rows
        counted, began = CountingCollectives(group), time.perf_counter()
        self.reducer.reduce(counted, gradient)
        coding_s = time.perf_counter() - began - counted.waited_s
        self.count(self.codec, ring_bytes(gradient.nbytes, group.size), counted.sent, coding_s)
        if rows is not None:
            gradient *= rows  # by which the model divides
        if isinstance(self.reducer, ObservesLoss) and loss[1] > 0:
            self.reducer.observe(float(loss[0] / loss[1]))

    def _rows(self, lane: Lane) -> np.float32:
        """Return by how many rows the model divides a lane's gradient, once sums are those of all ranks."""
        if self.adam is None:
            raise Mismatch(
                "the version's carry is one of 1bit-adam or dct, and this model has no Adam that it knows"
            )
        return np.float32(self.adam.gradient_rows(lane))

    def _add_carry(self, gradient: F32, lane: Lane, weight: float) -> None:
        if self.carry is None:
            return
        if self.carry.shape != gradient.shape:
            raise Mismatch(
                f"the version's carry has shape {self.carry.shape}, a gradient of this spec has"
                f" {gradient.shape}: it was written by another spec"
            )
        if self.carry_of_mean:
            gradient += self.carry * np.float32(weight * self._rows(lane))
            assert self.adam is not None
            if not isinstance(self.reducer, MomentsReducer) or self.reducer.core.frozen:
                self.adam.freeze_variance()
        else:
            gradient += self.carry * np.float32(weight)
        self.carry = None


class CountingCollectives:
    """The collectives of a group, the bytes that this rank sends by them, and the time that they take."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group
        self.sent = 0
        self.waited_s = 0.0

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        """Sum each (N,) array over the ranks in place."""
        began = time.perf_counter()
        self._group.reduce(buffers)
        self.waited_s += time.perf_counter() - began
        self.sent += ring_bytes(sum(buffer.nbytes for buffer in buffers), self.size)

    def all_to_all(self, parts: Sequence[U8], sizes: Sequence[int] | None = None) -> list[U8]:
        """Send part j, (N_j,) bytes, to rank j; returns the parts for this rank."""
        began = time.perf_counter()
        received = self._group.all_to_all(parts, sizes)
        self.waited_s += time.perf_counter() - began
        self.sent += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        return received

    def all_gather(self, part: U8, sizes: Sequence[int] | None = None) -> list[U8]:
        """Return the (N_i,) bytes of every rank in rank order."""
        began = time.perf_counter()
        received = self._group.all_gather(part, sizes)
        self.waited_s += time.perf_counter() - began
        self.sent += part.nbytes * (self.size - 1)
        return received


def ring_bytes(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends to sum an array of `size` bytes by a ring."""
    return 2 * (ranks - 1) * size // ranks


def _loss_and_rows(results: Sequence[StepResult]) -> F64:
    """Return the loss, a mean over experts, and the weighted rows, both summed over labels and batches."""
    losses = sum(float(result.expert_losses.sum(axis=0).mean()) for result in results)
    return np.array([losses, sum(float(result.rows.sum()) for result in results)], np.float64)


def _joined(parts: Sequence[F32]) -> F32:
    """Return the (d,) copy of all parts together."""
    return np.concatenate([*parts, np.empty(0, np.float32)], dtype=np.float32)


def _split(whole: F32, parts: Sequence[F32]) -> None:
    """Copy the (d,) array to the parts, in their order."""
    at = 0
    for part in parts:
        part[:] = whole[at : at + len(part)]
        at += len(part)
