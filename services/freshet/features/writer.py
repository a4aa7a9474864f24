"""Compiler of schemas for the native writers: names, symbols and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    spell,
)
from freshet.config.avro.types import decimal_scale, definitions
from freshet.errors import ConfigError
from freshet.features.avro_values import UNFIT, encode_value
from freshet.features.program import MAX_NODES, OPS, least_bytes, nullable, op_of
from freshet.types import BytesColumn

__all__ = ["Writer", "compile_writer"]


@dataclass(frozen=True, slots=True)
class Writer:
    """A native writer schema, with the path and type of each node for messages."""

    native: _native.WriterSchema
    places: Sequence[str]  # path of each node
    types: Sequence[Type]  # type of each node
    nodes: dict[str, int]  # path -> first node there


def compile_writer(schema: Record, where: str = "Avro schema") -> Writer:
    """Compile a schema. Raises ConfigError for a default that is not of its field's type."""
    compiler = _Compiler(where, definitions(schema))
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

    def __init__(self, where: str, named: dict[str, Record]) -> None:
        self.where, self.named = where, named
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
                self.where,
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
                        self.where,
                        f"{inside}.default",
                        f.default,
                        f"a value of the field's type, {spell(f.type)}",
                    ) from None
        return self.add_words(*words)
