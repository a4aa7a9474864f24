"""The past of `<model>.measures` and `<model>.versions`, in bounded memory. Pure; not thread-safe.

Other processes write these topics, too: a record that cannot be parsed is left out and is no error.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from freshet.console.instances import number
from freshet.console.segments import MOST_AHEAD_MS, Segments
from freshet.observability.skipped_state import skip
from freshet.versions.promotions import PEOPLE

# --- Points over time in bounded memory: the newest hour in full, older ones ever more sparsely. Pure.


POINTS = 720
"""Points of a span that are kept: an hour of one every 5 s, about a chart's pixels."""

HOUR_MS = 3_600_000

Point = Any
Merge = Callable[[Point, Point], Point]


def later(_old: Point, new: Point) -> Point:
    """Return the later of two points of one place in time."""
    return new


def added(old: Point, new: Point) -> Point:
    """Return the sum of two windows, from the first's start to the second's stop.

    Counts ({"model": {"clicks": 3}}) are added; of other keys (kind, offset) the newer value is kept.
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

    def __init__(self, longest_ms: int, merge: Merge = later) -> None:
        """`merge` combines two points that share a place in a span."""
        spans = [s for s in (HOUR_MS, 6 * HOUR_MS) if s < longest_ms]
        self._tiers = [_Tier(span, merge) for span in (*spans, longest_ms)]

    def add(self, time_ms: int, point: Point, now_ms: int) -> None:
        """Add a point; it may be older than the newest, or be dated ahead of now."""
        for tier in self._tiers:
            tier.add(time_ms, point, now_ms)

    def last(self, span_ms: int, now_ms: int) -> list[Point]:
        """Return points of the last `span_ms`, oldest first, at most about `POINTS`."""
        tier = next((t for t in self._tiers if t.span_ms >= span_ms), self._tiers[-1])
        return tier.since(now_ms - span_ms)

    def newest_ms(self, latest_ms: int) -> int:
        """Return the time of the newest point up to `latest_ms`; 0 if there is none."""
        return self._tiers[0].newest_ms(latest_ms)


class _Tier:
    """Points of one span, in places of one length."""

    def __init__(self, span_ms: int, merge: Merge) -> None:
        self.span_ms, self._step_ms, self._merge = span_ms, max(1, span_ms // POINTS), merge
        self._places: list[int] = []  # rising
        self._points: list[tuple[int, Point]] = []

    def newest_ms(self, latest_ms: int) -> int:
        after = bisect_right(self._places, latest_ms // self._step_ms)
        return self._points[after - 1][0] if after else 0

    def add(self, time_ms: int, point: Point, now_ms: int) -> None:
        place = time_ms // self._step_ms
        at = bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            before_ms, before = self._points[at]
            merged = self._merge(before, point) if time_ms >= before_ms else self._merge(point, before)
            self._points[at] = (max(time_ms, before_ms), merged)
            return
        self._places.insert(at, place)
        self._points.insert(at, (time_ms, point))
        if len(self._places) > POINTS:  # points of a clock that ran ahead go before older ones of now
            ahead = bisect_right(self._places, (now_ms + MOST_AHEAD_MS) // self._step_ms)
            first = ahead if ahead < len(self._places) else 0
            del self._places[first], self._points[first]

    def since(self, time_ms: int) -> list[Point]:
        first = bisect_left(self._places, time_ms // self._step_ms)
        return [point for _, point in self._points[first:]]


MOST_SERIES = 200
"""Kinds of prediction × labels that are kept; windows of further ones are left out."""

RELIABILITY_WINDOWS = 12
"""Windows in a reliability curve: a minute at 5 s a window, enough for a steady curve."""

SHOWN_OF = ("random", "served", "training")
"""Predictions of a reliability curve: the first of these that exist."""

LATEST_MS = 1 << 48
"""A record with a later time (the year 10889) is damaged."""


def parsed(value: bytes) -> dict[str, Any] | None:
    """Parse a JSON record of the topics of measures, versions, commits or dead letters.

    Returns None for other bytes, and counts them as skipped unless they are empty.
    """
    try:
        record = orjson.loads(value)
    except orjson.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or record.get("v") != 1 or not isinstance(record.get("kind"), str):
        if value:
            skip("console", "a record that the console reads", f"expected format 1, found {value[:60]!r}")
        return None
    return record


def _time(record: Mapping[str, Any], key: str) -> int | None:
    value = record.get(key)
    return value if type(value) is int and 0 <= value < LATEST_MS else None


class History:
    """Series of windows, vitals, clicks, drifts and versions."""

    def __init__(self, longest_ms: int) -> None:
        self._longest_ms = longest_ms
        self.segments = Segments()
        self.reliability = Reliability()
        self._windows: dict[tuple[str, str], Series] = {}
        self._vitals = Series(longest_ms)
        self._clicks = Series(longest_ms, added)
        self._drifts: dict[int, dict[str, Any]] = {}  # by time
        self._versions: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self.next = 0  # first offset of the measures that was not added

    def clicks_until_ms(self, latest_ms: int) -> int:
        """Return the end of the newest window of clicks up to `latest_ms`; 0 if there is none."""
        return self._clicks.newest_ms(latest_ms)

    @property
    def drifts(self) -> Sequence[Mapping[str, Any]]:
        """Drifts of the simulation, oldest first."""
        return [self._drifts[at] for at in sorted(self._drifts)]

    def add(self, offset: int, value: bytes, now_ms: int) -> dict[str, Any] | None:
        """Add a record of the measures; return its form for pages, or None if pages do not show it."""
        self.next = max(self.next, offset + 1)
        record = parsed(value)
        if record is None:
            return None
        shown: dict[str, Any] | None = None
        match record["kind"]:
            case "window":
                shown = self._window(offset, record, now_ms)
            case "vitals" if (at := _time(record, "time_ms")) is not None:
                shown = {"offset": offset, **record}
                self._vitals.add(at, shown, now_ms)
            case "clicks" if (at := _time(record, "stop_ms")) is not None and _clicks(record):
                shown = {"offset": offset, **record}
                self._clicks.add(at, shown, now_ms)
            case "drift" if (at := _time(record, "time_ms")) is not None:
                shown = {"offset": offset, **record}
                self._drifts[at] = shown
                while len(self._drifts) > POINTS:
                    del self._drifts[min(self._drifts)]
        return shown

    def add_version(self, event: Mapping[str, Any]) -> None:
        """Add a `version_event` of a record of `<model>.versions`."""
        self._versions.append(dict(event))

    def _window(self, offset: int, record: dict[str, Any], now_ms: int) -> dict[str, Any] | None:
        of, label, stop_ms = record.get("of"), record.get("label"), _time(record, "stop_ms")
        if not isinstance(of, str) or not isinstance(label, str) or stop_ms is None:
            return None
        if record.get("segment") is not None:
            self.segments.add(record, now_ms)
            return None
        bins = record.pop("reliability", None)
        if bins is not None:
            self.reliability.add(of, label, bins)
        if (of, label) not in self._windows and len(self._windows) >= MOST_SERIES:
            return None
        shown = {"offset": offset, **record}
        self._windows.setdefault((of, label), Series(self._longest_ms)).add(stop_ms, shown, now_ms)
        return shown

    def to_json(self, span_ms: int, now_ms: int) -> dict[str, Any]:
        """Return the answer of /api/history for the last `span_ms`."""
        windows = [w for series in self._windows.values() for w in series.last(span_ms, now_ms)]
        return {
            "now_ms": now_ms,
            "next": self.next,
            "vitals": self._vitals.last(span_ms, now_ms),
            "windows": sorted(windows, key=lambda w: int(w["stop_ms"])),
            "clicks": self._clicks.last(span_ms, now_ms),
            "drifts": [d for d in self.drifts if d["time_ms"] >= now_ms - span_ms],
            "versions": [v for v in self._versions if v["time_ms"] >= now_ms - span_ms],
        }


def _clicks(record: Mapping[str, Any]) -> bool:
    """Check that a window of clicks has counts that can be added."""
    for slate in ("model", "random", "best"):
        counts = record.get(slate)
        if not isinstance(counts, Mapping):
            return False
        if any(number(counts.get(key)) is None for key in ("impressions", "clicks")):
            return False
    return _time(record, "start_ms") is not None


def version_event(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the event of a record of `<model>.versions` (`time_ms`, `what`, …); None: pages omit it."""
    at, version = _time(record, "time_ms"), record.get("number")
    if at is None or type(version) is not int:
        return None
    event = {"time_ms": at, "number": version, "reason": str(record.get("reason") or "")[:500]}
    if record["kind"] == "verdict" and record.get("verdict") == "held":
        return {**event, "what": "held", "by": "gate"}
    if record["kind"] != "alias" or record.get("alias") != "stable":
        return None
    by = record.get("by")
    if by not in PEOPLE:
        return {**event, "what": "promoted", "by": "gate"}
    pinned = "; the gate promotes nothing until the next promote" if record.get("pinned") else ""
    return {**event, "what": "moved", "by": by, "reason": f"moved by hand{pinned}"}


