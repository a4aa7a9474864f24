"""The codes by which HTTP errors are told apart: what each means, and what its reader does about it.

Every error is `{"error": {code, message, expected, found, hint}}`; a code never changes its meaning, the
texts may. A service that makes a code of its own describes it here; a test looks for those that are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CODES", "ERROR", "ErrorCode", "by_status"]


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One code of an HTTP error."""

    code: str
    status: int
    means: str
    do: str  # what the client does about it


CODES = (
    ErrorCode("bad_input", 400, "the request cannot be understood", "mend it; the message says where"),
    ErrorCode(
        "token_missing",
        401,
        "a token is asked for, and none was sent",
        "send `Authorization: Bearer TOKEN`; the operator makes them, and the console takes that of "
        "state/console.token in the run folder, too",
    ),
    ErrorCode("token_unknown", 401, "the token is not known here", "ask the operator for one that is"),
    ErrorCode("token_expired", 401, "the token has expired", "ask the operator for another"),
    ErrorCode("token_scope", 403, "the token is for other things", "use one with the scope in `expected`"),
    ErrorCode(
        "host",
        403,
        "the port is not asked for by this name",
        "use localhost, or add it to FRESHET_COMMON_HOSTS",
    ),
    ErrorCode(
        "origin",
        403,
        "a page of another site asks",
        "ask from a program, or add the site to FRESHET_COMMON_HOSTS",
    ),
    ErrorCode("not_found", 404, "there is no such path", "see `expected` for the paths there are"),
    ErrorCode("no_model", 404, "another model is served here", "use the name in `expected`"),
    ErrorCode(
        "no_version", 404, "another version is served", "leave the version out, or move `stable` to it"
    ),
    ErrorCode("no_such_version", 404, "no such version is stored", "see `expected` for those there are"),
    ErrorCode("method_not_allowed", 405, "the path has no such method", "use one that `Allow` names"),
    ErrorCode("body_timeout", 408, "the body did not arrive in time", "send it again, in smaller pieces"),
    ErrorCode("version_damaged", 409, "the version's weights cannot be read", "choose another version"),
    ErrorCode("body_too_large", 413, "the body has too many bytes", "send smaller batches"),
    ErrorCode("too_large", 413, "too many events or candidates at once", "send smaller batches"),
    ErrorCode("content_type", 415, "bodies of this kind are not taken", "use one of those in `expected`"),
    ErrorCode("encoding", 415, "bodies of this coding are not taken", "use one that `expected` names"),
    ErrorCode(
        "events_refused",
        422,
        "some events do not fit their schema, or are dated too far ahead; the others are durable",
        "mend those that `refused` lists, and send only these again",
    ),
    ErrorCode("too_often", 429, "more than this client may", "wait `Retry-After`, send it again"),
    ErrorCode("overloaded", 429, "a queue is full; nothing was taken", "wait `Retry-After`, send it again"),
    ErrorCode("internal", 500, "an unforeseen error", "read the service's log; report it"),
    ErrorCode(
        "connections", 503, "too many connections are open", "use connections again; wait `Retry-After`"
    ),
    ErrorCode("bodies", 503, "too many bytes of requests are under way", "wait `Retry-After`, send it again"),
    ErrorCode("streams", 503, "too many pages are open", "close some, or raise the limit in `hint`"),
    ErrorCode(
        "unavailable",
        503,
        "a part is not ready or cannot be reached; nothing is known to be done",
        "wait `Retry-After`, send it again: events carry ids, so a repeat counts once",
    ),
)

_ANY: Mapping[str, Any] = {"description": "text, a number, a list of these, or null"}

ERROR: Mapping[str, Any] = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "expected", "found", "hint"],
            "additionalProperties": False,
            "properties": {
                "code": {"type": "string", "enum": [c.code for c in CODES]},
                "message": {"type": "string", "description": "what is wrong, for people"},
                "expected": {**_ANY},
                "found": {**_ANY},
                "hint": {"type": ["string", "null"], "description": "what to do"},
            },
        }
    },
}
"""The shape of every error."""


def by_status(codes: Iterable[str]) -> Mapping[int, str]:
    """Of some codes: each of their statuses, with what they mean in a sentence. KeyError: no such code."""
    known = {c.code: c for c in CODES}
    told: dict[int, list[str]] = {}
    for code in codes:
        told.setdefault(known[code].status, []).append(f"`{code}`: {known[code].means}")
    return {status: "; ".join(means) for status, means in sorted(told.items())}
