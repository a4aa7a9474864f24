"""Actions on their way: each is sent when it happens, in batches, until the gateway has it."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import orjson

from freshet.clock import Clock
from freshet.demo.connection import Door
from freshet.errors import Unavailable

__all__ = ["Outbox"]

BATCH = 500
REFUSING = (400, 413, 415, 422)
"""Answers that sending the same again would not change."""
LARGEST = 200_000
"""Actions held while the gateway is away: minutes of the highest rate. More are dropped and counted."""


class Outbox:
    """Thread-safe for `put`; one thread sends."""

    def __init__(self, clock: Clock, largest: int = LARGEST) -> None:
        self._clock, self._largest = clock, largest
        self._lock = threading.Lock()
        self._ties = itertools.count()
        self._waiting: list[tuple[int, int, Mapping[str, Any]]] = []  # a heap by time
        self._batch: list[Mapping[str, Any]] = []  # sent, and not known to be taken
        self.sent = 0  # actions that the log has
        self.refused = 0  # actions that the gateway does not want
        self.dropped = 0
        self.errors = 0  # requests that failed, each attempt

    def put(self, action: Mapping[str, Any]) -> None:
        """Send this action at its `ts`."""
        with self._lock:
            if len(self._waiting) >= self._largest:
                self.dropped += 1
                return
            heapq.heappush(self._waiting, (action["ts"], next(self._ties), action))

    def waiting(self) -> int:
        """Actions that the gateway does not have yet."""
        with self._lock:
            return len(self._waiting) + len(self._batch)

    def send_due(self, door: Door) -> bool | None:
        """Send what has happened by now.

        True: a batch was taken. None: nothing is due. False: it failed, and the next call sends the same
        batch with the same event ids.
        """
        if not self._batch:
            self._batch = self._take()
        if not self._batch:
            return None
        try:
            status, answer = door.post("/v1/actions", orjson.dumps(self._batch))
        except Unavailable:
            status, answer = 503, b""
        if status != 202 and status not in REFUSING:
            self.errors += 1
            return False
        refused = _refused(answer, len(self._batch))
        self.refused += refused
        self.sent += len(self._batch) - refused
        self._batch = []
        return True

    def _take(self) -> list[Mapping[str, Any]]:
        now_ms = self._clock.now_ms()
        taken: list[Mapping[str, Any]] = []
        with self._lock:
            while self._waiting and self._waiting[0][0] <= now_ms and len(taken) < BATCH:
                taken.append(heapq.heappop(self._waiting)[2])
        return taken


def _refused(answer: bytes, sent: int) -> int:
    """How many of a batch the gateway does not want; all of them if it did not look at them one by one."""
    body = orjson.loads(answer)
    return len(body.get("refused", ())) if "acks" in body else sent
