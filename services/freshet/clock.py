"""Time as an argument: a clock is passed in, so that a test can set it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a part gets its time from."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the Unix epoch. May jump."""

    def monotonic(self) -> float:
        """Seconds that never go back, from an arbitrary start. For deadlines and leases."""


class SystemClock:
    """The machine's own time."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()


SYSTEM_CLOCK = SystemClock()
