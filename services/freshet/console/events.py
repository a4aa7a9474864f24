"""Served events as people see them: values at paths, and events as rank requests again. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from freshet.config.avro.schema import SERVED_FIELD
from freshet.config.spec.model import Stream

__all__ = ["grouped", "leaves", "plain", "request_of", "without_logical_types"]


def without_logical_types(schema: Any) -> Any:
    """The schema with values as they are written: a time stays the number that rank requests take."""
    if isinstance(schema, dict):
        return {key: without_logical_types(v) for key, v in schema.items() if key != "logicalType"}
    return [without_logical_types(each) for each in schema] if isinstance(schema, list) else schema


def leaves(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """Values at a path, through every element of the arrays on the way."""
    if isinstance(value, list):
        for element in value:
            yield from leaves(element, path)
    elif not path:
        yield value
    elif isinstance(value, Mapping) and path[0] in value:
        yield from leaves(value[path[0]], path[1:])


def request_of(event: Mapping[str, Any], stream: Stream) -> dict[str, Any] | None:
    """A served event as a rank request, {request_id, context, candidates}; None if it served nothing.

    Without what serving adds, and without the id and the time of then, which are filled in anew.
    """
    context = _copied(plain(event))
    *parents, array = (stream.explode or "").split(".")
    holder: Any = context
    for part in parents:
        holder = holder.get(part) if isinstance(holder, dict) else None
    candidates = holder.pop(array, None) if isinstance(holder, dict) else None
    if not isinstance(candidates, list) or not candidates:
        return None
    request_id = _without(context, stream.key[0])
    _without(context, stream.time.path)
    stripped = [{k: v for k, v in c.items() if k != SERVED_FIELD} for c in candidates if isinstance(c, dict)]
    return {"request_id": request_id, "context": context, "candidates": stripped}


def grouped(events: Sequence[Mapping[str, Any]], stream: Stream) -> list[dict[str, Any]]:
    """Served events of one item each as rank requests: what all events of a request share is its context."""
    by_request: dict[str, tuple[Any, list[dict[str, Any]]]] = {}
    for event in events:
        item = _copied(plain(event))
        item.pop(SERVED_FIELD, None)
        request_id = _without(item, stream.key[0])
        _without(item, stream.time.path)
        by_request.setdefault(str(request_id), (request_id, []))[1].append(item)
    found = []
    for request_id, items in by_request.values():
        alike = {n: v for n, v in items[0].items() if all(n in i and i[n] == v for i in items)}
        shared = alike if len(items) > 1 else {}
        candidates = [{n: v for n, v in item.items() if n not in shared} for item in items]
        found.append({"request_id": request_id, "context": shared, "candidates": candidates})
    return found


def _without(tree: dict[str, Any], path: str) -> Any:
    """Take away what stands at a dotted path, and return it; None if there is nothing."""
    *parents, last = path.split(".")
    for part in parents:
        below = tree.get(part)
        if not isinstance(below, dict):
            return None
        tree = below
    return tree.pop(last, None)


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes become text, one character a byte, as Avro's JSON writes them."""
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in tree.items()}
