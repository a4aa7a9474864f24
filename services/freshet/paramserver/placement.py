"""Placement of slices on shards, without I/O: load reports in, plans out; time is an argument.

Every shard records all reports, so a new leader decides on the same figures as the last one. The leading
shard publishes the result as a plan.

A shard is named by its membership lease. S slices, M living shards. A slice's weight is its load on its
owner in rows per second, or 1 where load was not measured.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from freshet.coordination.claim_rules import Load
from freshet.types import F64, I64

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

    Fair shares are equal, except for shards with one slice (weights: (S,) float64) beyond an equal share: the
    others share the rest. So 0 is possible with any hot slice, up to the granularity of slices.
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
    """Load of each shard under the most even plan, not counting shards with one heavier slice."""
    rest, left = float(weights.sum()), shards
    for heaviest in np.sort(weights)[::-1].tolist():
        if left == 1 or heaviest * left <= rest:
            break
        rest, left = rest - heaviest, left - 1
    return max(0.0, rest) / left


def _parts(loads: F64, fair: F64) -> F64:
    """(M,) loads as parts of the fair share; 1 where it is 0."""
    return np.divide(loads, fair, out=np.ones(len(loads)), where=fair > 0)


LEAST_RATE = 1_000.0
"""Rows per second over all shards below which load moves nothing: a shard does more in a millisecond."""

IDLE = 0.02
"""Share of the mean load added to each slice: idle slices cost flushes and publishing, so they are spread."""

LEAST_REPORTS = 3
"""Reports of a slice required before load alone moves anything; a median of fewer follows a spike."""


class PlanReason(enum.Enum):
    """Reason for a new plan."""

    MEMBERS = "members"  # shards joined or left
    LOAD = "load"
    MEMORY = "memory"  # a shard has less than its slices need


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan that differs from the current one."""

    owners: tuple[str, ...]  # of the slices in order
    reason: PlanReason


@dataclass(frozen=True, slots=True)
class _Report:
    at_s: float
    rate: int  # rows per second


