"""Bytes that the calls of a gRPC door may hold together.

How long a message will be is not told before gRPC has read it, so whoever reads takes the room of the
largest first, and gives back what its message did not need. Who finds no room waits in turn, unread: its
client is slowed by flow control. A stream that is read holds its room while its client is quiet, or stops in
the middle of a message, which look the same; it ends when it has been so for a while and others wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Place", "Room"]


class Place:
    """Of one message, from before it is read until it is answered. Left once; leaving it again is nothing."""

    def __init__(self, room: Room, quiet: Callable[[], None] | None) -> None:
        self._room, self.quiet = room, quiet
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
        place for a message that does not come, while others wait."""
        self._together, self._largest, self._quiet_s = max(together, largest), largest, quiet_s
        self.held = 0
        self._waiting: dict[Place, None] = {}  # in turn
        self._quiet: dict[Place, None] = {}  # streams that are read, the longest first
        self._ending: set[Place] = set()  # of those that have been told to end
        self._timer: asyncio.TimerHandle | None = None

    def place(self, quiet: Callable[[], None] | None = None) -> Place:
        """A place in the queue; its message may be read when it is `granted`, and then it must be left.

        Args:
            quiet: is called when others wait and no message has come for a while: leave it then.
        """
        made = Place(self, quiet)
        self._waiting[made] = None
        self._grant()
        return made

    def changed(self, place: Place, size: int) -> None:
        """A place takes this many bytes from now on."""
        self._waiting.pop(place, None)
        self._quiet.pop(place, None)
        self._ending.discard(place)
        self.held += size - place.size
        place.size = size
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            first = next(iter(self._waiting))
            if not first.granted.done():  # else its caller waits no more
                if self.held + self._largest > self._together:
                    break
                self.held += self._largest
                first.size, first.since_s = self._largest, asyncio.get_running_loop().time()
                first.granted.set_result(None)
                if first.quiet is not None:
                    self._quiet[first] = None
            del self._waiting[first]
        if self._waiting:
            self._end_quiet()

    def _end_quiet(self) -> None:
        """End as many as others wait, of those that have been quiet for long enough; look again later."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wanted = len(self._waiting) - len(self._ending)
        for place in list(self._quiet)[: max(0, wanted)]:
            due_s = place.since_s + self._quiet_s
            if loop.time() < due_s:
                self._timer = loop.call_at(due_s, self._grant)
                break
            del self._quiet[place]
            self._ending.add(place)
            if place.quiet is not None:
                place.quiet()
