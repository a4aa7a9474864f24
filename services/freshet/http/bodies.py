"""Bodies of requests: whole, in time, and bounded: each by itself, and all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from freshet.http.responses import ClientGoneError, HttpError
from freshet.observability.metrics import Metric

__all__ = ["BODIES", "Bodies"]

BODIES = Metric(
    "freshet_http_body_bytes",
    "gauge",
    "bytes",
    "Bodies of requests that are coming or are worked on; what fits into one packet and is answered together "
    "with others, as most events are, counts where it waits.",
)
CLOSE = ((b"connection", b"close"),)


class Bodies:
    """Takes in the bodies of one service's requests, within bounds. Lives on one event loop."""

    def __init__(
        self, registry: CollectorRegistry, *, most_bytes: int, timeout_s: float, together: int
    ) -> None:
        """`most_bytes`: of one; `together`: of all that are held at once; `timeout_s`: for each to come."""
        self.most_bytes, self._timeout_s = most_bytes, timeout_s
        self._together = max(together, most_bytes)
        self.held = 0
        BODIES.gauge(registry, lambda: self.held)

    @asynccontextmanager
    async def whole(
        self, headers: Mapping[bytes, bytes], receive: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> AsyncIterator[bytes]:
        """A request's body, which counts until it is left. Raises HttpError, and ClientGoneError."""
        declared = headers.get(b"content-length", b"").lstrip(b"0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self.most_bytes):
            raise self._too_large(declared.decode() if len(declared) <= 18 else "more than 10**18")
        pieces: list[bytes] = []
        size = 0
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    more = True
                    while more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise ClientGoneError
                        piece: bytes = message.get("body", b"")
                        if size + len(piece) > self.most_bytes:
                            raise self._too_large(str(size + len(piece)))
                        if piece and self.held + len(piece) > self._together:
                            raise self._too_many()
                        size += len(piece)
                        self.held += len(piece)
                        pieces.append(piece)
                        more = message.get("more_body", False)
            except TimeoutError:
                raise self._too_late(size) from None
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            yield body
        finally:
            self.held -= size

    def _too_large(self, size: str) -> HttpError:
        return HttpError(
            413,
            "body_too_large",
            "the body is too large",
            expected=f"at most {self.most_bytes} bytes",
            found=f"{size} bytes or more",
            hint="send smaller batches",
            headers=CLOSE,
        )

    def _too_many(self) -> HttpError:
        return HttpError(
            503,
            "bodies",
            "too many bytes of requests are under way",
            expected=f"at most {self._together} bytes of all of them together",
            found=f"{self.held} bytes already",
            hint="send it again; FRESHET_<SERVICE>_MAX_BODIES_BYTES allows more",
            headers=CLOSE,
            retry_after_s=1,
        )

    def _too_late(self, size: int) -> HttpError:
        return HttpError(
            408,
            "body_timeout",
            "the body did not arrive in time",
            expected=f"a whole body within {self._timeout_s} s",
            found=f"{size} bytes",
            headers=CLOSE,
        )
