"""Whether a main loop still turns: a loop beats once a round, and `/health/live` says how long ago that
was."""

from __future__ import annotations

from freshet.clock import SYSTEM_CLOCK, Clock

__all__ = ["STUCK_S", "Pulse"]

STUCK_S = 120.0
"""Without a beat a loop is stuck. A round takes milliseconds. The longest one that is in order waits 10 s
for a lock of SQLite's, a few times."""


class Pulse:
    """Written by one loop, read by any thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK, stuck_s: float = STUCK_S) -> None:
        """Rest: nothing is known of the loop before its first beat, as while a service loads its state."""
        self._clock, self._stuck_s = clock, stuck_s
        self._beat_s: float | None = None

    def beat(self) -> None:
        """A round begins."""
        self._beat_s = self._clock.monotonic()

    def rest(self) -> None:
        """Until the next beat the loop does what may take any time, such as reading its state back."""
        self._beat_s = None

    def stuck(self) -> str | None:
        """None, or for how long the loop has stood still."""
        beat_s = self._beat_s
        still_s = 0.0 if beat_s is None else self._clock.monotonic() - beat_s
        return f"the main loop has stood still for {still_s:.0f} s" if still_s >= self._stuck_s else None
