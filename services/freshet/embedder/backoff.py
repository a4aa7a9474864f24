"""Waiting between two tries: longer each time, and cut short when there is no point in it any more."""

from __future__ import annotations

import threading

__all__ = ["Patience"]

SHORTEST_S, LONGEST_S = 0.01, 0.5
"""A shard that is replaced is away for seconds: half a second more is little, and 100 tries a second are too
many."""


class Patience:
    """Rests of one thread; any other may cut one short."""

    def __init__(self) -> None:
        self.next_s = SHORTEST_S
        self._cut = threading.Event()

    @property
    def short(self) -> bool:
        """Whether the next rest is the first since it went well."""
        return self.next_s == SHORTEST_S

    def rest(self) -> bool:
        """Rest, twice as long as the last time; True if it was cut short."""
        rested = self._cut.wait(self.next_s)
        self.next_s = min(2 * self.next_s, LONGEST_S)
        return rested

    def renew(self) -> None:
        """It went well: the next rest is short, and not cut any more."""
        self.next_s = SHORTEST_S
        self._cut.clear()

    def cut(self) -> None:
        """End the rest, and let the next ones be none until `renew`."""
        self._cut.set()
