"""Averaging: ranks that step alone make their dense states one (mode `async`; PROTOCOL 14, 15).

Between two averagings a rank learns from its own partitions only. At an averaging each array becomes the mean
over the ranks, weighted by the samples that each has learned from since the last one, and the union of the
vectors becomes that of all ranks. Local SGD (Stich 2019) averages weights; the optimiser's moments follow
them here, as each rank has seen gradients of its own samples only.

Each rank sends its state to all others, in the state's own types, and all compute the means in float64, in
the order of the ranks: one message a rank, and equal bits on all of them.

Letters: n ranks that have learned, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.model import STARTED, DenseModel, MergeRule, MergesState, State
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.state_sync import MODEL, VECTOR, DenseState, pack_arrays, unpack_arrays
from freshet.types import F64

__all__ = ["average"]

ROWS = "rows"


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
    report: dict[str, NDArray[Any]] = {ROWS: np.array([rows], np.int64), VECTOR: state.ledger.to_array()}
    if rows:
        report |= {f"{MODEL}{name}": array for name, array in state.model.state().items()}
    reports = [unpack_arrays(part) for part in group.exchange(pack_arrays(report))]
    try:
        learned = [part for part in reports if part[ROWS][0]]
        arrays = {name: [part[f"{MODEL}{name}"] for part in learned] for name in base}
        vectors = [part[VECTOR].tolist() for part in reports]
    except KeyError as error:
        raise Corrupt(f"expected the state of another rank, it has no array {error}") from error
    if learned:
        rules = _rules_of(state.model, base)
        shares = _shares(np.array([part[ROWS][0] for part in learned], np.float64), arrays.get(STARTED, ()))
        state.model.load_state(
            {name: _merged(rules[name], base[name], parts, shares) for name, parts in arrays.items()}
        )
        state.sums.carry = None  # each rank that learned has added it to its own first step
    for vector in vectors:
        state.ledger.raise_to(vector)
    state.progress.steps = step


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
        rows: (n,) samples of each rank.
        started: (L,) of each rank: 1 for a label that has its starting values; empty if the model has none.
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
    """Merge an array of n ranks, all of the shape of `base`, its state at the last averaging."""
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
