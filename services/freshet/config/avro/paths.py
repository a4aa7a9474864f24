"""Fields of an Avro schema by dotted path, and the schemas derived from the one of served events.

The schema of samples is that of served events with one element in place of the exploded array
(schemas/README.md). The schema of impressions that inference logs has one more field, `freshet_served`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import overload

from freshet.config.avro.parse import parse_schema
from freshet.config.avro.types import (
    Array,
    AvroField,
    Map,
    Primitive,
    Record,
    Recursion,
    Type,
    Union,
    Written,
    is_null,
    spell,
)
from freshet.errors import ConfigError

__all__ = ["SERVED_FIELD", "Located", "field_at", "paths", "sample_schema", "served_schema"]

SERVED_FIELD = "freshet_served"
"""Last field of an impression that inference logged: version, score, predictions, propensity, explored."""

_SERVED = parse_schema(
    {
        "type": "record",
        "name": "freshet.Served",
        "fields": [
            {"name": "version", "type": "long"},
            {"name": "score", "type": "float"},
            {"name": "predictions", "type": {"type": "array", "items": "float"}},
            {"name": "propensity", "type": "float"},
            {"name": "explored", "type": "boolean"},
        ],
    }
)


@dataclass(frozen=True, slots=True)
class Located:
    """The field at a path."""

    path: str
    type: Type  # without null; a union only of several other types
    nullable: bool  # the field or a parent may be null (or absent from a map)
    repeated: bool  # a parent is an array


Change = Callable[[Array], Type]


def field_at(schema: Record, path: str, where: str = "Avro schema") -> Located:
    """Find a field by its dotted path, through arrays (`items.id`) and maps (`stats.clicks`).

    Raises:
        ConfigError: there is no such field; names the existing ones.
    """
    here: Type = schema
    nullable = repeated = False
    done: list[str] = []
    for part in path.split("."):
        here, is_nullable, is_repeated = _enter(here)
        nullable |= is_nullable
        repeated |= is_repeated
        if isinstance(here, Map):
            here, nullable = here.values, True
        else:
            found = here.field(part) if isinstance(here, Record) else None
            if found is None:
                raise _no_such(path, part, ".".join(done) or schema.name, here, where)
            here = found.type
        done.append(part)
    type_, is_nullable = _without_null(here)
    return Located(path, type_, nullable or is_nullable, repeated)


def paths(schema: Record) -> list[str]:
    """Return all paths of fields in order, with records and arrays, but not inside maps."""
    out: list[str] = []

    def walk(type_: Type, prefix: str) -> None:
        inner, _, _ = _enter(type_)
        if isinstance(inner, Record):
            for f in inner.fields:
                out.append(prefix + f.name)
                walk(f.type, f"{prefix}{f.name}.")

    walk(schema, "")
    return out


@overload
def sample_schema(served: Record, explode: str | None) -> Record: ...
@overload
def sample_schema(served: Written, explode: str | None) -> Written: ...
def sample_schema(served: Written, explode: str | None) -> Written:
    """Derive the schema of samples: that of served events with one element in place of the exploded array.

    Args:
        served: schema of served events; in a union, the records with the array change.
        explode: path of the array, through records only; None: a served event is one impression.

    Raises:
        ConfigError: there is no such field, it is no array, or one of its parents is a recursive record.
    """
    if explode is None:
        return served
    if isinstance(served, Record):
        return _replace_array(served, explode.split("."), explode, lambda array: array.items)
    branches: list[Type] = []
    errors: list[ConfigError] = []
    for branch in served.branches:
        try:
            branches.append(sample_schema(branch, explode) if isinstance(branch, Record) else branch)
        except ConfigError as error:  # a record without the array is no impression
            errors.append(error)
            branches.append(branch)
    if len(errors) == sum(isinstance(b, Record) for b in served.branches):
        raise errors[0]
    return Union(tuple(branches))


def served_schema(served: Record, explode: str | None) -> Record:
    """Derive the schema of served events that inference logs, with `freshet_served` in each impression.

    Raises:
        ConfigError: as `sample_schema`; or the exploded array's elements are no records.
    """
    if explode is None:
        return _with_served(served)

    def extend(array: Array) -> Type:
        if not isinstance(array.items, Record):
            raise ConfigError(
                "Avro schema",
                explode,
                spell(array),
                "an array of records",
                "each impression gets a field of its own",
            )
        name = array.items.name
        extended = _with_served(array.items)
        if _count(served, array.items) > 1:  # the record is used elsewhere too, and a name has one definition
            extended = replace(extended, name=f"{name}_served")
        # External writers use the first name, inference may use the second.
        return Array(replace(extended, aliases=(*extended.aliases, name, f"{name}_served")))

    return _replace_array(served, explode.split("."), explode, extend)


def _enter(type_: Type) -> tuple[Type, bool, bool]:
    """Return the type inside nulls and arrays, and whether there were nulls and arrays."""
    nullable = repeated = False
    while True:
        inner, was_nullable = _without_null(type_)
        nullable |= was_nullable
        if not isinstance(inner, Array):
            return inner, nullable, repeated
        type_, repeated = inner.items, True


def _without_null(type_: Type) -> tuple[Type, bool]:
    if not isinstance(type_, Union):
        return type_, is_null(type_)
    others = type_.others
    if not others:
        return type_, True
    return (others[0] if len(others) == 1 else Union(others)), type_.nullable


def _no_such(path: str, part: str, parent: str, here: Type, where: str) -> ConfigError:
    if isinstance(here, Recursion):
        return ConfigError(
            where,
            path,
            f"{here.name} inside itself, at {parent!r}",
            "a path that does not lead through a recursive record",
            "the depth of such a record is unknown: name a field of its first level",
        )
    if isinstance(here, Record):
        names = ", ".join(f.name for f in here.fields)
        return ConfigError(where, path, part, f"a field of {parent}: {names}")
    return ConfigError(where, path, part, f"a record at {parent!r}, which is {spell(here)}")


def _replace_array(record: Record, parts: list[str], path: str, change: Change) -> Record:
    """Replace the array at a path by the result of `change`."""
    found = record.field(parts[0])
    if found is None:
        raise _no_such(path, parts[0], record.name, record, "Avro schema")
    if any(_contains(f.type, record.name) for f in record.fields):
        raise ConfigError(
            "Avro schema",
            path,
            f"record {record.name}, which contains itself",
            "records that do not contain themselves on the way to the exploded array",
            "explode changes the record and the one inside it; log one event for each impression instead",
        )
    inner, _ = _without_null(found.type)
    if len(parts) > 1:
        if not isinstance(found.type, Record):
            raise ConfigError("Avro schema", path, spell(found.type), f"a record at {parts[0]!r}, never null")
        changed: Type = _replace_array(found.type, parts[1:], path, change)
    elif isinstance(inner, Array):
        changed = change(inner)
        if isinstance(changed, Array) and isinstance(found.type, Union):
            changed = Union(tuple(changed if isinstance(b, Array) else b for b in found.type.branches))
    else:
        raise ConfigError(
            "Avro schema", path, spell(found.type), "an array", "explode names the array of impressions"
        )
    # The default of an array is none for its element.
    kept = found.has_default and isinstance(changed, (Array, Union))
    new = replace(found, type=changed, has_default=kept, default=found.default if kept else None)
    return replace(record, fields=tuple(new if f is found else f for f in record.fields))


def _with_served(record: Record) -> Record:
    if record.field(SERVED_FIELD) is not None:
        return record
    served = AvroField(SERVED_FIELD, Union((Primitive("null"), _SERVED)), True, None)
    return replace(record, fields=(*record.fields, served))


def _contains(type_: Type, name: str) -> bool:
    """Return whether a type refers to the enclosing record of that name."""
    match type_:
        case Recursion(used):
            return used == name
        case Record(own, fields):
            return own != name and any(_contains(f.type, name) for f in fields)
        case Array(inner) | Map(inner):
            return _contains(inner, name)
        case Union(branches):
            return any(_contains(b, name) for b in branches)
        case _:
            return False


def _count(type_: Type, wanted: Record) -> int:
    match type_:
        case Record(_, fields):
            return (type_ == wanted) + sum(_count(f.type, wanted) for f in fields)
        case Array(items):
            return _count(items, wanted)
        case Map(values):
            return _count(values, wanted)
        case Union(branches):
            return sum(_count(b, wanted) for b in branches)
        case _:
            return 0
