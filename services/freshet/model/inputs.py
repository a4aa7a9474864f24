"""What a model is given for one batch: looked-up rows, where they go, dense numbers and labels.

Letters: B samples, L labels, D dense columns, U unique rows of a group, S float slots of a row, N
occurrences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freshet.types import F32, I32, U8, U32

__all__ = ["GroupInputs", "Labels", "ModelInputs"]


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

    def copied(self) -> ModelInputs:
        """The same in memory of its own, to be kept beyond the lane's next batch."""
        groups = [
            GroupInputs(
                g.rows.copy(),
                g.positions.copy(),
                g.feature_starts.copy(),
                [None if ends is None else ends.copy() for ends in g.list_ends],
            )
            for g in self.groups
        ]
        labels = self.labels
        if labels is not None:
            labels = Labels(labels.index.copy(), labels.value.copy(), labels.weight.copy())
        return ModelInputs(self.size, groups, self.dense.copy(), labels)
