"""How many of a request's values have no row yet, by feature: what is new to the model, or misspelt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.model.inputs import GroupInputs
from freshet.types import I64, U8, U32

__all__ = ["Unknown", "values_without_row"]

Unknown = dict[str, int]
"""{feature: values without a row}; a value that a request's candidates share counts for each of them."""


def values_without_row(
    features: Sequence[str],
    inputs: GroupInputs,
    found: U8,
    request_ends: U32 | NDArray[Any],
    out: Sequence[Unknown],
) -> None:
    """Add to each request's counts what one store group's features lack.

    Args:
        features: names, in the group's order.
        inputs: the group as looked up, of R requests.
        found: (U,) which rows there are.
        request_ends: (R,) where each request's candidates end.
        out: (R,) counts.
    """
    if found.all():
        return
    missing = np.append(found == 0, False)[inputs.positions]  # -1, a null, is the last: not missing
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
    """(R,) values of one feature without a row; `sums` are those of all occurrences before each."""
    lists, last = inputs.list_ends[f], request_ends.astype(np.int64)
    if inputs.shared is not None and inputs.shared[f]:
        last = np.arange(1, len(last) + 1)
    if lists is not None:
        last = np.append(0, lists)[last]
    start = int(inputs.feature_starts[f])
    lacking: list[int] = np.diff(sums[start + last], prepend=sums[start]).tolist()
    return lacking
