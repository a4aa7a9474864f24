"""Refusals on their way to the disk: told from an event loop, written by a thread, in ever fewer lines.

Whoever is shut out must neither fill the disk nor hold up those who were let in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["LONGEST_PAUSES", "PAUSE_S", "Refusals"]

PAUSE_S = 1.0
"""Between the first two lines of a kind. What is refused meanwhile is counted into the next, which comes
after the pause; while refusals go on, each pause is twice the one before."""

LONGEST_PAUSES = 60
"""First pauses that a pause comes to: a flood of a day is 1,445 lines of a kind."""

MOST_KINDS = 1_000
"""That are told apart. Where as many wait for a disk that takes none, further ones are counted together, and
the newest of them stands for all."""

_OTHERS = object()

CLOSE_S = 10.0
"""For the last lines, of a disk that may hang."""

T = TypeVar("T")


class _Kind(Generic[T]):
    """What is refused in one way."""

    def __init__(self, pause_s: float) -> None:
        self.newest: T | None = None
        self.count = 0  # refused and not written
        self.added = False  # since the last line was tried
        self.is_tried = False  # now, of a count that comes back if it is not written
        self.next_s = float("-inf")  # of the next line, at the earliest
        self.pause_s = pause_s


class Refusals(Generic[T]):
    """Hands on the newest refusal of each kind, with how many more there were; the first without delay."""

    def __init__(
        self,
        write: Callable[[T, int], bool],
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`write`, on the thread: a refusal and how many more it stands for; False if they are not written,
        and are to be counted into the next line. The thread begins with the first refusal."""
        self._write, self._pause_s, self._clock = write, pause_s, clock
        self._changed = threading.Condition()
        self._kinds: dict[Hashable, _Kind[T]] = {}
        self._all_wait = False  # to be written, of as many kinds as are told apart
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, refusal: T, kind: Hashable = None) -> None:
        """Count it. Never blocks on the disk."""
        with self._changed:
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                kind = self._make_room_for(kind)
            one = self._kinds.setdefault(kind, _Kind(self._pause_s))
            one.newest, one.count, one.added = refusal, one.count + 1, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _make_room_for(self, kind: Hashable) -> Hashable:
        """Forget kinds that are written; what to count the kind as."""
        if not self._all_wait:  # which costs a look at each
            self._kinds = {name: one for name, one in self._kinds.items() if one.count or one.is_tried}
            self._all_wait = len(self._kinds) >= MOST_KINDS
        return _OTHERS if self._all_wait else kind

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
                taken = self._wait_for_some()
                last = self._closing
            for kind, newest, count in taken:
                written = self._write(newest, count - 1)
                with self._changed:
                    kind.is_tried = False
                    kind.count += 0 if written else count
                    self._all_wait = self._all_wait and not written
            if last:
                return

    def _wait_for_some(self) -> list[tuple[_Kind[T], T, int]]:
        """Take what may be written now; all that is left at the close."""
        while True:
            now = self._clock()
            taken = []
            for kind in self._kinds.values():
                if kind.newest is None or not kind.count:
                    continue
                if self._closing or (kind.added and kind.next_s <= now):
                    taken.append((kind, kind.newest, kind.count))
                    quiet = now - kind.next_s >= kind.pause_s
                    longest = LONGEST_PAUSES * self._pause_s
                    kind.pause_s = self._pause_s if quiet else min(2 * kind.pause_s, longest)
                    kind.next_s = now + kind.pause_s
                    kind.count, kind.added, kind.is_tried = 0, False, True
            if taken or self._closing:
                return taken
            waits = [kind.next_s - now for kind in self._kinds.values() if kind.added]
            self._changed.wait(min(waits) if waits else None)
