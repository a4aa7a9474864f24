"""Load balancing of one shard: it reports its load, records the reports of others, and plans if it leads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from freshet.clock import Clock
from freshet.coordination.assignment import SHARD_LEASES, lease_of, slices_of
from freshet.coordination.claim_rules import Load, Plan, SliceLoad
from freshet.coordination.claims import Claims, Lease
from freshet.errors import Unavailable
from freshet.paramserver.placement import BalanceRules, Decision, PlanReason
from freshet.paramserver.server import LoadMeter
from freshet.paramserver.shard import Shard
from freshet.types import F64, I64

log = structlog.get_logger("freshet.paramserver")

REPORT_S = 5.0
"""Time between two load reports; a twelfth of the balancing interval where that is less."""

COUNT_RETRY_S, COUNT_TIMEOUT_S = 0.5, 10.0
"""Time between two attempts to count stored rows, and the longest time for which a missing count delays
claims."""

MEASURED_ROWS = 100_000
"""Rows from which bytes per row are measured; with fewer, the fixed memory of the store would dominate."""

MEASURED_BY = 0.2
"""Share of the memory that is filled before bytes per row are measured."""

MOVED_SLICES, MOVED_ROWS = 4, 65_000
"""Most slices and rows revoked at once, but at least one slice: rows that load in about 0.1 s, during which
clients wait."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds beyond which load moves slices, and on a shard's memory."""

    unevenness: float = 0.25
    interval_s: float = 60.0
    memory_bytes: int = 0  # 0: no limit


DEFAULT_BOUNDS = Bounds()


