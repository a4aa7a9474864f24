"""Random pairs of a writer's and a reader's schema: records of the first, read as the second by freshet and
by fastavro's resolver.

The reader's schema is the writer's after some changes as people make them (fields added, gone, renamed with
an alias, in another order; types promoted, wrapped in unions, taken out of them; symbols added and gone;
records renamed), some of them against the rules. Features lie at leaves of the reader's schema; fastavro gets
the reader's schema without what no feature reads, as freshet does not resolve that (a record is not refused
for a field that is not used).

Where the two differ on purpose, and what is done about it here:

FLOAT    An int or long read as float has a float's 24 bits, as in Avro's other libraries; fastavro's Python
         float has 53. What fastavro reads is rounded.
DEFAULT  fastavro hands a default over as its JSON has it: bytes as text, a float's 1 as an integer. It is
         converted, by the reader's type.
SCHEMA   Where no value of a list, map or record can be read as the reader's schema, freshet refuses the
         schema, and so its records, empty lists or not; fastavro finds it when it comes to a value. Records
         without empty lists and maps are made for the check. The same holds within a type of a union, by
         record; these are counted apart.
UTF8     freshet takes strings for bytes where they make keys; fastavro refuses bytes read as string that are
         not UTF-8. Bytes here are.
KEYS     Of a map freshet reads the keys that features name; fastavro resolves all values. Maps here have
         that key, if any.
NAMES    fastavro takes a record for an enum or fixed of the same name, and fails with KeyError if two written
         fields are read as one. Neither is made here.
"""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import fastavro
import numpy as np
from fastavro.schema import SchemaParseException

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.layout import layout_of
from freshet.errors import ConfigError
from freshet.features import SampleDecoder
from freshet.features.program import WHY
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle
from tests.fuzz.compare import Disagreement, leaves, spec_of
from tests.fuzz.schemas import MAP_KEY, SchemaMaker, Writer, varint

UNRESOLVED = next(why for why in WHY if "does not take here" in why)

PROMOTIONS = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


