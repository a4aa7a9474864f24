"""When slices move, and why: what shards have told of their load, and the plan that follows. No I/O, the
clock is an argument. Every shard listens, so that whoever comes to lead knows what the last leader knew.

S slices.
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

__all__ = ["Balance", "Decided", "LoadMeter", "MeteredRows", "Why"]

# --- What each slice of a shard is asked for, and what a shard whose memory is full no longer takes.


class LoadMeter:
    """Counts rows by slice: one numpy call of a microsecond for each group of a lookup or push. Thread-safe,
    as numpy keeps Python's lock for arrays as short as these."""

    def __init__(self, buckets: int, slices: int) -> None:
        """Count nothing yet. `slices` divides `buckets`."""
        self._step = buckets // slices
        self._starts: I64 = np.zeros(slices + 1, np.int64)  # sums of where slices start, over all that came
        self._read = (0.0, self.rows)

    def count(self, bucket_starts: U32) -> None:
        """Rows of a lookup or push: (buckets + 1,) where each bucket's keys start."""
        self._starts += bucket_starts[:: self._step]

    @property
    def rows(self) -> I64:
        """(slices,) looked up and pushed so far."""
        return np.diff(self._starts)

    def rates(self, now_s: float) -> F64:
        """(slices,) rows a second since this was asked last, or since the beginning."""
        (before_s, before), rows = self._read, self.rows
        self._read = (now_s, rows)
        rates: F64 = (rows - before) / max(now_s - before_s, 1e-3)
        return rates


class MeteredRows:
    """A shard as its clients see it: counted, and refusing rows for training while its memory is full."""

    def __init__(self, rows: HeldRows, meter: LoadMeter, full: Callable[[], str | None]) -> None:
        """Serve `rows`; `full` says why no row may be added now, or None."""
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
        """As `RowService.lookup`. Lookups that may create rows are Unavailable while the memory is full:
        training stands still then, which loses nothing. What is looked up already may still be pushed."""
        if create:
            self._check_room()
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
        """The buckets held, rising."""
        return self._rows.held()

    def _check_room(self) -> None:
        if (why := self._full()) is not None:
            self.refused += 1
            raise Unavailable(why)

    def _count(self, groups: Sequence[KeyGroup]) -> None:
        for group in groups:
            self._meter.count(group.bucket_starts)


LEAST_RATE = 1_000.0
"""Rows a second over all shards; below it load says nothing: a shard does more than that in a millisecond."""

IDLE = 0.02
"""Of the mean slice, added to each: a slice that nobody asks for is flushed and published all the same, and
those are dealt evenly, too."""

LEAST_REPORTS = 3
"""Of a slice before load alone moves anything: the median of fewer is that of a spike."""


