"""Types of Avro schemas: their output as JSON, as canonical text and in words, and their resolution.

The objects hold no docs and no sort orders. A record inside its own definition is a `Recursion`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from freshet.errors import ConfigError

# --- Logical types: decimals are numbers, UUIDs text, times have a unit. By the specification, a logical type
# that does not fit its type is ignored.


DAY_NS = 86_400 * 10**9
_UNIT_NS = {"millis": 10**6, "micros": 10**3, "nanos": 1}
LARGEST_SCALE = 400


class TimeUnit(NamedTuple):
    """Unit and origin of a numeric time."""

    of_day: bool  # since midnight; else since 1970
    ns: int  # nanoseconds of a tick


def decimal_scale(type_: Type) -> int | None:
    """Return the digits after the point of a decimal, or None for another type."""
    if not isinstance(type_, Primitive | Fixed) or type_.logical != "decimal":
        return None
    if isinstance(type_, Primitive) and type_.name != "bytes":
        return None
    attributes = dict(type_.attributes)
    precision, scale = attributes.get("precision", 0), attributes.get("scale", 0)
    return scale if 0 <= scale <= min(precision, LARGEST_SCALE) and precision > 0 else None


def decimal_digits(type_: Type) -> int:
    """Return the precision of a decimal; 0 if its type has none."""
    return dict(type_.attributes).get("precision", 0) if isinstance(type_, Primitive | Fixed) else 0


def is_uuid(type_: Type) -> bool:
    """Return whether a type is a UUID of 16 bytes; a UUID as a string is text."""
    return isinstance(type_, Fixed) and type_.logical == "uuid" and type_.size == 16


def time_unit(type_: Type) -> TimeUnit | None:
    """Return the unit of a date, time or timestamp, or None for another type."""
    if not isinstance(type_, Primitive) or type_.logical is None or type_.name not in ("int", "long"):
        return None
    if type_.logical == "date":
        return TimeUnit(of_day=False, ns=DAY_NS) if type_.name == "int" else None
    family, _, unit = type_.logical.rpartition("-")
    if family not in ("time", "timestamp", "local-timestamp") or unit not in _UNIT_NS:
        return None
    fits = "int" if type_.logical == "time-millis" else "long"
    return TimeUnit(of_day=family == "time", ns=_UNIT_NS[unit]) if type_.name == fits else None


def leaf_name(type_: Type) -> str:
    """Return the primitive type that values are decoded to, or `fixed`, `enum` or the kind of container."""
    scale = decimal_scale(type_)
    if scale is not None:
        return "double" if scale else "long"
    if is_uuid(type_):
        return "string"
    match type_:
        case Primitive(name):
            return name
        case Recursion():
            return "record"
        case _:
            return type(type_).__name__.lower()


def leaf_names(type_: Type) -> set[str]:
    """Return `leaf_name` of all branches of a type, without null."""
    if isinstance(type_, Union):
        return {name for b in type_.branches if not is_null(b) for name in leaf_names(b)}
    return {leaf_name(type_)}


PrimitiveName = Literal["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
PRIMITIVES: tuple[str, ...] = get_args(PrimitiveName)

Aliases = tuple[str, ...]
"""Other names by which a reader's type or field matches a writer's (`Resolver`). Equality, hash
and canonical text ignore them."""


@dataclass(frozen=True, slots=True)
class Primitive:
    """One of Avro's eight primitive types; `logical` is `timestamp-millis`, `date`, ... or None."""

    name: PrimitiveName
    logical: str | None = None
    attributes: tuple[tuple[str, int], ...] = ()  # precision and scale of a decimal


