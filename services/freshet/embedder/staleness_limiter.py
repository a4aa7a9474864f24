"""The staleness limiter: lanes wait for permits, which bound the rows in flight."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from freshet.embedder.core import Permits

__all__ = ["StalenessLimiter"]


class StalenessLimiter:
    """The permits of one stream. Thread-safe.

    Among the waiting lanes, those with the fewest batches in flight get permits first, so that a lane that
    prefetches far cannot starve another.
    """

    def __init__(self, permits: Permits) -> None:
        self._permits = permits
        self._changed = threading.Condition()
        self._waiting: Counter[int] = Counter()

    def acquire(self, lane: int, rows: int, wait_s: float, given_up: Callable[[], bool] | None = None) -> int:
        """Return a permit for a batch; 0 if none is available within `wait_s`, or once `given_up()`.

        The caller calls `wake` after a change of `given_up()`.
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
        """Mark the return of gradients: in mode `sync` the batches in flight must be applied first."""
        with self._changed:
            self._permits.end_step()

    def release(self, permit: int) -> None:
        """Release a permit: the push is acknowledged, or the batch is discarded for ever."""
        with self._changed:
            self._permits.release(permit)
            self._changed.notify_all()

    def hold(self, permit: int) -> None:
        """Hold the permit of a void batch for its lane, which issues the batch again (PROTOCOL 16)."""
        with self._changed:
            self._permits.hold(permit)
            self._changed.notify_all()

    def release_held(self, lane: int) -> None:
        """Release a lane's held permits: its void batches were issued again, or turned out to be applied."""
        with self._changed:
            self._permits.release_held(lane)
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake the waiting lanes, so that they check `given_up`."""
        with self._changed:
            self._changed.notify_all()

    def batches(self) -> int:
        """Return the batches in flight."""
        with self._changed:
            return len(self._permits.in_flight)

    def rows(self) -> int:
        """Return the rows in flight."""
        with self._changed:
            return sum(self._permits.in_flight.values())

    def waiting(self) -> int:
        """Return the lanes that wait for a permit."""
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
