"""Schema resolution of Avro 1.12: the reader's type for each type of a writer.

`features.program` compiles the decoder from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from freshet.config.avro.types import (
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
)

__all__ = ["Resolver", "definitions", "fields_of"]

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
        match type_:
            case Record(name, fields):
                if name not in found:
                    found[name] = type_
                    for f in fields:
                        visit(f.type)
            case Array(inner) | Map(inner):
                visit(inner)
            case Union(branches):
                for branch in branches:
                    visit(branch)

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
