"""The gate's samples as named arrays in a version, so that the gate uses the same samples after a restart.

Letters are those of `inputs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.model.inputs import GroupInputs, Labels, ModelInputs

__all__ = ["arrays_of", "inputs_of", "joined"]


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
    """Build a batch of B samples from the arrays of `arrays_of`, whose shapes are those of `ModelInputs`.

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
