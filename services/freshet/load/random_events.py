"""Random events of a stream, and JSON values for any Avro schema, by the types and names of its fields.

Fields with rows, and key fields, draw from a given number of keys by Zipf's law, which real ids follow: few
are frequent, most are rare.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    field_at,
)
from freshet.config.spec.generate import IDENTIFIER, ITEM, USER, words_of
from freshet.config.spec.model import Spec, Stream
from freshet.errors import ConfigError
from freshet.inference.requests import time_value

IDS, OTHERS = 100_000, 50
"""Different values of a field with the name of an id, and of another key field."""

NULL_SHARE = 0.1
LIST_LENGTHS = (0, 5)
BLOCK = 4_096

Generate = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class KeySpace:
    """A field's key space: the i-th most frequent of `values` has weight 1 / i ** `zipf`."""

    path: str
    values: int
    zipf: float


@dataclass(eq=False)
class Draws:
    """Random generators of one seed."""

    seed: int
    keys: Mapping[str, KeySpace] = field(default_factory=dict)  # by path
    compared: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # values in labels, by path

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)  # nosec B311  # repeatable

    def ranks(self, keys: KeySpace) -> Generate:
        """Return a generator of ranks of keys by frequency; 0 is the most frequent."""
        rng = np.random.default_rng((self.seed, len(keys.path), *keys.path.encode()))
        weights = np.arange(1, keys.values + 1, dtype=np.float64) ** -keys.zipf
        cumulative = np.cumsum(weights / weights.sum())
        cumulative[-1] = 1.0
        drawn: list[int] = []

        def draw() -> int:
            if not drawn:
                drawn.extend(np.searchsorted(cumulative, rng.random(BLOCK), side="right").tolist())
            return drawn.pop()

        return draw


def keys_of(spec: Spec, sizes: Mapping[str, int], zipf: float) -> dict[str, KeySpace]:
    """Return the key spaces of features with rows and of the items' key fields, by path in the served event.

    Args:
        spec:  the model's.
        sizes: number of values by path; by default `IDS` or `OTHERS`.
        zipf:  exponent of Zipf's law; 0: uniform.

    Raises ConfigError if `sizes` names another field.
    """
    fields = [f.field for f in spec.features if f.field is not None and f.table is not None]
    paths = list(dict.fromkeys([*fields, *spec.events.served.key[1:]]))
    for path in sizes:
        if path not in paths:
            raise ConfigError("load", "--keys", path, f"one of the fields with rows: {', '.join(paths)}")
    named = USER | ITEM | IDENTIFIER
    return {
        path: KeySpace(path, sizes.get(path, IDS if named & set(words_of(path)) else OTHERS), zipf)
        for path in paths
    }


def record_generator(schema: Record, draws: Draws, *, leave_out: frozenset[str] = frozenset()) -> Generate:
    """Return a generator of records of the schema, without the fields at the paths in `leave_out`."""
    return _record_generator(schema, "", draws, leave_out)


def _record_generator(record: Record, prefix: str, draws: Draws, leave_out: frozenset[str]) -> Generate:
    fields = [
        (f.name, value_generator(f.type, f"{prefix}{f.name}", draws, leave_out))
        for f in record.fields
        if f"{prefix}{f.name}" not in leave_out
    ]
    return lambda: {name: generate() for name, generate in fields}


def value_generator(  # noqa: PLR0911 - one per type
    type_: Type, path: str, draws: Draws, leave_out: frozenset[str] = frozenset()
) -> Generate:
    """Return a generator of values of the field at `path`."""
    rng = draws.rng
    if path in draws.compared:
        wanted = [_fitting(value, type_) for value in draws.compared[path]]
        return lambda: rng.choice(wanted)
    match type_:
        case Record():
            return _record_generator(type_, f"{path}.", draws, leave_out)
        case Array(Recursion()):
            return list
        case Map(Recursion()):
            return dict
        case Recursion():
            return lambda: None  # a recursive field outside arrays and maps is nullable
        case Array(items):
            generate = value_generator(items, path, draws, leave_out)
            return lambda: [generate() for _ in range(rng.randint(*LIST_LENGTHS))]
        case Map(values):
            generate = value_generator(values, path, draws, leave_out)
            return lambda: {f"k{i}": generate() for i in range(rng.randint(*LIST_LENGTHS))}
        case Union():
            others = [
                value_generator(b, path, draws, leave_out)
                for b in type_.others
                if not isinstance(b, Recursion)
            ]
            share = NULL_SHARE if type_.nullable else 0.0
            return lambda: None if not others or rng.random() < share else rng.choice(others)()
        case Enum(_, symbols):
            return lambda: rng.choice(symbols)
        case Fixed(_, size):
            return lambda: rng.randbytes(size).decode("latin-1")  # Avro's JSON encoding of bytes
        case Primitive(name):
            return _primitive_generator(name, path, draws)


