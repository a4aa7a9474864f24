"""The memory budget of messages that a gRPC listener receives and processes at once.

gRPC does not expose a message's size before reading it, so each read reserves the size of the largest message
and releases the unused part afterwards. Calls without a reservation wait unread, and flow control slows their
clients. A stream keeps its reservation while its client sends nothing or stops within a message, which look
the same; it must end when it has been idle for a while and others wait.

Whether a message is on its way is not known either, so reservations are granted first to calls, as their
only message is on its way; then to streams that have sent a message; last to streams that were just opened,
which may have ended as idle before. So idle streams that are opened again do not keep others out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum

OLDEST_EVERY = 16
"""One of so many grants goes to the oldest waiter, so that calls cannot starve streams. More would give too
much of the budget to idle streams, which keep it."""

SHORTEST_IDLE = 0.1
"""The idle limit shrinks with the number of waiters, to this share: a message may arrive over a slow link."""


class Priority(IntEnum):
    """The order in which waiters are granted a reservation."""

    CALL = 0  # of one message
    SENDING = 1  # a stream that has sent a message
    OPENED = 2  # a stream that has sent no message yet


class Reservation:
    """Bytes reserved for one message, from before it is read until it is answered."""

    def __init__(
        self, budget: MemoryBudget, priority: Priority, number: int, on_idle: Callable[[], None] | None
    ) -> None:
        self._budget, self.priority, self.number, self.on_idle = budget, priority, number, on_idle
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.size = 0  # reserved bytes
        self.since_s = 0.0  # time of the grant, on the loop's clock

    def shrink(self, size: int) -> None:
        """Keep the size of the message that was read, and release the rest."""
        self._budget.resize(self, size)

    def release(self) -> None:
        """Release all bytes, or stop waiting. Idempotent."""
        self.granted.cancel()  # without effect once granted
        self._budget.resize(self, 0)


class MemoryBudget:
    """The bytes of one listener's messages. Lives on one event loop."""

    def __init__(self, limit_bytes: int, message_bytes: int, idle_s: float) -> None:
        """`message_bytes`: the largest message, of which one always fits; `idle_s`: longest time for which an
        idle stream keeps its reservation while others wait."""
        self._limit, self._message_bytes, self._idle_s = (
            max(limit_bytes, message_bytes),
            message_bytes,
            idle_s,
        )
        self.reserved = 0
        self._waiting: dict[Priority, dict[Reservation, None]] = {p: {} for p in Priority}  # oldest first
        self._numbers = self._granted = 0  # reservations made and granted so far
        self._idle: dict[Reservation, None] = {}  # streams without a message, the longest idle first
        self._ending: set[Reservation] = set()  # streams that must end
        self._timer: asyncio.TimerHandle | None = None

    @property
    def readers(self) -> int:
        """Number of messages that can be read at once while none is processed."""
        return self._limit // self._message_bytes

    def reserve(
        self, on_idle: Callable[[], None] | None = None, priority: Priority = Priority.CALL
    ) -> Reservation:
        """Queue a reservation: its message may be read once it is `granted`; it must then be released.

        Args:
            on_idle: called if others wait and no message has come for a while; must lead to a release.
            priority: the order of grants.
        """
        self._numbers += 1
        reservation = Reservation(self, priority, self._numbers, on_idle)
        self._waiting[priority][reservation] = None
        self._grant()
        return reservation

    def resize(self, reservation: Reservation, size: int) -> None:
        """Set the bytes of a reservation."""
        self._waiting[reservation.priority].pop(reservation, None)
        self._idle.pop(reservation, None)
        self._ending.discard(reservation)
        self.reserved += size - reservation.size
        reservation.size = size
        self._grant()

    def idle_limit_s(self) -> float:
        """Return how long a stream may be idle at present.

        The limit shrinks as more wait, so that a message waits less than `idle_s` behind idle streams, unless
        `SHORTEST_IDLE` is reached.
        """
        waiting = sum(map(len, self._waiting.values()))
        return self._idle_s * max(SHORTEST_IDLE, self.readers / (self.readers + waiting))

    def _grant(self) -> None:
        while (first := self._next()) is not None and self.reserved + self._message_bytes <= self._limit:
            del self._waiting[first.priority][first]
            self._granted += 1
            self.reserved += self._message_bytes
            first.size, first.since_s = self._message_bytes, asyncio.get_running_loop().time()
            first.granted.set_result(None)
            if first.on_idle is not None:
                self._idle[first] = None
        self._end_idle()

    def _next(self) -> Reservation | None:
        """Return the reservation to grant next."""
        firsts = [first for priority in Priority if (first := self._first(priority)) is not None]
        if self._granted % OLDEST_EVERY == OLDEST_EVERY - 1:
            return min(firsts, key=lambda reservation: reservation.number, default=None)
        return firsts[0] if firsts else None

    def _first(self, priority: Priority) -> Reservation | None:
        waiting = self._waiting[priority]
        while waiting:
            first = next(iter(waiting))
            if not first.granted.done():
                return first
            del waiting[first]  # its call no longer waits
        return None

    def _end_idle(self) -> None:
        """End idle streams beyond the limit, at most one for each waiter; set a timer for the next."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        limit_s = self.idle_limit_s()
        wanted = sum(map(len, self._waiting.values())) - len(self._ending)
        for reservation in list(self._idle)[: max(0, wanted)]:
            due_s = reservation.since_s + limit_s
            if loop.time() < due_s:
                self._timer = loop.call_at(due_s, self._grant)
                break
            del self._idle[reservation]
            self._ending.add(reservation)
            if reservation.on_idle is not None:
                reservation.on_idle()
