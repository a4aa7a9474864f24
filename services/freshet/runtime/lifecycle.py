"""How a service process lives: told to stop by a signal, drained with a deadline, never outliving its
supervisor."""

from __future__ import annotations

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
    """Set `stop` on SIGTERM and SIGINT; a second one ends the process at once with 130. Main thread only."""

    def handle(number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


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
