"""Figures that somebody else has to be asked for, who may not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from freshet.errors import Unavailable

__all__ = ["Newest"]

T = TypeVar("T")

WAIT_S = 1.0
"""Prometheus gives a page 5 s by our configuration; several such figures may stand on one."""


class Newest(Generic[T]):
    """What `ask` returned last: newly asked for at each call, unless the answer takes too long.

    So a page of metrics is told while the log is away, with what was known before. For any thread.
    """

    def __init__(self, ask: Callable[[], T], before: T, wait_s: float = WAIT_S) -> None:
        """`before`: what is told until there has been an answer. `wait_s`: for how long a call waits."""
        self._ask, self._known, self._wait_s = ask, before, wait_s
        self._lock = threading.Lock()
        self._under_way: threading.Event | None = None
        self._failed: BaseException | None = None

    def __call__(self) -> T:
        """The newest answer. Raises what `ask` raised, but Unavailable."""
        with self._lock:
            if self._under_way is None:
                done = threading.Event()
                threading.Thread(target=self._run, args=(done,), daemon=True, name="newest").start()
                self._under_way = done  # only once it runs: else all later calls would wait for nobody
            asked = self._under_way
        asked.wait(self._wait_s)
        with self._lock:
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed
            return self._known

    def _run(self, done: threading.Event) -> None:
        failed: BaseException | None = None
        try:
            known = self._ask()
        except Unavailable:
            known = self._known
        except BaseException as error:
            known, failed = self._known, error
        with self._lock:
            self._known, self._failed, self._under_way = known, failed, None
        done.set()
