"""Random events of one stream, with given request, items, time and id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freshet.config.avro.schema import Array, Primitive, Record, Type, Union, field_at
from freshet.config.spec.model import Stream
from freshet.inference.requests import time_value
from freshet.load.values import Draws, Generate, record_generator, value_generator

__all__ = ["EventBuilder", "identifier"]

Keys = tuple[Any, ...]
"""An item's values of the stream's key, without the first, which is the request."""


class EventBuilder:
    """Builds events of a stream as JSON objects."""

    def __init__(self, stream: Stream, schema: Record, draws: Draws) -> None:
        self.stream = stream
        self.request_type = field_at(schema, stream.key[0]).type
        keys = stream.key[1:]
        self._key_generators = [value_generator(field_at(schema, path).type, path, draws) for path in keys]
        self._id_type = field_at(schema, stream.id).type if stream.id else None
        places = [*stream.key, stream.time.path, *filter(None, (stream.id, stream.explode))]
        self._context = record_generator(schema, draws, leave_out=frozenset(places))
        self._element: Generate | None = None
        if stream.explode is not None:
            array = field_at(schema, stream.explode).type
            if isinstance(array, Array) and isinstance(array.items, Record):
                inner = frozenset(path for path in places if path != stream.explode)
                self._element = value_generator(array.items, stream.explode, draws, inner)

    def draw_items(self, most: int) -> list[Keys]:
        """Draw `most` different items, or fewer if 2 · `most` draws do not yield as many."""
        found: dict[Keys, None] = {}
        for _ in range(2 * most):
            found.setdefault(tuple(generate() for generate in self._key_generators))
            if len(found) == most:
                break
        return list(found)

    def context(self) -> dict[str, Any]:
        """Draw the fields of an event other than request, items, time and id."""
        drawn: dict[str, Any] = self._context()
        return drawn

    def elements(self, items: Sequence[Keys]) -> list[Any]:
        """Build the exploded array, with one element for each item."""
        if self._element is None:
            return [keys[0] if keys else None for keys in items]  # an array of ids
        elements = [self._element() for _ in items]
        for at, path in enumerate(self.stream.key[1:]):
            below = _below(self.stream.explode, path)
            if below is not None:
                for element, keys in zip(elements, items, strict=True):
                    set_path(element, below, keys[at])
        return elements

    def event(self, request: Any, items: Sequence[Keys], now_ms: int, number: int) -> dict[str, Any]:
        """Build an event of the items, or of the first if the stream explodes no array.

        `number` distinguishes its id from others of the request.
        """
        stream, event = self.stream, self.context()
        if stream.explode is not None:
            set_path(event, stream.explode, self.elements(items))
        for path, value in zip(stream.key, (request, *items[0]), strict=True):
            if value is request or _below(stream.explode, path) is None:
                self._set(event, path, value)
        self._set(event, stream.time.path, time_value(now_ms, stream.time))
        if stream.id is not None and self._id_type is not None:
            self._set(event, stream.id, identifier(self._id_type, f"{request}-{number}", number))
        return event

    def _set(self, event: dict[str, Any], path: str, value: Any) -> None:
        below = _below(self.stream.explode, path)
        if below is None or self.stream.explode is None:
            set_path(event, path, value)
            return
        for element in get_path(event, self.stream.explode):
            set_path(element, below, value)


def identifier(type_: Type, text: str, number: int) -> str | int:
    """Return the id as the field's type requires: the text or the number."""
    kinds = type_.branches if isinstance(type_, Union) else (type_,)
    names = {kind.name for kind in kinds if isinstance(kind, Primitive)}
    return text if "string" in names or not names & {"int", "long"} else number


def set_path(record: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path; create missing objects, also in place of null."""
    *parents, last = path.split(".")
    for part in parents:
        if not isinstance(record.get(part), dict):
            record[part] = {}
        record = record[part]
    record[last] = value


def get_path(record: Any, path: str) -> Any:
    """Return the value at a dotted path."""
    for part in path.split("."):
        record = record[part]
    return record


def _below(explode: str | None, path: str) -> str | None:
    """Return the rest of a path below the exploded array; None for another path."""
    if explode is None or not path.startswith(f"{explode}."):
        return None
    return path.removeprefix(f"{explode}.")
