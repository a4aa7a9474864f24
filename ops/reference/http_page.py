"""The HTTP API: a page for people and an OpenAPI document for each service, from the routes' descriptions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import freshet.console.api
import freshet.gateway.api
import freshet.inference.api
from freshet.http import admin
from freshet.http.endpoint import LIVE, METRICS_PAGE, Endpoint
from freshet.inference import oip_http as oip
from ops.reference.markdown import code, escaped, grid, header
from ops.reference.openapi import document

OIP = (oip.METADATA, oip.MODEL_READY, oip.CONFIG, oip.INFER)


@dataclass(frozen=True, slots=True)
class Api:
    """What one service answers."""

    service: str
    port: int  # by default
    about: str
    endpoints: tuple[Endpoint, ...]


def _versioned(endpoint: Endpoint) -> Endpoint:
    return endpoint.at(endpoint.path.replace("{model}", "{model}/versions/{version}"), oip.VERSION)


APIS = (
    Api(
        "gateway",
        7000,
        "Events in.",
        (
            *(freshet.gateway.api.events(role) for role in freshet.gateway.api.ROLES),
            LIVE,
            freshet.gateway.api.READY,
            freshet.gateway.api.STATUS,
            METRICS_PAGE,
        ),
    ),
    Api(
        "inference",
        7001,
        "Predictions out: our own ranking, and the Open Inference Protocol v2 (KServe, Triton).",
        (
            freshet.inference.api.RANK,
            freshet.inference.api.PROGRESS,
            LIVE,
            freshet.inference.api.READY,
            freshet.inference.api.STATUS,
            METRICS_PAGE,
            oip.SERVER,
            oip.LIVE,
            oip.READY,
            *OIP,
            *map(_versioned, OIP),
        ),
    ),
    Api(
        "console",
        7002,
        "The page for people. Promoting and rolling back ask for a token with the scope `operate`, or that "
        "of state/console.token in the run folder; another Host than its names is refused.",
        (
            *freshet.console.api.ENDPOINTS,
            LIVE,
            freshet.console.api.READY,
            freshet.console.api.STATUS,
            METRICS_PAGE,
        ),
    ),
    Api(
        "admin",
        7010,
        "What joiner (port 7010), trainer (7011), simulator (7012), shard (paramserver, 7021) and embedder "
        "(7031) answer: health, metrics, figures.",
        (*admin.ENDPOINTS, admin.PROGRESS),
    ),
)

INTRO = """\
Every service listens on 127.0.0.1 unless `FRESHET_COMMON_BIND_ADDRESS` says otherwise; the ports below
are the defaults, [settings.md](settings.md) has their variables. Bodies are JSON unless the route says
more. Errors are `{"error": {"code", "message", "expected", "found", "hint"}}`, their codes are in
[errors.md](errors.md); the routes of the Open Inference Protocol answer errors in its form,
`{"error": "text"}`, and take a slash at their end. HEAD is answered wherever GET is. OPTIONS lists the
methods of a path, and permits pages of other sites nothing.

The same as OpenAPI 3.1, for generators of clients: """


def openapi(api: Api) -> str:
    """The OpenAPI document of a service, as JSON."""
    made = document(f"freshet {api.service}", api.about, api.port, api.endpoints)
    made["info"]["x-source"] = "written by `make docs` from the descriptions of the routes; do not edit"
    return json.dumps(made, indent=1) + "\n"


def page() -> str:
    """The whole page."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield header("HTTP API", "the api.py of a service")
    yield INTRO + ", ".join(f"[{a.service}](openapi/{a.service}.json)" for a in APIS) + "."
    for api in APIS:
        yield f"\n## {api.service}\n\n{api.about} Port {api.port}.\n"
        rows = [(code(f"{e.method} {e.path}"), escaped(e.summary)) for e in api.endpoints]
        yield from grid(rows, ("route", "what"))
        told: dict[Any, Endpoint] = {}
        for endpoint in api.endpoints:
            if endpoint.bodies or endpoint.doc or len(endpoint.answers) > 2:
                alike = told.setdefault(_alike(endpoint), endpoint)
                yield from _endpoint(endpoint) if alike is endpoint else _as(endpoint, alike)


def _alike(endpoint: Endpoint) -> str:
    """What two routes share that differ in their paths alone."""
    answers = [(a.status, a.doc, [b.shape for b in a.bodies]) for a in endpoint.answers]
    parameters = [p for p in endpoint.parameters if p.where != "path"]
    return repr((endpoint.method, endpoint.doc, parameters, endpoint.bodies, answers))


def _as(endpoint: Endpoint, other: Endpoint) -> Iterator[str]:
    yield f"\n### `{endpoint.method} {endpoint.path}`\n"
    yield f"{endpoint.summary} Takes and answers as `{other.path}`."


def _endpoint(endpoint: Endpoint) -> Iterator[str]:
    yield f"\n### `{endpoint.method} {endpoint.path}`\n\n{endpoint.summary} {endpoint.doc}\n".rstrip() + "\n"
    if endpoint.scope is not None:
        when = "" if endpoint.scope == "operate" else "Where tokens are set, "
        either = "" if endpoint.or_scope is None else f" or `{endpoint.or_scope}`"
        asks = (
            f"{when}it asks for `Authorization: Bearer TOKEN`, with the scope `{endpoint.scope}`{either}.\n"
        )
        yield asks[0].upper() + asks[1:]
    if endpoint.parameters:
        parameters = [(code(p.name), p.where, escaped(p.doc)) for p in endpoint.parameters]
        yield from grid(parameters, ("parameter", "in", "what"))
        yield ""
    for body in endpoint.bodies:
        if body.media_type == "application/json" and body.shape is not None:
            yield from _fields("Body", body.shape)
    others = [code(b.media_type) for b in endpoint.bodies if b.media_type != "application/json"]
    if others:
        yield f"Also taken: {', '.join(others)}.\n"
    yield from grid([(str(a.status), escaped(a.doc)) for a in endpoint.answers], ("answer", "means"))
    for answer in endpoint.answers:
        if answer.status < 300 and answer.bodies and answer.bodies[0].shape is not None:
            yield ""
            yield from _fields(f"Answer {answer.status}", answer.bodies[0].shape)


def _fields(what: str, shape: Mapping[str, Any]) -> Iterator[str]:
    """A table of the fields of an object, those within it dotted."""
    rows = list(_rows(shape, ""))
    if not rows:
        return
    yield f"{what}:\n"
    yield from grid(rows, ("field", "type", "what"))
    yield ""


def _rows(shape: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, inner in shape.get("properties", {}).items():
        optional = "" if name in shape.get("required", ()) else ", optional"
        yield (code(prefix + name), _type(inner) + optional, escaped(inner.get("description", "")))
        for one in (inner, *inner.get("anyOf", ())):
            yield from _rows(one, f"{prefix}{name}.")
            if isinstance(one.get("items"), Mapping):
                yield from _rows(one["items"], f"{prefix}{name}[].")


def _type(shape: Mapping[str, Any]) -> str:
    if "anyOf" in shape:
        return " or ".join(_type(s) for s in shape["anyOf"])
    if "enum" in shape:
        return " or ".join(json.dumps(w) for w in shape["enum"])
    found = shape.get("type", "any")
    if isinstance(found, list):
        return " or ".join(found)
    if found == "array":
        return f"list of {_type(shape.get('items', {}))}"
    return str(found)