class Reliability:
    """Reliability curves: sums of the newest windows by bin."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], deque[list[tuple[float, float, float]]]] = {}

    def add(self, of: str, label: str, bins: Any) -> None:
        """Add a window's bins, [n, mean predicted, mean label] each; malformed ones are left out."""
        if (of, label) not in self._kept and len(self._kept) >= MOST_SERIES:
            return
        kept = self._kept.setdefault((of, label), deque(maxlen=RELIABILITY_WINDOWS))
        kept.append([b for b in map(_bin, bins if isinstance(bins, list) else []) if b is not None])

    def to_json(self) -> dict[str, list[list[float]]]:
        """Return {label: rising bins}, of random slates if there are any, else of served or training ones."""
        found: dict[str, list[list[float]]] = {}
        for label in dict.fromkeys(label for _, label in self._kept):
            of = next((of for of in SHOWN_OF if any(self._kept.get((of, label), ()))), None)
            if of is not None:
                found[label] = _summed([b for window in self._kept[of, label] for b in window])
        return found


def _bin(value: Any) -> tuple[float, float, float] | None:
    if not isinstance(value, list) or len(value) != 3:
        return None
    n, predicted, labelled = (number(x) for x in value)
    if n is None or predicted is None or labelled is None or n <= 0 or not 0 < predicted < 1:
        return None
    return n, predicted, labelled


def _summed(bins: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """Add the bins of several windows in bins of half a logit."""
    sums: dict[int, list[float]] = {}
    for n, predicted, labelled in bins:
        place = round(2 * math.log(predicted / (1 - predicted)))
        cell = sums.setdefault(max(-16, min(16, place)), [0.0, 0.0, 0.0])
        cell[0] += n
        cell[1] += n * predicted
        cell[2] += n * labelled
    return [[n, p / n, y / n] for _, (n, p, y) in sorted(sums.items())]
