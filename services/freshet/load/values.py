"""Random values of a user's own schema, as JSON has them: what a field may hold, by its type and its name.

A field with a table of rows, or a key, draws from a stated number of keys by Zipf's law, as real ids are
distributed: few are frequent and most are rare. Nothing else about the user's traffic is known here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freshet.config.avro.schema import Array, Enum, Fixed, Map, Primitive, Record, Recursion, Type, Union
from freshet.config.spec.guess import IDENTIFIER, ITEM, USER, words_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError

__all__ = ["IDS", "OTHERS", "Draws", "Keys", "keys_of", "maker", "value_maker"]

IDS, OTHERS = 100_000, 50
"""Different values of a field whose name says that it identifies something, and of any other key."""

NULL_SHARE = 0.1
LIST_LENGTHS = (0, 5)
BLOCK = 4_096

Make = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Keys:
    """A field's key space: so many values; the i-th most frequent is drawn with weight 1 / i ** `zipf`."""

    path: str
    values: int
    zipf: float


@dataclass(eq=False)
class Draws:
    """By chance, repeatable by the seed."""

    seed: int
    keys: Mapping[str, Keys] = field(default_factory=dict)  # by path
    compared: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # path -> what labels look for

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)  # nosec B311  # to be repeated

    def ranks(self, keys: Keys) -> Make:
        """Draws the place of a key among the most frequent: 0 is the most frequent one."""
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
    """The key spaces of a spec's fields, by path in the served event: those of features with rows, and those
    that tell impressions of a request apart.

    Args:
        spec:  of the model.
        sizes: values of single fields, by path; `IDS` or `OTHERS` of those without.
        zipf:  exponent of Zipf's law; 0: all alike.

    Raises:
        ConfigError: a size is of no such field.
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


def maker(schema: Record, draws: Draws, *, leave_out: frozenset[str] = frozenset()) -> Make:
    """Makes records of the schema, without the fields at these paths."""
    return _record(schema, "", draws, leave_out)


def value_maker(type_: Type, path: str, draws: Draws, *, leave_out: frozenset[str] = frozenset()) -> Make:
    """Makes values of the field at this path."""
    return _of(type_, path, draws, leave_out)


def _record(record: Record, prefix: str, draws: Draws, leave_out: frozenset[str]) -> Make:
    fields = [
        (f.name, _of(f.type, f"{prefix}{f.name}", draws, leave_out))
        for f in record.fields
        if f"{prefix}{f.name}" not in leave_out
    ]
    return lambda: {name: make() for name, make in fields}


def _of(type_: Type, path: str, draws: Draws, leave_out: frozenset[str]) -> Make:  # noqa: PLR0911 - one a type
    rng = draws.rng
    if path in draws.compared:
        wanted = [_fitting(value, type_) for value in draws.compared[path]]
        return lambda: rng.choice(wanted)
    match type_:
        case Record():
            return _record(type_, f"{path}.", draws, leave_out)
        case Array(Recursion()):
            return list
        case Map(Recursion()):
            return dict
        case Recursion():
            return lambda: None  # it may be null, or the record would have no end
        case Array(items):
            make = _of(items, path, draws, leave_out)
            return lambda: [make() for _ in range(rng.randint(*LIST_LENGTHS))]
        case Map(values):
            make = _of(values, path, draws, leave_out)
            return lambda: {f"k{i}": make() for i in range(rng.randint(*LIST_LENGTHS))}
        case Union():
            others = [_of(b, path, draws, leave_out) for b in type_.others if not isinstance(b, Recursion)]
            share = NULL_SHARE if type_.nullable else 0.0
            return lambda: None if not others or rng.random() < share else rng.choice(others)()
        case Enum(_, symbols):
            return lambda: rng.choice(symbols)
        case Fixed(_, size):
            return lambda: rng.randbytes(size).decode("latin-1")  # as Avro writes bytes in JSON
        case Primitive(name):
            return _primitive(name, path, draws)


def _primitive(name: str, path: str, draws: Draws) -> Make:
    rng = draws.rng
    keys = draws.keys.get(path)
    if name in ("string", "int", "long") and keys is not None:
        rank, word = draws.ranks(keys), words_of(path)[-1]
        return rank if name != "string" else lambda: f"{word}-{rank()}"
    makes: dict[str, Make] = {
        "null": lambda: None,
        "boolean": lambda: rng.random() < 0.5,
        "int": lambda: int(rng.lognormvariate(3.0, 1.5)) & 0x7FFFFFFF,
        "long": lambda: int(rng.lognormvariate(3.0, 1.5)),
        "float": lambda: round(rng.lognormvariate(0.0, 1.0), 4),
        "double": lambda: round(rng.lognormvariate(0.0, 1.0), 6),
        "bytes": lambda: rng.randbytes(8).decode("latin-1"),
        "string": lambda: f"{rng.getrandbits(32):08x}",
    }
    return makes[name]


def _fitting(value: Any, type_: Type) -> Any:
    """A value of an expression as the field's type has it: a condition writes 1 for 1.0."""
    names = {t.name for t in _flat(type_) if isinstance(t, Primitive)}
    if isinstance(value, int) and not isinstance(value, bool) and names & {"float", "double"}:
        return float(value)
    return value


def _flat(type_: Type) -> Sequence[Type]:
    return type_.branches if isinstance(type_, Union) else (type_,)
