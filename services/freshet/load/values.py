"""Random JSON values for any Avro schema, by the types and names of its fields.

Fields with rows, and key fields, draw from a given number of keys by Zipf's law, which real ids follow: few
are frequent, most are rare.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freshet.config.avro.schema import Array, Enum, Fixed, Map, Primitive, Record, Recursion, Type, Union
from freshet.config.spec.generate import IDENTIFIER, ITEM, USER, words_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError

__all__ = ["IDS", "OTHERS", "Draws", "Keys", "keys_of", "record_generator", "value_generator"]

IDS, OTHERS = 100_000, 50
"""Different values of a field with the name of an id, and of another key field."""

NULL_SHARE = 0.1
LIST_LENGTHS = (0, 5)
BLOCK = 4_096

Generate = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Keys:
    """A field's key space: the i-th most frequent of `values` has weight 1 / i ** `zipf`."""

    path: str
    values: int
    zipf: float


@dataclass(eq=False)
class Draws:
    """Random generators of one seed."""

    seed: int
    keys: Mapping[str, Keys] = field(default_factory=dict)  # by path
    compared: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # values in labels, by path

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)  # nosec B311  # repeatable

    def ranks(self, keys: Keys) -> Generate:
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


def keys_of(spec: Spec, sizes: Mapping[str, int], zipf: float) -> dict[str, Keys]:
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
        path: Keys(path, sizes.get(path, IDS if named & set(words_of(path)) else OTHERS), zipf)
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
