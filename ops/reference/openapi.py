"""Endpoints as an OpenAPI 3.1 document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from freshet.http.endpoint import ERROR, Answer, Body, Endpoint
from freshet.release import RELEASE


def document(title: str, about: str, port: int, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The document of one service; shapes with a title become its components."""
    components: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    endpoints = list(endpoints)
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, components)
    made: dict[str, Any] = {
        "openapi": "3.1.1",
        "info": {
            "title": title,
            "description": about,
            "version": RELEASE,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": f"http://127.0.0.1:{port}", "description": "by default"}],
        "paths": paths,
        "components": {"schemas": dict(sorted(components.items()))},
    }
    if any(e.scope for e in endpoints):
        made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return made


def _operation(endpoint: Endpoint, components: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"operationId": _id(endpoint), "summary": endpoint.summary}
    if endpoint.doc:
        made["description"] = endpoint.doc
    if endpoint.parameters:
        made["parameters"] = [
            {
                "name": p.name,
                "in": p.where,
                "description": p.doc,
                "required": p.required,
                "schema": _shape(p.shape, components),
            }
            for p in endpoint.parameters
        ]
    if endpoint.bodies:
        made["requestBody"] = {"required": True, "content": _content(endpoint.bodies, components)}
    made["responses"] = {str(a.status): _answer(a, components) for a in endpoint.answers}
    if str(500) not in made["responses"]:
        other = Answer(0, "an error, as every route may answer", (Body("application/json", ERROR),))
        made["responses"]["default"] = _answer(other, components)
    if endpoint.scope == "operate":
        made["security"] = [{"token": []}]
    elif endpoint.scope is not None:  # where tokens are set
        made["security"] = [{"token": []}, {}]
    return made


def _id(endpoint: Endpoint) -> str:
    """`getV2ModelsModelReady`."""
    parts = endpoint.path.replace("{", "").replace("}", "").replace("-", "_").split("/")
    alias = "Slash" if endpoint.path.endswith("/") and endpoint.path != "/" else ""
    return endpoint.method.lower() + "".join(p[:1].upper() + p[1:] for p in parts) + alias


def _answer(answer: Answer, components: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"description": answer.doc}
    if answer.headers:
        made["headers"] = {
            name: {"description": doc, "schema": {"type": "string"}} for name, doc in answer.headers.items()
        }
    if answer.bodies:
        made["content"] = _content(answer.bodies, components)
    return made


def _content(bodies: Iterable[Body], components: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for body in bodies:
        made[body.media_type] = {} if body.shape is None else {"schema": _shape(body.shape, components)}
        if body.example is not None:
            made[body.media_type]["example"] = body.example
    return made


def _shape(shape: Any, components: dict[str, Any]) -> Any:
    """The shape with every titled one within it moved to the components. Raises ValueError for a title that
    two shapes have."""
    if isinstance(shape, list):
        return [_shape(s, components) for s in shape]
    if not isinstance(shape, Mapping):
        return shape
    inner = {key: _shape(value, components) for key, value in shape.items() if key != "title"}
    title = shape.get("title")
    if not isinstance(title, str):
        return inner if title is None else {**inner, "title": _shape(title, components)}
    told = {"description": inner.pop("description")} if "description" in inner else {}
    if json.dumps(components.setdefault(title, inner)) != json.dumps(inner):
        raise ValueError(f"two shapes are titled {title}")
    return {"$ref": f"#/components/schemas/{title}", **told}
