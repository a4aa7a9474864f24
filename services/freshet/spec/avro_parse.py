"""From the JSON of an Avro schema to frozen objects, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from freshet.errors import ConfigError
from freshet.spec.avro_types import (
    PRIMITIVES,
    Array,
    AvroField,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    spell,
)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
MAX_DEPTH = 32
"""Nesting a schema may have; the native interpreter's stack is sized by it."""


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
        references: schemas of named types that it uses without defining them; each may use those before it.

    Raises:
        ConfigError: not JSON, not Avro, recursive, or not a record at the top; names the place in the schema.
    """
    parser = _Parser(where)
    for i, reference in enumerate(references):
        parser.type(_tree(reference, where), "", f"references[{i}]", 0)
    parsed = parser.type(_tree(source, where), "", "schema", 0)
    if not isinstance(parsed, Record):
        raise ConfigError(where, "type", spell(parsed), '"record"', "an event is a record of named fields")
    return parsed


def _tree(source: str | bytes | Mapping[str, Any], where: str) -> Any:
    if not isinstance(source, (str, bytes)):
        return source
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as e:
        raise ConfigError(where, "", f"not JSON: {e}", "an Avro schema, as JSON text") from None


class _Parser:
    """Walks the JSON of a schema; remembers named types, which may be used again by name."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.named: dict[str, Type | None] = {}  # None: being defined, so a use is recursion

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
            return self.type(kind, space, at, depth + 1)  # {"type": {...}}: the same type, wrapped
        if kind in PRIMITIVES:
            return Primitive(kind, *_logical(tree))  # type: ignore[arg-type]
        if kind == "array":
            return Array(self.type(self.need(tree, "items", at), space, f"{at}.items", depth + 1))
        if kind == "map":
            return Map(self.type(self.need(tree, "values", at), space, f"{at}.values", depth + 1))
        if kind in ("record", "enum", "fixed"):
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
                if found is None:
                    raise self.fail(
                        at, name, "a type that is not recursive", "recursive records are not supported"
                    )
                return found
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
        made: Type
        if kind == "record":
            made = self.record(full, tree, full.rpartition(".")[0], at, depth)
        elif kind == "enum":
            made = self.enum(full, tree, at)
        else:
            size = self.need(tree, "size", at)
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 24:
                raise self.fail(f"{at}.size", size, "a number of bytes below 16 MiB")
            made = Fixed(full, size, *_logical(tree))
        self.named[full] = made
        return made

    def record(self, full: str, tree: Mapping[str, Any], space: str, at: str, depth: int) -> Record:
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
            made = self.type(entry["type"], space, f"{at}.{name}", depth + 1)
            if isinstance(entry["type"], str) and "logicalType" in entry and isinstance(made, Primitive):
                made = Primitive(made.name, *_logical(entry))  # a common slip, which others read as meant too
            fields[name] = AvroField(name, made, "default" in entry, entry.get("default"))
        return Record(full, tuple(fields.values()))

    def enum(self, full: str, tree: Mapping[str, Any], at: str) -> Enum:
        symbols = self.need(tree, "symbols", at)
        if not isinstance(symbols, list) or not symbols or not all(isinstance(s, str) for s in symbols):
            raise self.fail(f"{at}.symbols", symbols, "a list of names")
        if len(set(symbols)) < len(symbols):
            raise self.fail(f"{at}.symbols", symbols, "each symbol once")
        default = tree.get("default")
        if default is not None and default not in symbols:
            raise self.fail(f"{at}.default", default, f"one of {', '.join(symbols)}")
        return Enum(full, tuple(symbols), default)


def _union_kind(type_: Type) -> str:
    match type_:
        case Primitive(name) | Record(name) | Enum(name) | Fixed(name):
            return name
        case _:
            return type(type_).__name__.lower()


def _logical(tree: Mapping[str, Any]) -> tuple[str | None, tuple[tuple[str, int], ...]]:
    logical = tree.get("logicalType")
    if not isinstance(logical, str):
        return None, ()
    return logical, tuple((k, tree[k]) for k in ("precision", "scale") if isinstance(tree.get(k), int))
