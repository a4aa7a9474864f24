"""Clocks, passed as arguments so that tests control time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

STEP_MS = 2_000
"""A wall clock that deviates by more than this from the time since boot, between two readings, was set.
Slewing stays below: 500 ppm are 1.8 s in an hour."""

CONFIRMED_S = 120.0
"""Time after which a new setting of the wall clock is accepted. A clock that is wrong for a shorter time
moves no event time; after a lasting correction event time stands still for this long."""


class Clock(Protocol):
    """Source of the time."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since the Unix epoch. It may jump."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start, never decreasing; for deadlines and leases."""


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds of the monotonic clock."""
        return time.monotonic()


SYSTEM_CLOCK = SystemClock()


def boot_id() -> str:
    """Return the id of the machine's boot, or "" if the system has none.

    `boot_ms` of two processes are comparable if their ids are equal.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boot_ms() -> int:
    """Return milliseconds since the machine's boot; settings of the wall clock do not change it.

    Time in suspension is included if the system counts it.
    """
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ClockState(NamedTuple):
    """State of a `SteadyClock`; times and offsets are in milliseconds since the machine's boot."""

    boot: str  # `boot_id`
    offset_ms: int  # wall clock minus time since boot
    former_ms: int | None  # the offset in force before this one
    known_from_ms: int  # time from which a step back needs confirmation


class SteadyClock:
    """A wall clock that ignores short wrong settings: the time since boot plus a confirmed offset.

    The offset follows the wall clock while that runs evenly. After a step of more than `STEP_MS` the former
    offset stays in force until the new one has lasted `CONFIRMED_S`. Two steps are followed at once: a return
    to the former offset, and a step back in a process younger than `CONFIRMED_S`, which may have started
    while the clock was ahead.

    Thread-safe. Another process of the same boot can resume from `state`.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, boot: str | None = None) -> None:
        """Start at the current time of `clock`.

        Args:
            clock: the wall clock; in tests also the monotonic one.
            boot: id of the boot; None: `boot_id()`.
        """
        self.clock = clock
        self._boot = boot_id() if boot is None else boot
        self._lock = threading.Lock()
        self._since_boot_ms = boot_ms if isinstance(clock, SystemClock) else self._since_start_ms
        at_ms, wall_ms = self._since_boot_ms(), clock.now_ms()
        self._offset_ms = wall_ms - at_ms
        self._since_ms = at_ms  # when the offset came into force
        self._former_ms: int | None = None  # the offset in force before this one
        self._known_from_ms = at_ms + round(
            CONFIRMED_S * 1_000
        )  # from then on a step back needs confirmation
        self._set_ms: tuple[int, int] | None = None  # unconfirmed offset after a step, and its start
        self._behind_ms: int | None = None  # offset of a wall clock that is known to be behind
        self._followed_back = False  # the offset is a step back that was followed at once

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch by the confirmed offset."""
        with self._lock:
            at_ms = self._since_boot_ms()
            self._follow(self.clock.now_ms() - at_ms, at_ms)
            return at_ms + self._offset_ms

    def latest_ms(self) -> int:
        """Return the upper bound of the time while it is uncertain which setting is right."""
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
        """Return seconds of the monotonic clock."""
        return self.clock.monotonic()

    @property
    def step_ms(self) -> int:
        """Wall clock minus `now_ms`; 0 while the wall clock runs evenly."""
        now_ms = self.now_ms()
        step_ms = self.clock.now_ms() - now_ms
        return step_ms if abs(step_ms) > STEP_MS else 0

    @property
    def state(self) -> ClockState:
        """State from which a later process on this machine can resume."""
        with self._lock:
            return ClockState(self._boot, self._offset_ms, self._former_ms, self._known_from_ms)

    def resume(self, state: ClockState) -> None:
        """Resume from the state of an earlier process.

        Ignored after a reboot, or if this process has known the time for longer.
        """
        with self._lock:
            if not state.boot or state.boot != self._boot or state.known_from_ms >= self._known_from_ms:
                return
            self._offset_ms, self._former_ms = state.offset_ms, state.former_ms
            self._known_from_ms = state.known_from_ms
            self._since_ms = state.known_from_ms - round(CONFIRMED_S * 1_000)
            self._set_ms = self._behind_ms = None
            self._followed_back = False

    def lead(self, now_ms: int) -> None:
        """Continue from `now_ms`, since another clock has shown that this one is behind."""
        with self._lock:
            at_ms = self._since_boot_ms()
            self._former_ms, self._since_ms, self._followed_back = None, at_ms, False
            self._offset_ms = now_ms - at_ms
            self._behind_ms = self.clock.now_ms() - at_ms
            self._set_ms = None

    def _since_start_ms(self) -> int:
        return int(self.clock.monotonic() * 1_000)

    def _follow(self, offset_ms: int, at_ms: int) -> None:
        """Follow, or hold back, the wall clock's current offset."""
        if abs(offset_ms - self._offset_ms) <= STEP_MS:
            self._offset_ms, self._set_ms, self._behind_ms = offset_ms, None, None
            return
        if self._behind_ms is not None and abs(offset_ms - self._behind_ms) <= STEP_MS:
            self._behind_ms = offset_ms  # still known to be behind
            return
        back = offset_ms < self._offset_ms and at_ms < self._known_from_ms
        confirmed = self._former_ms is not None and abs(offset_ms - self._former_ms) <= STEP_MS
        if self._set_ms is None or abs(offset_ms - self._set_ms[0]) > STEP_MS:
            self._set_ms = (offset_ms, at_ms)
        elif at_ms - self._set_ms[1] >= CONFIRMED_S * 1_000:
            confirmed = True
        if back or confirmed:
            # An offset that was followed for seconds and then reverted was wrong: no quick return to it.
            lasted = at_ms - self._since_ms >= CONFIRMED_S * 1_000
            self._former_ms = self._offset_ms if back or lasted else None
            self._offset_ms, self._since_ms = offset_ms, at_ms
            self._set_ms = self._behind_ms = None
            self._followed_back = back


def latest_ms(clock: Clock) -> int:
    """Return the upper bound of the time of a clock that may have been set."""
    return clock.latest_ms() if isinstance(clock, SteadyClock) else clock.now_ms()


STEADY_CLOCK = SteadyClock()
"""The clock by which this process dates records."""


class Stopwatch:
    """Seconds that a thread has spent in each stage of its work, readable from other threads.

    One thread marks; a mark costs 0.1 µs. Seconds are wall time, so waits for a core or the interpreter are
    included.
    """

    __slots__ = ("_at", "seconds")

    def __init__(self, names: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._at = time.perf_counter()

    def begin(self) -> None:
        """Start a stage; the time since the last mark is not counted."""
        self._at = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Add the time since `begin` or the last mark to a stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._at
        self._at = now


def summed(stopwatches: Iterable[Stopwatch]) -> dict[str, float]:
    """Sum the seconds of each stage over several threads."""
    total: dict[str, float] = {}
    for one in stopwatches:
        for name, seconds in one.seconds.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
