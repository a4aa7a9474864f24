"""How a service process lives: told to stop by a signal, drained with a deadline, never outliving its
supervisor."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

__all__ = ["Cleanup", "die_with_parent", "stop_on_signals"]

log = structlog.get_logger("freshet.lifecycle")

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


@dataclass
class Cleanup:
    """What must be closed at the end, in reverse order; a failure to close one thing does not keep the
    others."""

    _steps: list[tuple[str, Callable[[], object]]] = field(default_factory=list)

    def add(self, name: str, close: Callable[[], object]) -> None:
        """Close this, after everything that is added later."""
        self._steps.append((name, close))

    def run(self) -> Sequence[str]:
        """Close all; returns the names of what could not be closed."""
        failed = []
        while self._steps:
            name, close = self._steps.pop()
            try:
                close()
            except Exception as error:
                log.error("not closed cleanly", what=name, reason=str(error))
                failed.append(name)
        return failed
