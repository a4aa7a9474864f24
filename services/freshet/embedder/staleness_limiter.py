"""The staleness limiter: lanes wait for permits, which bound the rows in flight."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Permits:
    """The bound on staleness: rows of batches that are looked up and not yet applied.

    PERSIA's bounded staleness, counted in rows: a lookup misses the samples of the other batches in flight.
    In mode `sync` it may only miss those of the same step: each lane has at most one batch, and the next is
    looked up once all batches of the step are applied.
    """

    staleness_rows: int
    sync: bool = False
    in_flight: dict[int, int] = field(default_factory=dict)  # permit -> rows
    _lanes: dict[int, int] = field(default_factory=dict)  # permit -> lane
    _held: dict[int, int] = field(default_factory=dict)  # lane -> rows of its void batches
    _of_the_step: set[int] = field(default_factory=set)  # in flight when the step's gradients arrived
    _next: int = 0

    def is_available(self, lane: int = 0) -> bool:
        """Return whether the lane may look a batch up: the other rows in flight are within the bound."""
        if self.sync:
            return not self._of_the_step and not self.batches_of(lane)
        if self._held.get(lane):
            return True
        others = sum(self.in_flight.values()) + sum(self._held.values())
        return not others or others <= self.staleness_rows

    def batches_of(self, lane: int) -> int:
        """Return the batches of a lane in flight."""
        return sum(of == lane for of in self._lanes.values())

    def acquire(self, rows: int, lane: int = 0) -> int:
        """Return a new permit, never 0, using the lane's held rows first. Requires `is_available`."""
        self._next += 1
        self.in_flight[self._next], self._lanes[self._next] = rows, lane
        if lane in self._held:
            self._held[lane] = max(0, self._held[lane] - rows)
        return self._next

    def end_step(self) -> None:
        """Assign the batches in flight to the step with the returned gradients (mode `sync`)."""
        if self.sync:
            self._of_the_step.update(self.in_flight)

    def release(self, permit: int) -> None:
        """Release a permit. Idempotent: a batch may be voided and acknowledged."""
        self.in_flight.pop(permit, None)
        self._lanes.pop(permit, None)
        self._of_the_step.discard(permit)

    def hold(self, permit: int) -> None:
        """Hold the rows of a void batch for its lane until they are issued again (PROTOCOL 16)."""
        if permit in self.in_flight:
            lane = self._lanes[permit]
            self._held[lane] = self._held.get(lane, 0) + self.in_flight[permit]
        self.release(permit)

    def release_held(self, lane: int) -> None:
        """Release the lane's held rows: they were issued again, or turned out to be applied."""
        self._held.pop(lane, None)


class StalenessLimiter:
    """The permits of one stream. Thread-safe.

    Among the waiting lanes, those with the fewest batches in flight get permits first, so that a lane that
    prefetches far cannot starve another.
    """

    def __init__(self, permits: Permits) -> None:
        self._permits = permits
        self._changed = threading.Condition()
        self._waiting: Counter[int] = Counter()
        self.steps = 0  # returns of gradients

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
            self.steps += 1
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
