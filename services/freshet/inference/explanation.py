"""Existence and age of the rows behind a score.

Letters: B candidates, N occurrences of a feature, U unique rows of a store group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.model.inputs import GroupInputs
from freshet.types import I32, I64, U8, U32

__all__ = ["FeatureRows", "Unknown", "explained", "rows_of_feature", "values_without_row"]

Unknown = dict[str, int]
"""{feature: values without a row, as new or misspelt}; a shared value counts for each candidate."""


def values_without_row(
    features: Sequence[str],
    inputs: GroupInputs,
    found: U8,
    request_ends: U32 | NDArray[Any],
    out: Sequence[Unknown],
) -> None:
    """Count values of one store group without a row, for each of R requests.

    Args:
        features: names, in the group's order.
        inputs: the looked-up group.
        found: (U,) uint8, 1 where the row exists.
        request_ends: (R,) end of each request's candidates.
        out: (R,) counts to add to.
    """
    if found.all():
        return
    missing = np.append(found == 0, False)[inputs.positions]  # -1, a null, selects the appended False
    sums = np.zeros(len(missing) + 1, np.int64)
    np.cumsum(missing, out=sums[1:])
    before = sums[inputs.feature_starts].tolist()
    shared = [0] * len(features) if inputs.shared is None else inputs.shared.tolist()
    counts = np.diff(request_ends, prepend=0).tolist()
    for f, name in enumerate(features):
        if before[f] == before[f + 1]:
            continue
        lacking = [before[f + 1] - before[f]]
        if len(out) > 1:
            lacking = _of_requests(inputs, f, request_ends, sums)
        for r, n in enumerate(lacking):
            if n:
                out[r][name] = n * counts[r] if shared[f] else n


def _of_requests(inputs: GroupInputs, f: int, request_ends: NDArray[Any], sums: I64) -> list[int]:
    """Return the (R,) values of one feature without a row; `sums` are cumulative over occurrences."""
    lists, last = inputs.list_ends[f], request_ends.astype(np.int64)
    if inputs.shared is not None and inputs.shared[f]:
        last = np.arange(1, len(last) + 1)
    if lists is not None:
        last = np.append(0, lists)[last]
    start = int(inputs.feature_starts[f])
    lacking: list[int] = np.diff(sums[start + last], prepend=sums[start]).tolist()
    return lacking


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """Rows of one feature, by candidate."""

    known: I64  # (B,) values that have a row
    of: I64  # (B,) values: the length of a list, else 1; 0 for a null
    touched_s: I64  # (B,) newest event time that one of the rows has learned from, in seconds; 0: unknown


def rows_of_feature(
    positions: I32, list_ends: U32 | None, found: U8, touched_s: U32, candidates: int
) -> FeatureRows:
    """Aggregate a feature's occurrences by candidate.

    Args:
        positions: (N,) int32 row of each occurrence, in the order of candidates; -1: null.
        list_ends: (B,) uint32 end of each candidate's occurrences; None: one per candidate.
        found, touched_s: (U,) uint8 and uint32 of the lookup.
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
    """Return `rows` of one item of the answer of `/v1/rank`: {feature: known, of, age in seconds}."""
    out: dict[str, dict[str, Any]] = {}
    for name, feature in rows.items():
        touched_s = int(feature.touched_s[index])
        out[name] = {
            "known": int(feature.known[index]),
            "of": int(feature.of[index]),
            "age_s": max(0, now_ms // 1000 - touched_s) if touched_s else None,
        }
    return out
