"""Which shard should own which slice of the buckets. Pure: the leader of the shards writes what comes out as
a plan.

S slices, M living seats. A slice weighs what it costs its owner: rows a second, or one each where nothing was
measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet.types import F64, I64

__all__ = ["FILLED", "Memory", "next_plan", "overfull", "unevenness"]

FILLED = 0.9
"""Of a shard's memory, filled by a plan at most: the rest is for rows to come. Slices move away for want of
memory only from above the whole, so that growth on both sides moves none of them back."""

_SURELY = 1 - 1e-9
"""Of a difference: a move must lessen it by more than what rounding can, or two plans could take turns."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What rows need and what shards have."""

    sizes: F64  # (S,) bytes of each slice's rows, with their share of what else a shard keeps
    limits: Mapping[str, float] = field(default_factory=dict)  # {seat: bytes}; without one: no limit


def next_plan(
    current: Sequence[str | None],
    seats: Sequence[str],
    weights: F64 | None = None,
    memory: Memory | None = None,
    *,
    tolerance: float = 0.0,
) -> tuple[str, ...]:
    """Seats of the slices from now on: each slice has a living one, and their load is even within `tolerance`
    (see `unevenness`), if moving single slices, or exchanging two, makes it so.

    It begins with what is and moves the slice that helps most, again and again: hot ones first, and as few as
    it takes. Without weights no seat has two slices more than another. Equal input gives an equal plan, and
    what is even within the tolerance already stays as it is.

    No seat is given more than FILLED of its memory, unless nobody has room: then a slice without a living
    owner goes to the one with the most, which may refuse it.

    Args:
        current: seat of each slice by the last plan, or by the claims; None: nobody's.
        seats: that live, in any order; at least one.
        weights: (S,) >= 0; None: all alike.
        memory: that seats have, and slices need.
        tolerance: 0.1: within a tenth of a fair share. Infinite: only what must move does.
    """
    if not seats:
        raise ValueError("a plan needs a shard that lives")
    dealt = _Dealt(current, sorted(set(seats)), np.ones(len(current)) if weights is None else weights, memory)
    dealt.deal_orphans()
    dealt.relieve()
    while not math.isinf(tolerance) and dealt.level(tolerance):
        pass
    return dealt.plan


def unevenness(plan: Sequence[str | None], seats: Sequence[str], weights: F64) -> float:
    """How far the seat that is worst off lies from its fair share: 0.5 is half of it too much, or too little.

    A share is fair if everybody's is equal, but for slices that are heavier than that by themselves: their
    seats can have no less, and the others share what is left. So 0 can be reached however hot a slice is, up
    to the grain of slices.
    """
    dealt = _Dealt(plan, sorted(set(seats)), weights, None)
    return float(max(0.0, dealt.over().max(), dealt.under().max()))


def overfull(plan: Sequence[str | None], memory: Memory) -> list[str]:
    """Seats that a plan gives more than their memory holds."""
    held = dict.fromkeys(memory.limits, 0.0)
    for seat, size in zip(plan, memory.sizes.tolist(), strict=True):
        if seat in held:
            held[seat] += size
    return sorted(seat for seat, size in held.items() if size > memory.limits[seat])