class PairMaker(SchemaMaker):
    """Makes a writer's schema, and reader's schemas from it."""

    trees = True  # whether records get a field with a record that contains itself

    def record(self, depth: int = 0) -> dict[str, Any]:
        made = super().record(depth)
        if self.random.random() < 0.2:
            made["namespace"] = self.random.choice(("", "a", "a.b"))
        if self.trees and self.random.random() < 0.15:  # a record inside itself, which no feature reads
            name = self.name("R")
            again = self.random.choice((["null", name], {"type": "array", "items": name}))
            inside = [{"name": "x", "type": "int"}, {"name": "next", "type": again}]
            made["fields"].append(
                {"name": "tree", "type": {"type": "record", "name": name, "fields": inside}}
            )
        return made

    def reader(self, writer: dict[str, Any]) -> dict[str, Any]:
        """What a reader may have in its stead. The outermost record keeps its fields' names but for some."""
        self.trees = False
        return self.changed_record(copy.deepcopy(writer), often=0.35)

    def changed(self, type_: Any, often: float) -> Any:  # noqa: PLR0911 - one for each kind
        """A type in the reader's schema, for one in the writer's."""
        random = self.random
        if isinstance(type_, list):
            return self.changed_union(type_, often)
        if random.random() < often * 0.3:
            return self.wrapped(self.changed(type_, often))
        if isinstance(type_, str):
            if type_ in PROMOTIONS and random.random() < often:
                return random.choice(PROMOTIONS[type_])
            return random.choice(("int", "string", "double", "null")) if random.random() < 0.03 else type_
        match type_["type"]:
            case "record":
                return self.changed_record(type_, often)
            case "array":
                return {**type_, "items": self.changed(type_["items"], often)}
            case "map":
                return {**type_, "values": self.changed(type_["values"], often)}
            case "enum":
                return self.renamed(self.changed_enum(type_, often), often)
            case _:
                size = type_["size"] + (random.random() < 0.05)
                return self.renamed({**type_, "size": size}, often)

    def wrapped(self, type_: Any) -> Any:
        """A union with the type."""
        if isinstance(type_, list):
            return type_
        kind = type_ if isinstance(type_, str) else type_["type"]
        wide = () if kind == "float" else ("double",)
        others = [t for t in ("null", "boolean", "string", "long", "bytes", *wide) if t != kind]
        return self.shuffled([type_, *self.random.sample(others, self.random.randint(1, 2))])

    def changed_union(self, branches: list[Any], often: float) -> Any:
        made = [self.changed(b, often) for b in branches]
        kinds = {
            b if isinstance(b, str) else b.get("name", b["type"]): b for b in made if not isinstance(b, list)
        }
        if "double" in kinds:  # a Python float does not show which of the two was read
            kinds.pop("float", None)
        made = list(kinds.values()) or ["null"]
        if self.random.random() < often:
            self.random.shuffle(made)
        if len(made) > 1 and self.random.random() < often * 0.3:
            made.pop()
        return made[0] if len(made) == 1 and self.random.random() < 0.5 else made

    def changed_enum(self, enum: dict[str, Any], often: float) -> dict[str, Any]:
        symbols = list(enum["symbols"])
        if self.random.random() < often:
            symbols = self.random.sample(symbols, self.random.randint(1, len(symbols)))
        if self.random.random() < often:
            symbols.insert(self.random.randint(0, len(symbols)), "NEW")
        made = {**enum, "symbols": symbols}
        return {**made, "default": self.random.choice(symbols)} if self.random.random() < 0.5 else made

    def renamed(self, type_: dict[str, Any], often: float) -> dict[str, Any]:
        """A named type, perhaps under another name, mostly with an alias."""
        if self.random.random() > often * 0.4:
            return type_
        old = type_["name"]
        aliases = {"aliases": [old]} if self.random.random() < 0.9 else {}
        return {**type_, "name": self.name(old[0]), **aliases}

    def changed_record(self, record: dict[str, Any], often: float) -> dict[str, Any]:
        random, fields = self.random, []
        for f in record["fields"]:
            if f["name"] == "tree" or random.random() < often * 0.3:
                continue
            made = {"name": f["name"], "type": self.changed(f["type"], often)}
            if random.random() < often * 0.3:
                made |= {"name": f"{f['name']}_now", "aliases": [f["name"], "never"]}
            fields.append(made)
        for _ in range(random.choice((0, 0, 1, 2))):
            fields.append(self.new_field())
        if random.random() < often:
            random.shuffle(fields)
        made = self.renamed({**record, "fields": fields}, often)
        if random.random() < often * 0.3:
            made["namespace"] = "elsewhere"
        return made

    def new_field(self) -> dict[str, Any]:
        type_ = self.type(2)
        made = {"name": self.name("added"), "type": type_}
        return {**made, "default": self.default(type_)} if self.random.random() < 0.85 else made

    def default(self, type_: Any) -> Any:  # noqa: PLR0911 - one for each kind
        """A default, as JSON has it; of a union's first type, which all readers take."""
        random = self.random
        if isinstance(type_, list):
            plain = {"bytes": "ab", "float": 0.5, "double": 0.5, "string": "b"}
            return (
                plain[type_[0]] if isinstance(type_[0], str) and type_[0] in plain else self.default(type_[0])
            )
        if isinstance(type_, str):
            return {
                "null": None,
                "boolean": True,
                "int": random.randint(-9, 9),
                "long": 1 << 40,
                "float": random.choice((0.1, 3)),
                "double": random.choice((0.1, 7)),
                "bytes": "\u00ff\u0001",
                "string": "ä",
            }[type_]
        match type_["type"]:
            case "record":
                return {f["name"]: self.default(f["type"]) for f in type_["fields"]}
            case "array":
                return [self.default(type_["items"]) for _ in range(random.randint(0, 2))]
            case "map":
                return {MAP_KEY: self.default(type_["values"])} if random.random() < 0.7 else {}
            case "enum":
                return random.choice(type_["symbols"])
            case _:
                return "f" * type_["size"]


