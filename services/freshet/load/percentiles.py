"""Percentiles of durations, in bounded memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

__all__ = ["Durations", "Waited", "Waits"]

LEAST_S, MOST_S = 1e-6, 3_600.0
RATIO = 1.01
_LOG = math.log(RATIO)
_BINS = math.ceil(math.log(MOST_S / LEAST_S) / _LOG) + 1
PERCENTS = (50, 90, 99, 99.9)


class Durations:
    """A histogram of bins that are each 1% wider than the one before, from 1 µs to 1 h.

    A percentile is the upper end of its bin: at most 1% more than the true one, and never less.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self.count = 0
        self.shortest_s = math.inf
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        """One duration; below the least it counts as that, above the most as that."""
        at = 0 if seconds <= LEAST_S else min(math.ceil(math.log(seconds / LEAST_S) / _LOG), _BINS - 1)
        self._counts[at] += 1
        self.count += 1
        self.shortest_s = min(self.shortest_s, seconds)
        self.longest_s = max(self.longest_s, seconds)

    def merge(self, other: Durations) -> None:
        """Add all of another's."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.shortest_s = min(self.shortest_s, other.shortest_s)
        self.longest_s = max(self.longest_s, other.longest_s)

    def percentile(self, percent: float) -> float | None:
        """Seconds that so many percent of all are within; None of none."""
        if not self.count:
            return None
        return self.nth(_wanted(self.count, percent))

    def nth(self, n: int) -> float:
        """The n-th shortest, from 1 to `count`; at most 1% more than it."""
        return min(LEAST_S * RATIO ** self._bin(n), self.longest_s)

    def nth_at_least(self, n: int) -> float:
        """The n-th shortest; at most 1% less than it, and never more."""
        at = self._bin(n)
        return max(LEAST_S * RATIO ** (at - 1) if at else 0.0, self.shortest_s)

    def figures(self) -> dict[str, float | None]:
        """Milliseconds: p50, p90, p99, p99.9 and the longest; None of none."""
        shown = {f"p{p:g}_ms": self.percentile(p) for p in PERCENTS}
        shown["max_ms"] = self.longest_s if self.count else None
        return {name: None if s is None else round(s * 1e3, 3) for name, s in shown.items()}

    def _bin(self, n: int) -> int:
        seen = 0
        for at, count in enumerate(self._counts):
            seen += count
            if seen >= n:
                return at
        raise AssertionError("counts add up to `count`")


class Waited(NamedTuple):
    """How long something was waited for."""

    seconds: float
    at_least: bool  # it did not come: nobody knows how long it would have been

    def ms(self) -> str:
        """Milliseconds, for people."""
        return f"{'>= ' if self.at_least else ''}{self.seconds * 1e3:,.1f}"


class Waits:
    """How long was waited for what came, and for what did not.

    What failed counts as longer than all that came. So whatever failed makes no percentile smaller, and one
    that lies among what failed is a bound: what was waited for so many percent, at least.
    """

    def __init__(self) -> None:
        self.came = Durations()
        self.failed = Durations()

    @property
    def count(self) -> int:
        """Of both."""
        return self.came.count + self.failed.count

    def merge(self, other: Waits) -> None:
        """Add all of another's."""
        self.came.merge(other.came)
        self.failed.merge(other.failed)

    def percentile(self, percent: float) -> Waited | None:
        """What so many percent of all are within; None of none."""
        if not self.count:
            return None
        wanted = _wanted(self.count, percent)
        if wanted <= self.came.count:
            return Waited(self.came.nth(wanted), at_least=False)
        waited_s = self.failed.nth_at_least(wanted - self.came.count)
        return Waited(max(waited_s, self.came.longest_s), at_least=True)

    def longest(self) -> Waited | None:
        """The longest; None of none."""
        if not self.count:
            return None
        longest_s = max(self.came.longest_s, self.failed.longest_s)
        return Waited(longest_s, at_least=self.failed.count > 0)

    def all(self) -> dict[str, Waited | None]:
        """p50, p90, p99, p99.9 and the longest, by their names in JSON."""
        return {f"p{p:g}_ms": self.percentile(p) for p in PERCENTS} | {"max_ms": self.longest()}

    def figures(self) -> dict[str, Any]:
        """Milliseconds of `all`, and the names of those that are only bounds from below."""
        shown = self.all()
        return {
            **{
                name: None if waited is None else round(waited.seconds * 1e3, 3)
                for name, waited in shown.items()
            },
            "at_least": [name for name, waited in shown.items() if waited is not None and waited.at_least],
        }


def _wanted(count: int, percent: float) -> int:
    return max(1, math.ceil(count * percent / 100))
