"""Avro schemas: parser, fields by dotted path, and the schemas derived from the one of served events.

The schema of samples is that of served events with one element in place of the exploded array
(schemas/README.md). The schema of impressions that inference logs has one more field, `freshet_served`.
`freshet.features` decodes records. Paths cannot lead through a recursive record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from freshet.config.avro.types import (
    PRIMITIVES,
    Aliases,
    Array,
    AvroField,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Recursion,
    Type,
    Union,
    Written,
    canonical,
    inner_types,
    is_null,
    spell,
    to_json,
    without_defaults,
)
from freshet.errors import ConfigError

__all__ = [
    "SERVED_FIELD",
    "Array",
    "AvroField",
    "Enum",
    "Fixed",
    "Located",
    "Map",
    "Primitive",
    "Record",
    "Recursion",
    "Type",
    "Union",
    "Written",
    "canonical",
    "field_at",
    "is_null",
    "parse_schema",
    "parse_written",
    "paths",
    "sample_schema",
    "served_schema",
    "spell",
    "to_json",
    "without_defaults",
]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
MAX_DEPTH = 32
"""Limit on the nesting of a schema; the native interpreter's stack has this size."""


def parse_schema(source: str | bytes | Mapping[str, Any], where: str = "Avro schema") -> Record:
    """Parse the schema of an event, which must be a record.

    Args:
        source: JSON text, or the object that it holds.
        where: names the schema in errors, e.g. its file.

    Raises:
        ConfigError: not JSON, not Avro, or not a record at the top; names the place in the schema.
    """
    parsed = _Parser(where).type(_tree(source, where), "", "schema", 0)
    if not isinstance(parsed, Record):
        raise ConfigError(where, "type", spell(parsed), '"record"', "an event is a record of named fields")
    return parsed


def parse_written(
    source: str | bytes | Mapping[str, Any],
    where: str = "Avro schema",
    *,
    references: Sequence[str | bytes | Mapping[str, Any]] = (),
) -> Written:
    """Parse the schema of an external writer, as `parse_schema`; it may also be a union of records.

    `references`: schemas of named types that the source uses; each may use the types before it.

    Raises ConfigError as `parse_schema`, or if a union has no record.
    """
    parser = _Parser(where)
    for i, reference in enumerate(references):
        parser.type(_tree(reference, where), "", f"references[{i}]", 0)
    parsed = parser.type(_tree(source, where), "", "schema", 0)
    if isinstance(parsed, Union) and any(isinstance(b, Record) for b in parsed.branches):
        return parsed
    if not isinstance(parsed, Record):
        raise ConfigError(
            where,
            "type",
            spell(parsed),
            '"record", or a union of records',
            "an event is a record of named fields",
        )
    return parsed


def _tree(source: str | bytes | Mapping[str, Any], where: str) -> Any:
    if not isinstance(source, (str, bytes)):
        return source
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as e:
        raise ConfigError(where, "", f"not JSON: {e}", "an Avro schema, as JSON text") from None