class PairWriter(Writer):
    """Writes records of which maps hold the one key."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.named: dict[str, Any] = {}
        self.depth = 0
        self.full = False  # no empty lists and maps

    def write(self, type_: Any) -> bytes:
        if isinstance(type_, str) and type_ in self.named:
            type_ = self.named[type_]
        if isinstance(type_, dict) and type_["type"] == "record":
            self.named[type_["name"]] = type_
        if isinstance(type_, dict) and type_["type"] == "map":
            there = self.full or self.random.random() < 0.8
            return (
                varint(1) + varint(1) + MAP_KEY.encode() + self.write(type_["values"]) if there else b""
            ) + b"\0"
        if (
            isinstance(type_, list)
            and type_[0] == "null"
            and isinstance(type_[-1], str)
            and type_[-1] in self.named
        ):
            return b"\0" if self.random.random() < 0.6 else b"\2" + self.write(type_[1])
        return super().write(type_)

    def leaf(self, name: str) -> bytes:
        return super().leaf("string" if name == "bytes" else name)

    def blocks(self, item: Any, most: int = 5) -> bytes:
        self.depth += 1
        try:
            if self.depth > 4:
                return b"\0"
            made = super().blocks(item, min(most, 2))
            return varint(1) + item() + b"\0" if made == b"\0" and self.full else made
        finally:
            self.depth -= 1


def pruned(schema: Any, paths: Sequence[str]) -> Any:
    """The schema with the fields on these paths alone."""

    def record(type_: dict[str, Any], prefix: str) -> dict[str, Any]:
        fields = []
        for f in type_["fields"]:
            path = f"{prefix}{f['name']}"
            if any(p == path or p.startswith(f"{path}.") for p in paths):
                fields.append({**f, "type": inside(f["type"], path)})
        return {**type_, "fields": fields}

    def inside(type_: Any, path: str) -> Any:
        if isinstance(type_, list):
            return [inside(b, path) for b in type_]
        if isinstance(type_, dict) and type_["type"] == "record":
            return record(type_, f"{path}.")
        if isinstance(type_, dict) and type_["type"] == "array":
            return {**type_, "items": inside(type_["items"], path)}
        if isinstance(type_, dict) and type_["type"] == "map":
            return {**type_, "values": inside(type_["values"], f"{path}.{MAP_KEY}")}
        return type_

    return record(schema, "")


def as_read(type_: Any, value: Any) -> Any:  # noqa: PLR0911 - one for each kind
    """fastavro's value as the reader's type has it: see FLOAT and DEFAULT."""
    if value is None:
        return None
    if isinstance(type_, list):
        fitting = [b for b in type_ if fits(b, value)]
        return as_read(fitting[0], value) if fitting else value
    if type_ == "float":
        with np.errstate(over="ignore"):
            return float(np.float32(value))
    if type_ == "double":
        return float(value)
    if isinstance(type_, str):
        return value.encode("latin-1") if type_ == "bytes" and isinstance(value, str) else value
    match type_["type"]:
        case "record":
            return {f["name"]: as_read(f["type"], value[f["name"]]) for f in type_["fields"]}
        case "array":
            return [as_read(type_["items"], v) for v in value]
        case "map":
            return {k: as_read(type_["values"], v) for k, v in value.items()}
        case "fixed":
            return value.encode("latin-1") if isinstance(value, str) else value
        case _:
            return value


def fits(type_: Any, value: Any) -> bool:
    """Whether fastavro's value may be of this branch of a union. An integer of a default stands before those
    read."""
    kind = type_ if isinstance(type_, str) else type_["type"]
    wanted = {
        "boolean": bool, "int": int, "long": int, "float": float, "double": float, "bytes": bytes, "string":
        str, "fixed": bytes, "enum": str, "record": dict, "map": dict, "array": list, "null": type(None),
    }[kind]  # fmt: skip
    return isinstance(value, wanted) and not (isinstance(value, bool) and kind != "boolean")


def compare_pair(seed: str, records: int) -> Counter[str]:
    """Make a pair of schemas and `records` of the writer's, and compare what is read as the reader's.

    Returns:
        How many records were read, refused, and refused for their schema.

    Raises:
        Disagreement: with all that is needed to see it again.
    """
    random = Random(seed)
    maker = PairMaker(random)
    schema = maker.record()
    reader = maker.reader(schema)
    if not list(leaves(reader, "", many=False)):
        return Counter({"no leaf to read": records})
    spec, paths = spec_of(reader, random)
    theirs = pruned(reader, paths)
    try:
        written, read = parse_schema(schema), parse_schema(reader)
        parsed = fastavro.parse_schema(copy.deepcopy(schema)), fastavro.parse_schema(copy.deepcopy(theirs))
    except (ConfigError, SchemaParseException, ValueError) as error:
        raise Disagreement([schema, reader], b"", "both parse", repr(error)) from error
    writer = PairWriter(random)
    decoder = SampleDecoder(spec, layout_of(spec), lambda _: written, read, names=True)
    try:
        decoder.program(1)
    except ConfigError as error:
        writer.full = True
        for _ in range(records):
            record = writer.write(schema)
            value = fastavro_value(parsed, record)
            if not isinstance(value, Exception):
                raise Disagreement([schema, theirs], record, str(error), value) from error
        return Counter({"refused by the schema": records})
    made = [writer.write(schema) for _ in range(records)]
    values = [fastavro_value(parsed, record) for record in made]
    got = decoder.decode(BytesColumn.of(made), 1, np.zeros(records, np.int64))
    bad = dict(zip(got.bad.tolist(), got.why, strict=True))
    empty = 0
    for i, value in enumerate(values):
        if i in bad and UNRESOLVED in bad[i] and has_empty(value):
            empty += 1
        elif isinstance(value, Exception) != (i in bad):
            raise Disagreement([schema, theirs], made[i], bad.get(i, "read"), value)
    good = [i for i in range(records) if i not in bad]
    layout = layout_of(spec)
    samples = [as_read(theirs, values[i]) for i in good]
    ours = oracle.decoded_keys(got)
    expected = oracle.group_keys(spec, layout, samples, [0] * len(samples))
    wanted = [spec.features[f] for f in layout.dense]
    for row, i in enumerate(good):
        keys = [[feature[row] for feature in group] for group in ours]
        by_hand = [[feature[row] for feature in group] for group in expected]
        dense = np.array([oracle.dense_value(f, samples[row], serving=False) for f in wanted], np.float32)
        if keys != by_hand or not np.array_equal(got.dense[row], dense, equal_nan=True):
            found = (keys, got.dense[row].tolist())
            raise Disagreement([schema, theirs], made[i], found, (by_hand, dense.tolist(), samples[row]))
    refused = Counter({"refused": len(bad) - empty, "refused, an empty list or map": empty})
    return Counter({"read": len(good)}) + refused


def has_empty(value: Any) -> bool:
    """Whether there is an empty list or map in what fastavro read: see SCHEMA."""
    if isinstance(value, dict):
        return not value or any(has_empty(v) for v in value.values())
    return isinstance(value, list) and (not value or any(has_empty(v) for v in value))


def fastavro_value(parsed: tuple[Any, Any], record: bytes) -> Any:
    """What fastavro reads; or what it raises, of whatever type."""
    stream = io.BytesIO(record)
    try:
        value = fastavro.schemaless_reader(stream, *parsed, handle_unicode_errors="surrogateescape")
    except Exception as error:  # its types are not promised
        return error
    if stream.read(1):
        raise Disagreement(parsed[0], record, "is read", "fastavro leaves bytes")
    return value
