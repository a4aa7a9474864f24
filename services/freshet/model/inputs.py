"""Inputs of a model for one batch: rows, their occurrences, dense numbers and labels.

Letters: B samples, R requests, L labels, D dense columns, U unique rows of a group, S float slots of a row, N
occurrences, F_g features of group g.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet.types import F32, I32, I64, U8, U32

__all__ = ["GroupInputs", "Labels", "ModelInputs", "scores_requests"]


@dataclass(frozen=True, slots=True, eq=False)
class GroupInputs:
    """Rows of one store group and the occurrences that use them.

    Occurrences are feature-major: the group's features in spec order, each with its samples in order. A
    feature of single values has B occurrences; a list feature has one for each element, split by `list_ends`.
    """

    rows: F32  # (U, S) slots as looked up
    positions: I32  # (N,) row of each occurrence; -1: null, no row
    feature_starts: U32  # (F_g + 1,) occurrences of feature f are [feature_starts[f], feature_starts[f + 1])
    list_ends: Sequence[U32 | None]
    """Per feature: (B,) ends of each sample's occurrences within a list feature; None for other features."""
    shared: U8 | None = None  # (F_g,) 1: one occurrence, or list, per request instead of sample; serving only

    def expanded(self, request_of: I64) -> GroupInputs:
        """Return a copy with shared occurrences repeated per sample; `request_of`, (B,), has each sample's
        request."""
        if self.shared is None:
            return self
        positions: list[I32] = []
        list_ends: list[U32 | None] = []
        for f, ends in enumerate(self.list_ends):
            start, stop = self.feature_starts[f : f + 2].tolist()
            own = self.positions[start:stop]
            if not self.shared[f]:
                positions.append(own)
                list_ends.append(ends)
            elif ends is None:
                positions.append(own[request_of])
                list_ends.append(None)
            else:
                lists = np.split(own, ends[:-1])
                positions.append(np.concatenate([own[:0], *(lists[r] for r in request_of)]))
                list_ends.append(np.cumsum(np.diff(ends, prepend=0)[request_of], dtype=np.uint32))
        starts = np.cumsum([0, *(len(p) for p in positions)], dtype=np.uint32)
        joined = np.concatenate([self.positions[:0], *positions])
        return GroupInputs(self.rows, joined, starts, list_ends)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Labels of the samples, one each; the loss of the other heads is masked."""

    index: U8  # (B,) position of the label in the spec
    value: F32  # (B,)
    weight: F32  # (B,) 1, or 1/rate where negatives were down-sampled


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """One batch. The lane that built it reuses its arrays for the next batch."""

    size: int  # B
    groups: Sequence[GroupInputs]
    dense: F32  # (B, D) after stateless transforms, before standardisation; NaN where missing
    labels: Labels | None  # None at serving
    request_ends: U32 | None = None  # (R,) end of each request's samples, if groups share; serving only

    def expanded(self) -> ModelInputs:
        """Return a copy without shared features, for models that do not score requests."""
        if self.request_ends is None:
            return self
        counts = np.diff(self.request_ends, prepend=0)
        request_of = np.repeat(np.arange(len(counts)), counts)
        return ModelInputs(self.size, [g.expanded(request_of) for g in self.groups], self.dense, self.labels)

    def copied(self) -> ModelInputs:
        """Return a copy that owns its memory, to outlive the lane's next batch."""
        groups = [
            GroupInputs(
                g.rows.copy(),
                g.positions.copy(),
                g.feature_starts.copy(),
                [None if ends is None else ends.copy() for ends in g.list_ends],
                g.shared,
            )
            for g in self.groups
        ]
        labels = self.labels
        if labels is not None:
            labels = Labels(labels.index.copy(), labels.value.copy(), labels.weight.copy())
        return ModelInputs(self.size, groups, self.dense.copy(), labels, self.request_ends)


def scores_requests(model: object) -> bool:
    """Return whether a model's `score` accepts several requests with shared features.

    Such a model has a true attribute `scores_requests`; a sample's score then must not depend, to the bit, on
    the other samples. Other models score one expanded request at a time.
    """
    return bool(getattr(model, "scores_requests", False))
