"""Plans of the native core for a spec: columns of the model's input, and experts.

Letters: L labels, D dense columns, S float slots of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from freshet.config.spec.layout import Group, layout_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError
from freshet.model.inputs import ModelInputs
from freshet.types import I64

PAD = 16
"""Widths are padded to a multiple of this many floats, one AVX-512 register."""

Expert = tuple[int, bool, bool, float, bool, bool, bool]
"""First scalar or NO_SCALAR; FM adds to it; the MLP adds to it; share of its gradient that its rows get; has
weights of dense columns; is `counts`; is `stack`."""

NO_SCALAR = NO_SLOT = -1

LOSSES = {"logloss": 0, "huber": 1, "mse": 2}

GroupTuple = tuple[int, int, int, int, int, int, int, int, list[tuple[int, bool]]]
NativeInput = tuple[int, int, int, int, list[tuple[bool, int]], list[GroupTuple]]


def padded(width: int) -> int:
    """Round up to a multiple of PAD."""
    return -(-width // PAD) * PAD


@dataclass(frozen=True, slots=True, eq=False)
class InputPlan:
    """Layout of the model's input.

    The input of the MLP is [dense values | missing flags | zeros to 16 | vectors | zeros to 16], with vectors
    in the order of groups, then features. The scalars of a sample form one run, [wide L][fast L][cross L]
    [linear L], without those that no expert reads. FM pairs vectors of equal dim, so groups of equal dim
    share one sum.
    """

    native: NativeInput
    width: int  # columns of the input, padding included
    vectors_from: int  # first column of vectors
    columns: I64  # columns that are not padding, ascending
    scalars: dict[str, int]  # name of a run of L scalars -> its start
    vectors: tuple[tuple[int, int, int], ...]  # (index of the feature in the spec, first column, dim)
    flags: tuple[tuple[int, int], ...]  # (dense column, column of its missing flag)


def input_plan(spec: Spec, *, fm: bool = True) -> InputPlan:
    """Derive the plan, a pure function of the spec's identity keys."""
    layout = layout_of(spec)
    labels = len(spec.labels)
    present = [n for n in ("wide", "fast", "cross", "linear") if any(g.slot(n) for g in layout.groups)]
    scalars = {name: i * labels for i, name in enumerate(present)}
    dense, flags = _dense(spec, layout.dense)
    vectors_from = padded(len(dense) + len(flags))
    vectors: list[tuple[int, int, int]] = []
    groups: list[GroupTuple] = []
    sums: dict[int, int] = {}
    column = vectors_from
    for group in layout.groups:
        features: list[tuple[int, bool]] = []
        slot = group.slot("vector")
        dim = slot.width if slot else 0
        for index in group.features:
            feature = spec.features[index]
            mean = feature.pool == "mean" or (feature.pool is None and feature.kind == "list")
            features.append((column if dim else -1, mean))
            if dim:
                vectors.append((index, column, dim))
                column += dim
        if dim and dim not in sums:
            sums[dim] = sum(sums_dim for sums_dim in sums)
        first, row, count = _scalar_run(group, scalars, labels)
        at = sums[dim] if dim and fm else -1
        counts = group.slot("count")
        seen = counts.start if counts else NO_SLOT
        groups.append((group.width, row, first, count, slot.start if slot else 0, dim, seen, at, features))
    width = padded(column)
    real = [*range(len(dense) + len(flags)), *range(vectors_from, column)]
    native = (width, vectors_from, labels * len(present), sum(sums) if fm else 0, dense, groups)
    return InputPlan(
        native, width, vectors_from, np.array(real, np.int64), scalars, tuple(vectors), tuple(flags)
    )


def _dense(spec: Spec, columns: tuple[int, ...]) -> tuple[list[tuple[bool, int]], list[tuple[int, int]]]:
    """Return (is standardised, column of its missing flag or -1) of each dense column, and the flags."""
    dense: list[tuple[bool, int]] = []
    flags: list[tuple[int, int]] = []
    for d, index in enumerate(columns):
        feature = spec.features[index]
        flag = -1
        if feature.missing == "flag":
            flag = len(columns) + len(flags)
            flags.append((d, flag))
        dense.append(("standard" in feature.dense, flag))
    return dense, flags


def _scalar_run(group: Group, scalars: dict[str, int], labels: int) -> tuple[int, int, int]:
    """Return (first in the run, first in the row, count) of a group's scalars, contiguous in the run."""
    held = [(scalars[s.name], s.start) for s in group.slots if s.name in scalars]
    if not held:
        return 0, 0, 0
    first, row = held[0]
    for i, (canonical, start) in enumerate(held):
        if (canonical, start) != (first + i * labels, row + i * labels):
            raise AssertionError(f"scalars of group {group.index} are not in the order of the run: {held}")
    return first, row, len(held) * labels


def expert_plan(spec: Spec, scalars: dict[str, int]) -> tuple[tuple[str, ...], list[Expert]]:
    """Return names and definitions of the experts, `stack` last.

    Raises ConfigError for an unknown expert.
    """
    columns = spec.defaults > 1  # models with earlier defaults have no weights of dense columns
    if spec.model.kind == "linear":
        return ("linear",), [(scalars.get("linear", NO_SCALAR), False, False, 1.0, columns, False, False)]
    if spec.model.kind == "mlp":
        return ("mlp",), [(NO_SCALAR, False, True, 1.0, False, False, False)]
    sources = {
        "wide": ("wide", False, False),
        "fast": ("fast", False, False),
        "counts": ("wide", False, False),
        "cross": ("cross", False, False),
        "fm": ("linear", True, False),
        "deep": ("linear", True, True),
    }
    experts = []
    names = sorted(spec.model.experts, key="stack".__eq__)  # `stack` last, as it combines the others
    for name in names:
        if name == "stack":
            experts.append((NO_SCALAR, False, False, 1.0, False, False, True))
            continue
        if name not in sources:
            raise ConfigError("spec", "model.experts", name, f"{', '.join(sources)} or stack")
        source, fm, mlp = sources[name]
        scalar = scalars.get(source, NO_SCALAR)  # none in a model without keys
        if name == "counts":  # has no row gradients
            experts.append((scalar, False, False, 1.0, False, True, False))
            continue
        learners = [other for other in names if other in sources and other != "counts"]
        sharing = sum(sources[other][0] == source for other in learners)
        linear = columns and name in ("wide", "fast", "fm")
        experts.append((scalar, fm, mlp, 1.0 / sharing, linear, False, False))
    return tuple(names), experts


def groups_of(inputs: ModelInputs) -> list[tuple[Any, ...]]:
    """Return groups as the native core expects them."""
    return [(g.rows, g.positions, g.feature_starts, list(g.list_ends)) for g in inputs.groups]
