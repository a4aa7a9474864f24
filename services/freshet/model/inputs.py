"""What a model is given for one batch: looked-up rows, where they go, dense numbers and labels.

Letters: B samples, R requests, L labels, D dense columns, U unique rows of a group, S float slots of a row, N
occurrences.
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

    Occurrences are feature-major: the features of this group in spec order, each with its samples in order. A
    feature of single values has exactly B occurrences; a list feature has as many as its lists hold, cut by
    `list_ends`.
    """

    rows: F32  # (U, S) slots as looked up
    positions: I32  # (N,) row of each occurrence; -1: null, no row
    feature_starts: U32  # (F_g + 1,) occurrences of feature f are [feature_starts[f], feature_starts[f + 1])
    list_ends: Sequence[
        U32 | None
    ]  # per feature: None, or (B,) ends of each sample's occurrences within the feature
    shared: U8 | None = None  # (F_g,) 1: one occurrence, or list, a request and not a sample. Serving only

    def expanded(self, request_of: I64) -> GroupInputs:
        """The same with every occurrence a sample's own; `request_of` (B,) is each sample's request."""
        if self.shared is None:
            return self
        positions: list[I32] = []
        list_ends: list[U32 | None] = []
        for f, ends in enumerate(self.list_ends):
            start, stop = self.feature_starts[f : f + 2].tolist()
            mine = self.positions[start:stop]
            if not self.shared[f]:
                positions.append(mine)
                list_ends.append(ends)
            elif ends is None:
                positions.append(mine[request_of])
                list_ends.append(None)
            else:
                lists = np.split(mine, ends[:-1])
                positions.append(np.concatenate([mine[:0], *(lists[r] for r in request_of)]))
                list_ends.append(np.cumsum(np.diff(ends, prepend=0)[request_of], dtype=np.uint32))
        starts = np.cumsum([0, *(len(p) for p in positions)], dtype=np.uint32)
        joined = np.concatenate([self.positions[:0], *positions])
        return GroupInputs(self.rows, joined, starts, list_ends)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """What the samples teach. A sample carries one label; the loss of the other heads is masked."""

    index: U8  # (B,) position of the label in the spec
    value: F32  # (B,)
    weight: F32  # (B,) 1, or 1/rate where negatives were down-sampled


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """One batch as a model sees it. Arrays belong to the lane that made them and are valid until its next
    batch."""

    size: int  # B
    groups: Sequence[GroupInputs]
    dense: F32  # (B, D) after stateless transforms, before standardisation; NaN where missing
    labels: Labels | None  # None when serving
    request_ends: U32 | None = None  # (R,) where each request's samples end, if groups share; serving only

    def expanded(self) -> ModelInputs:
        """The same with nothing shared, for models that know no requests."""
        if self.request_ends is None:
            return self
        counts = np.diff(self.request_ends, prepend=0)
        request_of = np.repeat(np.arange(len(counts)), counts)
        return ModelInputs(self.size, [g.expanded(request_of) for g in self.groups], self.dense, self.labels)

    def copied(self) -> ModelInputs:
        """The same in memory of its own, to be kept beyond the lane's next batch."""
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
    """Whether a model's `score` takes several requests at once, with what their samples share given once.

    Such a model has an attribute `scores_requests` that is true, and promises that a sample's score depends
    on nothing but the sample: it is the same to the bit whatever is scored with it. Others are given one
    request at a time, expanded.
    """
    return bool(getattr(model, "scores_requests", False))
