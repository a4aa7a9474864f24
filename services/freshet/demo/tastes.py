"""What each reader likes, and how that changes: slowly all the time, abruptly at stated times.

A taste is a vector over topics. An abrupt drift deals a reader's likes and dislikes out to other topics, the
slow one turns one vector into another of equal length: what is liked changes, how strongly does not. So what
the best possible order earns stays nearly level, and a fall of the click rate is the model's.

Letters: U readers, G age groups, T topics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freshet.demo.draws import Draws
from freshet.types import F64, I64

__all__ = ["DriftPlan", "TasteOptions", "Tastes"]


@dataclass(frozen=True, slots=True)
class DriftPlan:
    """When tastes change abruptly, in seconds after the world began."""

    at_s: tuple[float, ...] = ()  # rising
    every_s: float | None = None  # after the last of them, again and again; None: no more

    def passed(self, time_s: float) -> int:
        """How many drifts have happened by then."""
        count = sum(at <= time_s for at in self.at_s)
        if self.every_s is None or not self.at_s or time_s < self.at_s[-1]:
            return count
        return count + int((time_s - self.at_s[-1]) // self.every_s)

    def time_s(self, number: int) -> float:
        """When drift `number` (from 1) happens; only of those that `passed` has counted."""
        if number <= len(self.at_s):
            return self.at_s[number - 1]
        assert self.every_s is not None, "a drift beyond the stated ones repeats"
        return self.at_s[-1] + (number - len(self.at_s)) * self.every_s


@dataclass(frozen=True, slots=True)
class TasteOptions:
    """How strong and how different tastes are; all in log-odds of a click."""

    group: float = 1.3  # deviation over topics that an age group shares
    own: float = 0.9  # deviation over topics of the reader alone
    readers: float = 0.34  # share of readers whose own tastes an abrupt drift deals out anew
    groups: float = 0.34  # share of age groups whose tastes it deals out anew
    period_s: float = 5_400.0  # of the slow drift: in a quarter of it a taste becomes another one


class Tastes:
    """Log-odds that readers add for topics, at any time. Pure but for a cache of the newest drift."""

    def __init__(
        self, draws: Draws, group_of: I64, topics: int, plan: DriftPlan, options: TasteOptions
    ) -> None:
        """`group_of`: (U,) age group of each reader."""
        self._draws, self._group_of, self._plan, self._options = draws, group_of, plan, options
        self._groups = np.arange(int(group_of.max()) + 1)
        self._users, self._topics = np.arange(len(group_of)), np.arange(topics)
        self._cached: tuple[int, _Circle, _Circle] | None = None

    def of(self, user: int, time_s: float) -> F64:
        """(T,) what the reader adds to the log-odds of a click, by topic."""
        groups, own = self._circles(self._plan.passed(time_s))
        turned = time_s / self._options.period_s
        return groups.at(int(self._group_of[user]), turned) + own.at(user, turned)

    def _circles(self, drifts: int) -> tuple[_Circle, _Circle]:
        if self._cached is None or self._cached[0] != drifts:
            options = self._options
            self._cached = (
                drifts,
                self._drawn("group", self._groups, options.groups, drifts, options.group),
                self._drawn("own", self._users, options.readers, drifts, options.own),
            )
        return self._cached[1], self._cached[2]

    def _drawn(self, of: str, who: I64, share: float, drifts: int, size: float) -> _Circle:
        epochs = np.zeros(len(who), np.int64)  # the last drift that each of them took part in
        for drift in range(1, drifts + 1):
            drawn = np.argsort(self._draws.uniform(f"{of} drift", drift, who))
            epochs[drawn[: round(share * len(who))]] = drift
        keys = who[:, None], self._topics[None, :]
        now = _standard(self._draws.normal(f"{of} now", *keys))
        later = self._draws.normal(f"{of} later", *keys)
        later = _standard(later - (later * now).mean(axis=1, keepdims=True) * now)
        topics = np.argsort(self._draws.uniform(f"{of} topics", *keys, epochs[:, None]), axis=1)
        return _Circle(
            size * np.take_along_axis(now, topics, axis=1),
            size * np.take_along_axis(later, topics, axis=1),
            self._draws.uniform(f"{of} phase", who),
        )


def _standard(tastes: F64) -> F64:
    """Each row with mean 0 and deviation 1."""
    centred = tastes - tastes.mean(axis=1, keepdims=True)
    standard: F64 = centred / centred.std(axis=1, keepdims=True)
    return standard


@dataclass(frozen=True, slots=True, eq=False)
class _Circle:
    """Tastes that turn slowly from one into another and on to the opposites of both."""

    now: F64  # (N, T)
    later: F64  # (N, T)
    phase: F64  # (N,) where on the circle each begins, 0 to 1

    def at(self, one: int, turned: float) -> F64:
        angle = 2 * np.pi * (turned + self.phase[one])
        taste: F64 = self.now[one] * np.cos(angle) + self.later[one] * np.sin(angle)
        return taste
