"""Time as an argument: a clock is passed in, so that a test can set it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

STEP_MS = 2_000
"""A wall clock that gains or loses more than this against the time since boot, between two readings, was set.
Slewing stays below: 500 ppm are 1.8 s in an hour."""

CONFIRMED_S = 120.0
"""A clock that was set is believed after it has stayed so for this long. A clock that is wrong for a shorter
time dates nothing and moves no event time; after a correction that stays, event time waits this long."""


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


def boot_id() -> str:
    """The id of this boot of the machine, by which `boot_ms` of two processes can be compared; "" if the
    system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boot_ms() -> int:
    """Milliseconds since the machine booted, time in which it was suspended included where the system counts
    that. No setting of the wall clock changes it."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ClockState(NamedTuple):
    """What a `SteadyClock` knows; times and offsets are in ms since the machine booted."""

    boot: str  # `boot_id`
    offset_ms: int  # added to the time since boot it gives the wall clock's time
    former_ms: int | None  # the offset in force before this one
    known_from_ms: int  # from then on a step back has to be confirmed


class SteadyClock:
    """A wall clock that one wrong setting does not move: the time since boot plus an offset that is known to
    be good.

    The offset follows the wall clock while that runs evenly. If the wall clock is set by more than `STEP_MS`,
    the former offset stays in force until the new one has lasted `CONFIRMED_S`. Two settings are followed at
    once: one that returns to the offset that was in force before, and one that goes back in a process that
    has not run for `CONFIRMED_S` yet (it may have started while the clock was ahead).

    Thread-safe. A Clock, and can be resumed from what another process of the same boot knew (`state`).
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, boot: str | None = None) -> None:
        """Begin with what `clock` says now.

        Args:
            clock: the wall clock, and for a clock of tests the monotonic one.
            boot: `boot_id()` unless a test says another.
        """
        self.clock = clock
        self._boot = boot_id() if boot is None else boot
        self._lock = threading.Lock()
        self._since_boot_ms = boot_ms if isinstance(clock, SystemClock) else self._since_start_ms
        at_ms, wall_ms = self._since_boot_ms(), clock.now_ms()
        self._offset_ms = wall_ms - at_ms
        self._since_ms = at_ms  # when the offset came into force
        self._former_ms: int | None = None  # the offset in force before this one
        self._known_from_ms = at_ms + round(CONFIRMED_S * 1_000)  # from then on a step back needs confirming
        self._set_ms: tuple[int, int] | None = None  # offset after a step, and since when
        self._behind_ms: int | None = None  # offset of a wall clock that is known to be behind
        self._followed_back = False  # the offset came into force at once, as a step back of a young process

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch, as far as they are known to be right."""
        with self._lock:
            at_ms = self._since_boot_ms()
            self._follow(self.clock.now_ms() - at_ms, at_ms)
            return at_ms + self._offset_ms

    def latest_ms(self) -> int:
        """The present time at the latest: which setting of the wall clock is right is not certain yet."""
        with self._lock:
            at_ms = self._since_boot_ms()
            offset_ms = self.clock.now_ms() - at_ms
            self._follow(offset_ms, at_ms)
            latest_ms = max(self._offset_ms, offset_ms)
            if self._followed_back and at_ms - self._since_ms < CONFIRMED_S * 1_000:
                assert self._former_ms is not None, "the offset before the step back"
                latest_ms = max(latest_ms, self._former_ms)
            return at_ms + latest_ms

    def monotonic(self) -> float:
        """Seconds of the monotonic clock."""
        return self.clock.monotonic()

    @property
    def step_ms(self) -> int:
        """By how much the wall clock differs from `now_ms`: ahead if positive, 0 while it runs evenly."""
        now_ms = self.now_ms()
        step_ms = self.clock.now_ms() - now_ms
        return step_ms if abs(step_ms) > STEP_MS else 0

    @property
    def state(self) -> ClockState:
        """What a later process on this machine can go on from."""
        with self._lock:
            return ClockState(self._boot, self._offset_ms, self._former_ms, self._known_from_ms)

    def resume(self, state: ClockState) -> None:
        """Go on from what a process knew that ran before this one. Nothing happens if the machine has booted
        since, or if this process knows the time for as long already."""
        with self._lock:
            if not state.boot or state.boot != self._boot or state.known_from_ms >= self._known_from_ms:
                return
            self._offset_ms, self._former_ms = state.offset_ms, state.former_ms
            self._known_from_ms = state.known_from_ms
            self._since_ms = state.known_from_ms - round(CONFIRMED_S * 1_000)
            self._set_ms = self._behind_ms = None
            self._followed_back = False

    def lead(self, now_ms: int) -> None:
        """Go on from `now_ms`: another clock has shown for long enough that this one is behind."""
        with self._lock:
            at_ms = self._since_boot_ms()
            self._former_ms, self._since_ms, self._followed_back = None, at_ms, False
            self._offset_ms = now_ms - at_ms
            self._behind_ms = self.clock.now_ms() - at_ms
            self._set_ms = None

    def _since_start_ms(self) -> int:
        return int(self.clock.monotonic() * 1_000)

    def _follow(self, offset_ms: int, at_ms: int) -> None:
        """Judge the wall clock's present offset."""
        if abs(offset_ms - self._offset_ms) <= STEP_MS:
            self._offset_ms, self._set_ms, self._behind_ms = offset_ms, None, None
            return
        if self._behind_ms is not None and abs(offset_ms - self._behind_ms) <= STEP_MS:
            self._behind_ms = offset_ms  # known to be wrong
            return
        back = offset_ms < self._offset_ms and at_ms < self._known_from_ms
        again = self._former_ms is not None and abs(offset_ms - self._former_ms) <= STEP_MS
        if self._set_ms is None or abs(offset_ms - self._set_ms[0]) > STEP_MS:
            self._set_ms = (offset_ms, at_ms)
        elif at_ms - self._set_ms[1] >= CONFIRMED_S * 1_000:
            again = True
        if back or again:
            # What was followed for seconds and taken back was wrong: it is not returned to at once.
            lasted = at_ms - self._since_ms >= CONFIRMED_S * 1_000
            self._former_ms = self._offset_ms if back or lasted else None
            self._offset_ms, self._since_ms = offset_ms, at_ms
            self._set_ms = self._behind_ms = None
            self._followed_back = back


def latest_ms(clock: Clock) -> int:
    """The present time at the latest: of a clock that was set, what it says or what it said before."""
    return clock.latest_ms() if isinstance(clock, SteadyClock) else clock.now_ms()


STEADY_CLOCK = SteadyClock()
"""The machine's time as this process dates records by it."""


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
