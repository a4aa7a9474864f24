"""Compiling decoding programs: a writer's schema and a list of wanted values become a flat program for
the native walker.

The native side (services/native/include/freshet/avro_program.hpp) runs it over any number of records.
Nodes stand in preorder, each with the sinks that take its value; what nobody wants is walked past
without being looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet import _native
from freshet.errors import BadInput, ConfigError
from freshet.spec.avro import (
    Array,
    AvroField,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    field_at,
    is_null,
    spell,
)
from freshet.types import I64, BytesColumn

__all__ = ["ANY_KEY", "NUMBERS", "TEXTS", "Compiled", "Want", "compile_program", "leaf_names"]

OPS = {
    "null": 0, "boolean": 1, "int": 2, "long": 3, "float": 4, "double": 5, "bytes": 6, "string": 7,
    "fixed": 8, "enum": 9, "record": 10, "array": 11, "map": 12, "union": 13,
}  # fmt: skip
NUMBERS = frozenset({"boolean", "int", "long", "float", "double"})
TEXTS = frozenset({"string", "bytes", "fixed", "enum"})
ANY_KEY = NUMBERS | TEXTS

WHY = (
    "",
    "the record ends inside this value",
    "a number of more than 10 bytes or 64 bits",
    "an int beyond 32 bits",
    "a boolean that is neither 0 nor 1",
    "a negative length",
    "a union branch that does not exist",
    "an enum symbol that does not exist",
    "a block whose count or size cannot be",
    "bytes after the last field; was it written by another schema?",
    "a string that is not UTF-8",
    "a part of the impression's key that is null",
    "an event time that is null",
    "an event time that cannot be read, or outside the years 1 to 9999",
    "an event id that is null",
    "no Confluent frame (a zero byte and a 4-byte schema id)",
)
"""What the native failures mean, by their number (`Why` in avro_program.hpp)."""


@dataclass(frozen=True, slots=True)
class Want:
    """A value that a program is to hand over."""

    path: str
    kind: int  # the native handler's sink kind
    slot: int
    takes: frozenset[str]  # leaf types that it can take
    what: str  # who wants it, for messages: "feature user", "the event's time"
    salt: int = 0
    many: bool = False  # takes every element of arrays on the way
    symbols: str = "keys"  # what an enum's words are: "keys" (salted), or "texts" (numbers of strings)
    edges: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program with the places of its nodes, for messages."""

    native: _native.Program
    places: Sequence[tuple[str, str]]  # per node: (path, type in words)

    def explain(self, why: int, node: int, offset: int) -> str:
        """A failure in words: what was found, at which field and byte."""
        path, type_ = self.places[node]
        where = f"{path} ({type_}): " if path else ""
        return f"{where}{WHY[why]}, at byte {offset}"


def leaf_names(type_: Type) -> set[str]:
    """Names of the leaf types that a value of this type can have, null left out; containers by their kind."""
    match type_:
        case Union(branches):
            return {name for b in branches if not is_null(b) for name in leaf_names(b)}
        case Primitive(name):
            return {name}
        case _:
            return {type(type_).__name__.lower()}


def compile_program(
    schema: Record, wants: Iterable[Want], *, explode: str | None = None, where: str = "Avro schema"
) -> Compiled:
    """Compile a program for records written by this schema.

    Args:
        schema: the writer's schema.
        wants: values to hand over, in the order in which sinks of one field run.
        explode: path of the array whose elements are impressions (event programs only).
        where: names the schema in errors.

    Raises:
        ConfigError: the schema lacks a wanted field, or has it with a type that cannot be taken.
    """
    wanted = list(wants)
    for want in wanted:
        _check(schema, want, explode, where)
    return _Compiler(explode).compile(schema, wanted)


def _check(schema: Record, want: Want, explode: str | None, where: str) -> None:
    found = field_at(schema, want.path, f"{where}, wanted by {want.what}")
    array_inside = _arrays_on(schema, want.path, explode)
    inner = found.type
    if want.path == explode and isinstance(inner, Array):
        inner = inner.items  # the element itself
    while isinstance(inner, Array) and want.many:
        array_inside, inner = True, inner.items
    if array_inside and not want.many:
        raise ConfigError(
            where,
            want.path,
            "an array on the way",
            f"one value for {want.what}",
            "a list feature takes many: set `max`",
        )
    wrong = leaf_names(inner) - want.takes
    if wrong or not leaf_names(inner):
        allowed = ", ".join(n for n in OPS if n in want.takes)
        raise ConfigError(where, want.path, spell(inner), f"one of {allowed}, for {want.what}")


