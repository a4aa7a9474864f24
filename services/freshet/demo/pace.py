"""How fast: events a second, kept over seconds whatever the single request takes."""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["Pace"]

DEBT_S = 0.5
"""What is further behind is let go: after an outage readers come as before, not all at once."""
MEASURED_S = 10.0


class Pace:
    """Deals out turns. Thread-safe; times are seconds of a monotonic clock."""

    def __init__(self, events_per_s: float, now_s: float) -> None:
        self.events_per_s = events_per_s
        self._lock = threading.Lock()
        self._due_s = now_s
        self._made: deque[tuple[float, int]] = deque()
        self._sum = 0

    def turn(self, now_s: float, events: int) -> float:
        """When the next visit, of so many events, is due; at most `DEBT_S` ago."""
        with self._lock:
            due_s = self._due_s = max(self._due_s, now_s - DEBT_S)
            self._due_s += events / self.events_per_s
            return due_s

    def made(self, now_s: float, events: int, *, counted: bool) -> None:
        """Events that were made; those that were not `counted` in the turn put off the next one."""
        with self._lock:
            if not counted:
                self._due_s += events / self.events_per_s
            self._made.append((now_s, events))
            self._sum += events
            self._forget(now_s)

    def measured(self, now_s: float) -> float:
        """Events a second over the last seconds."""
        with self._lock:
            self._forget(now_s)
            return self._sum / MEASURED_S

    def _forget(self, now_s: float) -> None:
        while self._made and self._made[0][0] <= now_s - MEASURED_S:
            self._sum -= self._made.popleft()[1]