class _Dealt:
    """A plan in the making: seats are numbers here, -1 is nobody."""

    def __init__(
        self, current: Sequence[str | None], living: Sequence[str], weights: F64, memory: Memory | None
    ) -> None:
        number = {seat: i for i, seat in enumerate(living)}
        self._living, self._weights = living, weights
        self._of: I64 = np.array([number.get(seat or "", -1) for seat in current], np.int64)
        self._sizes = np.zeros(len(current)) if memory is None else memory.sizes
        limits = {} if memory is None else memory.limits
        self._limits = np.array([limits.get(seat, math.inf) for seat in living])
        self._fair = _fair_share(weights, len(living))

    @property
    def plan(self) -> tuple[str, ...]:
        """Seats of the slices, all of which have one."""
        return tuple(self._living[i] for i in self._of.tolist())

    def over(self) -> F64:
        """(M,) by what part each seat has more than is fair; 0 or below: no more."""
        heaviest = [self._weights[self._of == i].max(initial=self._fair) for i in range(len(self._living))]
        return _parts(self._loads(), np.array(heaviest)) - 1

    def under(self) -> F64:
        """(M,) by what part each seat has less than is fair."""
        return 1 - _parts(self._loads(), np.full(len(self._living), self._fair))

    def deal_orphans(self) -> None:
        """Slices of nobody, heaviest first, to whoever has least to do and room."""
        orphans = np.flatnonzero(self._of < 0)
        for i in orphans[np.argsort(-self._weights[orphans], kind="stable")].tolist():
            loads, left = self._loads(), self._room() - self._sizes[i]
            fits = np.flatnonzero(left >= 0)
            self._of[i] = fits[np.argmin(loads[fits])] if len(fits) else np.argmax(left)

    def relieve(self) -> None:
        """Move slices away from who has more than its memory holds, to whoever has room; largest first. Where
        nobody is left with a margin, those beyond the whole of it go to who can just hold them."""
        for seat in np.flatnonzero(self._held() > self._limits).tolist():
            mine = np.flatnonzero(self._of == seat)
            for i in mine[np.argsort(-self._sizes[mine], kind="stable")].tolist():
                if self._room()[seat] >= 0:
                    break
                fits = np.flatnonzero(self._room() >= self._sizes[i])
                if len(fits) and self._sizes[i] > 0:
                    self._of[i] = fits[np.argmin(self._loads()[fits])]
            for i in np.flatnonzero(self._of == seat).tolist():
                if self._held()[seat] <= self._limits[seat]:
                    break
                left = self._limits - self._held()
                if 0 < self._sizes[i] <= left.max():
                    self._of[i] = np.argmax(left)

    def level(self, tolerance: float) -> bool:
        """Move one slice, or exchange two, so that load is more even; False if it is within the tolerance or
        nothing helps. The sum of the squares of loads falls each time, so this comes to an end."""
        return any(self._move(src, dst, tolerance) for src, dst in self._uneven(tolerance))

    def _uneven(self, tolerance: float) -> Iterator[tuple[int, int]]:
        """Pairs (from, to) of seats of which one is out of tolerance, the worst first."""
        loads, over, under = self._loads(), self.over(), self.under()
        by_load = np.argsort(loads, kind="stable").tolist()
        for src in np.argsort(-over, kind="stable").tolist():
            if over[src] > tolerance:
                yield from ((src, dst) for dst in by_load)
        for dst in np.argsort(-under, kind="stable").tolist():
            if under[dst] > tolerance:
                yield from ((src, dst) for src in reversed(by_load))

    def _move(self, src: int, dst: int, tolerance: float) -> bool:
        """Make these two more even, by the hottest slice that takes neither of them past what is fair; else
        by the slice, or else the exchange, that makes them most even. False if none does."""
        loads, room = self._loads(), self._room()
        gap = (loads[src] - loads[dst]) * _SURELY
        given = np.flatnonzero(self._of == src)[::-1]
        moved = self._weights[given]
        good = (moved > 0) & (moved < gap) & (self._sizes[given] <= room[dst])
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
        good = (change > 0) & (change < gap) & (grown <= max(room[dst], 0)) & (-grown <= max(room[src], 0))
        if not good.any():
            return False
        left = np.where(good, np.abs(gap / 2 - change), math.inf)
        i, j = np.unravel_index(np.argmin(left), left.shape)
        self._of[given[i]], self._of[taken[j]] = dst, src
        return True

    def _loads(self) -> F64:
        return self._sums(self._weights)

    def _held(self) -> F64:
        return self._sums(self._sizes)

    def _sums(self, of: F64) -> F64:
        owned = self._of >= 0
        return np.bincount(self._of[owned], of[owned], len(self._living)).astype(np.float64)

    def _room(self) -> F64:
        """(M,) bytes that a plan may add; below 0: it is filled beyond FILLED."""
        room: F64 = FILLED * self._limits - self._held()
        return room


def _fair_share(weights: F64, seats: int) -> float:
    """What each seat has if load is as even as can be, but for those whose one slice is heavier than that."""
    rest, left = float(weights.sum()), seats
    for heaviest in np.sort(weights)[::-1].tolist():
        if left == 1 or heaviest * left <= rest:
            break
        rest, left = rest - heaviest, left - 1
    return max(0.0, rest) / left


def _parts(loads: F64, fair: F64) -> F64:
    """(M,) loads as parts of what is fair; 1 where nothing is there to share."""
    return np.divide(loads, fair, out=np.ones(len(loads)), where=fair > 0)
