"""One visit after another: ask for a page, show it, react. Decisions and their order; threads are in
`service`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import orjson

from freshet.clock import Clock
from freshet.demo.connection import Door
from freshet.demo.outbox import Outbox
from freshet.demo.pace import Pace
from freshet.demo.pages import actions_of, candidates_of, context_of
from freshet.demo.windows import Windows
from freshet.demo.world import Visit, World
from freshet.errors import Unavailable
from freshet.types import I64

__all__ = ["Counts", "Readers"]

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
