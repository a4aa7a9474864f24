"""Queue of actions: each is sent at its time, in batches, until the gateway acknowledges it."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import orjson

from freshet.clock import Clock
from freshet.demo.connection import Connection
from freshet.errors import Unavailable

__all__ = ["Outbox"]

BATCH = 500
REFUSING = (400, 413, 415, 422)
"""Statuses that a retry would not change."""
LARGEST = 200_000
"""Actions queued while the gateway is unavailable, minutes at the highest rate. Further ones are dropped."""


class Outbox:
    """A queue with many writers, by `put`, and one sender."""

    def __init__(self, clock: Clock, largest: int = LARGEST) -> None:
        self._clock, self._largest = clock, largest
        self._lock = threading.Lock()
        self._ties = itertools.count()
        self._waiting: list[tuple[int, int, Mapping[str, Any]]] = []  # a heap by time
        self._batch: list[Mapping[str, Any]] = []  # sent and not acknowledged
        self.sent = 0  # acknowledged actions
        self.refused = 0  # actions that the gateway refused
        self.dropped = 0
        self.errors = 0  # failed attempts

    def put(self, action: Mapping[str, Any]) -> None:
        """Queue an action to be sent at its `ts`."""
        with self._lock:
            if len(self._waiting) >= self._largest:
                self.dropped += 1
                return
            heapq.heappush(self._waiting, (action["ts"], next(self._ties), action))

    def waiting(self) -> int:
        """Return the number of actions that are not acknowledged."""
        with self._lock:
            return len(self._waiting) + len(self._batch)

    def send_due(self, gateway: Connection) -> bool | None:
        """Send one batch of due actions.

        Returns True if the gateway acknowledged it, None if no action is due, False if the request failed;
        the next call then sends the same batch with the same event ids.
        """
        if not self._batch:
            self._batch = self._pop_due()
        if not self._batch:
            return None
        try:
            status, answer = gateway.post("/v1/actions", orjson.dumps(self._batch))
        except Unavailable:
            status, answer = 503, b""
        if status != 202 and status not in REFUSING:
            self.errors += 1
            return False
        refused = _count_refused(answer, len(self._batch))
        self.refused += refused
        self.sent += len(self._batch) - refused
        self._batch = []
        return True

    def _pop_due(self) -> list[Mapping[str, Any]]:
        now_ms = self._clock.now_ms()
        due: list[Mapping[str, Any]] = []
        with self._lock:
            while self._waiting and self._waiting[0][0] <= now_ms and len(due) < BATCH:
                due.append(heapq.heappop(self._waiting)[2])
        return due


def _count_refused(answer: bytes, sent: int) -> int:
    """Count the refused actions of a batch: all of them if the answer does not list single ones."""
    body = orjson.loads(answer)
    return len(body.get("refused", ())) if "acks" in body else sent
