"""Load balancing without I/O: load reports of shards in, plans out; time is an argument.

Every shard records all reports, so a new leader decides on the same figures as the last one.

A shard is named by its membership lease. S slices (of a row in `lookup`), B buckets, U keys.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from freshet.coordination.claim_rules import Load
from freshet.errors import Unavailable
from freshet.paramserver.placement import Memory, next_plan, overfull, unevenness
from freshet.paramserver.server import HeldRows
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.types import F32, F64, I64, U32, Bucket

__all__ = ["BalanceRules", "Decision", "LoadMeter", "MeteredRows", "PlanReason"]

# --- The load of each slice of a shard, and the memory bound.


class LoadMeter:
    """Rows looked up and pushed, by slice. Thread-safe: numpy holds the GIL for arrays this short.

    Each group of a lookup or push costs one numpy call, about a microsecond.
    """

    def __init__(self, buckets: int, slices: int) -> None:
        """Start at zero; `slices` must divide `buckets`."""
        self._step = buckets // slices
        self._starts: I64 = np.zeros(slices + 1, np.int64)  # start offsets of the slices, summed over groups
        self._read = (0.0, self.rows)

    def count(self, bucket_starts: U32) -> None:
        """Add a group's `bucket_starts`, shape (B + 1,) uint32: where each bucket's keys start."""
        self._starts += bucket_starts[:: self._step]

    @property
    def rows(self) -> I64:
        """(S,) int64 rows looked up and pushed so far."""
        return np.diff(self._starts)

    def rates(self, now_s: float) -> F64:
        """Return (S,) float64 rows per second since the last call, or since the start."""
        (before_s, before), rows = self._read, self.rows
        self._read = (now_s, rows)
        rates: F64 = (rows - before) / max(now_s - before_s, 1e-3)
        return rates


class MeteredRows:
    """Rows of a shard as its clients see them: metered, and without new rows while memory is full."""

    def __init__(self, rows: HeldRows, meter: LoadMeter, full: Callable[[], str | None]) -> None:
        """Serve `rows`; `full` returns the reason why no row may be added, or None."""
        self._rows, self._meter, self._full = rows, meter, full
        self.refused = 0  # lookups

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        """As `RowService.lookup`; out: (U, S) float32 for each group.

        Raises Unavailable if `create` is set while memory is full: training waits and loses nothing. Pushes
        are still accepted.
        """
        if create:
            self._check_memory()
        self._rows.lookup(groups, out, create=create, states=states)
        self._count(groups)

    def push(self, push: Push) -> bool:
        """As `RowService.push`."""
        applied = self._rows.push(push)
        self._count(push.groups)
        return applied

    def applied(self) -> Mapping[int, Sequence[int]]:
        """As `RowService.applied`."""
        return self._rows.applied()

    def held(self) -> Sequence[Bucket]:
        """The owned buckets, rising."""
        return self._rows.held()

    def _check_memory(self) -> None:
        if (reason := self._full()) is not None:
            self.refused += 1
            raise Unavailable(reason)

    def _count(self, groups: Sequence[KeyGroup]) -> None:
        for group in groups:
            self._meter.count(group.bucket_starts)


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
        new = [load for seat, load in loads.items() if self._last.get(seat) is not load]
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