@dataclass(frozen=True, slots=True)
class Enum:
    """One of a fixed list of symbols, written as its index."""

    name: str  # with namespace
    symbols: tuple[str, ...]
    default: str | None = None
    aliases: Aliases = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A byte string of one length."""

    name: str
    size: int
    logical: str | None = None
    attributes: tuple[tuple[str, int], ...] = ()
    aliases: Aliases = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Array:
    """A list of items of one type."""

    items: Type


@dataclass(frozen=True, slots=True)
class Map:
    """String keys to values of one type."""

    values: Type


@dataclass(frozen=True, slots=True)
class Union:
    """One of several types; at most one branch of each kind, or of each name of named types."""

    branches: tuple[Type, ...]

    @property
    def nullable(self) -> bool:
        """Whether null is one of the branches."""
        return any(is_null(b) for b in self.branches)

    @property
    def others(self) -> tuple[Type, ...]:
        """The branches without null."""
        return tuple(b for b in self.branches if not is_null(b))


@dataclass(frozen=True, slots=True)
class AvroField:
    """A field of a record. `default` is JSON, meaningful only if `has_default`."""

    name: str
    type: Type
    has_default: bool = False
    default: Any = field(default=None, hash=False)
    aliases: Aliases = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Record:
    """A record, with its fields in the order of the encoding."""

    name: str  # with namespace
    fields: tuple[AvroField, ...]
    aliases: Aliases = field(default=(), compare=False)

    def field(self, name: str) -> AvroField | None:
        """Return the field of that name, or None."""
        return next((f for f in self.fields if f.name == name), None)


@dataclass(frozen=True, slots=True)
class Recursion:
    """A reference to the innermost enclosing record of that name, inside its own definition."""

    name: str  # with namespace


Type = Primitive | Enum | Fixed | Array | Map | Union | Record | Recursion

Written = Record | Union
"""Schema of records of external writers: a record, or a union with at least one record."""


def is_null(type_: Type) -> bool:
    """Return whether a type is null."""
    return isinstance(type_, Primitive) and type_.name == "null"


def inner_types(type_: Type) -> tuple[Type, ...]:
    """Return the types of fields, items, values or branches of a type."""
    match type_:
        case Record(_, fields):
            return tuple(f.type for f in fields)
        case Array(inner) | Map(inner):
            return (inner,)
        case Union(branches):
            return branches
        case _:
            return ()


def spell(type_: Type) -> str:
    """Describe a type for messages: `long (timestamp-millis)`, `array of string`, `null or long`."""
    match type_:
        case Primitive(name, logical) | Fixed(name, _, logical):
            return f"{name} ({logical})" if logical else name
        case Array(items):
            return f"array of {spell(items)}"
        case Map(values):
            return f"map of {spell(values)}"
        case Union(branches):
            return " or ".join(spell(b) for b in branches)
        case Enum(name):
            return f"enum {name}"
        case Record(name) | Recursion(name):
            return f"record {name}"


def canonical(schema: Written) -> str:
    """Return the schema as text that is equal for equal schemas, as in the topic `schemas`.

    It is Avro's Parsing Canonical Form with defaults and logical types, which change decoded values.
    """
    return json.dumps(to_json(schema), separators=(",", ":"), ensure_ascii=True)


def to_json(schema: Type, *, aliases: bool = False) -> Any:
    """Return the schema as a JSON object for `parse_schema` and Avro libraries; readers need `aliases`."""
    return _json(schema, {}, aliases)


def without_defaults(tree: Any) -> Any:
    """Remove defaults from a schema's JSON: writers need none, and fastavro refuses invalid ones."""
    if isinstance(tree, list):
        return [without_defaults(part) for part in tree]
    if isinstance(tree, dict):
        return {key: without_defaults(part) for key, part in tree.items() if key != "default"}
    return tree


def _json(type_: Type, seen: dict[str, Type], aliases: bool) -> Any:  # noqa: PLR0911 - one for each kind of type
    if isinstance(type_, (Record, Enum, Fixed)):
        if type_.name in seen:
            if seen[type_.name] != type_:
                raise ConfigError("Avro schema", "name", type_.name, "one definition for each name")
            return type_.name
        seen[type_.name] = type_
    match type_:
        case Primitive(name, None):
            return name
        case Primitive(name, logical, attributes):
            return {"type": name, "logicalType": logical, **dict(attributes)}
        case Fixed(name, size, logical, attributes):
            extra = {"logicalType": logical, **dict(attributes)} if logical else {}
            extra |= _other_names(type_, aliases)
            return {"name": name, "type": "fixed", "size": size, **extra}
        case Enum(name, symbols, default):
            extra = _other_names(type_, aliases) | ({} if default is None else {"default": default})
            return {"name": name, "type": "enum", "symbols": list(symbols), **extra}
        case Array(items):
            return {"type": "array", "items": _json(items, seen, aliases)}
        case Map(values):
            return {"type": "map", "values": _json(values, seen, aliases)}
        case Union(branches):
            return [_json(b, seen, aliases) for b in branches]
        case Recursion(name):
            return name
        case Record(name, fields):
            extra = _other_names(type_, aliases)
            inside = [_field_json(f, seen, aliases) for f in fields]
            return {"name": name, "type": "record", "fields": inside, **extra}


