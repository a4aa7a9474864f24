"""Gather of a batch's rows into a network's input, and the sums of its gradients for each row.

On a processor the native core does both, in host memory, which tensors share. To another device a batch
travels as its unique rows and the positions that use them, and torch gathers, pools and sums there: a row
that occurs often travels once, and the host computes nothing. Letters: B samples, L labels, D dense columns,
F missing flags, W columns of vectors, U unique rows of a group, S float slots of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from freshet import _native
from freshet.model.device import Placement
from freshet.model.inputs import GroupInputs, ModelInputs
from freshet.model.plan import GroupTuple, InputPlan, groups_of
from freshet.types import F32, F64, Bool

STANDARD_LIMIT = 10.0
"""Limit of standardised numbers, in deviations."""


@dataclass(frozen=True, slots=True, eq=False)
class Standards:
    """How dense columns are standardised, each (D,); one that is not has mean 0, scale 1 and no limit."""

    standard: Bool
    mean: F64
    scale: F64  # 1 / deviation


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A batch's input, float32 on the device, and the tensors whose gradients `row_gradients` takes."""

    vectors: torch.Tensor  # (B, W)
    dense: torch.Tensor  # (B, D + F)
    linear: torch.Tensor  # (B, L)
    leaves: list[torch.Tensor]


class Gather(Protocol):
    """Gather of one thread."""

    def gather(self, inputs: ModelInputs, standards: Standards, *, learning: bool) -> Gathered:
        """Gather a batch; its leaves require gradients if it is `learning`."""

    def row_gradients(self, inputs: ModelInputs, of_leaves: Sequence[F32]) -> list[F32]:
        """Return each group's (U, S) gradients, by those of this batch's leaves; they own their memory."""


class HostGather:
    """`Gather` on a processor, by the native core."""

    def __init__(self, plan: InputPlan, placement: Placement, labels: int) -> None:
        self._plan, self._placement, self._labels = plan, placement, labels
        self._native = _native.InputLane(plan.native)

    def gather(self, inputs: ModelInputs, standards: Standards, *, learning: bool) -> Gathered:
        """See `Gather`. The leaves are vectors, with zeros to a multiple of 16, and linear."""
        plan, place = self._plan, self._placement
        x = np.empty((inputs.size, plan.width), np.float32)
        scalars = np.empty((inputs.size, plan.native[2]), np.float32)
        mean, scale = standards.mean, standards.scale
        self._native.gather(groups_of(inputs), inputs.dense, mean, scale, STANDARD_LIMIT, x, scalars)
        whole = place.send("x", x)
        vectors = whole[:, plan.vectors_from :]
        linear = place.send("scalars", scalars) if plan.scalars else torch.zeros(inputs.size, self._labels)
        if learning:
            vectors, linear = vectors.requires_grad_(), linear.requires_grad_()
        total = sum(dim for _, _, dim in plan.vectors)
        dense = whole[:, : inputs.dense.shape[1] + len(plan.flags)]
        return Gathered(vectors[:, :total], dense, linear, [vectors, linear])

    def row_gradients(self, inputs: ModelInputs, of_leaves: Sequence[F32]) -> list[F32]:
        """Return (U, S) gradients; see `Gather`."""
        vectors, linear = of_leaves
        gradients = [np.empty_like(group.rows) for group in inputs.groups]
        scalars = linear if self._plan.scalars else np.empty((inputs.size, 0), np.float32)
        dx, d_scalars = np.ascontiguousarray(vectors), np.ascontiguousarray(scalars)
        self._native.reduce(groups_of(inputs), inputs.dense, dx, d_scalars, gradients)
        return gradients


