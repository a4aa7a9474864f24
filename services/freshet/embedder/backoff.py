"""The growing, interruptible sleep between two tries."""

from __future__ import annotations

import threading

__all__ = ["Backoff"]

SHORTEST_S, LONGEST_S = 0.01, 0.5
"""Bounds of a sleep. A shard takes seconds to be replaced, so half a second adds little; more than 100
tries a second would load the machine."""


class Backoff:
    """The backoff of one thread; any other thread may interrupt it."""

    def __init__(self) -> None:
        self.next_s = SHORTEST_S
        self._interrupted = threading.Event()

    @property
    def is_first(self) -> bool:
        """Whether the next sleep is the first since a success."""
        return self.next_s == SHORTEST_S

    def sleep(self) -> bool:
        """Sleep, then double the next duration. Returns True if the sleep was interrupted."""
        interrupted = self._interrupted.wait(self.next_s)
        self.next_s = min(2 * self.next_s, LONGEST_S)
        return interrupted

    def reset(self) -> None:
        """Start with the shortest sleep again, after a success, and clear an interruption."""
        self.next_s = SHORTEST_S
        self._interrupted.clear()

    def interrupt(self) -> None:
        """End the present sleep and skip the next ones until `reset`."""
        self._interrupted.set()
