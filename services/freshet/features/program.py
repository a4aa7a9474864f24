"""Compiler of decoding programs: writer's schema, reader's schema and wanted values to a flat program for the
native walker (services/native/include/freshet/avro_program.hpp).

Nodes are the writer's types in preorder, each with the sinks that take its value. A wanted value has a path
in the reader's schema. Avro's schema resolution (`freshet.config.avro.types`) finds it in the writer's
schema; if it is not there, the reader's default is used. All other values are skipped, whether or not they
resolve.

Letters: K failures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from freshet import _native
from freshet.config.avro.schema import (
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
    field_at,
    is_null,
    spell,
)
from freshet.config.avro.types import (
    Resolver,
    TimeUnit,
    decimal_digits,
    decimal_scale,
    fields_of,
    is_uuid,
    leaf_name,
    leaf_names,
    time_unit,
)
from freshet.errors import ConfigError
from freshet.features.writer import MAX_NODES, OPS, UNFIT, encode_value, least_bytes, nullable, op_of
from freshet.types import I64, BytesColumn

UNRESOLVED = 16  # `Why` in avro_program.hpp: a value that does not resolve to the reader's schema
FLOAT_OF_INT, DOUBLE_OF_INT, SCALED_INT, DECIMAL, UUID, SYMBOLS = range(6)  # Conversion in avro_program.hpp
EXACT_DIGITS = 15
"""Digits up to which each decimal is a distinct double."""
NUMBERS = frozenset({"boolean", "int", "long", "float", "double"})
TEXTS = frozenset({"string", "bytes", "fixed", "enum"})
ANY_KEY = NUMBERS | TEXTS
EXPLODED, WANTED = 1, 2  # flags of a node in avro_program.hpp
CHECKED = -1  # kind of a want without a sink: the value is only validated

WHY_TIME = "an event time that cannot be read, or outside the years 1 to 9999"
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
    WHY_TIME,
    "an event id that is null",
    "no Confluent frame (a zero byte and a 4-byte schema id)",
    "a value that the spec's schema does not take here",
    "a symbol that the spec's schema does not have, whose enum has no default",
    "records inside themselves more than 500 deep, or values inside each other more than 4,000",
    "a decimal of more digits than can be read: 64 bits of an id, 153 digits of a number",
    "a time beyond 64 bits in the unit of the spec's schema",
    "more than 32,768 elements",
)
"""Native failures in words, by their number (`Why` in avro_program.hpp)."""


@dataclass(frozen=True, slots=True)
class Want:
    """A value that a program passes to a sink of the native handler."""

    path: str
    kind: int  # kind of the sink
    slot: int
    takes: frozenset[str]  # leaf types that the sink accepts
    name: str  # purpose, for messages: "feature user", "the event's time"
    salt: int = 0
    many: bool = False  # take every element of arrays on the path
    symbols: str = "keys"  # words of an enum: "keys" (salted), or "texts" (indexes of strings)
    edges: tuple[float, ...] = ()
    unit_ns: int | None = None  # of an event's time: unit to convert to if the schema has a unit


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program, with the path and type of each node for messages."""

    native: _native.Program
    places: Sequence[tuple[str, str]]  # per node: (path, type in words)

    def explain(self, why: int, node: int, offset: int) -> str:
        """Describe a failure: field, reason and byte."""
        path, type_ = self.places[node]
        where = f"{path} ({type_}): " if path else ""
        if why == UNRESOLVED and not path:
            where = f"the event ({type_}): "
        return f"{where}{WHY[why]}, at byte {offset}"


def compile_program(
    schema: Written,
    wants: Iterable[Want],
    *,
    reader: Record | None = None,
    explode: str | None = None,
    checked: Mapping[str, bool] | None = None,
    where: str = "Avro schema",
    names: bool = True,
) -> Compiled:
    """Compile a program for records written by a schema.

    Args:
        schema: Writer's schema.
        wants: Values to pass on, in the order in which sinks of one field run.
        reader: Schema that the records are read as, to which paths refer; None uses the writer's.
        explode: Path of the array of impressions (event programs only).
        checked: Paths of values that are only validated, with whether they are read as ids: they must resolve
            to the reader's schema as they must for the program that reads them.
        where: Name of the writer's schema in errors.
        names: Require equal names of records, enums and fixed outside of unions, too.

    Raises:
        ConfigError: The reader's schema lacks a wanted field or has it with an unsuitable type, or the
            writer's schema does not resolve to it.
    """
    wanted = list(wants)
    if reader is None:
        if not isinstance(schema, Record):
            raise ConfigError(
                where, "type", spell(schema), '"record"', "an event is a record of named fields"
            )
        reader = schema
    for want in wanted:
        _check(reader, want, explode, where)
    compiler = _Compiler(Resolver.of(schema, reader, names=names), explode, where)
    return compiler.compile(schema, reader, wanted, checked or {})


