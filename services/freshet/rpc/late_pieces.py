"""Ends streams that stop in the middle of a message: what has come of it would be kept for nothing.

gRPC has no deadline for the next message of a stream, and whoever waits for it does nothing else: so a thread
looks after those that wait for a piece. It sleeps while there are none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc

__all__ = ["LatePieces"]


class LatePieces:
    """Of one listener. Thread-safe."""

    def __init__(self, limit_s: float, ended: Callable[[], None]) -> None:
        """`limit_s`: until the next piece must have come; `ended`: is called for each stream that it ends."""
        self.limit_s, self._ended = limit_s, ended
        self._changed = threading.Condition()  # guards all below
        self._due: dict[grpc.ServicerContext, float] = {}  # in order
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="grpc-pieces", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def expect(self, stream: grpc.ServicerContext) -> None:
        """A piece of a message has come, and another one must."""
        with self._changed:
            self._due.pop(stream, None)
            self._due[stream] = time.monotonic() + self.limit_s
            if len(self._due) == 1:
                self._changed.notify_all()

    def forget(self, stream: grpc.ServicerContext) -> bool:
        """Nothing more of a message must come. False if nothing had to, or the stream was ended as late."""
        with self._changed:
            return self._due.pop(stream, None) is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (left_s := self._left_s()) != 0.0:
                    self._changed.wait(left_s)
                if self._stopped:
                    return
                stream = next(iter(self._due))
                del self._due[stream]
            self._ended()
            stream.cancel()

    def _left_s(self) -> float | None:
        """Until the first is late; None if there is none."""
        first = next(iter(self._due.values()), None)
        return None if first is None else max(0.0, first - time.monotonic())
