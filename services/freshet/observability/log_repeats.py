"""Messages that come too fast: the first of each are kept, the rest counted. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["LINES", "WINDOW_S", "Repeats"]

LINES = 10
"""Of one message in a window: enough to see who and what varies."""

WINDOW_S = 10.0
"""So a message that is repeated for ever costs one line a second."""

MOST_MESSAGES = 1_000
"""Of which counts are kept. Ours are some 80; a library's that never repeats must not fill the memory."""


@dataclass(slots=True)
class _Window:
    since: float
    lines: int = 0
    left_out: int = 0


class Repeats:
    """What was said of late. Used under the caller's lock."""

    def __init__(self, lines: int = LINES, window_s: float = WINDOW_S) -> None:
        self._lines, self._window_s = lines, window_s
        self._windows: dict[Hashable, _Window] = {}

    def admit(self, message: Hashable, now: float) -> int | None:
        """None if this line is left out; else how many of the same message were left out before it."""
        window = self._windows.get(message)
        if window is None or now - window.since >= self._window_s:
            left_out = window.left_out if window is not None else 0
            if window is None and len(self._windows) >= MOST_MESSAGES:
                del self._windows[next(iter(self._windows))]
            self._windows[message] = _Window(now, 1)
            return left_out
        if window.lines >= self._lines:
            window.left_out += 1
            return None
        window.lines += 1
        return 0

    @property
    def untold(self) -> bool:
        """Whether lines were left out that nobody has been told of."""
        return any(window.left_out for window in self._windows.values())

    def over(self, now: float | None) -> list[tuple[Hashable, int]]:
        """(message, lines left out) of windows that have ended; None: of all. Told once."""
        found = []
        for message, window in self._windows.items():
            if window.left_out and (now is None or now - window.since >= self._window_s):
                found.append((message, window.left_out))
                window.left_out = 0
        return found
