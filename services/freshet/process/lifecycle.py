"""How a service process lives: told to stop by a signal, drained with one deadline over all its stages,
never outliving its supervisor."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock

__all__ = [
    "CLOSE_S",
    "KILL_AFTER_S",
    "LAST_S",
    "STUCK_S",
    "Cleanup",
    "Drain",
    "Pulse",
    "Task",
    "die_with_parent",
    "join_all",
    "stop_on_signals",
    "within",
]

# --- Whether a main loop still turns: a loop beats once a round, and `/health/live` says how long ago
# that was.


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


log = structlog.get_logger("freshet.lifecycle")

LAST_S = 1.0
"""What a stage has that comes after others, however little of the drain they have left it: telling who was
cut off, a flush, releasing claims. At most two of a service."""

CLOSE_S = 1.0
"""How long files and connections may take to close; what does not is left to the end of the process."""

KILL_AFTER_S = 5.0
"""How long after its drain a process that was asked to stop is killed, if it still lives: two times LAST_S,
CLOSE_S, and two seconds for its last traces, where all of that hangs. Whoever else stops services (the grace
period of a container, say) should allow as much."""

_PR_SET_PDEATHSIG = 1


def stop_on_signals(stop: threading.Event) -> None:
    """Set `stop` on SIGTERM, SIGINT, and SIGHUP: the terminal was closed. A second SIGTERM or SIGINT ends the
    process at once, with 128 + its number, as shells say. Main thread only.
    """
    asked = False

    def handle(number: int, _frame: object) -> None:
        nonlocal asked
        if asked and number != signal.SIGHUP:  # a shell that ends sends one, and the system another
            os._exit(128 + number)
        asked = True
        # Not here: this thread may be within stop.wait(), with the lock that set() waits for.
        _thread.start_new_thread(stop.set, ())

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: go on without a terminal
        signal.signal(signal.SIGHUP, handle)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that no service outlives a killed
    supervisor.

    Linux only; elsewhere a killed supervisor leaves its services, which the next `freshet up` finds by their
    locks. `parent` is the process id that started us: if it is gone already, the process exits.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Drain:
    """The time of one stop, for all its stages together: `seconds` from when it `begin`s."""

    def __init__(self, seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seconds, self._clock = seconds, clock
        self._ends: float | None = None

    def begin(self) -> None:
        """The stop has come; only the first call counts."""
        if self._ends is None:
            self._ends = self._clock.monotonic() + self._seconds

    def left_s(self, least_s: float = 0.0) -> float:
        """What is left for the stages to come, or `least_s` if that is more; all of it before `begin`."""
        left = self._seconds if self._ends is None else self._ends - self._clock.monotonic()
        return max(left, least_s, 0.0)


class Task:
    """A call on a thread of its own, which the end of the process does not wait for."""

    def __init__(self, name: str, do: Callable[[], object]) -> None:
        """Begin."""
        self._do, self._raised = do, list[BaseException]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def done(self, seconds: float) -> bool:
        """Whether it has ended, waiting for so long at most. Raises what it raised."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if self._raised:
            raise self._raised[0]
        return True

    def _run(self) -> None:
        try:
            self._do()
        except BaseException as error:
            self._raised.append(error)


def within(seconds: float | None, name: str, do: Callable[[], object]) -> bool:
    """Do this for so long at most (None: however long it takes); False if it is not done then: it goes on by
    itself, as a `Task`. Raises what it raises."""
    if seconds is None:
        do()
        return True
    return Task(name, do).done(seconds)


def join_all(threads: Iterable[threading.Thread], seconds: float) -> Sequence[str]:
    """Wait for all of these together for so long; returns the names of those that have not ended."""
    deadline = time.monotonic() + seconds
    left = []
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    return left


@dataclass
class Cleanup:
    """What must be closed at the end, in reverse order; a failure to close one thing does not keep the
    others.

    A context manager: what is still in it at the end of its block is closed. A constructor that opens things
    takes them out by `pop_all` as its last step, so that one that fails leaves nothing open.
    """

    within_s: float | None = None  # of the block's end; see `run`
    _steps: list[tuple[str, Callable[[], object]]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.run(self.within_s)

    def pop_all(self) -> Cleanup:
        """What is to be closed, from now on by another: nothing is left in this one."""
        taken = Cleanup(self.within_s, self._steps)
        self._steps = []
        return taken

    def add(self, name: str, close: Callable[[], object]) -> None:
        """Close this, after everything that is added later."""
        self._steps.append((name, close))

    def run(self, within_s: float | None = None) -> Sequence[str]:
        """Close all; returns the names of what could not be closed.

        `within_s`: leave what is not closed by then to the end of the process. Something may wait there for a
        server that does not answer.
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
