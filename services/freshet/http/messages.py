"""HTTP requests and responses: headers, bodies within limits, errors as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import orjson
import structlog
from prometheus_client import CollectorRegistry

from freshet.errors import BadInput, Overloaded, TooLarge, Unavailable
from freshet.observability.metrics import Metric
from freshet.observability.tracing import Context

if TYPE_CHECKING:  # services without an ASGI server use errors and headers
    from starlette.types import Receive

    from freshet.http.authenticator import EventAllowance

log = structlog.get_logger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]

CLOSE = (b"connection", b"close")
"""Header of a response that ends its connection: the rest of the request's body is not read."""

FORWARDED = b"x-forwarded-for"

FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""Content types that a page may send to other sites without a preflight."""

SHOWN_CHARS = 200
"""Longest part of a header in an error."""

LINGER_S = 10.0
"""Seconds for which the rest of a refused body may still arrive."""

BODY_BYTES = Metric(
    "freshet_http_body_bytes",
    "gauge",
    "bytes",
    "Bodies of requests that are coming or are worked on.",
)


# --- responses


@dataclass(frozen=True, slots=True)
class Response:
    """Status, body and headers of a response."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = ()


GONE = Response(499, b"")
"""Response to a client that disconnected: counted and traced, but not sent. The number is nginx's."""


class ClientGoneError(Exception):
    """The client disconnected before its response, or before its body was complete."""


def json_response(status: int, content: object, headers: Headers = ()) -> Response:
    """Return a JSON response; numpy arrays and scalars are encoded as numbers."""
    return Response(status, orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), headers=headers)


class HttpError(Exception):
    """An error response: expected and found values, and a hint to the client."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
        headers: Headers = (),
        retry_after_s: float = 0.0,
    ) -> None:
        """`retry_after_s`: time until a retry, sent in whole seconds over HTTP; 0: none is sent."""
        super().__init__(message)
        if retry_after_s:
            headers = (*headers, (b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()))
        self.status, self.headers, self.retry_after_s = status, headers, retry_after_s
        self.content = {
            "code": code,
            "message": message,
            "expected": expected,
            "found": found,
            "hint": hint,
        }

    def response(self) -> Response:
        """Return the error as JSON."""
        return json_response(self.status, {"error": self.content}, self.headers)


def error_response(error: Exception) -> Response:
    """Return the response for an exception. An unexpected exception is logged, and its text is not sent."""
    if isinstance(error, HttpError):
        return error.response()
    if isinstance(error, ClientGoneError):
        return GONE
    return _http_error(error).response()


def _http_error(error: Exception) -> HttpError:
    if isinstance(error, TooLarge):
        return HttpError(413, "too_large", str(error), hint="send it in smaller pieces")
    if isinstance(error, BadInput):
        return HttpError(400, "bad_input", str(error))
    if isinstance(error, Overloaded):
        after = str(max(1, round(error.retry_after_s))).encode()
        return HttpError(429, "overloaded", str(error), headers=((b"retry-after", after),))
    if isinstance(error, Unavailable):
        return HttpError(503, "unavailable", str(error), headers=((b"retry-after", b"1"),))
    log.error("request failed", exc_info=error)
    return HttpError(500, "internal", "an unforeseen error; the service's log says more")


# --- requests


class Request(NamedTuple):
    """A request with its whole body."""

    method: str
    path: str
    query: str
    headers: Mapping[bytes, bytes]  # see `header_map`
    body: bytes
    arguments: tuple[str, ...] = ()  # values of `{name}` in the route's path, decoded
    peer: str = ""  # the client's address, behind trusted proxies
    token_name: str = ""  # name of the client's token, where one is required
    allowance: EventAllowance | None = None  # for `Authenticator.charge_events`
    span: Context | None = None  # of the request in its client's trace, if it is recorded
    receive: Receive | None = None  # ASGI's, for events after the body

    @property
    def content_type(self) -> str:
        """Media type without parameters, in lower case; empty without the header."""
        return self.headers.get(b"content-type", b"").split(b";")[0].strip().lower().decode("latin-1")

    def watch_client(self) -> Callable[[], bool]:
        """Start to watch the client; the returned function says whether it has disconnected.

        It costs a task, so handlers call it only for work that may wait longer than clients do.
        """
        if self.receive is None:
            return lambda: False
        return asyncio.get_running_loop().create_task(_until_gone(self.receive)).done


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def header_map(lines: Sequence[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """Return headers by name in lower case. The last value of a name counts, but X-Forwarded-For keeps all,
    as some proxies add a line (RFC 9110 §5.3)."""
    found = dict(lines)
    if len(found) < len(lines) and FORWARDED in found:
        found[FORWARDED] = b",".join(value for name, value in lines if name == FORWARDED)
    return found


def require_json(request: Request) -> None:
    """Raises HttpError 415, `content_type` or `encoding`, for a body that is not plain JSON."""
    require_identity(request)
    if request.content_type != "application/json":
        raise wrong_type(request.content_type, "application/json")


def require_identity(request: Request) -> None:
    """Raises HttpError 415 `encoding` for a compressed body."""
    found = request.headers.get(b"content-encoding")
    if found is None:
        return
    coding = found.decode("latin-1")
    if coding.strip().lower() not in ("", "identity"):
        raise HttpError(
            415,
            "encoding",
            "compressed bodies are not taken",
            expected="identity",
            found=coding[:SHOWN_CHARS],
            hint="send the body as it is, without the header Content-Encoding",
        )


def wrong_type(found: str, *types: str) -> HttpError:
    """Return the error for a body without one of these content types, of which the first is the usual one."""
    return HttpError(
        415,
        "content_type",
        "bodies of this content type are not taken",
        expected=list(types) if len(types) > 1 else types[0],
        found=found[:SHOWN_CHARS] or "no content type",
        hint=f"send the header Content-Type: {types[0]} (curl: -H 'content-type: {types[0]}')",
    )


# --- bodies


def refuse_upgrade(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request that has a body and the header Upgrade.

    httptools ends its message behind the head, so its body would be read as further requests, which a proxy
    did not see. So the answer closes the connection. Raises HttpError 400 `upgrade`.
    """
    if b"upgrade" not in headers:
        return
    if headers.get(b"content-length", b"").strip(b"0") or b"transfer-encoding" in headers:
        raise HttpError(
            400,
            "upgrade",
            "a request with a body cannot upgrade the connection; the body was not read",
            expected="a request without the header Upgrade",
            found=headers[b"upgrade"].decode("latin-1")[:SHOWN_CHARS],
            hint="send it as HTTP/1.1 without Upgrade; a proxy must not pass that header on",
            headers=(CLOSE,),
        )


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of request bodies."""

    max_bytes: int  # of one body
    timeout_s: float  # within which a body must arrive
    total_bytes: int = 128 << 20  # of all bodies that arrive or are processed; one always fits


class Incoming:
    """The body of a request while it arrives."""

    __slots__ = ("_receive", "more")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more = True  # whether pieces may follow

    async def next_piece(self) -> bytes:
        """Return the next piece. Raises ClientGoneError."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.more = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def discard(self) -> None:
        """Read and drop the rest of the body.

        The kernel resets a connection that is closed with unread bytes. Clients that send a whole body before
        they read, such as Python's, would then never receive the error.
        """
        with contextlib.suppress(TimeoutError, ClientGoneError):
            async with asyncio.timeout(LINGER_S):
                while self.more:
                    await self.next_piece()


