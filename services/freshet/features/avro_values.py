"""Encoder of single values, for the defaults in schemas. Events go through the native writers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

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
)

__all__ = ["UNFIT", "encode_value", "write_long"]

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
