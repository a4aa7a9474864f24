"""Descriptions of endpoints and of error codes; `App` serves only described endpoints.

docs/reference/http.md and the OpenAPI documents are generated from the descriptions, and tests compare
running services with them. Bodies are described by JSON Schema (2020-12, as in OpenAPI 3.1); the functions
below build the usual schemas, and a schema with a title is written once and referred to.

Every error is `{"error": {code, message, expected, found, hint}}`. The meaning of a code never changes; texts
may. A test finds codes that are not described here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from freshet.http.tokens import Scope

Shape = Mapping[str, Any]
"""A JSON Schema."""


@dataclass(frozen=True, slots=True)
class Body:
    """A form of a request or a response."""

    media_type: str
    shape: Shape | None = None  # None: bytes without a schema
    example: Any = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with one status."""

    status: int
    doc: str
    bodies: tuple[Body, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)  # meanings by name


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value in the path, the query or a header."""

    name: str
    where: Literal["path", "query", "header"]
    doc: str
    shape: Shape = field(default_factory=lambda: {"type": "string"})
    required: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path. `{name}` in the path matches any text without a slash."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    answers: tuple[Answer, ...]
    doc: str = ""
    parameters: tuple[Parameter, ...] = ()
    bodies: tuple[Body, ...] = ()  # alternatives; none: no body is read
    scope: Scope | None = None  # that a token must have, where required; None: no token
    or_scope: Scope | None = None  # another sufficient scope

    @property
    def pattern(self) -> str:
        """The path with `*` for each `{name}`, as in metrics."""
        return "/".join("*" if part.startswith("{") else part for part in self.path.split("/"))

    def at(self, path: str, *more: Parameter) -> Endpoint:
        """Return the same endpoint at another path."""
        return replace(self, path=path, parameters=(*self.parameters, *more))


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One code of an HTTP error."""

    code: str
    status: int
    means: str
    do: str  # advice to the client


