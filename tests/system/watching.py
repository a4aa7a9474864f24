"""Progress of a fleet, read by threads: a paused process answers no request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

PAUSE_S = 0.1


class Watch:
    """The highest offset of each partition that any of several looks has found. Thread-safe."""

    def __init__(self, looks: Sequence[Callable[[], Mapping[int, int]]]) -> None:
        """Each look is called again and again by a thread of its own; it returns {} if it sees nothing."""
        self._lock = threading.Lock()
        self._highest: dict[int, int] = {}
        self._began = 0.0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(look,), daemon=True) for look in looks]

    @property
    def highest(self) -> dict[int, int]:
        """{partition: offset}; never falls."""
        with self._lock:
            return dict(self._highest)

    @property
    def began(self) -> float:
        """When the newest look began that has found something (monotonic)."""
        return self._began

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, look: Callable[[], Mapping[int, int]]) -> None:
        while not self._stop.wait(PAUSE_S):
            began = time.monotonic()
            found = look()
            with self._lock:
                for p, offset in found.items():
                    self._highest[p] = max(offset, self._highest.get(p, 0))
                if found:
                    self._began = max(self._began, began)
