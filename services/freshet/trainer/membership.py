"""A rank's place among the others: its seat, the worlds that it is in, and the groups that it steps with."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import orjson
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.coordination.claims import LEASE_S, Claims, Held
from freshet.errors import Corrupt, Unavailable
from freshet.observability.skipped import skip
from freshet.trainer.ranks import Alone, RankGroup, RankLost
from freshet.trainer.torch_import import Loading
from freshet.types import Fence

__all__ = [
    "GRACE_S",
    "WORLD",
    "Membership",
    "Standing",
    "Terms",
    "World",
    "may_write",
    "read_world",
    "seat_name",
    "seat_of",
    "world_text",
]

# --- Which ranks train a model together, decided in the log: the rules, without I/O.
# `freshet.trainer.membership` does the I/O.
#
# Every rank has a seat, `trainer:<i>` with the lowest free i, a claim like any other (PROTOCOL 9).
# The ranks that step together are a *world*: a claim of `world`, in place of the world before it,
# that names its members by their seats' fences; the first in the log wins. Its own fence is what
# batches, pushes and versions of its ranks carry, so those of an earlier world are refused.
#
# A rank that is not in a world, or leaves one because a rank was lost or another wants to join,
# claims its seat anew: its fence is in no world then, and it *waits*. When nobody is left in the
# world, the waiting rank of the lowest seat writes the next one at once. Members that do not leave it
# hold that up for as long as their seats live; but who was a member itself has seen the world break,
# and after GRACE_S goes on without them: those are the lost ones, whose claims run out later.


WORLD = "world"
SEAT = "trainer:"

GRACE_S = 0.25
"""How long those who have left a broken world wait for the others: many times what a connection that breaks
takes to be noticed by all."""


def seat_name(seat: int) -> str:
    """What a rank claims."""
    return f"{SEAT}{seat}"


def seat_of(what: str) -> int | None:
    """The seat that a claim is of; None if it is of something else."""
    number = what.removeprefix(SEAT)
    return int(number) if number != what and number.isascii() and number.isdecimal() else None


@dataclass(frozen=True, slots=True)
class World:
    """Ranks that step together, in rank order."""

    members: Mapping[int, Fence]  # seat -> fence of its claim; ranks are in order of seats
    store: str  # where they meet: host:port
    lanes: int  # of each rank
    fence: Fence  # of the record
    lost: Mapping[int, Fence] = field(default_factory=dict)  # left out though their seats lived

    def rank(self, seat: int, fence: Fence) -> int | None:
        """The rank of who has this seat by this claim; None if it is not a member."""
        return sorted(self.members).index(seat) if self.members.get(seat) == fence else None


def world_text(members: Mapping[int, Fence], lost: Mapping[int, Fence], store: str, lanes: int) -> str:
    """A world as the owner's name of its claim, which `read_world` reads."""
    listed, left_out = ([[seat, int(of)] for seat, of in sorted(seats.items())] for seats in (members, lost))
    return orjson.dumps({"members": listed, "lost": left_out, "store": store, "lanes": lanes}).decode()


def read_world(text: str, fence: Fence) -> World:
    """The world that a claim's owner names. Raises Corrupt if it names none."""
    try:
        told = orjson.loads(text)
        store, lanes = told["store"], told["lanes"]
        members, lost = ({seat: Fence(of) for seat, of in told[name]} for name in ("members", "lost"))
        numbers = [lanes, *members, *members.values(), *lost, *lost.values()]
        if not all(type(number) is int for number in numbers) or lanes < 1 or not isinstance(store, str):
            raise TypeError("members, store or lanes of another kind")
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            f"the claim of {WORLD} with fence {fence}: expected ranks, found {text[:80]!r}"
        ) from error
    return World(members, store, lanes, fence, lost)


@dataclass(frozen=True, slots=True)
class Standing:
    """What the log says at one moment."""

    world: World | None  # the newest
    seats: Mapping[int, Fence]  # that live: seat -> fence of its claim

    def waiting(self) -> dict[int, Fence]:
        """Seats that are in no world, in order; not those that were left out of it: who was comes back by a
        new claim, who is dead does not."""
        members, lost = (self.world.members, self.world.lost) if self.world else ({}, {})
        seats = sorted(self.seats.items())
        return {seat: f for seat, f in seats if f not in (members.get(seat), lost.get(seat))}

    def staying(self) -> dict[int, Fence]:
        """Members of the newest world that live and have not left it."""
        members = self.world.members if self.world else {}
        return {seat: f for seat, f in sorted(self.seats.items()) if members.get(seat) == f}

    def left_out(self) -> dict[int, Fence]:
        """Living seats that a world written now would go on without."""
        lost = self.world.lost if self.world else {}
        return self.staying() | {seat: f for seat, f in self.seats.items() if lost.get(seat) == f}


