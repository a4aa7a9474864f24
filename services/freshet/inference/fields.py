"""Schemas for requests: of the user's schema only what is needed, everything of it optional.

A request lacks what is not known yet (the position of an item, say) or not wanted; a missing field is null,
and null makes no row. Types are the user's own, so values reach the same keys as in events; names are found
as in events.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from freshet.config.avro.schema import Array, AvroField, Map, Primitive, Record, Type, Union, field_at
from freshet.config.spec.model import Spec, Stream
from freshet.config.spec.schema_fit import feature_fields
from freshet.errors import BadInput, ConfigError
from freshet.inference.core import get_path, set_path, time_value
from freshet.json_text import shown

__all__ = ["Filling", "request_schema", "row_schema"]

# --- What a client may leave out of a rank request: the request's id and its time are filled in.


@dataclass(frozen=True, slots=True)
class Filling:
    """How requests of a stream of served events are completed."""

    stream: Stream
    number_ids: bool  # whether request ids are integers in the user's schema

    @classmethod
    def of(cls, stream: Stream, schema: Record) -> Filling:
        """As the user's schema of served events wants it."""
        kind = field_at(schema, stream.key[0]).type
        return cls(stream, isinstance(kind, Primitive) and kind.name in ("int", "long"))

    def filled(
        self, context: Mapping[str, Any], request_id: str | int | None, now_ms: int
    ) -> Mapping[str, Any]:
        """The context with id and time, which are the whole event's; what the client sent stays as it is.

        Raises BadInput if `request_id` is not the context's own, or the id is empty: all requests with it
        would be one to the joiner, and only the first of them would be learned from.
        """
        key = self.stream.key[0]
        given = get_path(context, key)
        if "" in (request_id, given):
            where = "request_id" if request_id == "" else f"context.{key}"
            raise BadInput(
                f'{where}: expected an id that no other request has, or none (then one is made), found ""'
            )
        other = isinstance(given, (dict, list)) or str(given) != str(request_id)
        if request_id is not None and given is not None and other:
            raise BadInput(
                f"request_id: expected that of the context's {key}, {shown(given)}; found {shown(request_id)}"
            )
        if self.number_ids and isinstance(given, float) and given.is_integer():
            context = set_path(context, key, int(given))  # 5.0: the log's key is written without a fraction
        if given is None:
            context = set_path(context, key, self.new_id() if request_id is None else request_id)
        path = self.stream.time.path
        if get_path(context, path) is None:
            context = set_path(context, path, time_value(now_ms, self.stream.time))
        return context

    def new_id(self) -> str | int:
        """An id that no other request has; of 53 bits if it is a number, which JavaScript keeps exact."""
        return _IDS.getrandbits(53) if self.number_ids else f"{_IDS.getrandbits(128):032x}"


_IDS = random.SystemRandom()
"""Nobody may guess the id of a request that he was not answered: by it alone he could report its clicks."""


_NULL = Primitive("null")


def row_schema(sample: Record, paths: Iterable[str]) -> Record:
    """A sample's schema with these fields only, all optional. Raises ConfigError for a path that does not
    exist."""
    return _record(sample, _tree(sample, paths), "row", None, ())


def request_schema(spec: Spec, served: Record) -> Record:
    """The served event's schema with the fields of features, key and time only; optional but for the
    exploded array."""
    stream = spec.events.served
    paths = [*feature_fields(spec), *stream.key, stream.time.path]
    if stream.explode is not None:
        paths.append(stream.explode)
    explode = tuple(stream.explode.split(".")) if stream.explode else ()
    return _record(served, _tree(served, paths), "request", explode or None, ())


Tree = Mapping[str, "Tree"]


def _tree(schema: Record, paths: Iterable[str]) -> Tree:
    tree: dict[str, Any] = {}
    for path in paths:
        field_at(schema, path)  # says what there is, if there is no such field
        node = tree
        for part in path.split("."):
            node = node.setdefault(part, {})
    return tree


def _record(
    record: Record, tree: Tree, name: str, explode: tuple[str, ...] | None, at: tuple[str, ...]
) -> Record:
    fields = []
    for f in record.fields:
        if f.name not in tree:
            continue
        here = (*at, f.name)
        inner = _only(f.type, tree[f.name], f"{name}_{f.name}", explode, here)
        if explode is not None and explode[: len(here)] == here:
            fields.append(AvroField(f.name, inner))  # on the way to the impressions: must be there
        else:
            fields.append(AvroField(f.name, _optional(inner), True, None))
    return Record(name, tuple(fields))


def _only(type_: Type, tree: Tree, name: str, explode: tuple[str, ...] | None, at: tuple[str, ...]) -> Type:
    """The type without the fields that are not in the tree."""
    match type_:
        case Record():
            # a record that is wanted whole (the exploded array's element, no field of which is used) keeps
            # its first
            return _record(type_, tree or {type_.fields[0].name: {}}, name, explode, at)
        case Array(items):
            return Array(_only(items, tree, name, explode, at))
        case Map(values):
            return Map(_only(values, next(iter(tree.values()), {}), name, explode, at))
        case Union(branches):
            kept = tuple(
                _only(b, tree, f"{name}_{i}", explode, at) for i, b in enumerate(branches) if b != _NULL
            )
            return kept[0] if len(kept) == 1 else Union(kept)
        case _:
            if tree:
                raise ConfigError(
                    "Avro schema", ".".join(at), str(type_), "a record, as a field within is wanted"
                )
            return type_


def _optional(type_: Type) -> Type:
    if isinstance(type_, Union):
        return Union((_NULL, *type_.others))
    return Union((_NULL, type_))
