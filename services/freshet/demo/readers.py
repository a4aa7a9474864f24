"""One visit after another: ask for a page, show it, react. Decisions and their order; threads are in
`service`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from freshet.clock import Clock
from freshet.demo.connection import Door
from freshet.demo.outbox import Outbox
from freshet.demo.windows import Windows
from freshet.demo.world import DEVICES, FORMATS, GROUPS, TOPICS, Reactions, Visit, World
from freshet.errors import Unavailable
from freshet.types import I64

__all__ = ["Counts", "Pace", "Readers", "actions_of", "candidates_of", "context_of", "item_name"]

# --- The world's visits and reactions in the words of the demo's schemas.


def item_name(item: int) -> str:
    """What the catalogue calls an item."""
    return f"item-{item}"


def context_of(visit: Visit, request_id: str) -> dict[str, Any]:
    """Who asks, and when: the context of a rank request."""
    return {
        "request_id": request_id,
        "reader": f"reader-{visit.user}",
        "age_group": GROUPS[visit.group],
        "device": DEVICES[visit.device],
        "hour": visit.hour,
    }


def candidates_of(world: World, visit: Visit) -> list[dict[str, Any]]:
    """(C,) what could be shown: the candidates of a rank request."""
    columns = visit.items, world.items.topic(visit.items), world.items.format(visit.items), visit.ages_s
    return [
        {"item": item_name(item), "topic": TOPICS[topic], "format": FORMATS[form], "age_s": round(age, 1)}
        for item, topic, form, age in zip(*(column.tolist() for column in columns), strict=True)
    ]


def actions_of(
    visit: Visit, request_id: str, shown: I64, reactions: Reactions, shown_ms: int
) -> Iterator[dict[str, Any]]:
    """Clicks and purchases that follow a page, each with the time at which it will happen.

    Their ids follow from request and item, so that sending one again changes nothing.
    """
    for place in np.flatnonzero(reactions.clicked).tolist():
        item = item_name(int(visit.items[shown[place]]))
        kinds = [("click", reactions.click_after_s[place])]
        if reactions.bought[place]:
            kinds.append(("purchase", reactions.purchase_after_s[place]))
        for kind, after_s in kinds:
            yield {
                "event_id": f"{kind}-{request_id}-{item}",
                "request_id": request_id,
                "item": item,
                "type": kind,
                "ts": shown_ms + round(1_000 * float(after_s)),
            }


# --- How fast: events a second, kept over seconds whatever the single request takes.


DEBT_S = 0.5
"""What is further behind is let go: after an outage readers come as before, not all at once."""
MEASURED_S = 10.0


class Pace:
    """Deals out turns. Thread-safe; times are seconds of a monotonic clock."""

    def __init__(self, events_per_s: float, now_s: float) -> None:
        self.events_per_s = events_per_s
        self._lock = threading.Lock()
        self._due_s = now_s
        self._made: deque[tuple[float, int]] = deque()
        self._sum = 0

    def turn(self, now_s: float, events: int) -> float:
        """When the next visit, of so many events, is due; at most `DEBT_S` ago."""
        with self._lock:
            due_s = self._due_s = max(self._due_s, now_s - DEBT_S)
            self._due_s += events / self.events_per_s
            return due_s

    def made(self, now_s: float, events: int, *, counted: bool) -> None:
        """Events that were made; those that were not `counted` in the turn put off the next one."""
        with self._lock:
            if not counted:
                self._due_s += events / self.events_per_s
            self._made.append((now_s, events))
            self._sum += events
            self._forget(now_s)

    def measured(self, now_s: float) -> float:
        """Events a second over the last seconds."""
        with self._lock:
            self._forget(now_s)
            return self._sum / MEASURED_S

    def _forget(self, now_s: float) -> None:
        while self._made and self._made[0][0] <= now_s - MEASURED_S:
            self._sum -= self._made.popleft()[1]


PATIENCE_S = 3.0
"""How long a reader waits for a page. Then the visit is over: nothing was shown, nothing will be clicked."""
AGAIN_S = 0.1
MOMENTARY = (429, 502, 503, 504)


@dataclass(slots=True)
class Counts:
    """What has happened since this process began."""

    impressions: int = 0
    clicks: int = 0
    purchases: int = 0
    errors: int = 0  # requests that failed, each attempt
    abandoned: int = 0  # visits whose page never came


class Readers:
    """The world's readers, as clients of a running system. Thread-safe; each thread brings its own door."""

    def __init__(
        self, world: World, outbox: Outbox, pace: Pace, clock: Clock, *, began_ms: int, first: int = 0
    ) -> None:
        """`began_ms`: when the world began. `first`: number of the first visit to be made."""
        self.world, self.windows, self.counts, self.pace = world, Windows(), Counts(), pace
        self._outbox, self._clock, self._began_ms, self._next = outbox, clock, began_ms, first
        self._lock = threading.Lock()

    def turn(self) -> tuple[int, float]:
        """The next visit's number, and when it is due."""
        with self._lock:
            number, self._next = self._next, self._next + 1
        return number, self.pace.turn(self._clock.monotonic(), self.world.options.shown)

    def visit(self, number: int, door: Door, wait: Callable[[float], bool]) -> None:
        """One visit, from asking for the page to the actions that will follow it.

        `wait` naps so many seconds and returns whether to give up. Errors are counted, none is raised.
        """
        visit = self.world.visit(number, (self._clock.now_ms() - self._began_ms) / 1_000)
        request_id = f"{self._began_ms:x}-{number}"
        asked = {
            "context": context_of(visit, request_id),
            "candidates": candidates_of(self.world, visit),
            "k": self.world.options.shown,
        }
        page = self._page(door, orjson.dumps(asked), wait)
        if page is not None:
            self._shown(visit, request_id, *page)

    def _page(self, door: Door, body: bytes, wait: Callable[[float], bool]) -> tuple[I64, bool] | None:
        """Candidates in their order, and whether that is random; None if the reader has gone."""
        deadline = self._clock.monotonic() + PATIENCE_S
        while True:
            try:
                status, answer = door.post("/v1/rank", body)
            except Unavailable:
                status, answer = 503, b""
            if status == 200:
                ranking = orjson.loads(answer)
                return np.array([item["index"] for item in ranking["items"]], np.int64), ranking["explored"]
            again = status in MOMENTARY and self._clock.monotonic() + AGAIN_S < deadline
            with self._lock:
                self.counts.errors += 1
                self.counts.abandoned += not again
            if not again or wait(AGAIN_S):
                return None

    def _shown(self, visit: Visit, request_id: str, shown: I64, explored: bool) -> None:
        now_ms = self._clock.now_ms()
        reactions = self.world.reactions(visit, shown)
        clicks, purchases = int(reactions.clicked.sum()), int(reactions.bought.sum())
        for action in actions_of(visit, request_id, shown, reactions, now_ms):
            self._outbox.put(action)
        self.windows.add(
            now_ms,
            explored=explored,
            impressions=len(shown),
            clicks=clicks,
            expected=float(self.world.expected(visit, shown).sum()),
            best=self.world.best(visit),
        )
        with self._lock:
            self.counts.impressions += len(shown)
            self.counts.clicks += clicks
            self.counts.purchases += purchases
        now_s = self._clock.monotonic()
        self.pace.made(now_s, len(shown), counted=True)
        self.pace.made(now_s, clicks + purchases, counted=False)
