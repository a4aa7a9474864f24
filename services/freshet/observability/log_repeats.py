"""Limits repeated messages: a structlog processor that passes the first lines of each and counts the rest."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from structlog.typing import EventDict

__all__ = ["LINES", "MOST_MESSAGES", "TEMPLATE", "WINDOW_S", "Later", "RepeatLimit"]

LINES = 10
"""Lines of one message in a window: enough to see what varies."""

WINDOW_S = 10.0
"""A message that is repeated for ever costs one line a second."""

MOST_MESSAGES = 1_000
"""Messages with a count. Freshet has some 80; a library's that never repeat must not fill the memory."""

TEMPLATE = "_template"
"""Key of a library's message before its arguments, by which its lines count as the same message."""

Message = tuple[str, str]  # level, template
Later = Callable[[float, Callable[[], None]], None]
"""Calls a function after so many seconds."""


def _on_a_timer(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread is left, or the process ends: reported then
        timer.start()


@dataclass(slots=True)
class _Window:
    since: float
    lines: int = 1
    left_out: int = 0


class RepeatLimit:
    """Drops freshet's warnings and errors, and all lines of libraries, that come too fast. The next such line
    gives their number; if none comes, a line of its own does once the window is over, or at the end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, later: Later = _on_a_timer) -> None:
        self._clock, self._later, self._waits = clock, later, False
        self._windows: dict[Message, _Window] = {}
        self._lock = threading.Lock()

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        """Pass a line on, or raise DropEvent."""
        template, level = event.pop(TEMPLATE, None), event["level"]
        if template is None and level in ("debug", "info"):
            return event
        with self._lock:
            left_out = self._admit((level, template or event["event"]), self._clock())
            starts = left_out is None and not self._waits
            self._waits = self._waits or starts
        if starts:
            self._later(WINDOW_S, self._report_ended)
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            event["left_out"] = left_out
        return event

    def report(self) -> None:
        """Write how many lines were left out and not reported yet; called at the end of the process."""
        with self._lock:
            counts = self._take_counts(None)
        self._write(counts)

    def _admit(self, message: Message, now: float) -> int | None:
        """Return how many lines of the message were left out before this one; None: this one is, too."""
        window = self._windows.get(message)
        if window is None or now - window.since >= WINDOW_S:
            if window is None and len(self._windows) >= MOST_MESSAGES:
                del self._windows[next(iter(self._windows))]
            self._windows[message] = _Window(now)
            return window.left_out if window is not None else 0
        if window.lines >= LINES:
            window.left_out += 1
            return None
        window.lines += 1
        return 0

    def _take_counts(self, now: float | None) -> list[tuple[Message, int]]:
        """Return and reset the counts of windows that have ended; None: of all windows."""
        found = []
        for message, window in self._windows.items():
            if window.left_out and (now is None or now - window.since >= WINDOW_S):
                found.append((message, window.left_out))
                window.left_out = 0
        return found

    def _report_ended(self) -> None:
        with self._lock:
            counts = self._take_counts(self._clock())
            self._waits = any(window.left_out for window in self._windows.values())
            waits = self._waits  # for a window that began since
        if waits:
            self._later(WINDOW_S, self._report_ended)
        self._write(counts)

    @staticmethod
    def _write(counts: list[tuple[Message, int]]) -> None:
        for (_, message), left_out in counts:
            structlog.get_logger(__name__).info("lines were left out", message=message, left_out=left_out)
