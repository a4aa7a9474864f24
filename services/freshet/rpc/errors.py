"""Errors on gRPC connections: FAILURE frames between services, statuses for external clients.

A FAILURE frame answers one request with the error's family and text; the stream stays open. Errors of the
connection itself are gRPC statuses, which `error_of` maps to the families of `freshet.errors`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import (
    BadInput,
    ConfigError,
    Corrupt,
    DataLost,
    Fenced,
    FreshetError,
    Mismatch,
    Overloaded,
    Refused,
    TooLarge,
    Unavailable,
)
from freshet.http.messages import HttpError
from freshet.rpc.channel import RETRY_AFTER_S
from freshet.rpc.frames import BadFrame, Frame, Kind, Part, encode_frame

log = structlog.get_logger("freshet.grpc")

TEXT_BYTES = 2_000
"""Longest text of an error that ends a call. It is sent in a header, where each byte may become three, and
clients accept 8 KiB of headers; beyond that they report their own limit instead of the error."""

TOKEN_GRACE_S = 10.0
"""Time for which a refused token is retried: a listener may read a changed token later than its clients."""

TOKEN_FORGET_S = 5.0
"""A refusal that comes so long after the last one counts as the first: retries are more frequent."""


# --- between services: FAILURE frames

_FAMILIES: Mapping[int, type[FreshetError]] = {
    1: Unavailable,
    4: Fenced,
    5: Mismatch,
    6: Corrupt,
    7: TooLarge,  # before its base class: the first match counts
    8: BadInput,
    9: DataLost,
    255: FreshetError,
}
_OVERLOADED, _REFUSED, _OTHER = 2, 3, 255


def failure_frame(error: BaseException, frame_id: int) -> bytes:
    """Encode the answer to a failed request; `flags` holds the number of the error's family."""
    text = np.frombuffer((str(error) or repr(error)).encode(), np.uint8)
    sections: dict[tuple[Part, int], NDArray[Any]] = {(Part.TEXT, 0): text}
    family = _OTHER
    if isinstance(error, Overloaded):
        family = _OVERLOADED
        sections[Part.REALS, 0] = np.array([error.retry_after_s], np.float64)
    elif isinstance(error, Refused):
        family = _REFUSED
        offsets = np.array(sorted(error.applied.items()), np.int64).reshape(-1, 2)
        sections[Part.APPLIED, 0] = offsets
    else:
        family = next((n for n, kind in _FAMILIES.items() if isinstance(error, kind)), _OTHER)
    return encode_frame(Frame(Kind.FAILURE, frame_id, flags=family, sections=sections))


def failure_of(frame: Frame) -> FreshetError:
    """Return the error in a FAILURE frame. Raises BadFrame if the frame lacks data of its family."""
    text = frame.text()
    if frame.flags == _OVERLOADED:
        retry_after_s = float(frame.array(Part.REALS, np.float64, (1,))[0])
        return Overloaded(text, retry_after_s if 0 <= retry_after_s <= 60 else 1.0)
    if frame.flags == _REFUSED:
        return Refused(text, dict(frame.array(Part.APPLIED, np.int64, (None, 2)).tolist()))
    family = _FAMILIES.get(frame.flags)
    if family is None:
        raise BadFrame(f"failure: expected a family that we know, found {frame.flags}: {text}", "shape")
    return family(text)


# --- between services: calls that gRPC ended


