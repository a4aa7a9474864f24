"""Exceptions as clients of a gRPC door are told them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc
import structlog

from freshet.errors import BadInput, Overloaded, TooLarge, Unavailable
from freshet.http.responses import HttpError

__all__ = ["NoMessageError", "Told", "told_of"]

log = structlog.get_logger("freshet.grpc")


class NoMessageError(BadInput):
    """A call ended without its message, or gRPC has thrown it away for its size."""


@dataclass(frozen=True, slots=True)
class Told:
    """An exception as a client is told it."""

    status: grpc.StatusCode
    code: str  # as over HTTP: `freshet.http.error_codes`
    text: str
    retry_after_ms: int = 0  # 0: do not try again unchanged


_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.UNAVAILABLE,
}


def told_of(error: Exception) -> Told:
    """What an exception says to a client. Unforeseen ones are logged whole and told without details."""
    if isinstance(error, HttpError):
        said = error.content
        more = [f"{name} {said[name]}" for name in ("expected", "found", "hint") if said[name] is not None]
        status = _STATUS.get(error.status, grpc.StatusCode.UNKNOWN)
        after_ms = math.ceil(error.retry_after_s * 1e3)
        return Told(status, str(said["code"]), "; ".join([str(error), *more]), after_ms)
    if isinstance(error, BadInput):
        large = isinstance(error, TooLarge)
        text = f"{error}; send it in smaller pieces" if large else str(error)
        code = "no_message" if isinstance(error, NoMessageError) else "too_large" if large else "bad_input"
        return Told(grpc.StatusCode.INVALID_ARGUMENT, code, text)
    if isinstance(error, Overloaded):
        after_ms = max(1, round(error.retry_after_s * 1e3))
        return Told(grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", str(error), after_ms)
    if isinstance(error, Unavailable):
        return Told(grpc.StatusCode.UNAVAILABLE, "unavailable", str(error), 1000)
    log.error("a call failed", exc_info=error)
    text = "an unforeseen error; the service's log says more"
    return Told(grpc.StatusCode.INTERNAL, "internal", text)
