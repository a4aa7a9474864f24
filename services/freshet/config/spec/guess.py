"""What the fields of unknown events probably mean, by their names and types: the guesses behind `freshet
init`.

Names are compared as words: `reqId`, `request_id` and `request.id` are the same. Nothing here is relied on
by a running service: a wrong guess is a line that the user mends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from freshet.config.avro.schema import (
    Array,
    Enum,
    Primitive,
    Record,
    Type,
    Union,
    field_at,
    paths,
    sample_schema,
)
from freshet.config.spec.schema_fit import kind_of
from freshet.errors import ConfigError

__all__ = ["Guess", "Leaf", "StreamGuess", "guess", "leaves", "words_of"]

SAME = {
    "req": "request",
    "imp": "impression",
    "sess": "session",
    "prod": "product",
    "cust": "customer",
    "pos": "position",
}
REQUEST = {"request", "impression", "session", "slate", "query", "search", "page", "auction"}
ITEM = {
    "item",
    "product",
    "ad",
    "sku",
    "video",
    "article",
    "doc",
    "document",
    "listing",
    "stock",
    "offer",
    "song",
    "candidate",
}
USER = {
    "user",
    "customer",
    "member",
    "visitor",
    "account",
    "viewer",
    "client",
    "person",
    "listener",
    "reader",
    "player",
    "shopper",
    "buyer",
    "guest",
    "subscriber",
    "profile",
}
IDENTIFIER = {"id", "code", "sku", "key", "uuid", "guid"}
TIME = {"ts", "time", "timestamp", "at", "date", "when"}
SERVED = {"impression", "served", "ranked", "slate", "recommendation"}
SHOWN = {"viewport", "shown", "seen", "exposure", "visible", "view"}
ACTION = {"action", "click", "feedback", "interaction", "conversion", "event", "response"}
TYPE = {"type", "action", "event", "kind", "verb"}

Role = Literal["served", "shown", "action"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A field with one value or a list of values."""

    path: str
    type: Type
    kind: str  # see `freshet.config.spec.schema_fit.kind_of`
    nullable: bool
    repeated: bool

    @property
    def words(self) -> tuple[str, ...]:
        """The words of its path."""
        return words_of(self.path)

    @property
    def identifies(self) -> bool:
        """Whether it may stand in a key: one integer or text."""
        return self.kind in ("integer", "text")


@dataclass(frozen=True, slots=True)
class StreamGuess:
    """Where the envelope stands in one stream's fields."""

    role: Role
    path: str  # of the schema file
    schema: Record
    key: tuple[str, ...]
    time: str  # "ts:ms"
    id: str | None


@dataclass(frozen=True, slots=True)
class Guess:
    """What the schemas seem to describe."""

    streams: tuple[StreamGuess, ...]  # served, shown if there is one, action
    explode: str | None
    type_field: Leaf | None  # of an action: which action it is

    def stream(self, role: Role) -> StreamGuess:
        """The stream of that role. Raises StopIteration."""
        return next(s for s in self.streams if s.role == role)


