"""Points over time in bounded memory: the newest hour in full, what is older ever more thinly. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

__all__ = ["POINTS", "Series", "added", "newest"]

POINTS = 720
"""Points that are given out and kept of a span: an hour of one every 5 s; about a chart's pixels."""

HOUR_MS = 3_600_000

Point = Any
Merge = Callable[[Point, Point], Point]


def newest(_old: Point, new: Point) -> Point:
    """Of two points of one place in time, keep the later."""
    return new


def added(old: Point, new: Point) -> Point:
    """The sum of two windows: from the first's start to the second's stop, the counts in it added.

    Counts are the numbers of what lies in the window by name ({"model": {"clicks": 3}}); of all else (kind,
    offset) the newer is kept.
    """
    both = {**old, **new}
    for key in old.keys() & new.keys():
        if isinstance(old[key], dict) and isinstance(new[key], dict):
            both[key] = {**old[key], **{k: _sum(old[key].get(k, 0), n) for k, n in new[key].items()}}
    bounds = {"start_ms": min, "stop_ms": max}
    return both | {k: f(old[k], new[k]) for k, f in bounds.items() if k in old and k in new}


def _sum(old: Any, new: Any) -> Any:
    return old + new if isinstance(old, (int, float)) and isinstance(new, (int, float)) else new


class Series:
    """Points by time. Each of a few spans is kept at `POINTS` a span, so memory does not grow with time."""

    def __init__(self, longest_ms: int, merge: Merge = newest) -> None:
        """`merge`: what becomes of two points that share a place in a span."""
        spans = [s for s in (HOUR_MS, 6 * HOUR_MS) if s < longest_ms]
        self._tiers = [_Tier(span, merge) for span in (*spans, longest_ms)]

    def add(self, time_ms: int, point: Point) -> None:
        """Take a point; one that is older than the newest is put in its place."""
        for tier in self._tiers:
            tier.add(time_ms, point)

    def last(self, span_ms: int, now_ms: int) -> list[Point]:
        """Points of the last `span_ms`, oldest first, at most about `POINTS`."""
        tier = next((t for t in self._tiers if t.span_ms >= span_ms), self._tiers[-1])
        return tier.since(now_ms - span_ms)

    @property
    def newest_ms(self) -> int | None:
        """Time of the newest point."""
        return self._tiers[0].newest_ms


class _Tier:
    """One span at one step."""

    def __init__(self, span_ms: int, merge: Merge) -> None:
        self.span_ms, self._step_ms, self._merge = span_ms, max(1, span_ms // POINTS), merge
        self._places: list[int] = []  # rising
        self._points: list[tuple[int, Point]] = []

    @property
    def newest_ms(self) -> int | None:
        return self._points[-1][0] if self._points else None

    def add(self, time_ms: int, point: Point) -> None:
        place = time_ms // self._step_ms
        at = bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            before_ms, before = self._points[at]
            merged = self._merge(before, point) if time_ms >= before_ms else self._merge(point, before)
            self._points[at] = (max(time_ms, before_ms), merged)
            return
        self._places.insert(at, place)
        self._points.insert(at, (time_ms, point))
        excess = len(self._places) - POINTS
        if excess > 0:
            del self._places[:excess], self._points[:excess]

    def since(self, time_ms: int) -> list[Point]:
        first = bisect_left(self._places, time_ms // self._step_ms)
        return [point for _, point in self._points[first:]]
