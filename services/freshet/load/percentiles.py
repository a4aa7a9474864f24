"""Percentiles of durations, in bounded memory."""

from __future__ import annotations

import math

__all__ = ["Durations"]

LEAST_S, MOST_S = 1e-6, 3_600.0
RATIO = 1.01
_LOG = math.log(RATIO)
_BINS = math.ceil(math.log(MOST_S / LEAST_S) / _LOG) + 1


class Durations:
    """A histogram of bins that are each 1% wider than the one before, from 1 µs to 1 h.

    A percentile is the upper end of its bin: at most 1% more than the true one, and never less.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self.count = 0
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        """One duration; below the least it counts as that, above the most as that."""
        at = 0 if seconds <= LEAST_S else min(math.ceil(math.log(seconds / LEAST_S) / _LOG), _BINS - 1)
        self._counts[at] += 1
        self.count += 1
        self.longest_s = max(self.longest_s, seconds)

    def merge(self, other: Durations) -> None:
        """Add all of another's."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.longest_s = max(self.longest_s, other.longest_s)

    def percentile(self, percent: float) -> float | None:
        """Seconds that so many percent of all are within; None of none."""
        if not self.count:
            return None
        wanted = max(1, math.ceil(self.count * percent / 100))
        seen = 0
        for at, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return min(LEAST_S * RATIO**at, self.longest_s)
        raise AssertionError("counts add up to `count`")

    def figures(self) -> dict[str, float | None]:
        """Milliseconds: p50, p90, p99, p99.9 and the longest; None of none."""
        shown = {f"p{p:g}_ms": self.percentile(p) for p in (50, 90, 99, 99.9)}
        shown["max_ms"] = self.longest_s if self.count else None
        return {name: None if s is None else round(s * 1e3, 3) for name, s in shown.items()}
