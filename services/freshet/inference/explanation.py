"""What the rows behind a score are: how many of a candidate's values have one, and how old they are.

Letters: B candidates, N occurrences of a feature, U unique rows of a store group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from freshet.types import I32, I64, U8, U32

__all__ = ["FeatureRows", "explained", "rows_of_feature"]


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """One feature's rows."""

    known: I64  # (B,) values that have a row
    of: I64  # (B,) values: one, or as many as a list holds; a null counts as none
    touched_s: I64  # (B,) newest event time that one of the rows has learned from, in seconds; 0: not known


def rows_of_feature(
    positions: I32, list_ends: U32 | None, found: U8, touched_s: U32, candidates: int
) -> FeatureRows:
    """Sum up a feature's occurrences.

    Args:
        positions: (N,) row of each occurrence, -1: null; in order of the candidates.
        list_ends: (B,) where each candidate's occurrences end; None: there is one of each.
        found, touched_s: (U,) as looked up.
    """
    counts = np.ones(candidates, np.int64) if list_ends is None else np.diff(list_ends, prepend=0)
    owner = np.repeat(np.arange(candidates), counts.astype(np.int64))
    value = positions >= 0
    rows, owner = positions[value], owner[value]
    newest = np.zeros(candidates, np.int64)
    np.maximum.at(newest, owner, touched_s[rows].astype(np.int64))
    return FeatureRows(
        np.bincount(owner, found[rows], candidates).astype(np.int64),
        np.bincount(owner, minlength=candidates).astype(np.int64),
        newest,
    )


def explained(rows: Mapping[str, FeatureRows], index: int, now_ms: int) -> dict[str, dict[str, Any]]:
    """{feature: known, of, age in seconds} of one candidate, as `/v1/rank` answers it."""
    out: dict[str, dict[str, Any]] = {}
    for name, feature in rows.items():
        touched_s = int(feature.touched_s[index])
        out[name] = {
            "known": int(feature.known[index]),
            "of": int(feature.of[index]),
            "age_s": max(0, now_ms // 1000 - touched_s) if touched_s else None,
        }
    return out
