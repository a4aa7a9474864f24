"""Events of one stream, by chance but for what joins them: request, items, time and id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freshet.config.avro.schema import Array, Primitive, Record, Type, Union, field_at
from freshet.config.spec.model import Stream
from freshet.inference.core import time_value
from freshet.load.values import Draws, Make, maker, value_maker

__all__ = ["Form", "identifier"]

Keys = tuple[Any, ...]
"""Values of an item: those of the stream's key but for the first, which is the request's."""


class Form:
    """How events of a stream are made."""

    def __init__(self, stream: Stream, schema: Record, draws: Draws) -> None:
        self.stream = stream
        self.request_type = field_at(schema, stream.key[0]).type
        self._key_makers = [value_maker(field_at(schema, path).type, path, draws) for path in stream.key[1:]]
        self._id_type = field_at(schema, stream.id).type if stream.id else None
        places = [*stream.key, stream.time.path, *filter(None, (stream.id, stream.explode))]
        self._context = maker(schema, draws, leave_out=frozenset(places))
        self._element: Make | None = None
        if stream.explode is not None:
            array = field_at(schema, stream.explode).type
            if isinstance(array, Array) and isinstance(array.items, Record):
                inner = frozenset(path for path in places if path != stream.explode)
                self._element = value_maker(array.items, stream.explode, draws, leave_out=inner)

    def draw_items(self, most: int) -> list[Keys]:
        """Different items by chance: `most`, or fewer where there are hardly as many."""
        found: dict[Keys, None] = {}
        for _ in range(2 * most):
            found.setdefault(tuple(make() for make in self._key_makers))
            if len(found) == most:
                break
        return list(found)

    def context(self) -> dict[str, Any]:
        """What an event has besides request, items, time and id."""
        made: dict[str, Any] = self._context()
        return made

    def elements(self, items: Sequence[Keys]) -> list[Any]:
        """The exploded array: an element for each item."""
        if self._element is None:
            return [keys[0] if keys else None for keys in items]  # the array holds the ids themselves
        made = [self._element() for _ in items]
        for at, path in enumerate(self.stream.key[1:]):
            below = _below(self.stream.explode, path)
            if below is not None:
                for element, keys in zip(made, items, strict=True):
                    put(element, below, keys[at])
        return made

    def event(self, request: Any, items: Sequence[Keys], now_ms: int, number: int) -> dict[str, Any]:
        """An event about the items: without an exploded array, about the first. `number` makes its id."""
        stream, made = self.stream, self.context()
        if stream.explode is not None:
            put(made, stream.explode, self.elements(items))
        for path, value in zip(stream.key, (request, *items[0]), strict=True):
            if value is request or _below(stream.explode, path) is None:
                self._put(made, path, value)
        self._put(made, stream.time.path, time_value(now_ms, stream.time))
        if stream.id is not None and self._id_type is not None:
            self._put(made, stream.id, identifier(self._id_type, f"{request}-{number}", number))
        return made

    def _put(self, made: dict[str, Any], path: str, value: Any) -> None:
        below = _below(self.stream.explode, path)
        if below is None or self.stream.explode is None:
            put(made, path, value)
            return
        for element in got(made, self.stream.explode):
            put(element, below, value)


def identifier(type_: Type, text: str, number: int) -> str | int:
    """What identifies something, as the field's type has it."""
    kinds = type_.branches if isinstance(type_, Union) else (type_,)
    names = {kind.name for kind in kinds if isinstance(kind, Primitive)}
    return text if "string" in names or not names & {"int", "long"} else number


def put(made: dict[str, Any], path: str, value: Any) -> None:
    """Set what stands at a path; objects on the way are made, also where chance had null."""
    *way, last = path.split(".")
    for part in way:
        if not isinstance(made.get(part), dict):
            made[part] = {}
        made = made[part]
    made[last] = value


def got(made: Any, path: str) -> Any:
    """What stands at a path."""
    for part in path.split("."):
        made = made[part]
    return made


def _below(explode: str | None, path: str) -> str | None:
    """The rest of a path that leads through the exploded array; None for another path."""
    if explode is None or not path.startswith(f"{explode}."):
        return None
    return path.removeprefix(f"{explode}.")
