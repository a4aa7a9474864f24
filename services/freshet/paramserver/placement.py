"""Placement of slices on shards, without I/O. The leading shard publishes the result as a plan.

A shard is named by its membership lease. S slices, M living shards. A slice's weight is its load on its
owner in rows per second, or 1 where load was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet.types import F64, I64

__all__ = ["FILLED", "Memory", "next_plan", "overfull", "unevenness"]

FILLED = 0.9
"""Share of a shard's memory that a plan fills at most; the rest is for new rows. Slices move for memory only
when all of it is exceeded, so that growth on both shards does not move them back and forth."""

_SURELY = 1 - 1e-9
"""Factor on a load difference: a move must reduce it by more than rounding, or two plans could alternate."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that rows need and shards have."""

    sizes: F64  # (S,) bytes of each slice's rows, with their share of the shard's other memory
    limits: Mapping[str, float] = field(default_factory=dict)  # {shard: bytes}; absent: no limit


def next_plan(
    current: Sequence[str | None],
    shards: Sequence[str],
    weights: F64 | None = None,
    memory: Memory | None = None,
    *,
    tolerance: float = 0.0,
) -> tuple[str, ...]:
    """Return the owner of each slice: a living shard, with load even within `tolerance` (see `unevenness`).

    The search starts at `current` and repeats the best move of one slice, or exchange of two, hottest first,
    until load is even or no step helps. Without weights no shard has two slices more than another. The
    result depends on the arguments only, and a plan within the tolerance is returned unchanged.

    No shard gets more than FILLED of its memory if any other has space. Otherwise a slice without a living
    owner goes to the shard with the most, which may refuse it.

    Args:
        current: owner of each slice by the last plan, or by the claims; None: no owner.
        shards: the living ones, in any order; at least one.
        weights: (S,) float64 >= 0; None: all equal.
        memory: sizes of the slices and limits of the shards.
        tolerance: 0.1: within a tenth of a fair share. Infinite: only slices that must move do.

    Raises:
        ValueError: `shards` is empty.
    """
    if not shards:
        raise ValueError("a plan needs at least one living shard")
    placement = _Placement(
        current, sorted(set(shards)), np.ones(len(current)) if weights is None else weights, memory
    )
    placement.place_unowned()
    placement.relieve_memory()
    while not math.isinf(tolerance) and placement.even_out(tolerance):
        pass
    return placement.plan


def unevenness(plan: Sequence[str | None], shards: Sequence[str], weights: F64) -> float:
    """Return the largest relative deviation of a shard from its fair share; 0.5: half too much or too little.

    Fair shares are equal, except for shards whose one slice (weights: (S,) float64) exceeds an equal share:
    the others share the rest. So 0 is possible with any hot slice, up to the granularity of slices.
    """
    placement = _Placement(plan, sorted(set(shards)), weights, None)
    return float(max(0.0, placement.over().max(), placement.under().max()))


def overfull(plan: Sequence[str | None], memory: Memory) -> list[str]:
    """Return the shards to which a plan gives more than their memory holds."""
    filled = dict.fromkeys(memory.limits, 0.0)
    for shard, size in zip(plan, memory.sizes.tolist(), strict=True):
        if shard in filled:
            filled[shard] += size
    return sorted(shard for shard, size in filled.items() if size > memory.limits[shard])


