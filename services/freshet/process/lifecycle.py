"""Lifecycle of a service process: stop signals, one drain deadline, resources, liveness of its main loop."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import Unavailable

STUCK_S = 120.0
"""Time without a beat after which a loop counts as stuck. A normal round takes milliseconds; the longest
waits a few times 10 s for a SQLite lock."""


class Pulse:
    """The heartbeat of a main loop: written by the loop, read by any thread for `/health/live`.

    Until the first beat the loop is not judged, because a service may load its state for any time.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._beat_s: float | None = None

    def beat(self) -> None:
        """Record that a round begins."""
        self._beat_s = self._clock.monotonic()

    def rest(self) -> None:
        """Suspend the check until the next beat, for work of unknown length such as loading state."""
        self._beat_s = None

    def stuck(self) -> str | None:
        """Return how long the loop has been stalled, in words; None if it is not stuck."""
        beat_s = self._beat_s
        stalled_s = 0.0 if beat_s is None else self._clock.monotonic() - beat_s
        return f"the main loop has stalled for {stalled_s:.0f} s" if stalled_s >= STUCK_S else None


log = structlog.get_logger("freshet.lifecycle")

LAST_S = 1.0
"""The least time of a late stage (a flush, the release of claims), even if earlier stages used up the drain.
A service has at most two such stages."""

CLOSE_S = 1.0
"""The time in which files and connections must close; the end of the process closes the rest."""

KILL_AFTER_S = 5.0
"""The time from the end of the drain until the supervisor kills a process that is still alive: two LAST_S,
CLOSE_S and two seconds for the last traces. Other grace periods (a container's, for example) should allow as
much."""

_PR_SET_PDEATHSIG = 1


def stop_on_signals(stop: threading.Event, *, supervised: bool = False) -> None:
    """Set `stop` on SIGTERM, SIGINT and SIGHUP (the terminal was closed). Call in the main thread only.

    A second SIGTERM or SIGINT ends the process at once, with the shell's exit code, 128 + the signal number.
    Not if `supervised`: systemd signals all processes, then the supervisor does, and kills after the drain.
    """
    stopping = False

    def handle(number: int, _frame: object) -> None:
        nonlocal stopping
        if stopping and not supervised and number != signal.SIGHUP:  # shell and kernel send one each
            os._exit(128 + number)
        stopping = True
        # On another thread: this one may be inside stop.wait() and hold the lock that set() needs.
        _thread.start_new_thread(stop.set, ())

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: go on without a terminal
        signal.signal(signal.SIGHUP, handle)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, so that no service outlives its supervisor.

    `parent` is the expected parent's process id: if that process is gone already, this one exits. Linux only;
    elsewhere services survive a killed supervisor, and the next `freshet up` finds them by their locks.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Drain:
    """One deadline for all stages of a stop: `seconds` from the call of `begin`."""

    def __init__(self, seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seconds, self._clock = seconds, clock
        self._ends: float | None = None

    def begin(self) -> None:
        """Start the time; only the first call counts."""
        if self._ends is None:
            self._ends = self._clock.monotonic() + self._seconds

    def left_s(self, least_s: float = 0.0) -> float:
        """Return the seconds left, at least `least_s`; before `begin`, the whole time."""
        left = self._seconds if self._ends is None else self._ends - self._clock.monotonic()
        return max(left, least_s, 0.0)


class Task:
    """A call on its own daemon thread, begun by the constructor."""

    def __init__(self, name: str, do: Callable[[], object]) -> None:
        self._do, self._raised = do, list[BaseException]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def done(self, seconds: float) -> bool:
        """Wait at most `seconds` and report whether the call has ended. Raises the call's exception."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if self._raised:
            raise self._raised[0]
        return True

    def _run(self) -> None:
        try:
            self._do()
        except BaseException as error:  # the caller raises it
            self._raised.append(error)


def within(seconds: float | None, name: str, do: Callable[[], object]) -> bool:
    """Call `do` and wait at most `seconds` (None: without limit). Raises the exception of `do`.

    Returns False if the call has not ended by then; it continues as a `Task`.
    """
    if seconds is None:
        do()
        return True
    return Task(name, do).done(seconds)


def join_all(threads: Iterable[threading.Thread], seconds: float) -> Sequence[str]:
    """Wait at most `seconds` for all threads together; return the names of those still alive."""
    deadline = time.monotonic() + seconds
    alive = []
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            alive.append(thread.name)
    return alive


@contextmanager
def interruptible_start(stop: threading.Event) -> Iterator[None]:
    """Suppress Unavailable within the block if `stop` is set: the start was interrupted on purpose."""
    try:
        yield
    except Unavailable as error:
        if not stop.is_set():
            raise
        log.info("stopped during the start", reason=str(error))


@dataclass
class Cleanup:
    """Resources to close in reverse order; a failure to close one does not keep the others open.

    As a context manager it closes them at the end of the block. A constructor that opens resources moves them
    out by `pop_all` as its last step, so a constructor that fails leaves none open.
    """

    within_s: float | None = None  # limit at the end of the block; see `run`
    _steps: list[tuple[str, Callable[[], object]]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.run(self.within_s)

    def pop_all(self) -> Cleanup:
        """Move all resources to a new `Cleanup` and return it."""
        moved = Cleanup(self.within_s, self._steps)
        self._steps = []
        return moved

    def add(self, name: str, close: Callable[[], object]) -> None:
        """Register `close`, to be called after every callback that is added later."""
        self._steps.append((name, close))

    def run(self, within_s: float | None = None) -> Sequence[str]:
        """Close all within `within_s`; return the names of resources that failed to close.

        A close may wait for a server that does not answer: at the limit the rest is left to the end of the
        process.
        """
        failed: list[str] = []
        closing = ""

        def close_all() -> None:
            nonlocal closing
            while self._steps:
                closing, close = self._steps.pop()
                try:
                    close()
                except Exception as error:
                    log.error("not closed cleanly", what=closing, reason=str(error))
                    failed.append(closing)

        if not within(within_s, "close", close_all):
            log.warning("not closed in time, left to the end of the process", what=closing)
            return [*failed, closing]
        return failed
