"""A clock that a test sets."""

from __future__ import annotations

import threading

__all__ = ["SettableClock"]


class SettableClock:
    """A `freshet.clock.Clock` that stands still until it is moved. Thread-safe."""

    def __init__(self, now_ms: int = 1_700_000_000_000, monotonic_s: float = 1000.0) -> None:
        self._lock = threading.Lock()
        self._now_ms, self._monotonic_s = now_ms, monotonic_s

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the Unix epoch."""
        with self._lock:
            return self._now_ms

    def monotonic(self) -> float:
        """Seconds that never go back."""
        with self._lock:
            return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Move both clocks on."""
        if seconds < 0:
            raise ValueError("time does not go back; `jump` moves the wall clock alone")
        with self._lock:
            self._monotonic_s += seconds
            self._now_ms += round(seconds * 1000)

    def jump(self, now_ms: int) -> None:
        """Set the wall clock alone, as an administrator or NTP may."""
        with self._lock:
            self._now_ms = now_ms
