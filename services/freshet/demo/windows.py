"""Click rates of shown items, in windows by the time of their page."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from freshet.demo.news_site import LONGEST_CLICK_S

__all__ = ["WINDOW_MS", "Shown", "Windows"]

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