class _Placement:
    """A plan under construction. Shards are indices here; -1 is no owner."""

    def __init__(
        self, current: Sequence[str | None], living: Sequence[str], weights: F64, memory: Memory | None
    ) -> None:
        number = {shard: i for i, shard in enumerate(living)}
        self._living, self._weights = living, weights
        self._of: I64 = np.array([number.get(shard or "", -1) for shard in current], np.int64)
        self._sizes = np.zeros(len(current)) if memory is None else memory.sizes
        limits = {} if memory is None else memory.limits
        self._limits = np.array([limits.get(shard, math.inf) for shard in living])
        self._fair = _fair_share(weights, len(living))

    @property
    def plan(self) -> tuple[str, ...]:
        """Owners of the slices, all of which have one."""
        return tuple(self._living[i] for i in self._of.tolist())

    def over(self) -> F64:
        """(M,) excess of each shard over its fair share, as a part of it; <= 0: none."""
        heaviest = [self._weights[self._of == i].max(initial=self._fair) for i in range(len(self._living))]
        return _parts(self._loads(), np.array(heaviest)) - 1

    def under(self) -> F64:
        """(M,) deficit of each shard from its fair share, as a part of it."""
        return 1 - _parts(self._loads(), np.full(len(self._living), self._fair))

    def place_unowned(self) -> None:
        """Give slices without an owner, heaviest first, to the least loaded shard with space."""
        unowned = np.flatnonzero(self._of < 0)
        for i in unowned[np.argsort(-self._weights[unowned], kind="stable")].tolist():
            loads, left = self._loads(), self._free_bytes() - self._sizes[i]
            fits = np.flatnonzero(left >= 0)
            self._of[i] = fits[np.argmin(loads[fits])] if len(fits) else np.argmax(left)

    def relieve_memory(self) -> None:
        """Move slices from shards over their memory to shards with space, largest first.

        Where no shard has space below FILLED, slices beyond the full memory go to shards that can just hold
        them.
        """
        for shard in np.flatnonzero(self._filled_bytes() > self._limits).tolist():
            owned = np.flatnonzero(self._of == shard)
            for i in owned[np.argsort(-self._sizes[owned], kind="stable")].tolist():
                if self._free_bytes()[shard] >= 0:
                    break
                fits = np.flatnonzero(self._free_bytes() >= self._sizes[i])
                if len(fits) and self._sizes[i] > 0:
                    self._of[i] = fits[np.argmin(self._loads()[fits])]
            for i in np.flatnonzero(self._of == shard).tolist():
                if self._filled_bytes()[shard] <= self._limits[shard]:
                    break
                left = self._limits - self._filled_bytes()
                if 0 < self._sizes[i] <= left.max():
                    self._of[i] = np.argmax(left)

    def even_out(self, tolerance: float) -> bool:
        """Move one slice, or exchange two; False if load is within the tolerance or no step helps.

        Each step reduces the sum of squared loads, so repetition ends.
        """
        return any(self._move(src, dst, tolerance) for src, dst in self._uneven(tolerance))

    def _uneven(self, tolerance: float) -> Iterator[tuple[int, int]]:
        """Pairs (from, to) of shards of which one is out of tolerance, the worst first."""
        loads, over, under = self._loads(), self.over(), self.under()
        by_load = np.argsort(loads, kind="stable").tolist()
        for src in np.argsort(-over, kind="stable").tolist():
            if over[src] > tolerance:
                yield from ((src, dst) for dst in by_load)
        for dst in np.argsort(-under, kind="stable").tolist():
            if under[dst] > tolerance:
                yield from ((src, dst) for src in reversed(by_load))

    def _move(self, src: int, dst: int, tolerance: float) -> bool:
        """Even out two shards by one step; False if none helps.

        First choice is the heaviest slice that takes neither shard past its fair share; then the slice, then
        the exchange, that leaves the smallest difference.
        """
        loads, free = self._loads(), self._free_bytes()
        gap = (loads[src] - loads[dst]) * _SURELY
        given = np.flatnonzero(self._of == src)[::-1]
        moved = self._weights[given]
        good = (moved > 0) & (moved < gap) & (self._sizes[given] <= free[dst])
        enough = min(loads[src] - self._fair * (1 - tolerance), self._fair * (1 + tolerance) - loads[dst])
        if (fair := good & (moved <= enough)).any():
            self._of[given[np.argmax(np.where(fair, moved, 0.0))]] = dst
            return True
        if good.any():
            left = np.where(good, np.abs(gap / 2 - moved), math.inf)
            self._of[given[np.argmin(left)]] = dst
            return True
        taken = np.flatnonzero(self._of == dst)[::-1]
        change = moved[:, None] - self._weights[taken]
        grown = self._sizes[given][:, None] - self._sizes[taken]
        good = (change > 0) & (change < gap) & (grown <= max(free[dst], 0)) & (-grown <= max(free[src], 0))
        if not good.any():
            return False
        left = np.where(good, np.abs(gap / 2 - change), math.inf)
        i, j = np.unravel_index(np.argmin(left), left.shape)
        self._of[given[i]], self._of[taken[j]] = dst, src
        return True

    def _loads(self) -> F64:
        return self._sums(self._weights)

    def _filled_bytes(self) -> F64:
        return self._sums(self._sizes)

    def _sums(self, of: F64) -> F64:
        owned = self._of >= 0
        return np.bincount(self._of[owned], of[owned], len(self._living)).astype(np.float64)

    def _free_bytes(self) -> F64:
        """(M,) bytes that a plan may add; negative: filled beyond FILLED."""
        free: F64 = FILLED * self._limits - self._filled_bytes()
        return free


def _fair_share(weights: F64, shards: int) -> float:
    """Load of each shard under the most even plan, not counting shards whose one slice is heavier."""
    rest, left = float(weights.sum()), shards
    for heaviest in np.sort(weights)[::-1].tolist():
        if left == 1 or heaviest * left <= rest:
            break
        rest, left = rest - heaviest, left - 1
    return max(0.0, rest) / left


def _parts(loads: F64, fair: F64) -> F64:
    """(M,) loads as parts of the fair share; 1 where it is 0."""
    return np.divide(loads, fair, out=np.ones(len(loads)), where=fair > 0)