class _Parser:
    """Recursive parser with a dictionary of the named types so far."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.named: dict[str, Type | None] = {}  # None: in its own definition, so a use is a recursion

    def fail(self, at: str, found: object, expected: str, hint: str = "") -> ConfigError:
        return ConfigError(self.where, at, found, expected, hint)

    def type(self, tree: Any, space: str, at: str, depth: int) -> Type:  # noqa: PLR0911 - one for each kind
        if depth > MAX_DEPTH:
            raise self.fail(at, "deeper", f"at most {MAX_DEPTH} levels of types")
        if isinstance(tree, str):
            return Primitive(tree) if tree in PRIMITIVES else self.reference(tree, space, at)  # type: ignore[arg-type]
        if isinstance(tree, list):
            return self.union(tree, space, at, depth)
        if not isinstance(tree, Mapping) or "type" not in tree:
            raise self.fail(at, tree, 'a type name, a list of types, or an object with "type"')
        kind = tree["type"]
        if not isinstance(kind, str):
            inner = self.type(kind, space, at, depth + 1)  # {"type": {...}}: the same type, wrapped
            return _with_logical_type(inner, tree)
        if kind in PRIMITIVES:
            return Primitive(kind, *_logical(tree))  # type: ignore[arg-type]
        if kind == "array":
            return Array(self.type(self.need(tree, "items", at), space, f"{at}.items", depth + 1))
        if kind == "map":
            return Map(self.type(self.need(tree, "values", at), space, f"{at}.values", depth + 1))
        if kind in ("record", "error", "enum", "fixed"):
            return self.define(kind, tree, space, at, depth)
        return self.reference(kind, space, at)

    def need(self, tree: Mapping[str, Any], key: str, at: str) -> Any:
        if key not in tree:
            raise self.fail(f"{at}.{key}", None, f"a {key!r} key, which every {tree['type']} has")
        return tree[key]

    def reference(self, name: str, space: str, at: str) -> Type:
        for full in (name, f"{space}.{name}") if "." in name or not space else (f"{space}.{name}", name):
            if full in self.named:
                found = self.named[full]
                return Recursion(full) if found is None else found
        known = ", ".join([*PRIMITIVES, "array", "map", "record", "enum", "fixed", *self.named])
        raise self.fail(at, name, f"one of {known}")

    def union(self, tree: list[Any], space: str, at: str, depth: int) -> Union:
        branches = tuple(self.type(t, space, f"{at}[{i}]", depth + 1) for i, t in enumerate(tree))
        kinds = [_union_kind(b) for b in branches]
        if not branches or "union" in kinds or len(set(kinds)) < len(kinds):
            raise self.fail(at, kinds, "a union of different types, none of them a union, at least one")
        return Union(branches)

    def define(self, kind: str, tree: Mapping[str, Any], space: str, at: str, depth: int) -> Type:
        name = self.need(tree, "name", at)
        namespace = tree.get("namespace", space) or ""
        full = name if not isinstance(name, str) or "." in name or not namespace else f"{namespace}.{name}"
        if not isinstance(full, str) or not NAME.match(full):
            raise self.fail(f"{at}.name", full, "a name of letters, digits and _, parts joined by dots")
        if full in self.named or full in PRIMITIVES:
            raise self.fail(f"{at}.name", full, "a name that is defined once and is not a primitive type's")
        self.named[full] = None
        defined: Type
        aliases = self.aliases(tree, full.rpartition(".")[0], at)
        if kind in ("record", "error"):
            defined = self.record(full, tree, aliases, at, depth)
        elif kind == "enum":
            defined = self.enum(full, tree, aliases, at)
        else:
            size = self.need(tree, "size", at)
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 24:
                raise self.fail(f"{at}.size", size, "a number of bytes below 16 MiB")
            defined = Fixed(full, size, *_logical(tree), aliases)
        self.named[full] = defined
        return defined

    def aliases(self, tree: Mapping[str, Any], space: str, at: str) -> Aliases:
        """Return the aliases; those without a namespace also in the namespace of the type."""
        names = tree.get("aliases") or []
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise self.fail(f"{at}.aliases", names, "a list of names")
        inside = [f"{space}.{n}" for n in names if space and "." not in n]
        return (*names, *inside)

    def record(self, full: str, tree: Mapping[str, Any], aliases: Aliases, at: str, depth: int) -> Record:
        space = full.rpartition(".")[0]
        entries = self.need(tree, "fields", at)
        if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
            raise self.fail(f"{at}.fields", entries, "a list of fields, {name, type}")
        fields: dict[str, AvroField] = {}
        for i, entry in enumerate(entries):
            name = entry.get("name")
            if not isinstance(name, str) or not NAME.match(name) or "." in name or name in fields:
                raise self.fail(
                    f"{at}.fields[{i}].name", name, "a name of letters, digits and _, once in a record"
                )
            if "type" not in entry:
                raise self.fail(f"{at}.{name}.type", None, "a type")
            type_ = self.type(entry["type"], space, f"{at}.{name}", depth + 1)
            # A logicalType beside the field's name is a common mistake that other libraries accept too.
            type_ = _with_logical_type(type_, entry)
            other_names = self.aliases(entry, "", f"{at}.{name}")
            fields[name] = AvroField(name, type_, "default" in entry, entry.get("default"), other_names)
        return Record(full, tuple(fields.values()), aliases)

    def enum(self, full: str, tree: Mapping[str, Any], aliases: Aliases, at: str) -> Enum:
        symbols = self.need(tree, "symbols", at)
        if not isinstance(symbols, list) or not symbols or not all(isinstance(s, str) for s in symbols):
            raise self.fail(f"{at}.symbols", symbols, "a list of names")
        if len(set(symbols)) < len(symbols):
            raise self.fail(f"{at}.symbols", symbols, "each symbol once")
        default = tree.get("default")
        if default is not None and default not in symbols:
            raise self.fail(f"{at}.default", default, f"one of {', '.join(symbols)}")
        return Enum(full, tuple(symbols), default, aliases)


def _union_kind(type_: Type) -> str:
    match type_:
        case Primitive(name) | Record(name) | Enum(name) | Fixed(name) | Recursion(name):
            return name
        case _:
            return type(type_).__name__.lower()


def _with_logical_type(type_: Type, tree: Mapping[str, Any]) -> Type:
    """Add the logicalType of an enclosing object to a primitive type without one."""
    if isinstance(type_, Primitive) and type_.logical is None and "logicalType" in tree:
        return Primitive(type_.name, *_logical(tree))
    return type_


def _logical(tree: Mapping[str, Any]) -> tuple[str | None, tuple[tuple[str, int], ...]]:
    logical = tree.get("logicalType")
    if not isinstance(logical, str):
        return None, ()
    return logical, tuple((k, tree[k]) for k in ("precision", "scale") if isinstance(tree.get(k), int))


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
    if isinstance(type_, Recursion | Record) and type_.name == name:
        return isinstance(type_, Recursion)
    return any(_contains(inner, name) for inner in inner_types(type_))


def _count(type_: Type, wanted: Record) -> int:
    return (type_ == wanted) + sum(_count(inner, wanted) for inner in inner_types(type_))
