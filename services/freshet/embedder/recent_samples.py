"""The newest samples with their rows before they were trained on, kept for the gate."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence

from freshet.clock import Clock
from freshet.model.inputs import ModelInputs

__all__ = ["RecentSamples"]

RECENT_REST_S = 0.25
"""Between two rounds of copies for the gate: a batch's copy costs 75 µs, and at full speed 2,000 samples
come in 10 ms."""


class RecentSamples:
    """Copies of batches, as many as the gate wants. Thread-safe."""

    def __init__(self, wanted: int, clock: Clock) -> None:
        """Keep at least the newest `wanted` samples."""
        self._wanted, self._clock = wanted, clock
        self._lock = threading.Lock()
        self._kept: deque[ModelInputs] = deque()
        self._rows = self._fresh_rows = 0  # kept; of these, since the last rest
        self._resting_until = -math.inf

    def wants(self) -> int:
        """How many of the newest samples are worth keeping now; 0 while it rests."""
        return 0 if self._clock.monotonic() < self._resting_until else self._wanted

    def add(self, inputs: ModelInputs) -> None:
        """Keep a copy, unless it is time to rest: the gate wants a few thousand rows every few seconds, not
        every batch."""
        if self.wants():
            self.keep(inputs.copied())  # the memory is used again by the next batch

    def keep(self, kept: ModelInputs) -> None:
        """Keep these, which are a copy already."""
        now = self._clock.monotonic()
        with self._lock:
            self._kept.append(kept)
            self._rows += kept.size
            self._fresh_rows += kept.size
            while self._rows - self._kept[0].size >= self._wanted:
                self._rows -= self._kept.popleft().size
            if self._fresh_rows >= self._wanted:
                self._fresh_rows, self._resting_until = 0, now + RECENT_REST_S

    def newest(self, rows: int) -> Sequence[ModelInputs]:
        """The newest batches with at least `rows` samples together, if there are so many; oldest first."""
        with self._lock:
            newest = list(self._kept)
        first, total = len(newest), 0
        while first and total < rows:
            first -= 1
            total += newest[first].size
        return newest[first:]