def _primitive_generator(name: str, path: str, draws: Draws) -> Generate:
    rng = draws.rng
    keys = draws.keys.get(path)
    if name in ("string", "int", "long") and keys is not None:
        rank, word = draws.ranks(keys), words_of(path)[-1]
        return rank if name != "string" else lambda: f"{word}-{rank()}"
    generators: dict[str, Generate] = {
        "null": lambda: None,
        "boolean": lambda: rng.random() < 0.5,
        "int": lambda: int(rng.lognormvariate(3.0, 1.5)) & 0x7FFFFFFF,
        "long": lambda: int(rng.lognormvariate(3.0, 1.5)),
        "float": lambda: round(rng.lognormvariate(0.0, 1.0), 4),
        "double": lambda: round(rng.lognormvariate(0.0, 1.0), 6),
        "bytes": lambda: rng.randbytes(8).decode("latin-1"),
        "string": lambda: f"{rng.getrandbits(32):08x}",
    }
    return generators[name]


def _fitting(value: Any, type_: Type) -> Any:
    """Convert a value of an expression to the field's type, since a condition may write 1 for 1.0."""
    names = {t.name for t in _branches(type_) if isinstance(t, Primitive)}
    if isinstance(value, int) and not isinstance(value, bool) and names & {"float", "double"}:
        return float(value)
    return value


def _branches(type_: Type) -> Sequence[Type]:
    return type_.branches if isinstance(type_, Union) else (type_,)


Keys = tuple[Any, ...]
"""An item's values of the stream's key, without the first, which is the request."""


class EventBuilder:
    """Builds events of a stream as JSON objects."""

    def __init__(self, stream: Stream, schema: Record, draws: Draws) -> None:
        self.stream = stream
        self.request_type = field_at(schema, stream.key[0]).type
        keys = stream.key[1:]
        self._key_generators = [value_generator(field_at(schema, path).type, path, draws) for path in keys]
        self._id_type = field_at(schema, stream.id).type if stream.id else None
        places = [*stream.key, stream.time.path, *filter(None, (stream.id, stream.explode))]
        self._context = record_generator(schema, draws, leave_out=frozenset(places))
        self._element: Generate | None = None
        if stream.explode is not None:
            array = field_at(schema, stream.explode).type
            if isinstance(array, Array) and isinstance(array.items, Record):
                inner = frozenset(path for path in places if path != stream.explode)
                self._element = value_generator(array.items, stream.explode, draws, inner)

    def draw_items(self, most: int) -> list[Keys]:
        """Draw `most` different items, or fewer if 2 · `most` draws do not yield as many."""
        found: dict[Keys, None] = {}
        for _ in range(2 * most):
            found.setdefault(tuple(generate() for generate in self._key_generators))
            if len(found) == most:
                break
        return list(found)

    def context(self) -> dict[str, Any]:
        """Draw the fields of an event other than request, items, time and id."""
        drawn: dict[str, Any] = self._context()
        return drawn

    def elements(self, items: Sequence[Keys]) -> list[Any]:
        """Build the exploded array, with one element for each item."""
        if self._element is None:
            return [keys[0] if keys else None for keys in items]  # an array of ids
        elements = [self._element() for _ in items]
        for at, path in enumerate(self.stream.key[1:]):
            below = _below(self.stream.explode, path)
            if below is not None:
                for element, keys in zip(elements, items, strict=True):
                    set_path(element, below, keys[at])
        return elements

    def event(self, request: Any, items: Sequence[Keys], now_ms: int, number: int) -> dict[str, Any]:
        """Build an event of the items, or of the first if the stream explodes no array.

        `number` distinguishes its id from others of the request.
        """
        stream, event = self.stream, self.context()
        if stream.explode is not None:
            set_path(event, stream.explode, self.elements(items))
        for path, value in zip(stream.key, (request, *items[0]), strict=True):
            if value is request or _below(stream.explode, path) is None:
                self._set(event, path, value)
        self._set(event, stream.time.path, time_value(now_ms, stream.time))
        if stream.id is not None and self._id_type is not None:
            self._set(event, stream.id, identifier(self._id_type, f"{request}-{number}", number))
        return event

    def _set(self, event: dict[str, Any], path: str, value: Any) -> None:
        below = _below(self.stream.explode, path)
        if below is None or self.stream.explode is None:
            set_path(event, path, value)
            return
        for element in get_path(event, self.stream.explode):
            set_path(element, below, value)


def identifier(type_: Type, text: str, number: int) -> str | int:
    """Return the id as the field's type requires: the text or the number."""
    kinds = type_.branches if isinstance(type_, Union) else (type_,)
    names = {kind.name for kind in kinds if isinstance(kind, Primitive)}
    return text if "string" in names or not names & {"int", "long"} else number


def set_path(record: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path; create missing objects, also in place of null."""
    *parents, last = path.split(".")
    for part in parents:
        if not isinstance(record.get(part), dict):
            record[part] = {}
        record = record[part]
    record[last] = value


def get_path(record: Any, path: str) -> Any:
    """Return the value at a dotted path."""
    for part in path.split("."):
        record = record[part]
    return record


def _below(explode: str | None, path: str) -> str | None:
    """Return the rest of a path below the exploded array; None for another path."""
    if explode is None or not path.startswith(f"{explode}."):
        return None
    return path.removeprefix(f"{explode}.")
