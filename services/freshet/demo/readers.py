"""Visits of simulated readers: request a page, draw the reactions, queue the actions. Thread-safe.

Letters: C candidates of a visit, K items shown.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from freshet.clock import Clock
from freshet.demo.connections import Connection, Outbox
from freshet.demo.news_site import (
    DEVICES,
    FORMATS,
    GROUPS,
    LONGEST_CLICK_S,
    TOPICS,
    NewsSite,
    Reactions,
    Visit,
)
from freshet.errors import Unavailable
from freshet.types import I64

WINDOW_MS = 5_000
KEPT = 120
CLOSES_AFTER_MS = int(LONGEST_CLICK_S * 1_000)
"""A window is published once all clicks on its pages have come; otherwise the newest would seem worse."""


@dataclass(slots=True)
class Shown:
    """Shown items and their clicks."""

    impressions: int = 0
    clicks: float = 0.0
    expected: float = 0.0  # clicks by the site's true probabilities

    def as_json(self) -> dict[str, float]:
        """Return the JSON object for `/status`."""
        return {
            "impressions": self.impressions,
            "clicks": self.clicks,
            "expected": round(self.expected, 3),
        }


@dataclass(slots=True)
class _Window:
    start_ms: int
    model: Shown = field(default_factory=Shown)
    random: Shown = field(default_factory=Shown)
    best: float = 0.0  # expected clicks of the best order of the model's candidates

    def as_json(self) -> dict[str, Any]:
        best = round(self.best, 3)
        return {
            "start_ms": self.start_ms,
            "stop_ms": self.start_ms + WINDOW_MS,
            "model": self.model.as_json(),
            "random": self.random.as_json(),
            "best": {"impressions": self.model.impressions, "clicks": best},
        }


class Windows:
    """The last `KEPT` windows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Window] = {}
        self._closed: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def add(
        self, shown_ms: int, *, explored: bool, impressions: int, clicks: int, expected: float, best: float
    ) -> None:
        """Add a page. `expected` and `best` are the mean clicks of its order and of the best order."""
        start = shown_ms - shown_ms % WINDOW_MS
        with self._lock:
            window = self._open.setdefault(start, _Window(start))
            if not explored:
                window.best += best
            shown = window.random if explored else window.model
            shown.impressions += impressions
            shown.clicks += clicks
            shown.expected += expected

    def closed(self, now_ms: int) -> list[dict[str, Any]]:
        """Return the complete windows, oldest first."""
        with self._lock:
            for start in sorted(self._open):
                if start + WINDOW_MS + CLOSES_AFTER_MS <= now_ms:
                    self._closed.append(self._open.pop(start).as_json())
            return list(self._closed)


def item_name(item: int) -> str:
    """Return the catalogue's name of an item."""
    return f"item-{item}"


def context_of(visit: Visit, request_id: str) -> dict[str, Any]:
    """Build the context of a rank request."""
    return {
        "request_id": request_id,
        "reader": f"reader-{visit.user}",
        "age_group": GROUPS[visit.group],
        "device": DEVICES[visit.device],
        "hour": visit.hour,
    }


def candidates_of(site: NewsSite, visit: Visit) -> list[dict[str, Any]]:
    """Build the C candidates of a rank request."""
    columns = visit.items, site.items.topic(visit.items), site.items.format(visit.items), visit.ages_s
    return [
        {"item": item_name(item), "topic": TOPICS[topic], "format": FORMATS[form], "age_s": round(age, 1)}
        for item, topic, form, age in zip(*(column.tolist() for column in columns), strict=True)
    ]


def actions_of(
    visit: Visit, request_id: str, shown: I64, reactions: Reactions, shown_ms: int
) -> Iterator[dict[str, Any]]:
    """Yield the clicks and purchases of a page, each with the time at which it will happen.

    `shown` is (K,) int64, the indices of the shown candidates. Event ids follow from request and item, so a
    retry is a duplicate.
    """
    for position in np.flatnonzero(reactions.clicked).tolist():
        item = item_name(int(visit.items[shown[position]]))
        kinds = [("click", reactions.click_after_s[position])]
        if reactions.bought[position]:
            kinds.append(("purchase", reactions.purchase_after_s[position]))
        for kind, after_s in kinds:
            yield {
                "event_id": f"{kind}-{request_id}-{item}",
                "request_id": request_id,
                "item": item,
                "type": kind,
                "ts": shown_ms + round(1_000 * float(after_s)),
            }


LONGEST_DELAY_S = 0.5
"""Visits may be late by this time. The pace drops the rest, so that no burst follows an outage."""
MEASURED_S = 10.0


