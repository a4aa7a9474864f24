"""Where lanes wait for permits: the bound on staleness, shared fairly."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from freshet.embedder.core import Permits

__all__ = ["StalenessLimiter"]


class StalenessLimiter:
    """Gives out permits of one stream. Thread-safe.

    Of the lanes that wait, those with the fewest batches in flight come first: a lane that looks far ahead
    must not leave another without work.
    """

    def __init__(self, permits: Permits) -> None:
        self._permits = permits
        self._changed = threading.Condition()
        self._waiting: Counter[int] = Counter()

    def acquire(self, lane: int, rows: int, wait_s: float, given_up: Callable[[], bool] | None = None) -> int:
        """A permit for a batch of the lane, or 0 if none is free within `wait_s`, or once `given_up()`.

        Who changes what `given_up` looks at calls `wake`.
        """

        def done() -> bool:
            return (given_up is not None and given_up()) or self._turn_of(lane)

        with self._changed:
            self._waiting[lane] += 1
            try:
                if not self._changed.wait_for(done, wait_s) or (given_up is not None and given_up()):
                    return 0
                return self._permits.acquire(rows, lane)
            finally:
                self._waiting[lane] -= 1
                self._changed.notify_all()

    def end_step(self) -> None:
        """Gradients come back: in mode `sync` no batch is looked up until those in flight now are applied."""
        with self._changed:
            self._permits.end_step()

    def release(self, permit: int) -> None:
        """The batch's push is acknowledged, or it will never be pushed nor issued again."""
        with self._changed:
            self._permits.release(permit)
            self._changed.notify_all()

    def hold(self, permit: int) -> None:
        """The batch is void and will be issued again: its lane keeps the permit for that (PROTOCOL 16)."""
        with self._changed:
            self._permits.hold(permit)
            self._changed.notify_all()

    def release_held(self, lane: int) -> None:
        """All that was void in the lane has been issued again, or was applied after all."""
        with self._changed:
            self._permits.release_held(lane)
            self._changed.notify_all()

    def wake(self) -> None:
        """Have those who wait look whether they have given up."""
        with self._changed:
            self._changed.notify_all()

    def batches(self) -> int:
        """Batches in flight now."""
        with self._changed:
            return len(self._permits.in_flight)

    def rows(self) -> int:
        """Rows in flight now."""
        with self._changed:
            return sum(self._permits.in_flight.values())

    def waiting(self) -> int:
        """Lanes that wait for a permit now."""
        with self._changed:
            return sum(self._waiting.values())

    def _turn_of(self, lane: int) -> bool:
        if not self._permits.is_available(lane):
            return False
        mine = self._permits.batches_of(lane)
        return not any(
            count
            and other != lane
            and self._permits.batches_of(other) < mine
            and self._permits.is_available(other)
            for other, count in self._waiting.items()
        )