def written_path(schema: Written, reader: Record, path: str) -> str:
    """Return the path in the writer's schema of the reader's field at `path`, through records only.

    Returns `path` itself if there is none. If the writer's schema is a union, uses its first branch that
    resolves to the reader's record.
    """
    resolver = Resolver.of(schema, reader)
    branches = schema.branches if isinstance(schema, Union) else (schema,)
    written = next((b for b in branches if resolver.choose(b, reader) is not None), branches[0])
    parts: list[str] = []
    at: Type = reader
    for part in path.split("."):
        _, written = nullable(written)
        _, at = nullable(at)
        if not isinstance(written, Record) or not isinstance(at, Record):
            return path
        found = next((name for name, f in fields_of(written, at).items() if f.name == part), None)
        if found is None:
            return path
        parts.append(found)
        (written,) = (f.type for f in written.fields if f.name == found)
        (at,) = (f.type for f in at.fields if f.name == part)
    return ".".join(parts)


def _check(schema: Record, want: Want, explode: str | None, where: str) -> None:
    found = field_at(schema, want.path, f"{where}, wanted by {want.name}")
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
            f"one value for {want.name}",
            "a list feature takes many: set `max`",
        )
    wrong = leaf_names(inner) - want.takes
    if wrong or not leaf_names(inner):
        allowed = ", ".join(n for n in OPS if n in want.takes)
        raise ConfigError(where, want.path, spell(inner), f"one of {allowed}, for {want.name}")
    for leaf in inner.branches if isinstance(inner, Union) else (inner,):
        if not want.takes <= NUMBERS and decimal_scale(leaf) and decimal_digits(leaf) > EXACT_DIGITS:
            raise ConfigError(
                where,
                want.path,
                f"{spell(leaf)} of precision {decimal_digits(leaf)}",
                f"a decimal of at most {EXACT_DIGITS} digits, or of scale 0, for {want.name}",
                "an id with a fraction is read as a double: ids that differ in later digits would be one",
            )


def _arrays_on(schema: Record, path: str, explode: str | None) -> bool:
    """Return whether an array, other than the exploded one, is on the path."""
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

    def at(self, path: str) -> _Trie:
        node = self
        for part in path.split("."):
            node = node.below.setdefault(part, _Trie())
        return node


class _UnresolvedError(Exception):
    """The writer's type at a path does not resolve to the reader's."""

    def __init__(self, path: str, found: str, expected: str, hint: str = "") -> None:
        super().__init__(path, found, expected, hint)


