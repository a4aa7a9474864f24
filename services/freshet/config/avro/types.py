"""The nouns of an Avro schema, and how they are written back: as JSON, as canonical text, in words."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from freshet.errors import ConfigError

__all__ = [
    "DAY_NS",
    "TimeUnit",
    "decimal_digits",
    "decimal_scale",
    "is_uuid",
    "leaf_name",
    "leaf_names",
    "time_unit",
]

# --- What logical types make of values: decimals are numbers, UUIDs text, times have a unit.
#
# A logical type that does not fit its type is as if it were not there, as the specification has it.


DAY_NS = 86_400 * 10**9
_UNIT_NS = {"millis": 10**6, "micros": 10**3, "nanos": 1}
LARGEST_SCALE = 400


class TimeUnit(NamedTuple):
    """What a number counts."""

    of_day: bool  # since midnight, not since 1970
    ns: int  # a tick


def decimal_scale(type_: Type) -> int | None:
    """Digits after the point of a decimal; None: it is none."""
    if not isinstance(type_, Primitive | Fixed) or type_.logical != "decimal":
        return None
    if isinstance(type_, Primitive) and type_.name != "bytes":
        return None
    attributes = dict(type_.attributes)
    precision, scale = attributes.get("precision", 0), attributes.get("scale", 0)
    return scale if 0 <= scale <= min(precision, LARGEST_SCALE) and precision > 0 else None


def decimal_digits(type_: Type) -> int:
    """Digits that a decimal has at most; 0 where its type does not say."""
    return dict(type_.attributes).get("precision", 0) if isinstance(type_, Primitive | Fixed) else 0


def is_uuid(type_: Type) -> bool:
    """Whether these are 16 bytes of a UUID. One that is written as text is text."""
    return isinstance(type_, Fixed) and type_.logical == "uuid" and type_.size == 16


def time_unit(type_: Type) -> TimeUnit | None:
    """The unit of a date, time or timestamp; None: it is none."""
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
    """The primitive type that a value is handed over as, or `fixed`, `enum`; of a container its kind."""
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
    """`leaf_name` of every type that a value of this type can have, null left out."""
    if isinstance(type_, Union):
        return {name for b in type_.branches if not is_null(b) for name in leaf_names(b)}
    return {leaf_name(type_)}


PrimitiveName = Literal["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
PRIMITIVES: tuple[str, ...] = get_args(PrimitiveName)

Aliases = tuple[str, ...]
"""Other names by which a reader's type or field is found in a writer's schema (`avro_resolve`). They are no
part of what a schema describes: equality, hash and canonical text leave them out."""


@dataclass(frozen=True, slots=True)
class Primitive:
    """One of Avro's eight primitive types; `logical` says what it means (`timestamp-millis`, `date`, ...)."""

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
    """One of several types, at most one of each kind (named types: of each name)."""

    branches: tuple[Type, ...]

    @property
    def nullable(self) -> bool:
        """Whether null is one of the branches."""
        return any(is_null(b) for b in self.branches)

    @property
    def others(self) -> tuple[Type, ...]:
        """The branches that are not null."""
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
    """A record: fields in the order in which they are written."""

    name: str  # with namespace
    fields: tuple[AvroField, ...]
    aliases: Aliases = field(default=(), compare=False)

    def field(self, name: str) -> AvroField | None:
        """The field of that name, if there is one."""
        return next((f for f in self.fields if f.name == name), None)


@dataclass(frozen=True, slots=True)
class Recursion:
    """A record used inside its own definition: the innermost enclosing record of that name."""

    name: str  # with namespace


Type = Primitive | Enum | Fixed | Array | Map | Union | Record | Recursion

Written = Record | Union
"""The schema of records that others write: a record, or a union of which some branches are records."""


def is_null(type_: Type) -> bool:
    """Whether this is the null type."""
    return isinstance(type_, Primitive) and type_.name == "null"


def spell(type_: Type) -> str:
    """A type in words, for messages: `long (timestamp-millis)`, `array of string`, `null or long`."""
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
    """The schema as text that is equal for equal schemas: what the topic `schemas` holds.

    Like Avro's Parsing Canonical Form, but it keeps defaults and logical types, which change what we read.
    """
    return json.dumps(to_json(schema), separators=(",", ":"), ensure_ascii=True)


def to_json(schema: Type, *, aliases: bool = False) -> Any:
    """The schema as the JSON object that `parse_schema` and other Avro libraries read; with `aliases` as a
    reader needs it."""
    return _json(schema, {}, aliases)


def without_defaults(tree: Any) -> Any:
    """A schema's JSON without defaults: fastavro takes no schema with a default that its field cannot have,
    and what is written needs none."""
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
