"""Medians over interleaved rounds: what one shared machine can say of two ways to do a thing.

Such a machine drifts by tens of percent within minutes, so cases that are compared take turns: each is called
once a round, and what is told of a case is the median of its rounds, with the lowest and the highest beside
it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Figure", "interleaved", "rate"]


@dataclass(frozen=True, slots=True)
class Figure:
    """What the rounds of one case gave."""

    median: float
    low: float
    high: float
    unit: str  # of the three above, such as "rows/s"; "" for a share
    n: int  # rounds

    @classmethod
    def of(cls, values: Sequence[float], unit: str = "") -> Figure:
        """The figure of one case's rounds; at least one."""
        if not values:
            raise ValueError("a figure needs at least one round")
        return cls(statistics.median(values), min(values), max(values), unit, len(values))

    def as_json(self) -> dict[str, float]:
        """The three numbers and how many rounds there were; the key that this is put under tells the unit."""
        return {"median": self.median, "low": self.low, "high": self.high, "n": self.n}

    def __str__(self) -> str:
        return f"{self.median:,.4g} {self.unit} ({self.low:,.4g}–{self.high:,.4g} of {self.n})"


def interleaved(
    cases: Mapping[str, Callable[[], float]], rounds: int, *, unit: str = ""
) -> dict[str, Figure]:
    """Call each case once a round, in turn, `rounds` times; each call returns a rate or a time.

    The order turns with the round, so that no case always runs behind the same neighbour. A case that needs
    warming up does that before, outside: every round counts.
    """
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}: expected 1 or more")
    names = list(cases)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            found[name].append(cases[name]())
    return {name: Figure.of(values, unit) for name, values in found.items()}


def rate(
    work: Callable[[], object], count: float, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """A case of `interleaved`: how many of `count` things `work` does a second of `clock`.

    `time.thread_time` as the clock tells them per CPU-second of the calling thread, which neighbours disturb
    less.
    """

    def once() -> float:
        began = clock()
        work()
        return count / (clock() - began)

    return once
