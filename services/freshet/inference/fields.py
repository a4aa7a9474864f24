"""Schemas for requests: of the user's schema only what is needed, everything of it optional.

A request lacks what is not known yet (the position of an item, say) or not wanted; a missing field is null,
and null makes no row. Types are the user's own, so values reach the same keys as in events; names are found
as in events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from freshet.config.avro.schema import Array, AvroField, Map, Primitive, Record, Type, Union, field_at
from freshet.config.spec.fields import feature_fields
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError

__all__ = ["request_schema", "row_schema"]

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