CODES = (
    ErrorCode("bad_input", 400, "the request cannot be understood", "mend it; the message says where"),
    ErrorCode(
        "upgrade",
        400,
        "a request with a body has the header `Upgrade`; the connection is closed",
        "send it as HTTP/1.1 without `Upgrade`",
    ),
    ErrorCode(
        "token_missing",
        401,
        "a token is needed, and none was sent",
        "send `Authorization: Bearer TOKEN`; the operator makes them, and the console takes that of "
        "state/console.token in the run folder, too",
    ),
    ErrorCode("token_unknown", 401, "the token is not known here", "ask the operator for one that is"),
    ErrorCode("token_expired", 401, "the token has expired", "ask the operator for another"),
    ErrorCode("token_scope", 403, "the token is for other things", "use one with the scope in `expected`"),
    ErrorCode(
        "host",
        403,
        "the port does not have this name",
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
    ErrorCode("version_damaged", 409, "the weights are damaged or not finite", "choose another version"),
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
"""The schema of every error."""


def by_status(codes: Iterable[str]) -> Mapping[int, str]:
    """Return the statuses of codes, each with the codes' meanings. Raises KeyError for an unknown code."""
    known = {c.code: c for c in CODES}
    meanings: dict[int, list[str]] = {}
    for code in codes:
        meanings.setdefault(known[code].status, []).append(f"`{code}`: {known[code].means}")
    return {status: "; ".join(texts) for status, texts in sorted(meanings.items())}


TOKEN_CODES = ("token_missing", "token_unknown", "token_expired", "token_scope", "too_often")
"""Errors of an endpoint with a scope."""


def json(shape: Shape, example: Any = None) -> Body:
    """Return a JSON body."""
    return Body("application/json", shape, example)


def refusals(*codes: str) -> tuple[Answer, ...]:
    """Return the error responses for the codes of an endpoint."""
    retry = {"Retry-After": "seconds to wait before trying again"}
    return tuple(
        Answer(status, means, (json(ERROR),), retry if status in (429, 503) else {})
        for status, means in by_status(codes).items()
    )


def record(title: str, required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """Return an object of these keys only. A title names it in the documents; "" leaves it inline."""
    return {
        **({"title": title} if title else {}),
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def mapping(values: Shape, doc: str = "") -> Shape:
    """Return an object with any keys and values of one schema."""
    return _described({"type": "object", "additionalProperties": values}, doc)


def array(items: Shape, doc: str = "") -> Shape:
    """Return a list."""
    return _described({"type": "array", "items": items}, doc)


def text(doc: str = "") -> Shape:
    """Return a text."""
    return _described({"type": "string"}, doc)


def words(options: Iterable[str], doc: str = "") -> Shape:
    """Return a text with these options."""
    return _described({"type": "string", "enum": list(options)}, doc)


def integer(doc: str = "", **more: Any) -> Shape:
    """Return an integer; `more`: minimum, maximum."""
    return _described({"type": "integer", **more}, doc)


def number(doc: str = "", **more: Any) -> Shape:
    """Return a number; `more`: minimum, maximum."""
    return _described({"type": "number", **more}, doc)


def boolean(doc: str = "") -> Shape:
    """Return a boolean."""
    return _described({"type": "boolean"}, doc)


def nullable(shape: Shape, doc: str = "") -> Shape:
    """Return the schema, or null for an unknown value."""
    if isinstance(shape.get("type"), str) and "enum" not in shape and "title" not in shape:
        return _described({**shape, "type": [shape["type"], "null"]}, doc)
    return _described({"anyOf": [shape, {"type": "null"}]}, doc)


def _described(shape: Shape, doc: str) -> Shape:
    return {**shape, "description": doc} if doc else shape


LIVE = Endpoint(
    "GET",
    "/health/live",
    "Whether the process runs, and its main loop turns. `freshet up` starts a service again that does not "
    "answer.",
    (
        Answer(200, "it does", (json(record("Live", {"status": words(["live"])}), {"status": "live"}),)),
        Answer(
            503,
            "the main loop of a joiner or trainer has stood still for two minutes: start the process again",
            (json(record("Stuck", {"status": words(["stuck"]), "reason": text("for how long")})),),
        ),
    ),
)

METRICS_PAGE = Endpoint(
    "GET",
    "/metrics",
    "Metrics for Prometheus.",
    (Answer(200, "in Prometheus' text format; see metrics.md", (Body("text/plain"),)),),
)


def ready_page(title: str, figures: Mapping[str, Shape] | None = None) -> Endpoint:
    """Return the readiness endpoint; `figures` of the service's status may be added to its body."""
    more = dict(figures or {})
    reason = text('why not; "" once it is')
    good = record(f"{title}Ready", {"status": words(["ready"])}, {"reason": reason, **more})
    bad = record(f"{title}Unready", {"status": words(["unready"]), "reason": reason}, more)
    return Endpoint(
        "GET",
        "/health/ready",
        "Whether the service does its work, and if not, why.",
        (
            Answer(200, "it does", (json(good, {"status": "ready"}),)),
            Answer(503, "it does not, for the reason given; its clients wait or try again", (json(bad),)),
        ),
    )


_SKIPPED: Shape = {
    "type": "object",
    "description": "damaged state that was left out, by what it is of: how much, and the newest place with "
    "its "
    "reason; empty: none",
    "additionalProperties": {
        "type": "object",
        "properties": {"count": {"type": "integer"}, "newest": {"type": "string"}},
        "required": ["count", "newest"],
    },
}


def _with_skipped(figures: Shape) -> Shape:
    return {**figures, "properties": {**figures.get("properties", {}), "skipped": _SKIPPED}}


def status_page(figures: Shape) -> Endpoint:
    """Return the endpoint with a service's figures, which `freshet status` and the console read."""
    return Endpoint(
        "GET",
        "/status",
        "Figures of the service since its process started.",
        (Answer(200, "the figures", (json(_with_skipped(figures)),)),),
        "What counts up starts at 0 with each new process, but for the ledger of a joiner, which counts "
        "since the model began.",
    )
