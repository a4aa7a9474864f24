"""torch, loaded before ranks wait for each other: it takes seconds, on a busy machine many."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

__all__ = ["Loading"]


def load_torch_ranks() -> None:
    """Import what ranks meet by."""
    importlib.import_module("freshet.trainer.torch_ranks")


class Loading:
    """Loads it once, at the first asking: at once, or beside other work. Nobody asks who never sees another's
    seat. Thread-safe."""

    def __init__(self, load: Callable[[], None] = load_torch_ranks) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self) -> bool:
        """Whether it is loaded; if it is not, a thread sees to it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="load-torch", daemon=True)
                self._thread.start()
            return not self._thread.is_alive()

    def wait(self) -> None:
        """Have it loaded when this returns. Raises what importing it raised: torch may not be installed."""
        if not self.begin():
            assert self._thread is not None
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._load()
        except Exception as error:
            self._error = error
