"""Medians over interleaved rounds: how to compare two ways to do a thing on one shared machine.

The speed of such a machine drifts by tens of percent within minutes, so the compared cases take turns: each
is called once a round, and its figure is the median of its rounds, with the lowest and the highest beside it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of 95 %, two-sided, from one degree of freedom on."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The rounds of one case."""

    median: float
    low: float
    high: float
    unit: str  # of the three above, such as "rows/s"; "" for a share
    n: int  # rounds

    @classmethod
    def of(cls, values: Sequence[float], unit: str = "") -> Figure:
        """Summarize the rounds of one case. Raises ValueError without a round."""
        if not values:
            raise ValueError("a figure needs at least one round")
        return cls(statistics.median(values), min(values), max(values), unit, len(values))

    def as_json(self) -> dict[str, float]:
        """Return the three numbers and the number of rounds; the caller's key names the unit."""
        return {"median": self.median, "low": self.low, "high": self.high, "n": self.n}

    def __str__(self) -> str:
        return f"{self.median:,.4g} {self.unit} ({self.low:,.4g}–{self.high:,.4g} of {self.n})"


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield each name once a round.

    The order turns with the round, so that no case always runs behind the same neighbour.
    """
    for turn in range(rounds):
        first = turn % max(1, len(names))
        yield from [*names[first:], *names[:first]]


def interleaved(
    cases: Mapping[str, Callable[[], float]], rounds: int, *, unit: str = ""
) -> dict[str, Figure]:
    """Call each case once a round, in turn, `rounds` times; each call returns a rate or a time.

    A case that needs warming up does that before: every round counts. Raises ValueError without a round.
    """
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}: expected 1 or more")
    found: dict[str, list[float]] = {name: [] for name in cases}
    for name in turns(list(cases), rounds):
        found[name].append(cases[name]())
    return {name: Figure.of(values, unit) for name, values in found.items()}


def figures_by_key(
    cases: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int
) -> dict[str, dict[str, Figure]]:
    """The same for cases that return several figures by key."""
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in cases}
    for name in turns(list(cases), rounds):
        found[name].append(cases[name]())
    return {
        name: {key: Figure.of([one[key] for one in calls]) for key in calls[0]}
        for name, calls in found.items()
    }


def interval_95(differences: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean of paired differences, by Student's t.

    Raises ValueError with fewer than two, or more than ten.
    """
    n = len(differences)
    if not 2 <= n <= len(_T95) + 1:
        raise ValueError(f"{n} differences: an interval needs 2 to {len(_T95) + 1}")
    return statistics.stdev(differences) / math.sqrt(n) * _T95[n - 2]


def rate(
    work: Callable[[], object], count: float, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Return a case of `interleaved`: how many of `count` things `work` does a second of `clock`.

    With `time.thread_time` as the clock the rate is per CPU-second of the calling thread, which other
    processes disturb less.
    """

    def once() -> float:
        began = clock()
        work()
        return count / (clock() - began)

    return once


def micros(work: Callable[[], object], seconds: float) -> float:
    """Return the median microseconds of this thread's CPU time for one call, calling it for `seconds`."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - started)
    return statistics.median(times) / 1e3
