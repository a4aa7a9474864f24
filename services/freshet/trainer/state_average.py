"""Averaging: ranks that step alone make their dense states one (mode `async`; PROTOCOL 14, 15).

Between two averagings a rank learns from its own partitions only. At an averaging each array becomes the mean
over the ranks, weighted by the samples that each has learned from since the last one, and the union of the
vectors becomes that of all ranks. Local SGD (Stich 2019) averages weights; the optimiser's moments follow
them here, as each rank has seen gradients of its own samples only.

Means are computed in float64 in the order of the ranks, and travel in the state's own types. Large arrays
(float32) take two phases: a rank gets its part of them from all others, and sends all the mean of that part.
Each rank computes the other means itself, from the states of all. So all have equal bits.

Letters: n ranks, L labels, d floats of the large arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.model import STARTED, DenseModel, MergeRule, MergesState, State
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.state_sync import MODEL, VECTOR, DenseState, pack_arrays, unpack_arrays
from freshet.types import F32, F64

__all__ = ["average"]

ROWS = "rows"
NOTHING: F32 = np.empty(0, np.float32)


def average(state: DenseState, group: ProcessGroup, rows: int, step: int) -> None:
    """Replace the dense state of all ranks by one, bit-identical on all of them.

    Args:
        state: of this rank; its flush point is the last averaging.
        group: all its ranks call `average`.
        rows: samples that this rank has learned from since the last averaging; without any it sends no state.
        step: of the rank that has made the most steps.

    Raises:
        RankLost: a rank did not answer; go back to the flush point.
        Corrupt: another rank's report cannot be decoded.
    """
    assert state.flush_point is not None, "the state of the last averaging"
    base = state.flush_point.model
    rules, mine = _rules_of(state.model, base), state.model.state() if rows else {}
    large = [name for name in sorted(base) if rules[name] == "mean" and base[name].dtype == np.float32]
    small = [name for name in base if name not in large]
    report: dict[str, NDArray[Any]] = {ROWS: np.array([rows], np.int64), VECTOR: state.ledger.to_array()}
    report |= {f"{MODEL}{name}": mine[name] for name in small if rows}
    reports = [unpack_arrays(part) for part in group.exchange(pack_arrays(report))]
    try:
        learned = np.array([part[ROWS][0] for part in reports], np.float64)
        vectors = [part[VECTOR].tolist() for part in reports]
        arrays = {name: [part[f"{MODEL}{name}"] for part in reports if part[ROWS][0]] for name in small}
    except KeyError as error:
        raise Corrupt(f"expected the state of another rank, it has no array {error}") from error
    if learned.any():
        shares = _shares(learned[learned > 0], arrays.get(STARTED, ()))
        merged = {name: _merged(rules[name], base[name], parts, shares) for name, parts in arrays.items()}
        flat = np.concatenate([mine[name].ravel() for name in large]) if rows and large else NOTHING
        size = sum(base[name].size for name in large)
        mean, at = _mean_in_parts(group, flat, size, learned / learned.sum()), 0
        for name in large:
            merged[name] = mean[at : at + base[name].size].reshape(base[name].shape)
            at += base[name].size
        state.model.load_state(merged)
        state.sums.carry = None  # each rank that learned has added it to its own first step
    for vector in vectors:
        state.ledger.raise_to(vector)
    state.progress.steps = step


def _mean_in_parts(group: ProcessGroup, mine: F32, size: int, shares: F64) -> F32:
    """Return the (d,) mean of the ranks' large arrays, of which each rank computes a part.

    Args:
        group: all its ranks call this.
        mine: (d,) of this rank; empty if it has no share.
        size: d.
        shares: (n,) weights of the ranks.

    Raises RankLost.
    """
    if not size:
        return NOTHING
    bounds = [size * rank // group.size for rank in range(group.size + 1)]
    lengths = [mine.itemsize * (stop - start) for start, stop in pairwise(bounds)]
    parts = [mine[start:stop].view(np.uint8) for start, stop in pairwise(bounds)]
    received = group.all_to_all(parts, [lengths[group.rank] * bool(share) for share in shares])
    total = np.zeros(bounds[group.rank + 1] - bounds[group.rank])
    for share, part in zip(shares, received, strict=True):
        if share > 0:
            total += part.view(np.float32) * share
    means = group.all_gather(total.astype(np.float32).view(np.uint8), lengths)
    return np.concatenate([part.view(np.float32) for part in means])


def _rules_of(model: DenseModel, state: State) -> dict[str, MergeRule]:
    """Return the rule of each array: by default the mean of floats, and the largest of integers."""
    own: Mapping[str, MergeRule] = model.merges if isinstance(model, MergesState) else {}
    return {
        name: own.get(name, "mean" if np.issubdtype(array.dtype, np.floating) else "max")
        for name, array in state.items()
    }


def _shares(rows: F64, started: Sequence[NDArray[Any]]) -> dict[MergeRule, F64]:
    """Return the weights of the ranks in a mean: (n,), and for arrays of started labels (n, L).

    Args:
        rows: (n,) samples of each rank that has learned.
        started: (L,) of each of them: 1 for a label that has its starting values; empty without such labels.
    """
    plain = rows / rows.sum()
    shares: dict[MergeRule, F64] = {"mean": plain}
    if len(started):
        counted = rows[:, None] * (np.stack(started) > 0)
        total = counted.sum(0)
        shares["started"] = np.where(total > 0, counted / np.where(total > 0, total, 1.0), plain[:, None])
    return shares


def _merged(
    rule: MergeRule,
    base: NDArray[Any],
    parts: Sequence[NDArray[Any]],
    shares: Mapping[MergeRule, F64],
) -> NDArray[Any]:
    """Merge an array of the ranks that have learned, all of the shape of `base`, of the last averaging."""
    if rule == "max":
        largest: NDArray[Any] = np.maximum.reduce(parts)
        return largest
    total = np.zeros(base.shape)
    for i, part in enumerate(parts):
        if rule == "sum":
            total += part.astype(np.float64) - base
            continue
        share = shares[rule][i]
        share = share.reshape(share.shape + (1,) * (base.ndim - share.ndim))
        total += np.where(share > 0, part * share, 0.0)  # what has no share may be NaN
    return (total + base if rule == "sum" else total).astype(base.dtype)