class Pace:
    """Schedules visits at a rate of events per second. Thread-safe; times are monotonic seconds."""

    def __init__(self, events_per_s: float, now_s: float) -> None:
        self.events_per_s = events_per_s
        self._lock = threading.Lock()
        self._due_s = now_s
        self._recorded: deque[tuple[float, int]] = deque()
        self._sum = 0

    def next_due(self, now_s: float, events: int) -> float:
        """Schedule a visit of so many events; return when it is due, at most `LONGEST_DELAY_S` ago."""
        with self._lock:
            due_s = self._due_s = max(self._due_s, now_s - LONGEST_DELAY_S)
            self._due_s += events / self.events_per_s
            return due_s

    def record_events(self, now_s: float, events: int, *, scheduled: bool) -> None:
        """Record created events; those that `next_due` had not scheduled delay the next visit."""
        with self._lock:
            if not scheduled:
                self._due_s += events / self.events_per_s
            self._recorded.append((now_s, events))
            self._sum += events
            self._drop_old(now_s)

    def measured_rate(self, now_s: float) -> float:
        """Return the events per second over the last `MEASURED_S`."""
        with self._lock:
            self._drop_old(now_s)
            return self._sum / MEASURED_S

    def _drop_old(self, now_s: float) -> None:
        while self._recorded and self._recorded[0][0] <= now_s - MEASURED_S:
            self._sum -= self._recorded.popleft()[1]


PAGE_WITHIN_S = 3.0
"""Time-out of a page. The visit then ends without impressions and actions."""
RETRY_S = 0.1
MOMENTARY = (429, 502, 503, 504)


@dataclass(slots=True)
class Counts:
    """Totals of this process."""

    impressions: int = 0
    clicks: int = 0
    purchases: int = 0
    errors: int = 0  # failed attempts
    abandoned: int = 0  # visits without a page in time


class Readers:
    """The site's readers as clients of a running system. Thread-safe; each thread has its own connection."""

    def __init__(
        self, site: NewsSite, outbox: Outbox, pace: Pace, clock: Clock, *, began_ms: int, first: int = 0
    ) -> None:
        """`began_ms`: start of the simulation. `first`: number of the first visit."""
        self.site, self.windows, self.counts, self.pace = site, Windows(), Counts(), pace
        self._outbox, self._clock, self._began_ms, self._next = outbox, clock, began_ms, first
        self._lock = threading.Lock()

    def next_visit(self) -> tuple[int, float]:
        """Schedule a visit; return its number and when it is due."""
        with self._lock:
            number, self._next = self._next, self._next + 1
        return number, self.pace.next_due(self._clock.monotonic(), self.site.options.shown)

    def visit(self, number: int, inference: Connection, wait: Callable[[float], bool]) -> None:
        """Simulate one visit: request the page, then queue its actions. Errors are counted, not raised.

        `wait` sleeps for so many seconds; it returns True to abandon the visit.
        """
        visit = self.site.visit(number, (self._clock.now_ms() - self._began_ms) / 1_000)
        request_id = f"{self._began_ms:x}-{number}"
        request = {
            "context": context_of(visit, request_id),
            "candidates": candidates_of(self.site, visit),
            "k": self.site.options.shown,
        }
        page = self._request_page(inference, orjson.dumps(request), wait)
        if page is not None:
            self._react(visit, request_id, *page)

    def _request_page(
        self, inference: Connection, body: bytes, wait: Callable[[float], bool]
    ) -> tuple[I64, bool] | None:
        """Return the shown candidates, (K,) int64, and whether their order is random; None without a page."""
        deadline = self._clock.monotonic() + PAGE_WITHIN_S
        while True:
            try:
                status, answer = inference.post("/v1/rank", body)
            except Unavailable:
                status, answer = 503, b""
            if status == 200:
                ranking = orjson.loads(answer)
                return np.array([item["index"] for item in ranking["items"]], np.int64), ranking["explored"]
            retry = status in MOMENTARY and self._clock.monotonic() + RETRY_S < deadline
            with self._lock:
                self.counts.errors += 1
                self.counts.abandoned += not retry
            if not retry or wait(RETRY_S):
                return None

    def _react(self, visit: Visit, request_id: str, shown: I64, explored: bool) -> None:
        now_ms = self._clock.now_ms()
        reactions = self.site.reactions(visit, shown)
        clicks, purchases = int(reactions.clicked.sum()), int(reactions.bought.sum())
        for action in actions_of(visit, request_id, shown, reactions, now_ms):
            self._outbox.put(action)
        self.windows.add(
            now_ms,
            explored=explored,
            impressions=len(shown),
            clicks=clicks,
            expected=float(self.site.expected(visit, shown).sum()),
            best=self.site.best(visit),
        )
        with self._lock:
            self.counts.impressions += len(shown)
            self.counts.clicks += clicks
            self.counts.purchases += purchases
        now_s = self._clock.monotonic()
        self.pace.record_events(now_s, len(shown), scheduled=True)
        self.pace.record_events(now_s, clicks + purchases, scheduled=False)
