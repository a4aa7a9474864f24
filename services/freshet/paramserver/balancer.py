"""A shard's part in balancing load: it tells of its own, hears of the others', and plans if it leads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from freshet.clock import Clock
from freshet.coordination.claim_rules import Load, Plan, SliceLoad
from freshet.coordination.claims import Claims, Held
from freshet.coordination.slices import SEATS, seat_of, slices_of
from freshet.errors import Unavailable
from freshet.paramserver.balance_rules import Balance, Decided, LoadMeter, Why
from freshet.paramserver.shard import Shard
from freshet.types import F64, I64

__all__ = ["DEFAULT_BOUNDS", "Balancing", "Bounds"]

log = structlog.get_logger("freshet.paramserver")

REPORT_S = 5.0
"""Between two reports of load, or a twelfth of the interval that plans are made by, if that is less."""


COUNT_AGAIN_S, COUNT_WITHIN_S = 0.5, 10.0
"""Between two attempts to count stored rows, and for how long nothing is taken for want of an answer."""

MEASURED_ROWS = 100_000
"""From so many on what a row takes is what they take; below, what the store keeps beside rows would count."""

MEASURED_BY = 0.2
"""Of the memory, filled before it is known what a row takes."""

MOVED_SLICES, MOVED_ROWS = 4, 65_000
"""Given away at once, one slice at least: rows that are loaded in about a tenth of a second, for which
everybody waits."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """When load moves slices, and how much a shard may hold."""

    unevenness: float = 0.25
    interval_s: float = 60.0
    memory_bytes: int = 0  # 0: no limit


DEFAULT_BOUNDS = Bounds()


class Balancing:
    """Of one shard; used by the thread that keeps its slices. Figures may be read from any."""

    def __init__(self, shard: Shard, claims: Claims, bounds: Bounds, *, buckets: int, clock: Clock) -> None:
        """Tell nothing yet."""
        self._shard, self._claims, self._bounds, self._clock = shard, claims, bounds, clock
        self._slices = slices_of(buckets)
        self._number = {what: i for i, what in enumerate(self._slices)}
        self._balance = Balance(len(self._slices), bound=bounds.unevenness, interval_s=bounds.interval_s)
        self.meter = LoadMeter(buckets, len(self._slices))
        self.meter.rates(clock.monotonic())
        self._report_s = min(REPORT_S, bounds.interval_s / 12)
        self._due_s = clock.monotonic()
        self._rates: dict[str, int] = {}  # of slices, as measured for the last report
        self._told: list[str] | None = None  # slices of the last report; None: it may not have been written
        self._without_room = 0
        self._stored: F64 | None = None  # rows of each slice as they were counted; None: not yet
        self._count_from_s = self._due_s  # when they may be counted, and by when: monotonic
        self._count_until_s = self._due_s + COUNT_WITHIN_S
        self._row_bytes = 0.0  # by which slices were judged last of which nobody has told
        self.rate = 0.0  # rows looked up and pushed here a second, as of the last report
        self.unevenness = 0.0  # of the shards, as of the last report
        self.plans: Counter[str] = Counter()  # written here, by why

    def step(self, seat: Held, loaded: Iterable[str], mine: Iterable[str]) -> None:
        """One round: tell what these slices ask for, if it is time; hear the others; plan if this seat leads.

        Args:
            seat: of this shard.
            loaded: slices that are served here, and loaded.
            mine: all that are served here.

        Raises Unavailable: not everything was written; the next round goes on.
        """
        now_s = self._clock.monotonic()
        alive = [claim.what for claim in self._claims.alive(SEATS)]
        plan = self._claims.plan()
        current: Sequence[str | None]
        if plan is not None and len(plan.seats) == len(self._slices):
            current = plan.seats
        else:
            owners = self._claims.owners()
            current = [seat_of(owners[what].owner) if what in owners else None for what in self._slices]
        self._expect(now_s)
        self._balance.hear(self._claims.loads(), now_s)
        self._report(seat, list(loaded), list(mine), current, alive, now_s)
        if not alive or alive[0] != seat.what:
            return
        decided = self._balance.decide(current, alive, now_s)
        unplanned = plan is None or len(plan.seats) != len(self._slices)
        if decided is None and unplanned and all(owner in alive for owner in current):
            decided = Decided(tuple(filter(None, current)), Why.MEMBERS)  # nobody may act without one
        if decided is not None:
            self._claims.advise(Plan(seat.what, seat.fence, decided.seats))
            self.plans[decided.why.value] += 1
            moved = sum(was != seat for was, seat in zip(current, decided.seats, strict=True))
            log.info("a plan was written", shards=len(alive), why=decided.why.value, slices_moved=moved)

    def told_by(self, what: str) -> str | None:
        """The seat that told last that it has loaded a slice."""
        return self._balance.told_by(self._number[what])

    def next_to_move(self, slices: Sequence[str]) -> list[str]:
        """The hottest of these, as many as nobody has to wait for long."""
        if not slices:
            return []
        weights = self._balance.weights()
        heat: F64 = np.zeros(len(self._slices)) if weights is None else weights
        chosen = sorted(slices, key=lambda what: -heat[self._number[what]])[:MOVED_SLICES]
        rows = np.cumsum([self._rows_of(what) for what in chosen])
        return chosen[: max(1, int((rows <= MOVED_ROWS).sum()))]

    def fitting(self, wanted: Sequence[str]) -> list[str]:
        """Of the slices that are wanted here those that there is memory for, as far as is known."""
        limit = self._bounds.memory_bytes
        if not limit:
            return list(wanted)
        if self._stored is None:
            return []
        sizes = dict(zip(self._slices, self._balance.sizes().tolist(), strict=True))
        room = limit - self._expected()
        # From the last on: a plan that takes slices from here begins with the first.
        found = _fitting(list(reversed(wanted)), sizes, room)
        if (left := len(wanted) - len(found)) != self._without_room:
            self._without_room = left
            if self.no_room:
                log.error("slices are not taken", reason=self.no_room)
        return found if self._is_measured() else self._sample(found, sizes, room)

    @property
    def no_room(self) -> str | None:
        """None, or why slices that the plan gives this shard are not taken."""
        if not self._without_room:
            return None
        return (
            f"{self._without_room} slices have no room here: rows take {self._held():,} of "
            f"{self._bounds.memory_bytes:,} bytes (FRESHET_PARAMSERVER_MEMORY_BYTES)\n"
            "  training waits and nothing is lost; start another shard, or this one with a higher limit"
        )

    @property
    def full(self) -> str | None:
        """None, or why no row may be added here now."""
        limit = self._bounds.memory_bytes
        if not limit or (held := self._held()) < limit:
            return None
        return (
            f"this shard's rows take {held:,} of {limit:,} bytes (FRESHET_PARAMSERVER_MEMORY_BYTES)\n"
            "  training waits and nothing is lost; start another shard, or this one with a higher limit"
        )

    def _report(
        self,
        seat: Held,
        loaded: list[str],
        mine: list[str],
        current: Sequence[str | None],
        alive: Sequence[str],
        now_s: float,
    ) -> None:
        """Tell, if it is time or other slices are served than were told. Rates are only measured when it is
        time: those of an instant say nothing."""
        if now_s >= self._due_s:
            rates = self.meter.rates(now_s).round()
            self._rates = {what: int(rates[self._number[what]]) for what in loaded}
            self.rate, self._due_s = float(rates.sum()), now_s + self._report_s
            self.unevenness = self._balance.unevenness(current, alive)
        elif loaded == self._told:
            return
        parts = []
        for what in loaded:
            i = self._number[what]
            rate = self._rates.get(what, self._balance.last_rate(i))
            parts.append(SliceLoad(i, rate, self._rows_of(what)))
        # Their share alone: rows that are loading are here as well.
        told, all_ = sum(1 + part.rows for part in parts), sum(1 + self._rows_of(what) for what in mine)
        held = self._expected() * told // max(told, all_, 1)
        self._told = None
        self._claims.tell(Load(seat.what, seat.fence, held, self._bounds.memory_bytes, tuple(parts)))
        self._told = loaded

    def _rows_of(self, what: str) -> int:
        buckets = self._slices[what]
        return int(self._shard.stored_rows[buckets.start : buckets.stop].sum())

    def _held(self) -> int:
        return self._shard.store.memory_bytes

    def _expected(self) -> int:
        """What rows will take once those of loading buckets are all here, whose number alone is known."""
        return self._held() + int(self._shard.loader.progress.rows * self._bytes_a_row())

    def _expect(self, now_s: float) -> None:
        """Know of slices of which nobody has told, from the row store, as soon as it answers. Where it does
        not for long, a claim says why."""
        if self._stored is None and now_s >= self._count_from_s:
            try:
                self._stored = self._by_slice(self._shard.count_stored())
            except Unavailable as error:
                log.warning("stored rows are not counted, tried again", reason=str(error))
                self._count_from_s = now_s + COUNT_AGAIN_S
                if now_s >= self._count_until_s:
                    self._stored = np.zeros(len(self._slices))
        row_bytes = self._bytes_a_row()
        if self._stored is not None and abs(row_bytes - self._row_bytes) > 0.02 * row_bytes:
            self._balance.expect(self._stored * row_bytes)
            self._row_bytes = row_bytes

    def _sample(self, found: list[str], sizes: Mapping[str, float], room: float) -> list[str]:
        """As many of these as say what a row takes, of one slice with rows at least; and all without rows."""
        few = _fitting(found, sizes, max(0.0, room - self._bounds.memory_bytes * (1 - MEASURED_BY)))
        begun = self._rows_here() or self._shard.loader.progress.rows or any(sizes[what] for what in few)
        return few if begun else few + [what for what in found if sizes[what]][:1]

    def _is_measured(self) -> bool:
        """Is it known what a row takes: from many, or from all that are to be here by now."""
        rows = self._rows_here()
        return rows >= MEASURED_ROWS or (rows > 0 and not self._shard.loader.progress.rows)

    def _rows_here(self) -> int:
        return sum(self._shard.store.memory().rows.values())

    def _bytes_a_row(self) -> float:
        """What a row takes whose table is not known: as those do that are here, else as tables do on the
        average. Keys are spread evenly, so that slices are alike in that."""
        store = self._shard.store
        if (rows := self._rows_here()) >= MEASURED_ROWS:
            return self._held() / rows
        return sum(map(store.resident_bytes, store.tables)) / max(1, len(store.tables))

    def _by_slice(self, of_buckets: I64) -> F64:
        return np.array([of_buckets[b.start : b.stop].sum() for b in self._slices.values()], np.float64)


def _fitting(wanted: Sequence[str], sizes: Mapping[str, float], room: float) -> list[str]:
    """Those that go into the room one after the other; who does not leaves it to the next."""
    found = []
    for what in wanted:
        if sizes[what] <= room:
            room -= sizes[what]
            found.append(what)
    return found