class BodyReader:
    """Reads the bodies of a service's requests within limits. Lives on one event loop."""

    def __init__(self, registry: CollectorRegistry, limits: BodyLimits) -> None:
        self._max_bytes, self._timeout_s = limits.max_bytes, limits.timeout_s
        self._total_bytes = max(limits.total_bytes, limits.max_bytes)
        self._held = 0
        self._deadlines: dict[asyncio.Task[object] | None, float] = {}  # of arriving bodies
        self._timer: asyncio.TimerHandle | None = None  # set while a body may be arriving
        BODY_BYTES.gauge(registry, lambda: self._held)

    async def read(self, headers: Mapping[bytes, bytes], incoming: Incoming) -> bytes:
        """Read a whole body; it counts until `release`. Raises HttpError and ClientGoneError."""
        declared = headers.get(b"content-length", b"").lstrip(b"0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._max_bytes):
            raise self._too_large(declared.decode() if len(declared) <= 18 else "more than 10**18")
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self._deadlines[task] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._cancel_late, loop)
        pieces: list[bytes] = []
        size, complete = 0, False
        try:
            while True:
                piece = await incoming.next_piece()
                if size + len(piece) > self._max_bytes:
                    raise self._too_large(str(size + len(piece)))
                if piece and self._held + len(piece) > self._total_bytes:
                    raise self._too_many()
                size += len(piece)
                self._held += len(piece)
                pieces.append(piece)
                if not incoming.more:
                    complete = True
                    return piece if len(pieces) == 1 else b"".join(pieces)
        except asyncio.CancelledError:
            if task is None or task in self._deadlines:  # not cancelled by `_cancel_late`
                raise
            task.uncancel()
            raise self._too_late(size) from None
        finally:
            if not complete:
                self._held -= size
            self._deadlines.pop(task, None)

    def release(self, body: bytes) -> None:
        """Release the body of an answered request."""
        self._held -= len(body)

    def _cancel_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the tasks of late bodies. One timer serves all: a timer for each costs more than the rest of
        the work for a small body."""
        self._timer = None
        for task, deadline in list(self._deadlines.items()):
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._cancel_late, loop)
                return
            del self._deadlines[task]
            if task is not None:
                task.cancel()

    def _too_large(self, size: str) -> HttpError:
        return HttpError(
            413,
            "body_too_large",
            "the body is too large",
            expected=f"at most {self._max_bytes} bytes",
            found=f"{size} bytes or more",
            hint="send smaller batches",
            headers=(CLOSE,),
        )

    def _too_many(self) -> HttpError:
        return HttpError(
            503,
            "bodies",
            "too many bytes of requests are under way",
            expected=f"at most {self._total_bytes} bytes of all of them together",
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
