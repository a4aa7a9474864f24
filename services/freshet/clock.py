"""Time as an argument: a clock is passed in, so that a test can set it."""

from __future__ import annotations

import time
from collections.abc import Iterable
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


class Stages:
    """How long a thread has been in each stage of its work: an odometer, read by others at any time.

    One thread marks; a mark costs a tenth of a microsecond. Times of a stage are wall time: what a thread
    waits for its turn on a core, or for the interpreter, counts as the stage's.
    """

    __slots__ = ("_at", "seconds")

    def __init__(self, names: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._at = time.perf_counter()

    def begin(self) -> None:
        """Forget the time since the last mark: it is no stage's."""
        self._at = time.perf_counter()

    def mark(self, stage: str) -> None:
        """The time since `begin` or the last mark was this stage's."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._at
        self._at = now


def summed(stages: Iterable[Stages]) -> dict[str, float]:
    """Seconds of each stage over several threads."""
    total: dict[str, float] = {}
    for one in stages:
        for name, seconds in one.seconds.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
