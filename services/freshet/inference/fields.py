"""Schemas of requests: the fields of the user's schema that features read, all optional.

A request may lack fields, such as an item's position, which is not known yet: they are null, and null has no
row. Types are those of the user's schema, so that values have the same keys as in events.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from freshet.config.avro.schema import Array, AvroField, Map, Primitive, Record, Type, Union, field_at
from freshet.config.spec.model import Spec, Stream
from freshet.config.spec.schemas import feature_fields
from freshet.errors import BadInput, ConfigError
from freshet.inference.core import get_path, set_path, time_value
from freshet.json_text import shown

__all__ = ["Filling", "request_schema", "row_schema"]


@dataclass(frozen=True, slots=True)
class Filling:
    """Fills in the id and the time of rank requests."""

    stream: Stream
    number_ids: bool  # whether request ids are integers in the user's schema

    @classmethod
    def of(cls, stream: Stream, schema: Record) -> Filling:
        """Derive the type of ids from the user's schema of served events."""
        kind = field_at(schema, stream.key[0]).type
        return cls(stream, isinstance(kind, Primitive) and kind.name in ("int", "long"))

    def filled(
        self, context: Mapping[str, Any], request_id: str | int | None, now_ms: int
    ) -> Mapping[str, Any]:
        """Return the context with id and time; values that the client sent are kept.

        Raises BadInput if `request_id` differs from the context's id, or the id is empty: the joiner would
        take all requests with an empty id for duplicates of the first.
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
            context = set_path(context, key, int(given))  # the log's key of 5.0 is "5"
        if given is None:
            context = set_path(context, key, self.new_id() if request_id is None else request_id)
        path = self.stream.time.path
        if get_path(context, path) is None:
            context = set_path(context, path, time_value(now_ms, self.stream.time))
        return context

    def new_id(self) -> str | int:
        """Generate a random id; a number has 53 bits, which JavaScript represents exactly."""
        return _IDS.getrandbits(53) if self.number_ids else f"{_IDS.getrandbits(128):032x}"


_IDS = random.SystemRandom()
"""Ids must not be guessable: a client that knows an id can report actions on its impression."""


_NULL = Primitive("null")


def row_schema(sample: Record, paths: Iterable[str]) -> Record:
    """Reduce a sample's schema to these fields, all optional. Raises ConfigError if a path does not exist."""
    return _record(sample, _tree(sample, paths), "row", None, ())


def request_schema(spec: Spec, served: Record) -> Record:
    """Reduce the served event's schema to the fields of features, key and time.

    All are optional except the exploded array.
    """
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
        field_at(schema, path)  # raises ConfigError if the field does not exist
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
    """Reduce a type to the fields of the tree."""
    match type_:
        case Record():
            # a record needs a field: an exploded array's element of which none is used keeps its first
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