class _Compiler:
    """Emitter of nodes in preorder."""

    def __init__(self, resolver: Resolver, explode: str | None, where: str) -> None:
        self.resolver, self.explode, self.where = resolver, explode, where
        self.in_element = False  # inside an element of the exploded array
        self.nodes: list[list[int]] = []
        self.sinks: list[tuple[int, int, int, int, int]] = []
        self.words: list[int] = []
        self.texts: list[bytes] = []
        self.places: list[tuple[str, str]] = []
        self.skipped_around: dict[str, int] = {}  # enclosing skipped records: name -> node

    def compile(
        self, schema: Written, reader: Record, wants: Sequence[Want], checked: Mapping[str, bool]
    ) -> Compiled:
        trie = _Trie()
        for want in wants:
            trie.at(want.path).here.append(want)
        for path, is_id in checked.items():
            takes = ANY_KEY if is_id else NUMBERS
            trie.at(path).here.append(Want(path, CHECKED, 0, takes, "a check"))
        if self.explode is not None:
            trie.at(self.explode)
        try:
            self.root(schema, reader, trie)
        except _UnresolvedError as error:
            raise ConfigError(self.where, *error.args) from None
        text = BytesColumn.of(self.texts)
        native = _native.Program(
            np.array(self.nodes, np.int64).reshape(-1, 7),
            np.array(self.sinks, np.uint64).reshape(-1, 5),
            np.array(self.words, np.uint64),
            text.data,
            text.ends,
        )
        return Compiled(native, self.places)

    def root(self, schema: Written, reader: Record, trie: _Trie) -> None:
        """Emit the root, which must be a record. A union becomes a record's only field, as a record adds no
        bytes."""
        if isinstance(schema, Union):
            with self.node("record", 0, "", spell(schema)):
                self.read(schema, reader, trie, "")
        elif trie.below:
            self.read(schema, reader, trie, "")
        else:
            self.skip(schema, "")

    @contextmanager
    def node(self, op: str, null_branch: int, path: str, type_: str) -> Iterator[list[int]]:
        """Append a node; the `with` block appends its subtree and may set its argument, [6]."""
        if len(self.nodes) >= MAX_NODES:
            found = f"more than {MAX_NODES} types, each use of one counted"
            raise ConfigError(self.where, path, found, "a smaller schema")
        node = [OPS[op], null_branch, 0, 0, 0, 0, 0]
        self.nodes.append(node)
        self.places.append((path, type_))
        yield node
        node[3] = len(self.nodes)

    # --- skipped values

    def skip(self, type_: Type, path: str) -> int:
        """Append the subtree of skipped values; return its node's index."""
        null_branch, inner = nullable(type_)
        index = len(self.nodes)
        if isinstance(inner, Recursion) and inner.name not in self.skipped_around:
            inner = self.resolver.written(inner)
        with self.node(op_of(inner), null_branch, path, spell(type_)) as node:
            match inner:
                case Record(name, fields):
                    with self.inside(name, index):
                        for f in fields:
                            self.skip(f.type, _join(path, f.name))
                case Recursion(name):
                    node[6] = self.skipped_around[name]
                case Array(items):
                    node[6] = least_bytes(items)
                    self.skip(items, path)
                case Map(values):
                    self.skip(values, f"{path}.*")
                    node[6] = self.add_words(0)
                case Union(branches):
                    children = [self.skip(b, path) for b in branches]
                    node[6] = self.add_words(len(children), *children)
                case Enum(_, symbols):
                    node[6] = len(symbols)
                case Fixed(_, size):
                    node[6] = size
        return index

    @contextmanager
    def inside(self, name: str, index: int) -> Iterator[None]:
        outer = self.skipped_around.get(name)
        self.skipped_around[name] = index
        yield
        if outer is None:
            del self.skipped_around[name]
        else:
            self.skipped_around[name] = outer

    def add_words(self, *words: int) -> int:
        at = len(self.words)
        self.words += words
        return at

    # --- wanted values

    def read(self, written: Type, read: Type, trie: _Trie, path: str) -> int:
        """Append the subtree of a writer's type, to be read as a reader's; return its node's index.

        Raises _UnresolvedError, after appending a part of it, if no value resolves.
        """
        written = self.resolver.written(written)
        if not isinstance(written, Union):
            return self.value(written, self.chosen(written, read, path), trie, path, 0, spell(written))
        null_branch, inner = nullable(written)
        null = next((b for b in written.branches if is_null(b)), None)
        if null_branch and null is not None and self.resolver.choose(null, read) is not None:
            mark = self.mark()
            try:
                inner = self.resolver.written(inner)
                into = self.chosen(inner, read, path)
                return self.value(inner, into, trie, path, null_branch, spell(written))
            except _UnresolvedError:  # nulls still resolve
                self.truncate(mark)
        index = len(self.nodes)
        with self.node("union", 0, path, spell(written)) as node:
            children: list[int] = []
            errors: list[_UnresolvedError] = []
            for branch in written.branches:
                children.append(len(self.nodes))
                mark = self.mark()
                try:
                    self.read(branch, read, trie, path)
                except _UnresolvedError as error:
                    errors.append(error)
                    self.truncate(mark)
                    with self.node("refuse", 0, path, f"{spell(branch)}, for {spell(read)}"):
                        pass
            if len(errors) == len(children):
                raise errors[0]
            node[2] = EXPLODED if self.explodes(path) else 0
            node[6] = self.add_words(len(children), *children)
        return index

    def explodes(self, path: str) -> bool:
        """Return whether the exploded array, or the union around it, begins here; elements share its path."""
        return path == self.explode and path != "" and not self.in_element

    def mark(self) -> tuple[int, ...]:
        return len(self.nodes), len(self.sinks), len(self.words), len(self.texts)

    def truncate(self, mark: tuple[int, ...]) -> None:
        nodes, sinks, words, texts = mark
        del (
            self.nodes[nodes:],
            self.places[nodes:],
            self.sinks[sinks:],
            self.words[words:],
            self.texts[texts:],
        )

    def chosen(self, written: Type, read: Type, path: str) -> Type:
        into = self.resolver.choose(written, read)
        if into is None:
            raise _UnresolvedError(
                path, spell(written), f"what the spec's schema can read as {spell(read)}", HINT
            )
        return into

    def value(self, written: Type, read: Type, trie: _Trie, path: str, null_branch: int, type_: str) -> int:
        """Append the subtree of two types that match; neither is a union."""
        index = len(self.nodes)
        match written, read:
            case Record(), Record():
                with self.node("record", null_branch, path, type_):
                    self.record(written, read, trie, path)
            case Array(items), Array(into):
                with self.node("array", null_branch, path, type_) as node:
                    node[2] = EXPLODED if self.explodes(path) else 0
                    node[6] = least_bytes(items)
                    outer, self.in_element = self.in_element, self.in_element or bool(node[2])
                    try:
                        self.wanted(items, into, trie, path)
                    finally:
                        self.in_element = outer
            case Map(values), Map(into):
                with self.node("map", null_branch, path, type_) as node:
                    node[6] = self.map(values, into, trie, path)
            case _:
                self.leaf(written, read, trie, path, null_branch, type_)
        return index

    def wanted(self, written: Type, read: Type, trie: _Trie, path: str) -> int:
        if trie.here or trie.below or path == self.explode:
            return self.read(written, read, trie, path)
        return self.skip(written, path)

    def record(self, written: Record, read: Record, trie: _Trie, path: str) -> None:
        into = fields_of(written, read)
        for f in written.fields:
            found = into.get(f.name)
            if found is None or found.name not in trie.below:
                self.skip(f.type, _join(path, f.name))
            else:
                self.wanted(f.type, found.type, trie.below[found.name], _join(path, found.name))
        have = {f.name for f in into.values()}
        for f in read.fields:
            if f.name in trie.below and f.name not in have:
                self.default(f, trie.below[f.name], _join(path, f.name))

    def default(self, f: AvroField, trie: _Trie, path: str) -> None:
        """Append the default of a field that the writer's schema lacks."""
        on_the_way = self.explode is not None and f"{self.explode}.".startswith(f"{path}.")
        if not f.has_default or on_the_way:
            raise _UnresolvedError(
                path,
                "no such field",
                f"{spell(f.type)}" + ("" if on_the_way else ", or a default in the spec's schema"),
                "the array that `explode` names must be there" if on_the_way else HINT_DEFAULT,
            )
        try:
            written = encode_value(f.type, f.default, self.resolver.reader)
        except UNFIT:
            raise ConfigError(
                self.where, f"{path}.default", f.default, f"a value of the field's type, {spell(f.type)}"
            ) from None
        own = _Compiler(Resolver(self.resolver.reader, self.resolver.reader), self.explode, self.where)
        own.nodes, own.sinks, own.words = self.nodes, self.sinks, self.words
        own.texts, own.places = self.texts, self.places
        with self.node("default", 0, path, spell(f.type)) as node:
            node[6] = len(self.texts)
            self.texts.append(written)
            own.read(f.type, f.type, trie, path)

    def map(self, values: Type, read: Type, trie: _Trie, path: str) -> int:
        self.skip(values, f"{path}.*")
        below = trie.below.items()
        looked_up = [(self.read(values, read, sub, f"{path}.{key}"), key) for key, sub in below]
        at = self.add_words(len(looked_up))
        for child, key in looked_up:
            self.add_words(child, len(self.texts))
            self.texts.append(key.encode())
        return at

    # --- leaves

    def leaf(self, written: Type, read: Type, trie: _Trie, path: str, null_branch: int, type_: str) -> None:
        wants = [want for want in trie.here if leaf_name(read) in want.takes]
        how = self.conversion(written, read, wants, path) if wants else ()
        with self.node("convert" if how else op_of(written), null_branch, path, type_) as node:
            if how:
                node[6] = self.add_words(*how)
            elif isinstance(written, Fixed):
                node[6] = written.size
            elif isinstance(written, Enum):
                node[6] = len(written.symbols)
            node[2] = WANTED if wants else 0
            node[4] = len(self.sinks)
            for want in wants:
                if want.kind != CHECKED:
                    self.sink(want, written, read)
            node[5] = len(self.sinks)

    def conversion(self, written: Type, read: Type, wants: Sequence[Want], path: str) -> tuple[int, ...]:
        """Return the words of the conversion that a value needs; () if none."""
        scale = decimal_scale(read)
        if scale is not None:
            written_scale = decimal_scale(written)
            exact = any(not want.takes <= NUMBERS for want in wants)
            if exact and written_scale not in (None, scale):
                same = f"a decimal of scale {scale}, as an id has one scale"
                raise _UnresolvedError(path, f"{spell(written)} of scale {written_scale}", same, HINT)
            if exact and scale and decimal_digits(written) > EXACT_DIGITS:
                few = f"a decimal of at most {EXACT_DIGITS} digits, as an id with a fraction is a double"
                raise _UnresolvedError(
                    path, f"{spell(written)} of precision {decimal_digits(written)}", few, HINT
                )
            size = written.size + 1 if isinstance(written, Fixed) else 0
            # An id without a fraction must have 64 bits; one with a fraction is the nearest double.
            return DECIMAL, size, scale if written_scale is None else written_scale, int(exact and scale == 0)
        if is_uuid(read):
            return (UUID,)
        if isinstance(written, Enum) and isinstance(read, Enum):
            bad = [int(s not in read.symbols and read.default is None) for s in written.symbols]
            return (SYMBOLS, len(bad), *bad) if any(bad) else ()
        if isinstance(written, Primitive) and written.name in ("int", "long"):
            return self.conversion_of_int(written, read, wants, path)
        return ()

    def conversion_of_int(
        self, written: Primitive, read: Type, wants: Sequence[Want], path: str
    ) -> tuple[int, ...]:
        is_int = int(written.name == "int")
        if leaf_name(read) in ("float", "double"):
            return (FLOAT_OF_INT if leaf_name(read) == "float" else DOUBLE_OF_INT), is_int
        found, wanted = time_unit(written), self.unit_of(read, wants)
        if found is not None and found.of_day and any(want.unit_ns is not None for want in wants):
            raise _UnresolvedError(
                path, spell(written), "a date or timestamp: an event's time has a day", HINT
            )
        if found is None or wanted is None or found == wanted or found.of_day != wanted.of_day:
            return ()
        factor, divisor = max(1, found.ns // wanted.ns), max(1, wanted.ns // found.ns)
        return SCALED_INT, is_int, factor, divisor

    @staticmethod
    def unit_of(read: Type, wants: Sequence[Want]) -> TimeUnit | None:
        """Return the unit of the reader's type; if it has none, the spec's unit of the event's time."""
        unit = time_unit(read)
        ns = next((want.unit_ns for want in wants if want.unit_ns is not None), None)
        return unit if unit is not None or ns is None else TimeUnit(of_day=False, ns=ns)

    def sink(self, want: Want, written: Type, read: Type) -> None:
        begin = len(self.words)
        if want.edges:
            self.words += np.array(want.edges, np.float64).view(np.uint64).tolist()
        elif isinstance(written, Enum) and isinstance(read, Enum):
            symbols = [(s if s in read.symbols else read.default or "").encode() for s in written.symbols]
            if want.symbols == "keys":
                column = BytesColumn.of(symbols)
                self.words += _native.keys_of_bytes(column.data, column.ends, want.salt).tolist()
            else:
                self.words += range(len(self.texts), len(self.texts) + len(symbols))
                self.texts += symbols
        self.sinks.append((want.kind, want.slot, want.salt, begin, len(self.words) - begin))


HINT = "the rules are those of Avro's schema resolution; change the spec's schema so that it can read both"
HINT_DEFAULT = "with a default there, records without the field can be read"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def explain_all(failures: I64, programs: Sequence[Compiled]) -> list[str]:
    """Describe native failures, (K, 5) int64: index, program, why, node, offset."""
    return [
        f"record {index}: {programs[program].explain(why, node, offset)}"
        for index, program, why, node, offset in failures.tolist()
    ]
