"""How many of a request's values have no row yet, by feature: what is new to the model, or misspelt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.model.inputs import GroupInputs
from freshet.types import U8, U32

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
    ends = request_ends.astype(np.int64)
    counts = np.diff(ends, prepend=0).tolist()
    starts = inputs.feature_starts.tolist()
    for f, (name, lists) in enumerate(zip(features, inputs.list_ends, strict=True)):
        if sums[starts[f]] == sums[starts[f + 1]]:
            continue
        shared = inputs.shared is not None and bool(inputs.shared[f])
        last = np.arange(1, len(ends) + 1) if shared else ends
        if lists is not None:
            last = np.append(0, lists)[last]
        lacking = np.diff(sums[starts[f] + last], prepend=sums[starts[f]]).tolist()
        for r, n in enumerate(lacking):
            if n:
                out[r][name] = n * counts[r] if shared else n