def words_of(path: str) -> tuple[str, ...]:
    """The words of a path, singular and in small letters: `user.lastItems` is user, last, item."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", path)
    words = (SAME.get(p.lower(), p.lower()) for p in parts)
    singular = tuple(w[:-1] if len(w) > 3 and w.endswith("s") and w[-2] not in "sui" else w for w in words)
    return singular or (path.lower(),)


def leaves(schema: Record) -> Iterator[Leaf]:
    """Every field with values of its own, in order; those inside arrays of records are `repeated`."""
    for path in paths(schema):
        found = field_at(schema, path)
        kind = kind_of(found.type)
        if "record" not in kind and "map" not in kind and kind not in ("null", ""):
            yield Leaf(path, found.type, kind, found.nullable, found.repeated)


def guess(schemas: Sequence[tuple[str, Record]]) -> Guess:
    """Guess what two or three schemas describe.

    Args:
        schemas: (path of the file, its schema).

    Raises:
        ConfigError: there are not two or three, or the request, the item or the time cannot be found.
    """
    if not 2 <= len(schemas) <= 3:
        raise ConfigError(
            "freshet init",
            "--schema",
            [p for p, _ in schemas],
            "two or three schemas: served events, actions, and events shown",
        )
    roles = _roles(schemas)
    served_path, served = roles["served"]
    explode = _explode(served)
    key = _served_key(served_path, served, roles["action"][1], explode)
    order: tuple[Role, ...] = ("served", "shown", "action")
    streams = []
    for role in (r for r in order if r in roles):
        path, schema = roles[role]
        own = key if role == "served" else tuple(_matching(served, k, path, schema) for k in key)
        streams.append(StreamGuess(role, path, schema, own, _time(path, schema, own), _event_id(schema, own)))
    return Guess(tuple(streams), explode, _type_field(roles["action"][1], streams[-1].key))


def _roles(schemas: Sequence[tuple[str, Record]]) -> dict[Role, tuple[str, Record]]:
    names: tuple[Role, ...] = ("served", "action") if len(schemas) == 2 else ("served", "action", "shown")

    def score(role: Role, path: str, schema: Record) -> int:
        words = set(words_of(f"{path.rpartition('/')[2].removesuffix('.avsc')}.{schema.name}"))
        has_array = _explode(schema) is not None
        has_type = any(set(leaf.words[-1:]) & TYPE for leaf in leaves(schema))
        named = {"served": SERVED, "shown": SHOWN, "action": ACTION}[role]
        return 2 * bool(words & named) + {"served": 3 * has_array, "shown": 0, "action": 2 * has_type}[role]

    # the first of equally good ones: schemas in the order given
    best = max(permutations(names), key=lambda p: sum(score(r, *s) for r, s in zip(p, schemas, strict=True)))
    return dict(zip(best, schemas, strict=True))


def _explode(schema: Record) -> str | None:
    """The array of records that looks most like the items of a request."""
    arrays = []
    for path in paths(schema):
        found = field_at(schema, path)
        whole = "." not in path and not found.nullable and not found.repeated
        if whole and isinstance(found.type, Array) and isinstance(found.type.items, Record):
            arrays.append(path)
    return max(arrays, key=lambda p: bool(set(words_of(p)) & (ITEM | SERVED)), default=None)


def _served_key(path: str, served: Record, action: Record, explode: str | None) -> tuple[str, ...]:
    def inside(leaf: Leaf) -> bool:
        return explode is not None and leaf.path.startswith(explode + ".")

    own = [x for x in leaves(served) if x.identifies and (inside(x) or not x.repeated)]
    theirs = [x for x in leaves(action) if x.identifies and not x.repeated]

    def best(candidates: list[Leaf], wanted: set[str], unwanted: set[str]) -> Leaf | None:
        scored = [(_alike(a, b, wanted, unwanted), a) for a in candidates for b in theirs if a.kind == b.kind]
        top = max((s for s, _ in scored), default=0)
        return next(a for s, a in scored if s == top) if top >= 3 else None

    request = best([x for x in own if not inside(x)], REQUEST, ITEM | USER | TIME | TYPE)
    if request is None:
        raise _missing(path, served, "a field that identifies the request, of the same name in the actions")
    item = best(
        [x for x in own if x is not request and (explode is None or inside(x))], ITEM, USER | TIME | TYPE
    )
    if item is None and explode is not None:
        raise _missing(
            path, served, f"a field of {explode} that identifies the item, of the same name in the actions"
        )
    return (request.path,) if item is None else (request.path, item.path)


def _alike(a: Leaf, b: Leaf, wanted: set[str], unwanted: set[str]) -> int:
    """How much two fields of two streams look like one and the same identifier; 3 and more is likely."""
    x, y = a.words, b.words
    shorter = min(len(x), len(y))
    same = x == y or x[-shorter:] == y[-shorter:]
    last = bool({x[-1], y[-1]} & IDENTIFIER)
    if not same or set(x[-1:]) & unwanted:
        return 0
    return 2 + (x == y) + 2 * bool(set(x) & wanted) + last - 3 * bool(set(x) & unwanted)


def _matching(served: Record, key: str, path: str, schema: Record) -> str:
    kind = kind_of(field_at(served, key).type)
    wanted = Leaf(key, field_at(served, key).type, kind, nullable=False, repeated=False)
    same_kind = [x for x in leaves(schema) if x.kind == kind and not x.repeated]
    found = max(same_kind, key=lambda x: _alike(wanted, x, set(), set()), default=None)
    if found is None or _alike(wanted, found, set(), set()) < 2:
        raise _missing(path, schema, f"a field of {kind} that says what {key} of served events does")
    return found.path


def _time(path: str, schema: Record, key: Sequence[str]) -> str:
    found: list[tuple[int, str]] = []
    for leaf in leaves(schema):
        if leaf.nullable or leaf.repeated or leaf.path in key:
            continue
        logical = leaf.type.logical if isinstance(leaf.type, Primitive) else None
        unit = {"millis": "ms", "micros": "us", "nanos": "ns"}.get(
            (logical or "").rpartition("timestamp-")[2]
        )
        named = bool(set(leaf.words) & TIME)
        if leaf.kind == "integer" and (unit or named):
            by_name = (
                "us" if leaf.words[-1] == "us" else "s" if leaf.words[-1] in ("s", "sec", "second") else "ms"
            )
            found.append((2 + named if unit else 1, f"{leaf.path}:{unit or by_name}"))
        elif leaf.kind == "text" and isinstance(leaf.type, Primitive) and named:
            found.append((1, f"{leaf.path}:iso"))
    if not found:
        raise _missing(path, schema, "a field with the time of the event, such as ts, never null")
    return max(found, key=lambda f: f[0])[1]


def _event_id(schema: Record, key: Sequence[str]) -> str | None:
    names = {("event", "id"), ("action", "id"), ("event", "uuid"), ("uuid",), ("eventid",)}
    found = (x for x in leaves(schema) if x.words in names and x.identifies)
    return next((x.path for x in found if not x.nullable and not x.repeated and x.path not in key), None)


def _type_field(action: Record, key: Sequence[str]) -> Leaf | None:
    texts = [x for x in leaves(action) if x.kind == "text" and not x.repeated and x.path not in key]
    named = [x for x in texts if x.words[-1] in TYPE]
    enums = [x for x in texts if _symbols(x)]
    return next(iter([x for x in enums if x in named] + enums + named), None)


def _symbols(leaf: Leaf) -> tuple[str, ...]:
    branches = leaf.type.branches if isinstance(leaf.type, Union) else (leaf.type,)
    return next((b.symbols for b in branches if isinstance(b, Enum)), ())


def _missing(path: str, schema: Record, what: str) -> ConfigError:
    return ConfigError(
        path,
        "",
        "no field was recognised",
        what,
        f"it has {', '.join(paths(schema))}: write freshet.toml by hand, see docs/reference/feature-spec.md",
    )


def sample_of(found: Guess) -> Record:
    """The schema of a sample: what features are made of."""
    return sample_schema(found.stream("served").schema, found.explode)
