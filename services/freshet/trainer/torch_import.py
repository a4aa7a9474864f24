"""The import of torch, which takes seconds, before other ranks wait for this one."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

__all__ = ["Loading"]


def load_torch_ranks() -> None:
    """Import the module of process groups, and torch with it."""
    importlib.import_module("freshet.trainer.torch_ranks")


class Loading:
    """One import of torch, started by the first call. Thread-safe.

    A rank that never observes another member's lease never imports torch.
    """

    def __init__(self, load: Callable[[], None] = load_torch_ranks) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self) -> bool:
        """Start the import in a thread unless it was started; return whether it has ended."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="load-torch", daemon=True)
                self._thread.start()
            return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the import. Raises its error, such as ImportError if torch is not installed."""
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