class TokenRefusals:
    """Refusals of this process's token, by listener. Thread-safe."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: dict[str, tuple[float, float]] = {}  # address -> first and last refusal

    def error_of(self, where: str, details: str) -> FreshetError:
        """Return the error of a refusal: Unavailable for `TOKEN_GRACE_S` from the first, then ConfigError."""
        now = self._clock.monotonic()
        with self._lock:
            first, last = self._refused.get(where, (now, now))
            if now - last > TOKEN_FORGET_S:
                first = now
            self._refused = {at: t for at, t in self._refused.items() if now - t[1] <= TOKEN_FORGET_S}
            self._refused[where] = (first, now)
        if now - first < TOKEN_GRACE_S:
            return Unavailable(f"{where}: {details}; for {TOKEN_GRACE_S:g} s it may just be changed")
        hint = f"{details}, for {now - first:.0f} s; FRESHET_GRPC_TOKEN_FILE has none that is taken there"
        return ConfigError("grpc", "token_file", where, "the token that this listener asks for", hint)


_TOKEN_REFUSALS = TokenRefusals()
"""Shared by all connections of the process, since one refusal ends several calls."""

_TLS_HINTS = {
    "certificate has expired": "renew the certificate of {host}, as docs/security.md says",
    "Hostname Verification": "the certificate there is not for {host}: make one that is, as "
    "docs/security.md says, or advertise a host that it names",
    "CERTIFICATE_VERIFY_FAILED": "FRESHET_GRPC_CA_FILE here has not signed the certificate of {host}",
    "WRONG_VERSION_NUMBER": "what answers there speaks no TLS: FRESHET_GRPC_CERT_FILE is set here, not there",
}
"""Hints by gRPC's text for a handshake that failed at the client; the first match counts."""

_FAMILY_OF_STATUS: dict[grpc.StatusCode, Callable[[str], FreshetError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: Mismatch,
    grpc.StatusCode.UNIMPLEMENTED: Mismatch,
    grpc.StatusCode.INVALID_ARGUMENT: BadInput,
}


def error_of(error: grpc.RpcError, where: str) -> FreshetError:
    """Return the error of a call that gRPC ended; `where` is the peer's address."""
    code, details = error.code(), error.details() or ""
    text = f"{where}: {details or code.name}"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return _TOKEN_REFUSALS.error_of(where, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        too_large = "larger than max" in details
        return TooLarge(text) if too_large else Overloaded(text, RETRY_AFTER_S)
    for found, hint in _TLS_HINTS.items():
        if found in details:
            text += f"\n  {hint.format(host=where.rpartition(':')[0])}"
            break
    return _FAMILY_OF_STATUS.get(code, Unavailable)(text)


# --- to external clients: statuses


class NoMessageError(BadInput):
    """A call ended without its message, or gRPC dropped the message for its size."""


@dataclass(frozen=True, slots=True)
class CallStatus:
    """An exception as an external client receives it."""

    status: grpc.StatusCode
    code: str  # as over HTTP: `freshet.http.endpoint.CODES`
    text: str
    retry_after_ms: int = 0  # 0: a retry of the same call fails again


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


def call_status(error: Exception) -> CallStatus:
    """Return the status of an exception. An unexpected exception is logged, and its text is not sent."""
    if isinstance(error, HttpError):
        content = error.content
        more = [
            f"{name} {content[name]}" for name in ("expected", "found", "hint") if content[name] is not None
        ]
        status = _STATUS.get(error.status, grpc.StatusCode.UNKNOWN)
        after_ms = math.ceil(error.retry_after_s * 1e3)
        return CallStatus(status, str(content["code"]), "; ".join([str(error), *more]), after_ms)
    if isinstance(error, BadInput):
        large = isinstance(error, TooLarge)
        text = f"{error}; send it in smaller pieces" if large else str(error)
        code = "no_message" if isinstance(error, NoMessageError) else "too_large" if large else "bad_input"
        return CallStatus(grpc.StatusCode.INVALID_ARGUMENT, code, text)
    if isinstance(error, Overloaded):
        after_ms = max(1, round(error.retry_after_s * 1e3))
        return CallStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", str(error), after_ms)
    if isinstance(error, Unavailable):
        return CallStatus(grpc.StatusCode.UNAVAILABLE, "unavailable", str(error), 1000)
    log.error("a call failed", exc_info=error)
    text = "an unforeseen error; the service's log says more"
    return CallStatus(grpc.StatusCode.INTERNAL, "internal", text)


def shortened(text: str) -> str:
    """Shorten the text of an error that ends a call to `TEXT_BYTES`."""
    data = text.encode(errors="replace")
    if len(data) <= TEXT_BYTES:
        return text
    return data[: TEXT_BYTES - 3].decode(errors="ignore") + "…"
