"""Bodies of requests: whole, in time, and bounded: each by itself, and all together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from starlette.types import Receive

from freshet.http.responses import CLOSE, ClientGoneError, HttpError
from freshet.observability.metrics import Metric

__all__ = ["BODIES", "Bodies", "Incoming"]

BODIES = Metric(
    "freshet_http_body_bytes",
    "gauge",
    "bytes",
    "Bodies of requests that are coming or are worked on.",
)

LINGER_S = 10.0
"""How long the rest of a refused body may take to arrive."""


class Incoming:
    """The body of one request, while it arrives."""

    __slots__ = ("_receive", "more")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more = True  # pieces may follow

    async def piece(self) -> bytes:
        """The next piece. Raises ClientGoneError."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.more = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def drop_rest(self) -> None:
        """Read what is still to come, and drop it.

        The kernel resets a connection that is closed while bytes of it are unread. Clients that send a whole
        body before they read, as those of Python do, would then never see why it was refused.
        """
        with contextlib.suppress(TimeoutError, ClientGoneError):
            async with asyncio.timeout(LINGER_S):
                while self.more:
                    await self.piece()


class Bodies:
    """Reads the bodies of one service's requests, within bounds. Lives on one event loop."""

    def __init__(
        self, registry: CollectorRegistry, *, most_bytes: int, timeout_s: float, together: int
    ) -> None:
        """`most_bytes`: of one; `together`: of all that are held at once; `timeout_s`: for each to come."""
        self._most_bytes, self._timeout_s = most_bytes, timeout_s
        self._together = max(together, most_bytes)
        self._held = 0
        self._deadlines: dict[asyncio.Task[object] | None, float] = {}  # of arriving bodies
        self._timer: asyncio.TimerHandle | None = None  # runs while there may be one
        BODIES.gauge(registry, lambda: self._held)

    async def read(self, headers: Mapping[bytes, bytes], incoming: Incoming) -> bytes:
        """A request's whole body, which counts until `release`. Raises HttpError and ClientGoneError."""
        declared = headers.get(b"content-length", b"").lstrip(b"0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._most_bytes):
            raise self._too_large(declared.decode() if len(declared) <= 18 else "more than 10**18")
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self._deadlines[task] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._give_up, loop)
        pieces: list[bytes] = []
        size, complete = 0, False
        try:
            while True:
                piece = await incoming.piece()
                if size + len(piece) > self._most_bytes:
                    raise self._too_large(str(size + len(piece)))
                if piece and self._held + len(piece) > self._together:
                    raise self._too_many()
                size += len(piece)
                self._held += len(piece)
                pieces.append(piece)
                if not incoming.more:
                    complete = True
                    return piece if len(pieces) == 1 else b"".join(pieces)
        except asyncio.CancelledError:
            if task is None or task in self._deadlines:  # cancelled by another than `_give_up`
                raise
            task.uncancel()
            raise self._too_late(size) from None
        finally:
            if not complete:
                self._held -= size
            self._deadlines.pop(task, None)

    def release(self, body: bytes) -> None:
        """The request of a body that was read is answered."""
        self._held -= len(body)

    def _give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the tasks of bodies that are late. One timer for all: a timer for each costs more than all
        else that is done here for a small body."""
        self._timer = None
        for task, deadline in list(self._deadlines.items()):
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._give_up, loop)
                return
            del self._deadlines[task]
            if task is not None:
                task.cancel()

    def _too_large(self, size: str) -> HttpError:
        return HttpError(
            413,
            "body_too_large",
            "the body is too large",
            expected=f"at most {self._most_bytes} bytes",
            found=f"{size} bytes or more",
            hint="send smaller batches",
            headers=(CLOSE,),
        )

    def _too_many(self) -> HttpError:
        return HttpError(
            503,
            "bodies",
            "too many bytes of requests are under way",
            expected=f"at most {self._together} bytes of all of them together",
            found=f"{self._held} bytes already",
            hint="send it again; FRESHET_<SERVICE>_MAX_BODIES_BYTES allows more",
            headers=(CLOSE,),
            retry_after_s=1,
        )

    def _too_late(self, size: int) -> HttpError:
        return HttpError(
            408,
            "body_timeout",
            "the body did not arrive in time",
            expected=f"a whole body within {self._timeout_s} s",
            found=f"{size} bytes",
            headers=(CLOSE,),
        )
