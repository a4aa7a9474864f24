"""Schemas of requests: the fields of the user's schema that features read, all optional.

A request may lack fields, such as an item's position, which is not known yet. They have the default of the
user's schema, as in the logged impression, from which training learns; without a default they are null, and
null has no row. Types are those of the user's schema, so that values have the same keys as in events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from freshet.config.avro.schema import Array, AvroField, Map, Primitive, Record, Type, Union, field_at
from freshet.config.avro.types import is_null
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import feature_fields
from freshet.errors import ConfigError

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
            # on the way to the impressions: must be there, and not null
            fields.append(AvroField(f.name, inner.others[0] if isinstance(inner, Union) else inner))
        else:
            fields.append(_optional(f, inner))
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
            return Map(_only(values, _merged(tree.values()), name, explode, at))
        case Union(branches):
            # null stays: events may have it inside arrays and maps, too
            return Union(
                tuple(
                    b if is_null(b) else _only(b, tree, f"{name}_{i}", explode, at)
                    for i, b in enumerate(branches)
                )
            )
        case _:
            if tree:
                raise ConfigError(
                    "Avro schema", ".".join(at), str(type_), "a record, as a field within is wanted"
                )
            return type_


def _merged(trees: Iterable[Tree]) -> Tree:
    """Merge trees: a map's values have one type, which has the fields wanted below each of its keys."""
    found: dict[str, list[Tree]] = {}
    for tree in trees:
        for name, below in tree.items():
            found.setdefault(name, []).append(below)
    return {name: _merged(below) for name, below in found.items()}


def _optional(f: AvroField, type_: Type) -> AvroField:
    """Return a field of the reduced type that may be missing; the first branch is that of its default."""
    others = type_.others if isinstance(type_, Union) else (type_,)
    if f.default is None:
        return AvroField(f.name, Union((_NULL, *others)), True, None)
    return AvroField(f.name, Union((*others, _NULL)), True, _only_default(others[0], f.default))


def _only_default(type_: Type, default: Any) -> Any:
    """Reduce a default to the fields of the reduced type."""
    match type_, default:
        case Record(_, fields), dict():
            return {f.name: _only_default(f.type, default[f.name]) for f in fields if f.name in default}
        case Array(items), list():
            return [_only_default(items, one) for one in default]
        case Map(values), dict():
            return {key: _only_default(values, one) for key, one in default.items()}
        case Union() as union, _ if default is not None:
            return _only_default(union.others[0], default)
        case _:
            return default
