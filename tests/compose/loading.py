"""The ledger's events and rank requests at a stated rate, with books of what was acknowledged."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from typing import Any

import orjson

from freshet.load.connections import Connections, server_at
from freshet.load.open_loop import Figures, Lane, drive, new_loop
from freshet.load.requests import Request
from tests.fixtures.traffic import ITEMS, USERS, Impression

ACTIONS = 0.3
"""Their share of the events."""

BATCH = 10
"""Events of a request."""

SOON_S = 1.5
"""Actions come within it: the ledger's shorter window is 2 s."""

CANDIDATES = 10
MOST = 64


class Load:
    """Events and rank requests that arrive by chance, an open loop, on a thread of its own. An event that is
    not acknowledged is sent no second time: what became of it stands in `figures`."""

    def __init__(
        self, gateway: str, inference: str, *, events: float, ranks: float, seed: int, timeout_s: float = 30.0
    ) -> None:
        """`events`: a second, in requests of ten. `ranks`: requests a second."""
        self.impressions: dict[tuple[str, int], Impression] = {}
        self.actions: dict[tuple[str, int], set[str]] = {}  # impression -> types of its actions
        self.figures: dict[str, Figures] = {}
        self.parts: list[tuple[float, dict[str, Figures]]] = []  # by second
        self.errors: list[BaseException] = []
        self._gateway, self._inference, self._timeout_s = gateway, inference, timeout_s
        self._rates, self._seed, self._rng = (events / BATCH, ranks), seed, random.Random(seed)
        self._number = self._seq = 0
        self._recent: deque[tuple[float, str, int, int]] = deque()  # monotonic, request, item, its time
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()
        assert self._begun.wait(30)

    def stop(self) -> dict[str, Figures]:
        """Send no more; the figures, once everything is answered."""
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._timeout_s + 30)
        assert not self._thread.is_alive(), "a request is never answered"
        assert not self.errors, self.errors
        return self.figures

    def figures_since(self, begin: int) -> dict[str, Figures]:
        """The sum of `parts[begin:]`, by lane."""
        summed = {"events": Figures(), "ranks": Figures()}
        for _, part in self.parts[begin:]:
            for name, figures in part.items():
                summed[name].merge(figures)
        return summed

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                self.figures = runner.run(self._drive())
        except BaseException as error:
            self.errors.append(error)

    async def _drive(self) -> dict[str, Figures]:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        gateway = Connections([server_at("gateway", self._gateway)], MOST, self._timeout_s)
        inference = Connections([server_at("inference", self._inference)], MOST, self._timeout_s)
        lanes = [
            Lane("events", self._rates[0], self._events, gateway, self._seed),
            Lane("ranks", self._rates[1], self._ranking, inference, self._seed),
        ]
        self._begun.set()
        try:
            return await drive(
                lanes,
                86_400,
                every_s=1,
                report=lambda at_s, part: self.parts.append((at_s, part)),
                stop=self._stop,
            )
        finally:
            for lane in lanes:
                lane.connections.close()

    def _events(self) -> Request:
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - SOON_S:
            self._recent.popleft()
        if self._recent and self._rng.random() < ACTIONS:
            return self._acts()
        return self._pages(now)

    def _pages(self, now: float) -> Request:
        now_ms, pages, made = time.time_ns() // 1_000_000, [], []
        for _ in range(BATCH):
            self._number += 1
            request, user = f"load-{self._seed}-{self._number}", f"user-{self._rng.randrange(USERS)}"
            item, self._seq = self._rng.randrange(ITEMS), self._seq + 1
            shown = [{"item": item, "seq": float(self._seq)}]
            pages.append({"request_id": request, "ts": now_ms, "user": user, "items": shown})
            made.append((request, item, Impression(self._seq, user, now_ms)))

        def acknowledged(_: bytes) -> None:
            for request, item, impression in made:
                self.impressions[request, item] = impression
                self._recent.append((now, request, item, now_ms))

        return Request("/v1/impressions", orjson.dumps(pages), BATCH, acknowledged)

    def _acts(self) -> Request:
        acts: dict[str, dict[str, Any]] = {}
        for _ in range(min(BATCH, len(self._recent))):
            _, request, item, shown_ms = self._recent[self._rng.randrange(len(self._recent))]
            kind = self._rng.choice(("click", "buy"))
            event = f"{request}/{item}/{kind}"
            ts = max(shown_ms, time.time_ns() // 1_000_000)
            acts[event] = {"event_id": event, "request_id": request, "item": item, "type": kind, "ts": ts}

        def acknowledged(_: bytes) -> None:
            for act in acts.values():
                self.actions.setdefault((act["request_id"], act["item"]), set()).add(act["type"])

        return Request("/v1/actions", orjson.dumps(list(acts.values())), len(acts), acknowledged)

    def _ranking(self) -> Request:
        candidates = [{"item": item, "seq": 1} for item in self._rng.sample(range(ITEMS), CANDIDATES)]
        user = f"user-{self._rng.randrange(USERS)}"
        return Request("/v1/rank", orjson.dumps({"context": {"user": user}, "candidates": candidates}))
