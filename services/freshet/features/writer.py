"""Writers of Avro: single values for the defaults in schemas, and schemas compiled for the native writers.

Events go through the native writers only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freshet import _native
from freshet.config.avro.schema import (
    Array,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Recursion,
    Type,
    Union,
    is_null,
    spell,
)
from freshet.config.avro.types import decimal_scale, definitions
from freshet.errors import ConfigError
from freshet.types import BytesColumn

UNFIT = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError, struct.error)
"""Errors that `encode_value` raises for a value that is not of the type."""


def write_long(value: int) -> bytes:
    """Encode an Avro long: zigzag, then 7 bits per byte. Raises ValueError beyond 64 bits."""
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(value)
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw >= 0x80:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def encode_value(  # noqa: PLR0911 - one for each kind of type
    type_: Type, value: Any, named: Mapping[str, Record] | None = None
) -> bytes:
    """Encode a default of a schema.

    A union's default is encoded by the first branch that fits. A field that the value lacks takes its own
    default.

    Args:
        type_: Type of the value.
        value: JSON value; bytes are a string of the characters U+0000 to U+00FF.
        named: Records that enclose `type_`, by name, for recursive types.

    Raises one of `UNFIT` if the value is not of the type.
    """
    match type_:
        case Primitive(name):
            return _primitive(name, value)
        case Fixed(_, size):
            raw: bytes = value.encode("latin-1")
            return raw if len(raw) == size else _wrong(value)
        case Enum(_, symbols):
            return write_long(symbols.index(value))
        case Array(items):
            _demand(value, list)
            return _counted([encode_value(items, v, named) for v in value])
        case Map(values):
            _demand(value, dict)
            return _counted(
                [_primitive("string", k) + encode_value(values, v, named) for k, v in value.items()]
            )
        case Record(name, fields):
            _demand(value, dict)
            inside = {**(named or {}), name: type_}
            given = [value[f.name] if f.name in value or not f.has_default else f.default for f in fields]
            return b"".join(encode_value(f.type, v, inside) for f, v in zip(fields, given, strict=True))
        case Recursion(name):
            return encode_value((named or {})[name], value, named)
        case Union(branches):
            return _union(branches, value, named)


def _union(branches: Sequence[Type], value: Any, named: Mapping[str, Record] | None) -> bytes:
    for i, branch in enumerate(branches):
        if is_null(branch) != (value is None):
            continue
        try:
            return write_long(i) + encode_value(branch, value, named)
        except UNFIT:
            continue
    return _wrong(value)


def _primitive(name: str, value: Any) -> bytes:  # noqa: PLR0911 - one for each type
    if name == "null":
        return b"" if value is None else _wrong(value)
    if name == "boolean":
        _demand(value, bool)
        return bytes([value])
    if name in ("int", "long"):
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or (name == "int" and value != _int32(value))
        ):
            return _wrong(value)
        return write_long(value)
    if name in ("float", "double"):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return _wrong(value)
        return struct.pack("<f" if name == "float" else "<d", value)
    _demand(value, str)
    raw: bytes = value.encode("utf-8" if name == "string" else "latin-1")
    return write_long(len(raw)) + raw


def _counted(parts: Sequence[bytes]) -> bytes:
    return (write_long(len(parts)) + b"".join(parts) if parts else b"") + b"\x00"


def _int32(value: int) -> int:
    return max(-(1 << 31), min(value, (1 << 31) - 1))


def _demand(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        _wrong(value)


def _wrong(value: Any) -> bytes:
    raise TypeError(json.dumps(value, default=str))


OPS = {
    "null": 0, "boolean": 1, "int": 2, "long": 3, "float": 4, "double": 5, "bytes": 6, "string": 7,
    "fixed": 8, "enum": 9, "record": 10, "array": 11, "map": 12, "union": 13,
    "recursion": 14, "default": 15, "convert": 16, "refuse": 17,
}  # fmt: skip
MAX_NODES = 100_000
"""Largest number of types, each use of a named type counted: a few lines of JSON can expand to 2^32."""


def nullable(type_: Type) -> tuple[int, Type]:
    """Return the position of null in a union of null and one type, 1 or 2, with that type; else 0 and the
    type itself."""
    if isinstance(type_, Union) and len(type_.branches) == 2 and type_.nullable:
        first, second = type_.branches
        return (1, second) if is_null(first) else (2, first)
    return 0, type_


def op_of(type_: Type) -> str:
    """Return the name of a type's operation in `OPS`."""
    return type_.name if isinstance(type_, Primitive) else type(type_).__name__.lower()


