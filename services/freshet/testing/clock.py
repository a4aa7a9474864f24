"""A clock that tests set."""

from __future__ import annotations

import threading

__all__ = ["SettableClock"]


class SettableClock:
    """A `freshet.clock.Clock` that stands still until it is moved. Thread-safe."""

    def __init__(self, now_ms: int = 1_700_000_000_000, monotonic_s: float = 1000.0) -> None:
        self._lock = threading.Lock()
        self._now_ms, self._monotonic_s = now_ms, monotonic_s

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since the Unix epoch."""
        with self._lock:
            return self._now_ms

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        with self._lock:
            return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward. Raises ValueError for a negative time."""
        if seconds < 0:
            raise ValueError("time does not go back; `jump` moves only the wall clock")
        with self._lock:
            self._monotonic_s += seconds
            self._now_ms += round(seconds * 1000)

    def jump(self, now_ms: int) -> None:
        """Set only the wall clock, as an administrator or NTP may."""
        with self._lock:
            self._now_ms = now_ms
