"""What writing Avro needs of a schema: names, symbols and defaults, compiled for the native writers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freshet import _native
from freshet.errors import ConfigError
from freshet.features.program import OPS, least_bytes, nullable, op_of
from freshet.spec.avro import Array, Enum, Fixed, Map, Primitive, Record, Type, Union, is_null, spell
from freshet.types import BytesColumn

__all__ = ["Writer", "compile_writer", "encode_value", "write_long"]


@dataclass(frozen=True, slots=True)
class Writer:
    """A native writer schema with the places and types of its nodes, for messages."""

    native: _native.WriterSchema
    places: Sequence[str]  # per node: path
    types: Sequence[Type]  # per node
    nodes: dict[str, int]  # path -> first node there


def compile_writer(schema: Record, where: str = "Avro schema") -> Writer:
    """Compile. Raises ConfigError for a default that is not of its field's type."""
    compiler = _Compiler(where)
    compiler.emit(schema, "")
    text = BytesColumn.of(compiler.texts)
    native = _native.WriterSchema(
        np.array(compiler.nodes, np.int64).reshape(-1, 7),
        np.array(compiler.words, np.uint64),
        text.data,
        text.ends,
    )
    first: dict[str, int] = {}
    for i, place in enumerate(compiler.places):
        first.setdefault(place, i)
    return Writer(native, compiler.places, compiler.types, first)


class _Compiler:
    """Emits nodes in preorder; records and enums are described by words (avro_write.hpp)."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.nodes: list[list[int]] = []
        self.words: list[int] = []
        self.texts: list[bytes] = []
        self.places: list[str] = []
        self.types: list[Type] = []

    def emit(self, type_: Type, path: str) -> int:
        null_branch, inner = nullable(type_)
        index = len(self.nodes)
        node = [OPS[op_of(inner)], null_branch, 0, 0, 0, 0, 0]
        self.nodes.append(node)
        self.places.append(path)
        self.types.append(type_)
        match inner:
            case Record():
                node[6] = self.record(inner, path)
            case Array(items):
                node[6] = least_bytes(items)
                self.emit(items, f"{path}[]")
            case Map(values):
                self.emit(values, f"{path}.*")
                node[6] = self.say(0)
            case Union(branches):
                node[6] = self.say(len(branches), *[self.emit(b, path) for b in branches])
            case Enum(_, symbols):
                node[6] = self.say(len(symbols), len(self.texts))
                self.texts += [s.encode() for s in symbols]
            case Fixed(_, size):
                node[6] = size
        node[3] = len(self.nodes)
        return index

    def say(self, *words: int) -> int:
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
                    self.texts.append(encode_value(f.type, f.default))
                except (TypeError, ValueError, KeyError, OverflowError, struct.error):
                    raise ConfigError(
                        self.where,
                        f"{inside}.default",
                        f.default,
                        f"a value of the field's type, {spell(f.type)}",
                    ) from None
        return self.say(*words)


def write_long(value: int) -> bytes:
    """An Avro long: zigzag, then 7 bits a byte."""
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(value)
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw >= 0x80:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def encode_value(type_: Type, value: Any) -> bytes:  # noqa: PLR0911 - one for each kind of type
    """Avro bytes of one JSON value, as defaults in schemas are; a union's default is of the first branch
    that fits.

    For defaults and single values: events go through the native writers. Raises ValueError or TypeError.
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
            return _counted([encode_value(items, v) for v in value])
        case Map(values):
            _demand(value, dict)
            return _counted([_primitive("string", k) + encode_value(values, v) for k, v in value.items()])
        case Record(_, fields):
            _demand(value, dict)
            return b"".join(encode_value(f.type, value.get(f.name, f.default)) for f in fields)
        case Union(branches):
            return _union(branches, value)


def _union(branches: Sequence[Type], value: Any) -> bytes:
    for i, branch in enumerate(branches):
        if is_null(branch) != (value is None):
            continue
        try:
            return write_long(i) + encode_value(branch, value)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, struct.error):
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