def _other_names(of: Record | Enum | Fixed | AvroField, aliases: bool) -> dict[str, Any]:
    return {"aliases": list(of.aliases)} if aliases and of.aliases else {}


def _field_json(f: AvroField, seen: dict[str, Type], aliases: bool) -> dict[str, Any]:
    out = {"name": f.name, "type": _json(f.type, seen, aliases), **_other_names(f, aliases)}
    return {**out, "default": f.default} if f.has_default else out


# --- Schema resolution of Avro 1.12: the reader's type for each type of a writer. `features.program` compiles
# the decoder from it.

PROMOTIONS: Mapping[str, frozenset[str]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}


def definitions(schema: Type) -> dict[str, Record]:
    """Return the records that a schema defines, by full name."""
    found: dict[str, Record] = {}

    def visit(type_: Type) -> None:
        if isinstance(type_, Record):
            if type_.name in found:
                return
            found[type_.name] = type_
        for inner in inner_types(type_):
            visit(inner)

    visit(schema)
    return found


@dataclass(frozen=True, slots=True)
class Resolver:
    """Resolver of types between one writer's schema and one reader's."""

    writer: Mapping[str, Record]  # definitions, for recursive records
    reader: Mapping[str, Record]
    names: bool = True  # whether names of records, enums and fixed must agree outside of unions too

    @classmethod
    def of(cls, writer: Written, reader: Written, *, names: bool = True) -> Resolver:
        """Create a resolver for two schemas."""
        return cls(definitions(writer), definitions(reader), names)

    def written(self, type_: Type) -> Type:
        """Return a writer's type; for a recursion, the record."""
        return self.writer[type_.name] if isinstance(type_, Recursion) else type_

    def read(self, type_: Type) -> Type:
        """Return a reader's type; for a recursion, the record."""
        return self.reader[type_.name] if isinstance(type_, Recursion) else type_

    def choose(self, writer: Type, reader: Type) -> Type | None:
        """Return the reader's type for a writer's type that is no union, or None if none matches.

        For a reader's union it is the first branch that matches.
        """
        writer, reader = self.written(writer), self.read(reader)
        if not isinstance(reader, Union):
            return reader if self.matches(writer, reader, names=self.names) else None
        return next((self.read(b) for b in reader.branches if self.matches(writer, b)), None)

    def matches(self, writer: Type, reader: Type, *, names: bool = True) -> bool:
        """Return whether two types match by the specification: containers by content, named types by name.

        With `names` false the outermost names may differ.
        """
        writer, reader = self.written(writer), self.read(reader)
        match writer, reader:
            case (Union(), _) | (_, Union()):
                return True
            case (Array(w), Array(r)) | (Map(w), Map(r)):
                return self.matches(w, r, names=self.names)
            case Primitive(w_name), Primitive(r_name):
                return w_name == r_name or r_name in PROMOTIONS.get(w_name, ())
            case Fixed(_, w_size), Fixed(_, r_size):
                return w_size == r_size and (not names or _same_name(writer, reader))
            case (Record(), Record()) | (Enum(), Enum()):
                return not names or _same_name(writer, reader)
            case _:
                return False


def fields_of(writer: Record, reader: Record) -> dict[str, AvroField]:
    """Return the reader's field for each field of the writer, by its name: that of the same name, else alias.

    A reader's field with two candidates gets the one of the same name.
    """
    by_name = {f.name: f for f in reader.fields}
    by_alias = {alias: f for f in reversed(reader.fields) for alias in reversed(f.aliases)}
    found: dict[str, AvroField] = {}
    used: set[str] = set()
    for known in (by_name, by_alias):
        for f in writer.fields:
            into = known.get(f.name)
            if into is not None and f.name not in found and into.name not in used:
                found[f.name] = into
                used.add(into.name)
    return found


def _same_name(writer: Type, reader: Type) -> bool:
    assert isinstance(writer, Record | Enum | Fixed)
    assert isinstance(reader, Record | Enum | Fixed)
    bare = writer.name.rpartition(".")[2]
    return bare == reader.name.rpartition(".")[2] or writer.name in reader.aliases or bare in reader.aliases