class LoadBalancer:
    """Load balancing of one shard, on the thread of its shard manager. Figures are readable from any."""

    def __init__(self, shard: Shard, claims: Claims, bounds: Bounds, *, buckets: int, clock: Clock) -> None:
        """Start without reports; `buckets` of the model."""
        self._shard, self._claims, self._bounds, self._clock = shard, claims, bounds, clock
        self._slices = slices_of(buckets)
        self._number = {name: i for i, name in enumerate(self._slices)}
        self.rules = BalanceRules(len(self._slices), bound=bounds.unevenness, interval_s=bounds.interval_s)
        self.meter = LoadMeter(buckets, len(self._slices))
        self.meter.rates(clock.monotonic())
        self._report_s = min(REPORT_S, bounds.interval_s / 12)
        self._due_s = clock.monotonic()
        self._rates: dict[str, int] = {}  # of slices, as measured for the last report
        self._reported: list[str] | None = None  # slices of the last report; None: it may not be written
        self._unfit = 0  # planned slices for which memory is missing
        self._stored: F64 | None = None  # (S,) rows in the row store; None: not counted yet
        self._count_from_s = self._due_s
        self._count_until_s = self._due_s + COUNT_TIMEOUT_S
        self._row_bytes = 0.0  # by which unreported slices were sized last
        self.rate = 0.0  # rows looked up and pushed here per second, as of the last report
        self.unevenness = 0.0  # of all shards, as of the last report
        self.plans: Counter[str] = Counter()  # plans published here, by reason

    def step(self, lease: Lease, loaded: Iterable[str], owned: Iterable[str]) -> None:
        """Run one round: report the load if it is due, record other reports, plan if this shard leads.

        Args:
            lease: membership lease of this shard.
            loaded: owned slices, as far as their rows are loaded.
            owned: all slices served here.

        Raises:
            Unavailable: not everything was written; the next round continues.
        """
        now_s = self._clock.monotonic()
        alive = [claim.thing for claim in self._claims.alive(SHARD_LEASES)]
        plan = self._claims.plan()
        current: Sequence[str | None]
        if plan is not None and len(plan.owners) == len(self._slices):
            current = plan.owners
        else:
            owners = self._claims.owners()
            current = [lease_of(owners[name].owner) if name in owners else None for name in self._slices]
        self._set_expected_sizes(now_s)
        self.rules.record_reports(self._claims.loads(), now_s)
        self._report(lease, list(loaded), list(owned), current, alive, now_s)
        if not alive or alive[0] != lease.thing:
            return
        decision = self.rules.decide(current, alive, now_s)
        unplanned = plan is None or len(plan.owners) != len(self._slices)
        if decision is None and unplanned and all(owner in alive for owner in current):
            # Shards act on plans only, so the first one is published even if it changes nothing.
            decision = Decision(tuple(filter(None, current)), PlanReason.MEMBERS)
        if decision is not None:
            self._claims.advise(Plan(lease.thing, lease.fence, decision.owners))
            reason = decision.reason.value
            self.plans[reason] += 1
            moved = sum(was != owner for was, owner in zip(current, decision.owners, strict=True))
            log.info("a plan was written", shards=len(alive), why=reason, slices_moved=moved)

    def reported_owner(self, name: str) -> str | None:
        """The shard that last reported a slice as loaded."""
        return self.rules.reported_owner(self._number[name])

    def next_to_move(self, slices: Sequence[str]) -> list[str]:
        """Return the hottest of these slices, within MOVED_SLICES and MOVED_ROWS."""
        if not slices:
            return []
        weights = self.rules.weights()
        heat: F64 = np.zeros(len(self._slices)) if weights is None else weights
        chosen = sorted(slices, key=lambda name: -heat[self._number[name]])[:MOVED_SLICES]
        rows = np.cumsum([self._stored_rows(name) for name in chosen])
        return chosen[: max(1, int((rows <= MOVED_ROWS).sum()))]

    def fitting(self, wanted: Sequence[str]) -> list[str]:
        """Return those of the wanted slices for which there is memory, by the sizes known."""
        limit = self._bounds.memory_bytes
        if not limit:
            return list(wanted)
        if self._stored is None:
            return []
        sizes = dict(zip(self._slices, self.rules.sizes().tolist(), strict=True))
        free = limit - self._expected_bytes()
        # Last first, because a plan that takes slices from this shard begins with the first.
        found = _fitting(list(reversed(wanted)), sizes, free)
        if (unfit := len(wanted) - len(found)) != self._unfit:
            self._unfit = unfit
            if self.lacks_memory:
                log.error("slices are not claimed", reason=self.lacks_memory)
        return found if self._is_measured() else self._sample(found, sizes, free)

    @property
    def lacks_memory(self) -> str | None:
        """None, or the reason why planned slices are not claimed."""
        if not self._unfit:
            return None
        return (
            f"{self._unfit} slices do not fit: rows take {self._used_bytes():,} of "
            f"{self._bounds.memory_bytes:,} bytes (FRESHET_PARAMSERVER_MEMORY_BYTES)\n"
            "  training waits and nothing is lost; start another shard, or this one with a higher limit"
        )

    @property
    def full(self) -> str | None:
        """None, or the reason why no row may be added here now."""
        limit = self._bounds.memory_bytes
        if not limit or (used := self._used_bytes()) < limit:
            return None
        return (
            f"this shard's rows take {used:,} of {limit:,} bytes (FRESHET_PARAMSERVER_MEMORY_BYTES)\n"
            "  training waits and nothing is lost; start another shard, or this one with a higher limit"
        )

    def _report(
        self,
        lease: Lease,
        loaded: list[str],
        owned: list[str],
        current: Sequence[str | None],
        alive: Sequence[str],
        now_s: float,
    ) -> None:
        """Report the load when it is due, or when other slices are served than were reported.

        Rates are measured only when a report is due, because those of shorter times are noise.
        """
        if now_s >= self._due_s:
            rates = self.meter.rates(now_s).round()
            self._rates = {name: int(rates[self._number[name]]) for name in loaded}
            self.rate, self._due_s = float(rates.sum()), now_s + self._report_s
            self.unevenness = self.rules.unevenness(current, alive)
        elif loaded == self._reported:
            return
        parts = []
        for name in loaded:
            i = self._number[name]
            rate = self._rates.get(name, self.rules.last_rate(i))
            parts.append(SliceLoad(i, rate, self._stored_rows(name)))
        # The loaded slices' share of memory; rows that are loading take the rest.
        reported = sum(1 + part.rows for part in parts)
        total = sum(1 + self._stored_rows(name) for name in owned)
        size = self._expected_bytes() * reported // max(reported, total, 1)
        self._reported = None
        self._claims.report_load(
            Load(lease.thing, lease.fence, size, self._bounds.memory_bytes, tuple(parts))
        )
        self._reported = loaded

    def _stored_rows(self, name: str) -> int:
        buckets = self._slices[name]
        return int(self._shard.buckets.stored_rows[buckets.start : buckets.stop].sum())

    def _used_bytes(self) -> int:
        return self._shard.store.memory_bytes

    def _expected_bytes(self) -> int:
        """Memory of the rows once loading buckets are complete; of those only the number of rows is known."""
        return self._used_bytes() + int(self._shard.buckets.progress.rows * self._bytes_a_row())

    def _set_expected_sizes(self, now_s: float) -> None:
        """Size unreported slices by the rows in the row store, as soon as it answers.

        After COUNT_TIMEOUT_S they count as empty: a claim then fails with the store's reason.
        """
        if self._stored is None and now_s >= self._count_from_s:
            try:
                self._stored = self._by_slice(self._shard.buckets.count_stored())
            except Unavailable as error:
                log.warning("stored rows are not counted, tried again", reason=str(error))
                self._count_from_s = now_s + COUNT_RETRY_S
                if now_s >= self._count_until_s:
                    self._stored = np.zeros(len(self._slices))
        row_bytes = self._bytes_a_row()
        if self._stored is not None and abs(row_bytes - self._row_bytes) > 0.02 * row_bytes:
            self.rules.set_expected_sizes(self._stored * row_bytes)
            self._row_bytes = row_bytes

    def _sample(self, found: list[str], sizes: Mapping[str, float], free: float) -> list[str]:
        """Return as many slices as measure bytes per row: at least one with rows, and all without."""
        few = _fitting(found, sizes, max(0.0, free - self._bounds.memory_bytes * (1 - MEASURED_BY)))
        begun = self._rows_here() or self._shard.buckets.progress.rows or any(sizes[name] for name in few)
        return few if begun else few + [name for name in found if sizes[name]][:1]

    def _is_measured(self) -> bool:
        """Check that bytes per row are known, from many rows or from all that are expected here."""
        rows = self._rows_here()
        return rows >= MEASURED_ROWS or (rows > 0 and not self._shard.buckets.progress.rows)

    def _rows_here(self) -> int:
        return sum(self._shard.store.memory().rows.values())

    def _bytes_a_row(self) -> float:
        """Mean bytes per row here; before MEASURED_ROWS the mean over the tables' layouts.

        Keys are spread evenly, so slices have the same mix of tables.
        """
        store = self._shard.store
        if (rows := self._rows_here()) >= MEASURED_ROWS:
            return self._used_bytes() / rows
        return sum(map(store.resident_bytes, store.tables)) / max(1, len(store.tables))

    def _by_slice(self, of_buckets: I64) -> F64:
        return np.array([of_buckets[b.start : b.stop].sum() for b in self._slices.values()], np.float64)


def _fitting(wanted: Sequence[str], sizes: Mapping[str, float], free: float) -> list[str]:
    """Return the slices that fit one after the other; one that does not fit is left out."""
    found = []
    for name in wanted:
        if sizes[name] <= free:
            free -= sizes[name]
            found.append(name)
    return found
