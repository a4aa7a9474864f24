"""Bytes that the calls of a gRPC door may hold together.

How long a message will be is not told before gRPC has read it, so whoever reads takes the room of the
largest first, and gives back what its message did not need. Who finds no room waits in turn, unread: its
client is slowed by flow control. A stream that is read holds its room while its client is quiet, or stops in
the middle of a message, which look the same; it ends when it has been so for a while and others wait.

Whether a message is there is not told either, so it is guessed whose room is free again soonest: a call's,
whose one message is on its way; then a stream's that has just sent one; last that of a stream that was just
opened, which may have been ended for being quiet. So idle streams that are opened again keep out no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum

__all__ = ["Place", "Room", "Turn"]

OLDEST_EVERY = 16
"""Of so many that are granted, one goes to whoever has waited longest, so that nobody waits for ever behind
calls that go on coming; and no more often, since a quiet stream keeps what it is granted."""

SHORTEST = 0.1
"""Of the time that a stream may be quiet while nobody much waits, what is left of it however many wait: for a
message that is on its way over a slow link."""


class Turn(IntEnum):
    """Who is granted room first."""

    CALL = 0  # of one message
    SENDING = 1  # a stream that has sent a message
    OPENED = 2  # a stream that has not sent any yet


class Place:
    """Of one message, from before it is read until it is answered. Left once; leaving it again is nothing."""

    def __init__(self, room: Room, turn: Turn, number: int, quiet: Callable[[], None] | None) -> None:
        self._room, self.turn, self.number, self.quiet = room, turn, number, quiet
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.size = 0  # bytes that it takes of the room
        self.since_s = 0.0  # when it was granted, on the loop's clock

    def came(self, size: int) -> None:
        """The message is there, and has this many bytes."""
        self._room.changed(self, size)

    def leave(self) -> None:
        """Whatever was done with it."""
        self.granted.cancel()  # does nothing once it is granted
        self._room.changed(self, 0)


class Room:
    """Of one door. Lives on one event loop."""

    def __init__(self, together: int, largest: int, quiet_s: float) -> None:
        """`together`: bytes, and one of the `largest` in any case; `quiet_s`: that a stream may keep its
        place for a message that does not come, while few others wait."""
        self._together, self._largest, self._quiet_s = max(together, largest), largest, quiet_s
        self.held = 0
        self._waiting: dict[Turn, dict[Place, None]] = {turn: {} for turn in Turn}  # each the oldest first
        self._numbers, self._granted = 0, 0  # so far
        self._quiet: dict[Place, None] = {}  # streams that are read, the longest first
        self._ending: set[Place] = set()  # of those that have been told to end
        self._timer: asyncio.TimerHandle | None = None

    @property
    def places(self) -> int:
        """How many messages may be waited for at once, where none is worked on."""
        return self._together // self._largest

    def place(self, quiet: Callable[[], None] | None = None, turn: Turn = Turn.CALL) -> Place:
        """A place in the queue; its message may be read when it is `granted`, and then it must be left.

        Args:
            quiet: is called when others wait and no message has come for a while: leave it then.
            turn: who is granted room before whom.
        """
        self._numbers += 1
        made = Place(self, turn, self._numbers, quiet)
        self._waiting[turn][made] = None
        self._grant()
        return made

    def changed(self, place: Place, size: int) -> None:
        """A place takes this many bytes from now on."""
        self._waiting[place.turn].pop(place, None)
        self._quiet.pop(place, None)
        self._ending.discard(place)
        self.held += size - place.size
        place.size = size
        self._grant()

    def quiet_limit_s(self) -> float:
        """How long a stream may be quiet by now: the more wait, the shorter, so that a message waits for less
        than `quiet_s` behind quiet streams (unless `SHORTEST` is reached)."""
        wait = sum(map(len, self._waiting.values()))
        return self._quiet_s * max(SHORTEST, self.places / (self.places + wait))

    def _grant(self) -> None:
        while (first := self._next()) is not None and self.held + self._largest <= self._together:
            del self._waiting[first.turn][first]
            self._granted += 1
            self.held += self._largest
            first.size, first.since_s = self._largest, asyncio.get_running_loop().time()
            first.granted.set_result(None)
            if first.quiet is not None:
                self._quiet[first] = None
        self._end_quiet()

    def _next(self) -> Place | None:
        """Who is granted room next."""
        firsts = [first for turn in Turn if (first := self._first(turn)) is not None]
        if self._granted % OLDEST_EVERY == OLDEST_EVERY - 1:
            return min(firsts, key=lambda place: place.number, default=None)
        return firsts[0] if firsts else None

    def _first(self, turn: Turn) -> Place | None:
        waiting = self._waiting[turn]
        while waiting:
            first = next(iter(waiting))
            if not first.granted.done():
                return first
            del waiting[first]  # its caller waits no more
        return None

    def _end_quiet(self) -> None:
        """End as many as others wait, of those that have been quiet for long enough; look again later."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        limit_s = self.quiet_limit_s()
        wanted = sum(map(len, self._waiting.values())) - len(self._ending)
        for place in list(self._quiet)[: max(0, wanted)]:
            due_s = place.since_s + limit_s
            if loop.time() < due_s:
                self._timer = loop.call_at(due_s, self._grant)
                break
            del self._quiet[place]
            self._ending.add(place)
            if place.quiet is not None:
                place.quiet()
