"""Which ranks train a model together, decided in the log: the rules, without I/O.
`freshet.trainer.membership` does the I/O.

Every rank has a seat, `trainer:<i>` with the lowest free i, a claim like any other (PROTOCOL 9). The ranks
that step together are a *world*: a claim of `world`, in place of the world before it, that names its members
by their seats' fences; the first in the log wins. Its own fence is what batches, pushes and versions of its
ranks carry, so those of an earlier world are refused.

A rank that is not in a world, or leaves one because a rank was lost or another wants to join, claims its
seat anew: its fence is in no world then, and it *waits*. When nobody is left in the world, the waiting rank
of the lowest seat writes the next one at once. Members that do not leave it hold that up for as long as
their seats live; but who was a member itself has seen the world break, and after GRACE_S goes on without
them: those are the lost ones, whose claims run out later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from freshet.errors import Corrupt
from freshet.types import Fence

__all__ = [
    "GRACE_S",
    "WORLD",
    "Standing",
    "World",
    "may_write",
    "read_world",
    "seat_name",
    "seat_of",
    "world_text",
]

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
