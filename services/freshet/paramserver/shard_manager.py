"""A shard among others: which slices it claims, serves and gives away (PROTOCOL 9 and 10).

Every shard holds a seat. The living seat with the lowest fence leads and writes plans, by the load that
shards report (`freshet.paramserver.balance_rules`); a plan is advice, claims are the truth. A shard claims
the slices that the plan gives it once they are free: never claimed, released, or of an owner that was silent
for a lease. It gives a slice away by flushing it and releasing the claim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from freshet.clock import Clock
from freshet.coordination.claims import Claims, Held
from freshet.coordination.slices import SEATS, owner_text, seat_of, slices_of
from freshet.errors import Corrupt, Fenced, FreshetError, Unavailable
from freshet.paramserver.balancer import Balancing
from freshet.paramserver.shard import Shard
from freshet.types import Bucket

__all__ = ["Keeper", "KeeperCounts"]

log = structlog.get_logger("freshet.paramserver")

ROUND_S = 0.05
"""Between two looks at the claims: short against the lease of 3 s, after which a dead shard is replaced."""

UNTAKEN_S = 5.0
"""A slice that nobody takes for so long holds up no other that is to be given away, if who should take it
has to give as well: that may come first."""

DAMAGED_AGAIN_S = 30.0
"""Before a slice whose rows are damaged is claimed again: an operator may have mended them."""

CLAIM_S = 1.0
"""How long a claim may take to be read back; another shard may have been faster."""


@dataclass(slots=True)
class KeeperCounts:
    """What has happened to slices since the shard started."""

    taken: int = 0
    given: int = 0
    lost: int = 0
    doubted: int = 0
    """their rows were not what they were when they were claimed, and they were claimed anew"""


class Keeper:
    """Keeps a shard's slices. `run` does rounds until told to stop; `step` is one, for tests.

    A round may hang as long as the row store has patience: `run` and `leave` are for one thread, `drain` may
    be called from another, and waits for the round in hand.
    """

    def __init__(
        self,
        shard: Shard,
        claims: Claims,
        balancing: Balancing,
        *,
        name: str,
        address: str,
        life: str,
        buckets: int,
        clock: Clock,
    ) -> None:
        self._shard, self._claims, self._clock, self._balancing = shard, claims, clock, balancing
        self._slices = slices_of(buckets)
        self._name, self._seat_name = name, SEATS + name
        self._owner = owner_text(name, address, life)
        self._seat: Held | None = None
        self._mine: dict[str, Held] = {}  # slices that are served
        self._doubted: set[str] = set()  # to be read whole before they are served again
        self._at_once = len(self._slices)  # of doubted slices
        self._left: set[str] = set()  # not known to be served by others; the log is held for them
        self._damaged: dict[str, tuple[float, str]] = {}  # slices not to be claimed before then, and why
        self._free_since: dict[str, float] = {}  # slices of nobody, monotonic
        self._leaving = False
        self._round = threading.Lock()
        self.counts = KeeperCounts()

    def take_seat(self, deadline: float, stop: threading.Event | None = None) -> None:
        """Be counted on from now. Raises Unavailable if another process of this name lives until the deadline
        or `stop`."""
        self._seat = self._claims.acquire(self._seat_name, self._owner, deadline, stop)

    def run(self, stop: threading.Event) -> None:
        """Rounds until `stop`. Raises what ends the shard: Fenced if another process took its name."""
        while not stop.wait(ROUND_S):
            try:
                self.step()
            except Unavailable as error:
                log.warning("slices are looked after in the next round", reason=str(error))

    def step(self) -> None:
        """One round. Raises Unavailable (the next round goes on), Fenced, DataLost, Mismatch, Corrupt."""
        with self._round:
            assert self._seat is not None, "take_seat comes first"
            self._seat.check()
            if self._shard.failed is not None:
                raise self._shard.failed
            self._drop_lost()
            self._leave_doubtful()
            self._let_go()
            loading = self._with_buckets(self._shard.loader.loading())
            loaded = [what for what in self._mine if what not in loading]
            self._balancing.step(self._seat, loaded, self._mine)
            plan = self._claims.plan()
            if plan is None or len(plan.seats) != len(self._slices):
                return
            planned = dict(zip(self._slices, plan.seats, strict=True))
            untaken: Unavailable | None = None
            try:
                if not self._leaving:
                    mine = [what for what, seat in planned.items() if seat == self._seat_name]
                    free = self._claims.free([what for what in mine if what not in self._mine])
                    free = self._sound(mine, free)
                    self._take(self._balancing.fitting(free))
            except Unavailable as error:  # what cannot be taken keeps nothing from others
                untaken = error
            self._give(self._balancing.next_to_move(self._away(planned)))
            if untaken is not None:
                raise untaken

    def leave(self, deadline: float) -> None:
        """Give up the seat, and serve on while others take over, a little at a time, and until they have told
        so; not beyond the clock's `deadline`. What is left then, or if nobody else is there, is for
        `drain`."""
        assert self._seat is not None, "take_seat comes first"
        self._leaving, pause = True, threading.Event()
        self._seat.release()
        while self._mine or self._left:
            if self._clock.monotonic() >= deadline or not self._claims.alive(SEATS):
                return
            try:
                self.step()
            except FreshetError as error:
                log.warning("slices are not handed over one by one", reason=str(error))
                return
            pause.wait(ROUND_S)

    def drain(self) -> None:
        """Flush and release everything, so that others need not wait for a lease. Raises Unavailable.

        The log stays held for slices of which no other shard has told that it serves them: others may have
        no room, or die before they have read them. The hold is in this shard's name, and stands until it is
        started again.
        """
        with self._round:
            self._give(list(self._mine))
            self._let_go()
            if self._left and any(claim.what != self._seat_name for claim in self._claims.alive(SEATS)):
                log.warning(
                    "no other shard serves these slices yet; the log is held for them until this one is "
                    "started again",
                    slices=len(self._left),
                )
            if self._seat is not None:
                self._seat.release()

    @property
    def slices(self) -> Sequence[str]:
        """Those served here."""
        return list(self._mine)

    @property
    def ready(self) -> str | None:
        """None, or why this shard does not serve what it should."""
        if (why := self._balancing.full or self._balancing.no_room) is not None:
            return why
        if self._damaged:
            what, (_, reason) = next(iter(self._damaged.items()))
            return f"{len(self._damaged)} slices are not served, {what} first: {reason}"
        plan = self._claims.plan()
        wanted = plan.seats.count(self._seat_name) if plan is not None else 0
        if plan is None or wanted > len(self._mine):
            return f"{len(self._mine)} of {wanted} slices are served"
        return None

    def _drop_lost(self) -> None:
        lost = [what for what, held in self._mine.items() if what not in held.things]
        if lost:
            log.warning("slices were taken over by another shard", slices=len(lost), slice=lost[0])
            for what in lost:
                del self._mine[what]
            self._shard.leave(self._buckets(lost))  # who claimed them may not get to hold the log for them
            self._left.update(lost)
            self.counts.lost += len(lost)

    def _leave_doubtful(self) -> None:
        """Give slices up whose rows changed while they were loaded: what they have learned is lost, and
        owners must be seen to change, so that it is replayed (PROTOCOL 7)."""
        for what in self._with_buckets(self._shard.doubtful()) & set(self._mine):
            self._shard.leave(self._buckets([what]))
            self._mine.pop(what).release([what])
            self._doubted.add(what)
            self._left.add(what)
            self.counts.doubted += 1

    def _let_go(self) -> None:
        """Others serve some of the slices that were left, and have told so: from then on what the log must
        still hold for them is theirs to say."""
        if not self._left:
            return
        claims, living = self._claims.snapshot()
        served = []
        for what in sorted(self._left & living.keys()):
            seat = seat_of(claims[what].owner)
            if seat != self._seat_name and self._balancing.told_by(what) == seat:
                served.append(what)
        if served:
            self._shard.drop(self._buckets(served))
            self._left -= set(served)

    def _away(self, planned: Mapping[str, str]) -> list[str]:
        """Slices that others should have, if it is time for this shard to give some of them away.

        One shard gives at a time, and the next slices go when the last ones are loaded and told of: whoever
        looks rows up or pushes waits for all of them together, and in between must find everything served.
        """
        claims, living = self._claims.snapshot()
        now_s = self._clock.monotonic()
        free = planned.keys() - living.keys()
        self._free_since = {what: self._free_since.get(what, now_s) for what in free}
        owners = {what: seat_of(claims[what].owner) for what in planned.keys() & living.keys()}
        givers = {
            owner
            for what, owner in owners.items()
            if owner is not None and planned[what] != owner and planned[what] in living
        }
        for what, seat in planned.items():
            if seat not in living:
                continue
            owner = owners.get(what)
            if owner is None and seat in givers and now_s - self._free_since[what] > UNTAKEN_S:
                continue
            if owner == seat and self._balancing.told_by(what) == seat:
                continue
            released = owner == self._seat_name and what not in self._mine  # and not read back yet
            if owner is None or owner == seat or released:
                return []  # nobody's, or not loaded yet
        if min(givers, default=None) != self._seat_name:
            return []
        loading = self._with_buckets(self._shard.loader.loading())  # what they learn could not be flushed yet
        away = [what for what in self._mine if planned[what] != self._seat_name and planned[what] in living]
        return [what for what in away if what not in loading]

    def _take(self, free: Sequence[str]) -> None:
        if not free:
            return
        sure = [what for what in free if what not in self._doubted]
        # Rows that disagree again, or are damaged, hold up no others.
        free, whole = (sure, False) if sure else (free[: self._at_once], True)
        held = self._claims.acquire_all(free, self._owner, self._clock.monotonic() + CLAIM_S)
        try:
            rows = self._shard.take(self._buckets(free), held.fence, whole=whole)
        except Corrupt as error:
            held.release()
            if len(free) > 1:  # which of them it is is found by halves
                self._doubted.update(free)
                self._at_once = len(free) // 2
            else:
                self._set_aside(free, str(error))
            raise Unavailable(f"slices are not taken: {error}") from error
        except FreshetError as error:
            held.release()
            if isinstance(error, Fenced):  # somebody else was faster with a later claim
                raise Unavailable(str(error)) from error
            raise
        self._mine.update(dict.fromkeys(free, held))
        for what in self._damaged.keys() & set(free):
            del self._damaged[what]
        self._doubted -= set(free)
        self._at_once = min(2 * self._at_once, len(self._slices))
        self._left -= set(free)
        self.counts.taken += len(free)
        log.info("slices are served", slices=len(free), rows=rows, fence=int(held.fence), loaded=whole)

    def _sound(self, mine: Sequence[str], free: Sequence[str]) -> list[str]:
        """The free slices without those whose rows were damaged just now."""
        now_s = self._clock.monotonic()
        for what in self._damaged.keys() - set(mine):  # another shard's to take
            del self._damaged[what]
        return [what for what in free if self._damaged.get(what, (now_s, ""))[0] <= now_s]

    def _set_aside(self, slices: Sequence[str], reason: str) -> None:
        until_s = self._clock.monotonic() + DAMAGED_AGAIN_S
        self._damaged.update(dict.fromkeys(slices, (until_s, reason)))
        what = slices[0]
        log.error("slices with damaged rows are not served", slices=len(slices), slice=what, reason=reason)

    @property
    def damaged(self) -> Mapping[str, str]:
        """{slice that is not served because its rows are damaged: why}."""
        return {what: why for what, (_, why) in self._damaged.items()}

    def _give(self, slices: Sequence[str]) -> None:
        if not slices:
            return
        self._shard.give_up(self._buckets(slices))
        for what in slices:
            self._mine.pop(what).release([what])
        self._left.update(slices)
        self.counts.given += len(slices)
        log.info("slices were given away", slices=len(slices))

    def _with_buckets(self, buckets: Iterable[Bucket]) -> set[str]:
        """The slices that hold one of these."""
        chosen = set(buckets)
        return {what for what, of in self._slices.items() if chosen and not chosen.isdisjoint(of)}

    def _buckets(self, slices: Sequence[str]) -> list[Bucket]:
        return [Bucket(b) for what in slices for b in self._slices[what]]