class DeviceGather:
    """`Gather` by torch, on the placement's device. Its leaves: each group's (U + 1, S) rows, the last 0."""

    def __init__(self, plan: InputPlan, placement: Placement, labels: int) -> None:
        self._plan, self._placement, self._labels = plan, placement, labels

    def gather(self, inputs: ModelInputs, standards: Standards, *, learning: bool) -> Gathered:
        """See `Gather`. Raises ValueError if the inputs do not fit the plan."""
        self._check(inputs)
        device = self._placement.device
        scalars = torch.zeros(inputs.size, self._plan.native[2], device=device)
        vectors = [torch.zeros(inputs.size, 0, device=device)]
        leaves: list[torch.Tensor] = []
        for g, (group, plan) in enumerate(zip(inputs.groups, self._plan.native[5], strict=True)):
            slots, scalar_slot, first, count, vector_slot, dim, *_ = plan
            sent = self._placement.send(f"rows/{g}", group.rows)
            rows = torch.cat([sent, torch.zeros(1, slots, device=device)]).requires_grad_(learning)
            leaves.append(rows)
            pooled = self._pooled(g, group, plan, rows, inputs.size)
            vectors.append(pooled[:, :, vector_slot : vector_slot + dim].transpose(0, 1).flatten(1))
            if count:
                of_group = pooled[:, :, scalar_slot : scalar_slot + count].sum(0)
                scalars = scalars + functional.pad(of_group, (first, scalars.shape[1] - first - count))
        linear = scalars if self._plan.scalars else torch.zeros(inputs.size, self._labels, device=device)
        return Gathered(torch.cat(vectors, 1), self._dense(inputs.dense, standards), linear, leaves)

    def row_gradients(self, inputs: ModelInputs, of_leaves: Sequence[F32]) -> list[F32]:
        """Return (U, S) gradients; see `Gather`."""
        return [gradient[:-1].copy() for gradient in of_leaves]

    def _pooled(
        self, g: int, group: GroupInputs, plan: GroupTuple, rows: torch.Tensor, size: int
    ) -> torch.Tensor:
        """Return (features, B, S): rows, or pooled rows of lists, of group `g`'s (U + 1, S) rows."""
        zeros = rows.shape[0] - 1
        sent = self._placement.send(f"positions/{g}", group.positions)
        whole = torch.where(sent < 0, zeros, sent)
        starts = group.feature_starts.tolist()
        positions = [whole[start:stop] for start, stop in pairwise(starts)]
        singles = [f for f, ends in enumerate(group.list_ends) if ends is None]
        of: dict[int, torch.Tensor] = {}
        if singles:  # all at once: a kernel, not one for each feature
            taken = torch.cat([positions[f] for f in singles]).view(len(singles), size)
            of |= zip(singles, functional.embedding(taken, rows, padding_idx=zeros).unbind(), strict=True)
        for f, ends in enumerate(group.list_ends):
            if ends is not None:
                begins = (ends - np.diff(ends, prepend=np.uint32(0))).astype(np.int32)
                offsets = self._placement.send(f"offsets/{g}/{f}", begins)
                mode = "mean" if plan[8][f][1] else "sum"
                of[f] = functional.embedding_bag(positions[f], rows, offsets, mode=mode, padding_idx=zeros)
        if not of:  # a table that no feature uses
            return rows.new_zeros(0, size, rows.shape[1])
        return torch.stack([of[f] for f in range(len(of))])

    def _check(self, inputs: ModelInputs) -> None:
        """Raise ValueError for what would end a GPU's context, or be taken for something else there."""
        dense, groups = len(self._plan.native[4]), self._plan.native[5]
        if inputs.dense.shape != (inputs.size, dense) or len(inputs.groups) != len(groups):
            raise ValueError(
                f"expected {dense} dense columns of {inputs.size} samples and {len(groups)} groups, "
                f"found {inputs.dense.shape} and {len(inputs.groups)}"
            )
        for g, (group, plan) in enumerate(zip(inputs.groups, groups, strict=True)):
            positions, features = group.positions, len(plan[8])
            fits = len(group.list_ends) == features and len(group.feature_starts) == features + 1
            if not fits or group.rows.shape[1] != plan[0]:
                raise ValueError(f"group {g}: expected {features} features and rows of {plan[0]} floats")
            if not -1 <= positions.min(initial=-1) <= positions.max(initial=-1) < len(group.rows):
                raise ValueError(f"group {g}: positions reach beyond its {len(group.rows)} rows")
            sizes = np.diff(group.feature_starts.astype(np.int64))
            for f, ends in enumerate(group.list_ends):
                own = inputs.size if ends is None else int(ends[-1]) if len(ends) else 0
                if own != sizes[f] or (ends is not None and (np.diff(ends.astype(np.int64)) < 0).any()):
                    raise ValueError(f"group {g}: expected {own} occurrences of its feature {f}, in order")

    def _dense(self, numbers: F32, standards: Standards) -> torch.Tensor:
        """Return (B, D + F): (B, D) numbers, standardised, 0 where missing; and flags, 1 where missing."""
        send = self._placement.send
        x, standard = send("dense", numbers), send("dense/standard", standards.standard)
        there = torch.isfinite(x)
        mean, scale = send("dense/mean", standards.mean), send("dense/scale", standards.scale)
        scaled = (x.double() - mean) * scale
        limited = scaled.float().clamp(-STANDARD_LIMIT, STANDARD_LIMIT)
        values = torch.where(there, torch.where(standard, limited, x), 0.0)
        flags = [column for column, _ in self._plan.flags]
        return torch.cat([values, (~there[:, flags]).float()], 1)
