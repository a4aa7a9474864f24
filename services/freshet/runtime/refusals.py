"""Refusals on their way to the disk: told from an event loop, written by a thread, one line a second at most.

Whoever is shut out must neither fill the disk nor hold up those who were let in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Refusals"]

PAUSE_S = 1.0
"""Between two lines. What is refused meanwhile is counted into the next, which comes after the pause."""

CLOSE_S = 10.0
"""For the last line, of a disk that may hang."""

T = TypeVar("T")


class Refusals(Generic[T]):
    """Hands on the newest refusal, with how many more there were; the first without delay."""

    def __init__(self, write: Callable[[T, int], bool], pause_s: float = PAUSE_S) -> None:
        """`write`, on the thread: a refusal and how many more it stands for; False if they are not written,
        and are to be counted into the next line. The thread begins with the first refusal."""
        self._write, self._pause_s = write, pause_s
        self._changed = threading.Condition()
        self._newest: T | None = None
        self._count = 0  # refused and not written
        self._due = False  # whether one was added since the last line was tried
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, refusal: T) -> None:
        """Count it. Never blocks on the disk."""
        with self._changed:
            self._newest, self._count, self._due = refusal, self._count + 1, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closing)
                newest, count, last = self._newest, self._count, self._closing
                self._count, self._due = 0, False
            written = newest is None or count == 0 or self._write(newest, count - 1)
            with self._changed:
                if last:
                    return
                if not written:
                    self._count += count
                self._changed.wait_for(lambda: self._closing, self._pause_s)