class BalanceRules:
    """Load reports and the plans that follow. Not thread-safe.

    A slice's load is the median of its reports over the last interval, so a spike of less than half an
    interval moves nothing. Load moves slices when unevenness exceeds the bound, one interval after the last
    plan at the earliest. It moves as few slices as bring unevenness within half the bound, and none if the
    gain is below half the bound.
    """

    def __init__(self, slices: int, *, bound: float, interval_s: float) -> None:
        """Start without reports.

        Args:
            slices: number of slices of the model.
            bound: unevenness (`placement.unevenness`) above which load moves slices.
            interval_s: time over which load is measured, and the least time between two plans for load.
        """
        self._bound, self._interval_s = bound, interval_s
        self._rates: list[deque[_Report]] = [deque() for _ in range(slices)]
        self._sizes: F64 = np.zeros(slices)
        self._owners: list[str | None] = [None] * slices  # by the last report
        self._limits: dict[str, float] = {}
        self._last: dict[str, Load] = {}
        self._reports = 0
        self._unchanged: object = None  # input of the last decision that needed no plan
        self._plan: tuple[str | None, ...] = ()
        self._planned_s = 0.0
        self._shards: frozenset[str] | None = None  # for which the plan needed no change; None: its owners

    def record_reports(self, loads: Mapping[str, Load], now_s: float) -> None:
        """Record the new reports among {shard: its last report}."""
        new = [load for shard, load in loads.items() if self._last.get(shard) is not load]
        for load in sorted(new, key=lambda load: load.fence):
            self._last[load.by] = load
            self._reports += 1
            self._limits[load.by] = float(load.limit) if load.limit else math.inf
            parts = [part for part in load.slices if part.slice < len(self._rates)]
            rows = sum(1 + part.rows for part in parts)
            for part in parts:
                self._rates[part.slice].append(_Report(now_s, part.rate))
                self._sizes[part.slice] = load.bytes * (1 + part.rows) / rows
                self._owners[part.slice] = load.by
        for reports in self._rates if new else ():
            while reports and reports[0].at_s < now_s - self._interval_s:
                reports.popleft()

    def set_expected_sizes(self, sizes: F64) -> None:
        """Set (S,) float64 bytes of the rows of each slice that no shard has reported."""
        self._sizes = np.where([owner is None for owner in self._owners], sizes, self._sizes)
        self._reports += 1

    def decide(self, current: Sequence[str | None], shards: Sequence[str], now_s: float) -> Decision | None:
        """Return the next plan, or None if `current` stays. The leader calls it; cheap without new reports.

        Args:
            current: owner of each slice, by the last plan or the claims; None: no owner.
            shards: the living ones.
            now_s: monotonic time.
        """
        plan = tuple(current)
        if any(map(math.isfinite, self._limits.values())):  # a shard without a report may have little memory
            shards = [shard for shard in shards if shard in self._limits or shard in plan] or shards
        if plan != self._plan:
            self._plan, self._planned_s, self._shards = plan, now_s, None
        given = (plan, tuple(shards), self._reports)
        if given == self._unchanged:
            return None
        decision = self._decide(plan, shards, now_s)
        if decision is None:
            self._unchanged, self._shards = given, frozenset(shards)
        return decision

    def reported_owner(self, number: int) -> str | None:
        """The shard that reported a slice last: it serves the slice, or did at that time."""
        return self._owners[number]

    def last_rate(self, number: int) -> int:
        """Rows per second of a slice in its last report; 0 without one."""
        return self._rates[number][-1].rate if self._rates[number] else 0

    def sizes(self) -> F64:
        """(S,) float64 bytes of each slice's rows: as reported last, else as expected, else 0."""
        return self._sizes.copy()

    def weights(self) -> F64 | None:
        """(S,) float64 load of each slice, or None while the total is below LEAST_RATE.

        A slice without a report counts as the mean of the others.
        """
        medians = [median(r.rate for r in reports) if reports else math.nan for reports in self._rates]
        rates = np.array(medians)
        known = np.isfinite(rates)
        if rates[known].sum() < LEAST_RATE:
            return None
        mean = rates[known].mean()
        weights: F64 = np.where(known, rates, mean) + IDLE * mean
        return weights

    def unevenness(self, plan: Sequence[str | None], shards: Sequence[str]) -> float:
        """Unevenness of a plan under the reported load; 0 while the load is unknown."""
        weights = self.weights()
        return 0.0 if weights is None or not shards else unevenness(plan, shards, weights)

    def _decide(self, plan: tuple[str | None, ...], shards: Sequence[str], now_s: float) -> Decision | None:
        weights, memory, tolerance = self.weights(), self._memory(shards), self._bound / 2
        living = frozenset(shards)
        if not living.issuperset(plan) or living != (self._shards or set(plan)):
            even = tolerance if weights is not None else 0.0
            found = next_plan(plan, shards, weights, memory, tolerance=even)
            if found != plan:
                return Decision(found, PlanReason.MEMBERS)
        if memory is not None and overfull(plan, memory):
            found = next_plan(plan, shards, weights, memory, tolerance=math.inf)
            if found != plan:
                return Decision(found, PlanReason.MEMORY)
        if weights is None or not self._is_measured(plan, now_s):
            return None
        if (before := unevenness(plan, shards, weights)) <= self._bound:
            return None
        found = next_plan(plan, shards, weights, memory, tolerance=tolerance)
        gain = before - unevenness(found, shards, weights)
        return Decision(found, PlanReason.LOAD) if gain >= tolerance else None

    def _memory(self, shards: Sequence[str]) -> Memory | None:
        limits = {shard: self._limits[shard] for shard in shards if shard in self._limits}
        return Memory(self._sizes, limits) if any(map(math.isfinite, limits.values())) else None

    def _is_measured(self, plan: Sequence[str | None], now_s: float) -> bool:
        """Check that the plan is in effect for an interval, with reports of each slice over most of it."""
        long_ago = now_s - self._interval_s / 2
        return (
            now_s - self._planned_s >= self._interval_s
            and tuple(self._owners) == tuple(plan)
            and all(
                len(reports) >= LEAST_REPORTS and reports[0].at_s <= long_ago <= reports[-1].at_s
                for reports in self._rates
            )
        )