class Why(enum.Enum):
    """What made a plan necessary."""

    MEMBERS = "members"  # shards have come or gone
    LOAD = "load"
    MEMORY = "memory"  # a shard has less of it than its slices need


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan that differs from the last."""

    seats: tuple[str, ...]
    why: Why


@dataclass(frozen=True, slots=True)
class _Heard:
    at_s: float
    rate: int


class Balance:
    """Decides on plans. Not thread-safe.

    A slice's load is the median of what its owners told within the last interval: a spike of less than half
    of that moves nothing. Load moves slices once shards are uneven beyond a bound, and an interval after the
    last plan at the earliest; then as few as bring them within half that bound, and none if less than half
    of it would be won.
    """

    def __init__(self, slices: int, *, bound: float, interval_s: float) -> None:
        """Know nothing yet.

        Args:
            slices: of the model.
            bound: unevenness (`planning.unevenness`) from which on load moves slices.
            interval_s: over which load is measured, and between two plans for load alone.
        """
        self._bound, self._interval_s = bound, interval_s
        self._rates: list[deque[_Heard]] = [deque() for _ in range(slices)]
        self._sizes: F64 = np.zeros(slices)
        self._owners: list[str | None] = [None] * slices  # who told of it last
        self._limits: dict[str, float] = {}
        self._last: dict[str, Load] = {}
        self._reports = 0
        self._settled: object = None  # what was asked when there was last nothing to do
        self._plan: tuple[str | None, ...] = ()
        self._planned_s = 0.0
        self._seats: frozenset[str] | None = None  # that the plan was found good for; None: those in it

    def hear(self, loads: Mapping[str, Load], now_s: float) -> None:
        """Take note of what is new in {seat: what it told last}."""
        new = [load for seat, load in loads.items() if self._last.get(seat) is not load]
        for load in sorted(new, key=lambda load: load.fence):
            self._last[load.by] = load
            self._reports += 1
            self._limits[load.by] = float(load.limit) if load.limit else math.inf
            told = [part for part in load.slices if part.slice < len(self._rates)]
            rows = sum(1 + part.rows for part in told)
            for part in told:
                self._rates[part.slice].append(_Heard(now_s, part.rate))
                self._sizes[part.slice] = load.bytes * (1 + part.rows) / rows
                self._owners[part.slice] = load.by
        for heard in self._rates if new else ():
            while heard and heard[0].at_s < now_s - self._interval_s:
                heard.popleft()

    def expect(self, sizes: F64) -> None:
        """(S,) bytes that each slice's rows will take, wherever nobody has told of it yet."""
        self._sizes = np.where([owner is None for owner in self._owners], sizes, self._sizes)
        self._reports += 1

    def decide(self, current: Sequence[str | None], seats: Sequence[str], now_s: float) -> Decided | None:
        """The next plan, if there should be another than `current`. For the leader; cheap if nothing is new.

        Args:
            current: seat of each slice, by the last plan or the claims; None: nobody's.
            seats: that live.
            now_s: of a monotonic clock.
        """
        plan = tuple(current)
        if any(map(math.isfinite, self._limits.values())):  # who has told nothing yet may have little
            seats = [seat for seat in seats if seat in self._limits or seat in plan] or seats
        if plan != self._plan:
            self._plan, self._planned_s, self._seats = plan, now_s, None
        asked = (plan, tuple(seats), self._reports)
        if asked == self._settled:
            return None
        found = self._decide(plan, seats, now_s)
        if found is None:
            self._settled, self._seats = asked, frozenset(seats)
        return found

    def told_by(self, number: int) -> str | None:
        """The seat that told of a slice last: it serves it, or did then."""
        return self._owners[number]

    def last_rate(self, number: int) -> int:
        """Of a slice, as it was told last."""
        return self._rates[number][-1].rate if self._rates[number] else 0

    def sizes(self) -> F64:
        """(S,) bytes that each slice's rows take: as its owner told last, else what is expected, else 0."""
        return self._sizes.copy()

    def weights(self) -> F64 | None:
        """(S,) load of each slice; None while there is too little to go by. A slice that nobody has told of
        counts as the mean of the others."""
        known = [median(one.rate for one in heard) if heard else math.nan for heard in self._rates]
        rates = np.array(known)
        told = np.isfinite(rates)
        if rates[told].sum() < LEAST_RATE:
            return None
        mean = rates[told].mean()
        weights: F64 = np.where(told, rates, mean) + IDLE * mean
        return weights

    def unevenness(self, plan: Sequence[str | None], seats: Sequence[str]) -> float:
        """Of a plan, by the load that was told; 0 while there is too little to go by."""
        weights = self.weights()
        return 0.0 if weights is None or not seats else unevenness(plan, seats, weights)

    def _decide(self, plan: tuple[str | None, ...], seats: Sequence[str], now_s: float) -> Decided | None:
        weights, memory, tolerance = self.weights(), self._memory(seats), self._bound / 2
        living = frozenset(seats)
        if not living.issuperset(plan) or living != (self._seats or set(plan)):
            even = tolerance if weights is not None else 0.0
            found = next_plan(plan, seats, weights, memory, tolerance=even)
            if found != plan:
                return Decided(found, Why.MEMBERS)
        if memory is not None and overfull(plan, memory):
            found = next_plan(plan, seats, weights, memory, tolerance=math.inf)
            if found != plan:
                return Decided(found, Why.MEMORY)
        if weights is None or not self._is_measured(plan, now_s):
            return None
        if (before := unevenness(plan, seats, weights)) <= self._bound:
            return None
        found = next_plan(plan, seats, weights, memory, tolerance=tolerance)
        won = before - unevenness(found, seats, weights)
        return Decided(found, Why.LOAD) if won >= tolerance else None

    def _memory(self, seats: Sequence[str]) -> Memory | None:
        limits = {seat: self._limits[seat] for seat in seats if seat in self._limits}
        return Memory(self._sizes, limits) if any(map(math.isfinite, limits.values())) else None

    def _is_measured(self, plan: Sequence[str | None], now_s: float) -> bool:
        """Is the plan carried out, an interval old, and each slice's load known from most of that time."""
        long_ago = now_s - self._interval_s / 2
        return (
            now_s - self._planned_s >= self._interval_s
            and tuple(self._owners) == tuple(plan)
            and all(
                len(heard) >= LEAST_REPORTS and heard[0].at_s <= long_ago <= heard[-1].at_s
                for heard in self._rates
            )
        )
