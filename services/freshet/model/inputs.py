"""Inputs of a model for one batch: rows, their occurrences, dense numbers and labels.

The gate's samples are such a batch; as named arrays in a version they serve the gate after a restart.

Letters: B samples, R requests, L labels, D dense columns, U unique rows of a group, S float slots of a row, N
occurrences, F_g features of group g.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.types import F32, I32, I64, U8, U32


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


def joined(batches: Sequence[ModelInputs]) -> ModelInputs:
    """Concatenate labelled batches of one model, at least one, to a batch that owns its memory."""
    first = batches[0]
    groups = [_joined_group([batch.groups[g] for batch in batches]) for g in range(len(first.groups))]
    labels = [batch.labels for batch in batches if batch.labels is not None]
    return ModelInputs(
        sum(batch.size for batch in batches),
        groups,
        np.concatenate([batch.dense for batch in batches]),
        Labels(
            np.concatenate([x.index for x in labels]),
            np.concatenate([x.value for x in labels]),
            np.concatenate([x.weight for x in labels]),
        ),
    )


def _joined_group(parts: Sequence[GroupInputs]) -> GroupInputs:
    shifts = np.cumsum([0, *(len(part.rows) for part in parts[:-1])])
    positions, ends, sizes = [], [], []
    for f in range(len(parts[0].list_ends)):
        shifted = []
        for part, shift in zip(parts, shifts.tolist(), strict=True):
            start, stop = part.feature_starts[f : f + 2].tolist()
            at = part.positions[start:stop]
            shifted.append(np.where(at < 0, at, at + shift).astype(np.int32))
        before = np.cumsum([0, *(len(s) for s in shifted[:-1])])
        lists = [part.list_ends[f] for part in parts]
        ends.append(
            None
            if lists[0] is None
            else np.concatenate(
                [e + b for e, b in zip(lists, before.tolist(), strict=True) if e is not None]
            ).astype(np.uint32)
        )
        positions += shifted
        sizes.append(sum(len(s) for s in shifted))
    return GroupInputs(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([np.empty(0, np.int32), *positions]),
        np.cumsum([0, *sizes], dtype=np.uint32),
        ends,
    )


def arrays_of(inputs: ModelInputs) -> dict[str, NDArray[Any]]:
    """Return a labelled batch as arrays by name."""
    assert inputs.labels is not None, "the gate's samples have labels"
    arrays: dict[str, NDArray[Any]] = {
        "dense": inputs.dense,
        "label": inputs.labels.index,
        "value": inputs.labels.value,
        "weight": inputs.labels.weight,
    }
    for g, group in enumerate(inputs.groups):
        arrays |= {
            f"{g}/rows": group.rows,
            f"{g}/positions": group.positions,
            f"{g}/starts": group.feature_starts,
        }
        arrays |= {f"{g}/ends/{f}": ends for f, ends in enumerate(group.list_ends) if ends is not None}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def inputs_of(arrays: Mapping[str, NDArray[Any]]) -> ModelInputs:
    """Build a batch of B samples from the arrays of `arrays_of`, with the shapes of `ModelInputs`.

    Raises KeyError if an array is missing.
    """
    groups: list[GroupInputs] = []
    while f"{len(groups)}/rows" in arrays:
        index = len(groups)
        starts = np.asarray(arrays[f"{index}/starts"], np.uint32)
        ends = [arrays.get(f"{index}/ends/{f}") for f in range(len(starts) - 1)]
        groups.append(
            GroupInputs(
                np.asarray(arrays[f"{index}/rows"], np.float32),
                np.asarray(arrays[f"{index}/positions"], np.int32),
                starts,
                [None if e is None else np.asarray(e, np.uint32) for e in ends],
            )
        )
    labels = Labels(
        np.asarray(arrays["label"], np.uint8),
        np.asarray(arrays["value"], np.float32),
        np.asarray(arrays["weight"], np.float32),
    )
    return ModelInputs(len(labels.index), groups, np.asarray(arrays["dense"], np.float32), labels)
