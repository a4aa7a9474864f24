"""Parser of Avro schemas from JSON into frozen objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    spell,
)
from freshet.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
MAX_DEPTH = 32
"""Limit on the nesting of a schema; the native interpreter's stack has this size."""


def parse_schema(
    source: str | bytes | Mapping[str, Any],
    where: str = "Avro schema",
    *,
    references: Sequence[str | bytes | Mapping[str, Any]] = (),
) -> Record:
    """Parse the schema of an event, which must be a record.

    Args:
        source: JSON text, or the object that it holds.
        where: names the schema in errors, e.g. its file.
        references: schemas of named types that the source uses; each may use the types before it.

    Raises:
        ConfigError: not JSON, not Avro, or not a record at the top; names the place in the schema.
    """
    parsed = _parsed(source, where, references)
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

    Raises ConfigError as `parse_schema`, or if a union has no record.
    """
    parsed = _parsed(source, where, references)
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


def _parsed(source: Any, where: str, references: Sequence[Any]) -> Type:
    parser = _Parser(where)
    for i, reference in enumerate(references):
        parser.type(_tree(reference, where), "", f"references[{i}]", 0)
    return parser.type(_tree(source, where), "", "schema", 0)


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
