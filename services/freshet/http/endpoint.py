"""What a route takes and answers, said beside the route: `App` routes nothing that is not described.

docs/reference/http.md and the OpenAPI documents are written from these, and tests hold running services to
them. Bodies are described by JSON Schema (2020-12, as OpenAPI 3.1 has it); the functions below spell the
usual ones, and a shape with a title is written once and referred to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from freshet.http.error_codes import ERROR, by_status
from freshet.http.tokens import Scope

__all__ = [
    "LIVE",
    "METRICS_PAGE",
    "TOKEN_CODES",
    "Answer",
    "Body",
    "Endpoint",
    "Parameter",
    "Shape",
    "array",
    "boolean",
    "integer",
    "json",
    "mapping",
    "nullable",
    "number",
    "ready_page",
    "record",
    "refusals",
    "status_page",
    "text",
    "words",
]

Shape = Mapping[str, Any]
"""A JSON Schema."""


@dataclass(frozen=True, slots=True)
class Body:
    """One form that a request or an answer may have."""

    media_type: str
    shape: Shape | None = None  # None: bytes that JSON Schema cannot say more of
    example: Any = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes back under one status."""

    status: int
    doc: str
    bodies: tuple[Body, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)  # name: meaning


@dataclass(frozen=True, slots=True)
class Parameter:
    """What stands in the path, the query or a header."""

    name: str
    where: Literal["path", "query", "header"]
    doc: str
    shape: Shape = field(default_factory=lambda: {"type": "string"})
    required: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `{name}` in the path stands for anything but a slash."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    answers: tuple[Answer, ...]
    doc: str = ""
    parameters: tuple[Parameter, ...] = ()
    bodies: tuple[Body, ...] = ()  # any one of them; none: no body is read
    scope: Scope | None = None  # that a token must have, where tokens are asked for; None: open to all
    or_scope: Scope | None = None  # is as good

    @property
    def pattern(self) -> str:
        """The path as `App` matches it: `*` for each `{name}`."""
        return "/".join("*" if part.startswith("{") else part for part in self.path.split("/"))

    def at(self, path: str, *more: Parameter) -> Endpoint:
        """The same under another path."""
        return replace(self, path=path, parameters=(*self.parameters, *more))


TOKEN_CODES = ("token_missing", "token_unknown", "token_expired", "token_scope", "too_often")
"""The errors of a route with a scope."""


def json(shape: Shape, example: Any = None) -> Body:
    """A body of JSON."""
    return Body("application/json", shape, example)


def refusals(*codes: str) -> tuple[Answer, ...]:
    """The answers of errors, by the codes that a route may give, as `HttpError` writes them."""
    retry = {"Retry-After": "seconds to wait before trying again"}
    return tuple(
        Answer(status, means, (json(ERROR),), retry if status in (429, 503) else {})
        for status, means in by_status(codes).items()
    )


def record(title: str, required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """An object of just these keys. A title names it in the documents; "" leaves it where it stands."""
    return {
        **({"title": title} if title else {}),
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def mapping(values: Shape, doc: str = "") -> Shape:
    """An object with any keys and values of one shape."""
    return _told({"type": "object", "additionalProperties": values}, doc)


def array(items: Shape, doc: str = "") -> Shape:
    """A list."""
    return _told({"type": "array", "items": items}, doc)


def text(doc: str = "") -> Shape:
    """Any text."""
    return _told({"type": "string"}, doc)


def words(options: Iterable[str], doc: str = "") -> Shape:
    """One of a few words."""
    return _told({"type": "string", "enum": list(options)}, doc)


def integer(doc: str = "", **more: Any) -> Shape:
    """A whole number; `more`: minimum, maximum."""
    return _told({"type": "integer", **more}, doc)


def number(doc: str = "", **more: Any) -> Shape:
    """A number; `more`: minimum, maximum."""
    return _told({"type": "number", **more}, doc)


def boolean(doc: str = "") -> Shape:
    """True or false."""
    return _told({"type": "boolean"}, doc)


def nullable(shape: Shape, doc: str = "") -> Shape:
    """The shape, or null for what is not known."""
    if isinstance(shape.get("type"), str) and "enum" not in shape and "title" not in shape:
        return _told({**shape, "type": [shape["type"], "null"]}, doc)
    return _told({"anyOf": [shape, {"type": "null"}]}, doc)


def _told(shape: Shape, doc: str) -> Shape:
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
    """Whether the service does its work; with `figures`, those of its status come along."""
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
    """The figures of a service, as `freshet status` and the console read them."""
    return Endpoint(
        "GET",
        "/status",
        "Figures of the service since its process started.",
        (Answer(200, "the figures", (json(_with_skipped(figures)),)),),
        "What counts up starts at 0 with each new process.",
    )
