"""What samples look like once they are decoded: columns of keys, numbers and ids, no object a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freshet.types import F32, I64, U32, U64, Bool

__all__ = ["ABSENT_KEY", "Decoded", "GroupKeys"]

ABSENT_KEY = 0
"""The key of a null: it makes no row. The key function never yields it for a value."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupKeys:
    """Keys of one store group, an occurrence each, feature-major (see `freshet.model.inputs.GroupInputs`)."""

    keys: U64  # (N,); ABSENT_KEY: null
    feature_starts: U32  # (F_g + 1,)
    list_ends: Sequence[
        U32 | None
    ]  # per feature: None, or (B,) ends of each sample's occurrences within the feature


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Samples decoded column by column. B counts the good ones only."""

    size: int  # B
    groups: Sequence[GroupKeys]
    dense: F32  # (B, D) transformed, but for `standard`; NaN where missing
    segments: Mapping[str, U64]  # segment feature -> (B,) keys of values, unsalted
    served: Mapping[str, F32]  # label -> (B,) prediction logged at serving; NaN where none
    explored: Bool  # (B,) whether it was served in random order; False where nothing was logged
    bad: I64  # indexes of input records that could not be decoded; the others keep their order
    why: Sequence[str] = ()  # for each of them, where and why
