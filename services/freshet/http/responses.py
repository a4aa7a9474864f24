"""What services say to clients over HTTP: answers, and errors that tell what to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import orjson
import structlog

from freshet.errors import BadInput, Overloaded, TooLarge, Unavailable

__all__ = [
    "CLOSE",
    "GONE",
    "ClientGoneError",
    "Headers",
    "HttpError",
    "Response",
    "error_response",
    "json_response",
]

log = structlog.get_logger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]
CLOSE = (b"connection", b"close")
"""Of an answer that ends its connection: the rest of the request's body is not read."""


@dataclass(frozen=True, slots=True)
class Response:
    """What is sent back."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = ()


GONE = Response(499, b"")
"""To a client that went away: counted and traced, and sent to nobody. The number is nginx's."""


class ClientGoneError(Exception):
    """The client went away before it was answered, or before its body was whole."""


def json_response(status: int, content: object, headers: Headers = ()) -> Response:
    """A response of JSON; numpy arrays and scalars are written as numbers."""
    return Response(status, orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), headers=headers)


class HttpError(Exception):
    """A request that is answered with an error: what was expected, what was found, what to do."""

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
        """`retry_after_s`: told to the client, over HTTP in whole seconds; 0: nothing to wait for."""
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
        """The error as JSON."""
        return json_response(self.status, {"error": self.content}, self.headers)


def error_response(error: Exception) -> Response:
    """What an exception says to a client. Unforeseen ones are logged whole and told without details."""
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