def may_write(standing: Standing, seat: int, former: Fence | None, waited_s: float) -> bool:
    """Whether the waiting rank of this seat is to write the next world now.

    Args:
        standing: what the log says. former: fence of the world that the rank was in; None if it was in none.
        waited_s: for how long it has waited.
    """
    waiting = list(standing.waiting())
    if seat not in waiting:
        return False
    if not standing.staying():
        return waiting[0] == seat
    if standing.world is None or standing.world.fence != former:
        return False  # it has not seen that world break
    # One after the other, the lowest seat first: which of the others has seen it break is not known.
    return waited_s >= GRACE_S * (1 + waiting.index(seat))


log = structlog.get_logger("freshet.trainer")

LOOK_S = 0.01
"""Between two looks at what the log says while a world is formed."""

AWAY_S = 0.5
"""Between two tries while the log cannot be reached, which each wait long for an answer themselves."""

QUIET_S = 10.0
"""For how long those who wait are not let in after ranks did not meet, times how often that was so."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On what a rank meets others."""

    address: str  # of this host, as other ranks reach it
    lanes: int  # that this rank would have
    partitions: int  # of the model
    form_s: float = 2 * LEASE_S  # how long ranks wait for each other when they meet
    answer_s: float = LEASE_S  # and at each step: who is silent for longer is lost

    def lanes_of(self, ranks: int) -> int:
        """Lanes of each of so many ranks: no more than there are partitions for."""
        return max(1, min(self.lanes, self.partitions // ranks))


class Membership:
    """Used by one thread, but for `somebody_waits` and `world`."""

    def __init__(
        self,
        claims: Claims,
        terms: Terms,
        stop: Callable[[], bool],
        clock: Clock = SYSTEM_CLOCK,
        loading: Loading | None = None,
    ) -> None:
        """`stop`: whether the process was told to stop, asked while the rank waits for others."""
        self._loading = loading or Loading()
        self._claims, self._terms, self._stop, self._clock = claims, terms, stop, clock
        self._owner = f"{socket.gethostname()}:{os.getpid()}/{uuid.uuid4().hex[:12]}"
        self._pause = threading.Event()
        self._held: Held | None = None
        self._seat = -1
        self._hosted: object | None = None  # the store of the present world, if this rank hosts it
        self.world: World | None = None  # that this rank is or was in
        self._met: set[int] = set()  # seats of the last world whose ranks met
        self._failures = 0  # worlds whose ranks did not meet, since then
        self._quiet_until = 0.0

    @property
    def seat(self) -> int:
        """The number of its seat; -1 if it has none yet."""
        return self._seat

    def join(self) -> RankGroup | None:
        """Leave the present world, if there is one, and meet the ranks of the next; None if the rank was told
        to stop meanwhile.

        While the log is away it waits. Raises DataLost, Corrupt: as `Claims` do.
        """
        while not self._stop():
            try:
                if self.standing().seats:  # others would wait for us with their worlds ended
                    self._loading.wait()
                self._sit()
                world = self._next_world()
            except Unavailable as error:  # what was written all the same is nobody's, and its lease runs out
                log.warning("no world is formed while the log is away", reason=str(error))
                self._pause.wait(AWAY_S)
                continue
            if world is None:
                continue
            try:
                group = self._meet(world)
            except RankLost as lost:
                log.warning("the ranks of a world did not meet", world=int(world.fence), reason=str(lost))
                self._failures += 1
                self.world = world
                continue
            # Whoever could not be reached may try again, but not at once: each time all others stop for it.
            self._quiet_until = self._clock.monotonic() + QUIET_S * self._failures
            self._failures = 0
            self.world, self._met = world, set(world.members)
            log.info("a world is formed", world=int(world.fence), rank=group.rank, ranks=group.size)
            return group
        return None

    def somebody_waits(self) -> bool:
        """Whether a living rank is in no world, or the newest is not this rank's any more. Any thread.

        Who trains alone goes on until it has what ranks meet by.
        """
        if self.left_behind():
            return True
        waits = bool(self.standing().waiting()) and self._clock.monotonic() >= self._quiet_until
        return waits and self._loading.begin()

    def left_behind(self) -> bool:
        """Whether others have made a newer world than this rank's: what it sends is refused. Any thread."""
        newest = self.standing().world
        return newest is not None and (self.world is None or newest.fence != self.world.fence)

    def was_left_behind(self) -> bool:
        """As `left_behind`, of a rank whose sendings were refused: who refused them may have read more of the
        log than this process, as when it stood still. So it waits for as long as others wait for a rank."""
        deadline = self._clock.monotonic() + self._terms.answer_s
        while not self.left_behind():
            if self._stop() or self._clock.monotonic() >= deadline:
                return False
            self._pause.wait(LOOK_S)
        return True

    def standing(self) -> Standing:
        """What the log says now. Any thread."""
        self._claims.check()
        claims, living = self._claims.survey()
        record = claims.get(WORLD)
        seats = {seat: claims[what].fence for what in living if (seat := seat_of(what)) is not None}
        try:
            world = read_world(record.owner, record.fence) if record is not None else None
        except Corrupt as error:  # nobody is in it, so the next world replaces it at once
            assert record is not None
            skip("world", f"{WORLD} with fence {record.fence}", str(error))
            world = World({}, "", 1, record.fence)
        return Standing(world, seats)

    def leave(self) -> None:
        """Give the seat up."""
        self._hosted = None
        if self._held is not None:
            self._held.release()
            self._held = None

    def _sit(self) -> None:
        """Claim the seat anew, or the lowest that is free; nothing where the seat waits already."""
        held, deadline = self._held, self._clock.monotonic() + self._terms.form_s
        if held is not None and not held.lost.is_set():
            if self.world is None or self.world.rank(self._seat, held.fence) is None:
                return  # no world that it was in had this claim
            self._held = self._claims.replace(held.what, self._owner, held.fence, deadline)
        else:
            self._held = None
        while self._held is None:
            claims, living = self._claims.survey()
            self._seat = next(i for i in range(len(living) + 1) if seat_name(i) not in living)
            name = seat_name(self._seat)
            former = claims[name].fence if name in claims else None
            self._held = self._claims.replace(name, self._owner, former, deadline)

    def _next_world(self) -> World | None:
        """Wait for a world with this rank in it, and write it if that is this rank's part; None if the seat
        is lost or the rank was told to stop."""
        assert self._held is not None
        since = self._clock.monotonic()
        former = self.world.fence if self.world else None
        while not self._stop() and not self._held.lost.is_set():
            standing = self.standing()
            if len(standing.seats) > 1:  # before one writes a world: then the others have `form_s` to come
                self._loading.wait()
            world = standing.world
            if world is not None and world.rank(self._seat, self._held.fence) is not None:
                return world
            if may_write(standing, self._seat, former, self._clock.monotonic() - since):
                self._write(standing)
            else:
                self._pause.wait(LOOK_S)
        return None

    def _write(self, standing: Standing) -> None:
        members = {seat: f for seat, f in standing.waiting().items() if self._reachable(seat)}
        place = ""
        if len(members) > 1:
            from freshet.trainer.torch_ranks import host_store  # noqa: PLC0415 - imports torch

            self._hosted, place = host_store(self._terms.address, self._terms.form_s)
        text = world_text(members, standing.left_out(), place, self._terms.lanes_of(len(members)))
        former = standing.world.fence if standing.world else None
        deadline = self._clock.monotonic() + self._terms.form_s
        try:
            claim = self._claims.replace(WORLD, text, former, deadline)
        except Unavailable as error:
            log.warning("a world could not be written", reason=str(error))
            return
        if claim is not None:
            claim.forget()

    def _reachable(self, seat: int) -> bool:
        """Whether to try with this seat: after a failure only with whom this rank has met, then alone."""
        if self._failures == 0 or seat == self._seat:
            return True
        return self._failures == 1 and seat in self._met

    def _meet(self, world: World) -> RankGroup:
        assert self._held is not None
        rank = world.rank(self._seat, self._held.fence)
        assert rank is not None
        size = len(world.members)
        if size == 1:
            self._hosted = None
            return Alone(world.fence)
        from freshet.trainer.torch_ranks import TorchRanks, connect_store  # noqa: PLC0415 - imports torch

        terms = self._terms
        return TorchRanks(
            connect_store(world.store, terms.form_s),
            fence=world.fence,
            rank=rank,
            size=size,
            lanes=world.lanes,
            partitions=terms.partitions,
            address=terms.address,
            form_s=terms.form_s,
            answer_s=terms.answer_s,
        )