def _arrays_on(schema: Record, path: str, explode: str | None) -> bool:
    """Whether an array, other than the exploded one, lies on the way to the field."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        prefix = ".".join(parts[:i])
        if prefix == explode:
            continue
        at: Type | None = field_at(schema, prefix).type
        if isinstance(at, Array):
            return True
    return False


@dataclass
class _Trie:
    """Wants by path."""

    here: list[Want] = field(default_factory=list)
    below: dict[str, _Trie] = field(default_factory=dict)

    def add(self, want: Want) -> None:
        node = self
        for part in want.path.split("."):
            node = node.below.setdefault(part, _Trie())
        node.here.append(want)


_NOTHING = _Trie()


class _Compiler:
    """Emits nodes in preorder."""

    def __init__(self, explode: str | None) -> None:
        self.explode = explode
        self.nodes: list[list[int]] = []
        self.sinks: list[tuple[int, int, int, int, int]] = []
        self.words: list[int] = []
        self.texts: list[bytes] = []
        self.places: list[tuple[str, str]] = []

    def compile(self, schema: Record, wants: Sequence[Want]) -> Compiled:
        trie = _Trie()
        for want in wants:
            trie.add(want)
        self.emit(schema, trie, "")
        text = BytesColumn.of(self.texts)
        native = _native.Program(
            np.array(self.nodes, np.int64).reshape(-1, 7),
            np.array(self.sinks, np.uint64).reshape(-1, 5),
            np.array(self.words, np.uint64),
            text.data,
            text.ends,
        )
        return Compiled(native, self.places)

    def emit(self, type_: Type, trie: _Trie, path: str) -> int:
        """Append the subtree of a type; returns its node's index."""
        null_branch, inner = nullable(type_)
        index = len(self.nodes)
        node = [OPS[op_of(inner)], null_branch, 0, 0, 0, 0, 0]
        self.nodes.append(node)
        self.places.append((path, spell(type_)))
        match inner:
            case Record(_, fields):
                self.record(fields, trie, path)
            case Array(items):
                node[2] = int(path == self.explode and path != "")
                node[6] = least_bytes(items)
                self.emit(items, trie, path)
            case Map(values):
                node[6] = self.map(values, trie, path)
            case Union(branches):
                children = [self.emit(b, trie, path) for b in branches]
                node[6] = len(self.words)
                self.words += [len(children), *children]
            case _:
                node[6] = inner.size if isinstance(inner, Fixed) else 0
                if isinstance(inner, Enum):
                    node[6] = len(inner.symbols)
                node[4] = len(self.sinks)
                for want in trie.here:
                    if op_of(inner) in want.takes:
                        self.sink(want, inner)
                node[5] = len(self.sinks)
        node[3] = len(self.nodes)
        return index

    def record(self, fields: Sequence[AvroField], trie: _Trie, path: str) -> None:
        for f in fields:
            self.emit(f.type, trie.below.get(f.name, _NOTHING), f"{path}.{f.name}" if path else f.name)

    def map(self, values: Type, trie: _Trie, path: str) -> int:
        self.emit(values, _NOTHING, f"{path}.*")
        looked_up = [(self.emit(values, sub, f"{path}.{key}"), key) for key, sub in trie.below.items()]
        at = len(self.words)
        self.words.append(len(looked_up))
        for child, key in looked_up:
            self.words += [child, len(self.texts)]
            self.texts.append(key.encode())
        return at

    def sink(self, want: Want, inner: Type) -> None:
        begin = len(self.words)
        if want.edges:
            self.words += np.array(want.edges, np.float64).view(np.uint64).tolist()
        elif isinstance(inner, Enum) and want.symbols == "keys":
            symbols = BytesColumn.of([s.encode() for s in inner.symbols])
            self.words += _native.keys_of_bytes(symbols.data, symbols.ends, want.salt).tolist()
        elif isinstance(inner, Enum):
            self.words += range(len(self.texts), len(self.texts) + len(inner.symbols))
            self.texts += [s.encode() for s in inner.symbols]
        self.sinks.append((want.kind, want.slot, want.salt, begin, len(self.words) - begin))


def explain_all(failures: I64, programs: Sequence[Compiled]) -> list[str]:
    """Words for the native (k, 5) failures: index, program, why, node, offset."""
    return [
        f"record {index}: {programs[program].explain(why, node, offset)}"
        for index, program, why, node, offset in failures.tolist()
    ]


def refuse(failures: I64, programs: Sequence[Compiled]) -> None:
    """Raise BadInput that names the first failures, if there are any."""
    if len(failures):
        raise BadInput("; ".join(explain_all(failures[:5], programs)))


def nullable(type_: Type) -> tuple[int, Type]:
    """(1: null comes first, 2: it comes second, 0: no union of null and one type; the type within)."""
    if isinstance(type_, Union) and len(type_.branches) == 2 and type_.nullable:
        first, second = type_.branches
        return (1, second) if is_null(first) else (2, first)
    return 0, type_


def op_of(type_: Type) -> str:
    return type_.name if isinstance(type_, Primitive) else type(type_).__name__.lower()


def least_bytes(type_: Type) -> int:
    """Fewest bytes that a value of this type takes."""
    match type_:
        case Primitive(name):
            return {"null": 0, "float": 4, "double": 8}.get(name, 1)
        case Fixed(_, size):
            return size
        case Record(_, fields):
            return sum(least_bytes(f.type) for f in fields)
        case _:
            return 1