def least_bytes(type_: Type) -> int:
    """Return the fewest bytes of a value. The recursion ends, as recursive records do so in a union, array or
    map, which has at least one byte."""
    match type_:
        case Primitive(name):
            return {"null": 0, "float": 4, "double": 8}.get(name, 1)
        case Fixed(_, size):
            return size
        case Record(_, fields):
            return sum(least_bytes(f.type) for f in fields)
        case _:
            return 1


@dataclass(frozen=True, slots=True)
class Writer:
    """A native writer schema, with the path and type of each node for messages."""

    native: _native.WriterSchema
    places: Sequence[str]  # path of each node
    types: Sequence[Type]  # type of each node
    nodes: dict[str, int]  # path -> first node there


def compile_writer(schema: Record) -> Writer:
    """Compile a schema. Raises ConfigError for a default that is not of its field's type."""
    compiler = _Compiler(definitions(schema))
    compiler.emit(schema, "")
    text = BytesColumn.of(compiler.texts)
    native = _native.WriterSchema(
        np.array(compiler.nodes, np.int64).reshape(-1, 7),
        np.array(compiler.words, np.uint64),
        text.data,
        text.ends,
        np.array(compiler.decimals, np.int64),
    )
    first: dict[str, int] = {}
    for i, place in enumerate(compiler.places):
        first.setdefault(place, i)
    return Writer(native, compiler.places, compiler.types, first)


class _Compiler:
    """Emitter of nodes in preorder; words describe records and enums (avro_write.hpp)."""

    def __init__(self, named: dict[str, Record]) -> None:
        self.named = named
        self.around: dict[str, int] = {}  # enclosing records: name -> node
        self.nodes: list[list[int]] = []
        self.words: list[int] = []
        self.texts: list[bytes] = []
        self.places: list[str] = []
        self.types: list[Type] = []
        self.decimals: list[int] = []  # node, precision, scale of each

    def emit(self, type_: Type, path: str) -> int:
        null_branch, inner = nullable(type_)
        index = len(self.nodes)
        if index > MAX_NODES:
            raise ConfigError(
                "Avro schema",
                path,
                f"more than {MAX_NODES} types",
                "a smaller schema, each use of a type counted",
            )
        if isinstance(inner, Recursion) and inner.name not in self.around:
            inner = self.named[inner.name]
        node = [OPS[op_of(inner)], null_branch, 0, 0, 0, 0, 0]
        self.nodes.append(node)
        self.places.append(path)
        self.types.append(type_)
        scale = decimal_scale(inner)
        if scale is not None and isinstance(inner, Primitive | Fixed):
            self.decimals += [index, dict(inner.attributes)["precision"], scale]
        match inner:
            case Recursion(name):
                node[6] = self.around[name]
            case Record(name):
                outer = self.around.get(name)
                self.around[name] = index
                node[6] = self.record(inner, path)
                self.around.pop(name)
                if outer is not None:
                    self.around[name] = outer
            case Array(items):
                node[6] = least_bytes(items)
                self.emit(items, f"{path}[]")
            case Map(values):
                self.emit(values, f"{path}.*")
                node[6] = self.add_words(0)
            case Union(branches):
                node[6] = self.add_words(len(branches), *[self.emit(b, path) for b in branches])
            case Enum(_, symbols):
                node[6] = self.add_words(len(symbols), len(self.texts))
                self.texts += [s.encode() for s in symbols]
            case Fixed(_, size):
                node[6] = size
        node[3] = len(self.nodes)
        return index

    def add_words(self, *words: int) -> int:
        at = len(self.words)
        self.words += words
        return at

    def record(self, record: Record, path: str) -> int:
        words = [len(record.fields)]
        for f in record.fields:
            inside = f"{path}.{f.name}" if path else f.name
            child = self.emit(f.type, inside)
            words += [child, len(self.texts), 0]
            self.texts.append(f.name.encode())
            if f.has_default:
                words[-1] = len(self.texts) + 1
                try:
                    self.texts.append(encode_value(f.type, f.default, self.named))
                except UNFIT:
                    raise ConfigError(
                        "Avro schema",
                        f"{inside}.default",
                        f.default,
                        f"a value of the field's type, {spell(f.type)}",
                    ) from None
        return self.add_words(*words)
