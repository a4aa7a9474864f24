"""Generator of a commented `freshet.toml` for the user's schemas, for `freshet init`.

It guesses the meaning of fields by their names and types. Names are compared as words: `reqId`, `request_id`
and `request.id` are equal. Running services do not use this; the user corrects a wrong guess in the spec.
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
from freshet.config.avro.types import DAY_NS, time_unit
from freshet.config.expression import RESERVED
from freshet.config.options import Section
from freshet.config.spec.identity import toml_value
from freshet.config.spec.inputs import UNIT_OF_NS
from freshet.config.spec.model import MODEL_NAME
from freshet.config.spec.schemas import kind_of
from freshet.errors import ConfigError

SAME = {
    "req": "request", "imp": "impression", "sess": "session", "prod": "product", "cust": "customer",
    "pos": "position",
}  # fmt: skip
REQUEST = {"request", "impression", "session", "slate", "query", "search", "page", "auction"}
ITEM = {
    "item", "product", "ad", "sku", "video", "article", "doc", "document", "listing", "stock", "offer",
    "song", "candidate",
}  # fmt: skip
USER = {
    "user", "customer", "member", "visitor", "account", "viewer", "client", "person", "listener", "reader",
    "player", "shopper", "buyer", "guest", "subscriber", "profile",
}  # fmt: skip
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
    kind: str  # see `freshet.config.spec.schemas.kind_of`
    nullable: bool
    repeated: bool

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the path."""
        return words_of(self.path)

    @property
    def identifies(self) -> bool:
        """Whether it may be part of a key: one integer or text."""
        return self.kind in ("integer", "text")


@dataclass(frozen=True, slots=True)
class StreamGuess:
    """Guessed key, time and id of one stream."""

    role: Role
    path: str  # of the schema file
    schema: Record
    key: tuple[str, ...]
    time: str  # "ts:ms"
    id: str | None


@dataclass(frozen=True, slots=True)
class Guess:
    """Guessed meaning of all schemas."""

    streams: tuple[StreamGuess, ...]  # served, shown if there is one, action
    explode: str | None
    type_field: Leaf | None  # field with the type of an action

    def stream(self, role: Role) -> StreamGuess:
        """Return the stream of that role. Raises StopIteration."""
        return next(s for s in self.streams if s.role == role)


def words_of(path: str) -> tuple[str, ...]:
    """Split a path into words, singular and in lower case: `user.lastItems` is user, last, item."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", path)
    words = (SAME.get(p.lower(), p.lower()) for p in parts)
    singular = tuple(w[:-1] if len(w) > 3 and w.endswith("s") and w[-2] not in "sui" else w for w in words)
    return singular or (path.lower(),)


def leaves(schema: Record) -> Iterator[Leaf]:
    """Yield all fields that are no records or maps, in order; fields in arrays of records are `repeated`."""
    for path in paths(schema):
        found = field_at(schema, path)
        kind = kind_of(found.type)
        if "record" not in kind and "map" not in kind and kind not in ("null", ""):
            yield Leaf(path, found.type, kind, found.nullable, found.repeated)


def guess(schemas: Sequence[tuple[str, Record]]) -> Guess:
    """Guess the roles of two or three schemas and the meaning of their fields.

    Args:
        schemas: (path of the file, its schema).

    Raises:
        ConfigError: the number of schemas differs, or the request, the item or a time is not recognised.
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

    # `max` returns the first of equal scores: the schemas in the given order.
    best = max(permutations(names), key=lambda p: sum(score(r, *s) for r, s in zip(p, schemas, strict=True)))
    return dict(zip(best, schemas, strict=True))


def _explode(schema: Record) -> str | None:
    """Return the array of records that is most likely the items of a request."""
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
    in_actions = [x for x in leaves(action) if x.identifies and not x.repeated]

    def best(candidates: list[Leaf], wanted: set[str], unwanted: set[str]) -> Leaf | None:
        scored = [
            (_alike(a, b, wanted, unwanted), a) for a in candidates for b in in_actions if a.kind == b.kind
        ]
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
    """Score how likely two fields of two streams are the same identifier; 3 or more is likely."""
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
        raise _missing(path, schema, f"a field of {kind} with the same meaning as {key} of served events")
    return found.path


def _time(path: str, schema: Record, key: Sequence[str]) -> str:
    found: list[tuple[int, str]] = []
    for leaf in leaves(schema):
        unit, named = time_unit(leaf.type), set(leaf.words) & TIME
        if leaf.nullable or leaf.repeated or leaf.path in key or (unit is not None and unit.of_day):
            continue
        day = named == {"date"} if unit is None else unit.ns == DAY_NS  # without a time of day
        if unit is not None and (named or not day):
            found.append((0 if day else 2 + bool(named), f"{leaf.path}:{UNIT_OF_NS[unit.ns]}"))
        elif leaf.kind == "integer" and named:
            seconds = leaf.words[-1] in ("s", "sec", "second") or leaf.type == Primitive("int")
            by_name = "us" if leaf.words[-1] == "us" else "s" if seconds else "ms"
            found.append((not day, f"{leaf.path}:{by_name}"))
        elif leaf.kind == "text" and isinstance(leaf.type, Primitive) and named:
            found.append((not day, f"{leaf.path}:iso"))
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


def _missing(path: str, schema: Record, expected: str) -> ConfigError:
    return ConfigError(
        path,
        "",
        "no field was recognised",
        expected,
        f"it has {', '.join(paths(schema))}: write freshet.toml by hand, see docs/reference/feature-spec.md",
    )


def sample_of(found: Guess) -> Record:
    """Return the schema of samples, which has the fields of features."""
    return sample_schema(found.stream("served").schema, found.explode)


NOT_A_SUCCESS = {
    "view", "impression", "shown", "seen", "cancel", "adjust", "skip", "hide", "dislike", "other",
    "unknown",
}  # fmt: skip
WINDOWS = {
    "buy": "24h", "purchase": "24h", "order": "24h", "convert": "24h", "play": "10m", "watch": "10m",
    "click": "2m",
}  # fmt: skip
ENTITY = {"id", "uuid", "guid"}
"""Words at the end of the names of identifiers, which have many values."""
FREE_TEXT = {"title", "description", "url", "text", "query", "comment", "agent", "referrer", "message", "doc"}
CODES = IDENTIFIER | {
    "category", "type", "position", "rank", "zip", "version", "segment", "group", "brand", "hour", "day",
}  # fmt: skip
SEGMENTS = {"country", "device", "platform", "locale", "language", "channel", "region", "market"}


@dataclass(frozen=True, slots=True)
class _Line:
    """The line of one feature, with its table, or the reason why it is commented out."""

    name: str
    text: str
    table: str | None
    comment: str = ""
    left_out: bool = False


def generate_spec(schemas: Sequence[tuple[str, Record]], name: str | None = None) -> str:
    """Write a spec for two or three schemas.

    Args:
        schemas: (path of the file for the spec, its schema).
        name: name of the model; derived from the name of served events by default.

    Raises:
        ConfigError: the schemas lack a required field, or the name is invalid.
    """
    if name is not None:
        Section("freshet init", "", {"name": name}).read_value("name", MODEL_NAME)
    found = guess(schemas)
    features = list(_features(found))
    lines = [
        f"# Written by freshet init from {', '.join(path for path, _ in schemas)}.",
        "# Each line is a guess: read it once and correct it.",
        "# All keys: docs/reference/feature-spec.md.",
        f'name = "{name or _model_name(found)}"    # names topics and stores; another name is another model',
        "",
        *_events(found),
        "",
        "[join]",
        'emit = "early"    # positives at once: freshest. "window": all when the window closes, unbiased',
        'grace = "30s"     # how late an event may come',
        *(
            ['require = "shown"    # no samples of items that were not seen']
            if len(found.streams) == 3
            else []
        ),
        "",
        *_labels(found),
        "",
        *_tables(features),
        "",
        "[features]    # inputs of the model; comments are omitted fields, with the reason",
        *(_feature_text(f) for f in features),
        "",
        *_rest(features),
    ]
    return "\n".join(lines) + "\n"


def _events(found: Guess) -> Iterator[str]:
    yield "[events]    # your fields with ids and times"
    yield "# time: in s, ms, us, ns, days or iso. key: the request first; the same order in all streams."
    for stream in found.streams:
        values: dict[str, object] = {"schema": stream.path}
        if stream.role == "served" and found.explode:
            values["explode"] = found.explode
        values |= {"key": list(stream.key), "time": stream.time}
        if stream.id is not None:
            values["id"] = stream.id
        yield f"{stream.role} = {toml_value(values)}"
    if found.explode:
        yield f"# explode: each element of {found.explode} is an impression of its own"
    if found.stream("action").id is None:
        yield '# the id of an action detects repeats; without one its content does: id = "event_id"'


def _labels(found: Guess) -> Iterator[str]:
    yield "[labels]    # what the model predicts; each has its own window and head"
    field = found.type_field
    if field is None:
        yield "# every action counts: the actions have no field with their type"
        yield f'acted = {{ on = "action.{found.stream("action").key[0]} is not null", window = "10m" }}'
        return
    symbols = _symbols(field)
    if not symbols:
        yield f"# {field.path} is any text: use a value of your actions here"
    good = [s for s in symbols if s.lower() not in NOT_A_SUCCESS] or list(symbols) or ["click"]
    for i, symbol in enumerate(dict.fromkeys(good)):
        on = f"action.{field.path} == '{symbol}'"
        line = f'{_label_name(symbol)} = {{ on = "{on}", window = "{_window(symbol)}" }}'
        yield line if i == 0 else f"# {line}"
    for leaf in leaves(found.stream("action").schema):
        if leaf.kind == "fraction" and not leaf.repeated:
            on = f"action.{field.path} == '{good[0]}'"
            value = f"sum(action.{leaf.path})"
            yield f'# a number instead: amount = {{ on = "{on}", value = "{value}", window = "10m" }}'


def _tables(features: Sequence[_Line]) -> Iterator[str]:
    yield "[tables]    # families of rows: lists share the item's, other features have rows of their own"
    used = {f.table for f in features if not f.left_out}
    notes = {
        "user": 'rows of users; ttl = "90d" would evict users not seen for so long',
        "item": "admission = 2 gives a key a row when it is seen again: for short-lived items",
        "ids": "other ids, many values each",
        "small": "countries, devices, hours: few values each",
    }
    for name, note in notes.items():
        if name in used:
            yield f"{name} = {{ dim = 16 }}    # {note}"


def _features(found: Guess) -> Iterator[_Line]:
    served = found.stream("served")
    skipped = {served.key[0], served.time.rpartition(":")[0], served.id}
    item = served.key[1] if len(served.key) > 1 else None
    taken = {"hour", "weekday"}
    for leaf in leaves(sample_of(found)):
        if leaf.path not in skipped:
            line = _feature(_free_name(leaf.path, taken), leaf, item)
            taken.add(line.name)
            yield line
    yield _Line("hour", '{ time = "hour", table = "small" }', "small", "of the event's time, UTC")
    yield _Line("weekday", '{ time = "weekday", table = "small" }', "small")


def _feature(name: str, leaf: Leaf, item: str | None) -> _Line:  # noqa: PLR0911 - a case each
    path, words = leaf.path, set(leaf.words)
    if leaf.path == item:
        return _Line(name, f'{{ field = "{path}", table = "item" }}', "item", "the item")
    if leaf.repeated or leaf.kind.startswith("list of "):
        return _list(name, leaf)
    plain = f'{{ field = "{path}", table = "small" }}'
    if " or " in leaf.kind:
        return _Line(name, plain, None, "several types in one field", left_out=True)
    if _is_time(leaf):
        return _Line(name, plain, None, "a time: an age is a better feature", left_out=True)
    table = _table(leaf)
    if leaf.kind == "fraction" or (leaf.kind == "integer" and not words & (CODES | USER)):
        missing = ', missing = "flag"' if leaf.nullable else ""
        note = (
            'log1p for counts and prices, then standard: ["log1p", "standard"]'
            if leaf.kind == "integer"
            else ""
        )
        return _Line(name, f'{{ field = "{path}", dense = "standard"{missing} }}', None, note)
    if leaf.words[-1] in ("position", "rank") and leaf.kind == "integer":
        text = f'{{ field = "{path}", table = "small", serve_as = 0 }}'
        return _Line(name, text, "small", "position of the item: known in training, not in serving")
    if leaf.kind == "text" and leaf.words[-1] in FREE_TEXT and not _symbols(leaf):
        return _Line(name, plain, None, "free text: values rarely repeat", left_out=True)
    return _Line(name, f'{{ field = "{path}", table = "{table}" }}', table)


def _table(leaf: Leaf) -> str:
    """Return the table of a field that is no item and no list."""
    last = leaf.words[-1]
    if set(leaf.words) & USER and last in IDENTIFIER | USER:
        return "user"
    return "ids" if last in ENTITY else "small"


def _list(name: str, leaf: Leaf) -> _Line:
    inner = leaf.kind.removeprefix("list of ")
    table = "item" if set(leaf.words) & ITEM else "small"
    text = f'{{ field = "{leaf.path}", table = "{table}", max = 50, pool = "mean" }}'
    if leaf.repeated or inner not in ("integer", "text"):
        return _Line(name, text, None, "a list of values that are no ids", left_out=True)
    return _Line(name, text, table, "the first 50; pool: mean or sum of their rows")


def _feature_text(line: _Line) -> str:
    comment = f"    # {line.comment}" if line.comment else ""
    return f"{'# ' if line.left_out else ''}{line.name} = {line.text}{comment}"


def _rest(features: Sequence[_Line]) -> Iterator[str]:
    single = [f for f in features if not f.left_out and "max = " not in f.text]
    small = [f.name for f in single if f.table == "small" and set(f.name.lower().split("_")) & SEGMENTS]
    pair = [f.name for t in ("user", "ids", "item", "small") for f in single if f.table == t][:2]
    yield "[model]"
    yield "deep = [256, 128]    # hidden widths of the MLP, one of the experts that the hedge weighs"
    yield f"# crosses = {toml_value([pair])}    # pairs with their own weights; all pairs of few features"
    yield ""
    yield "[train]"
    yield f"segments = {toml_value([*small[:2], 'hour'])}    # measures are split by these"
    yield ""
    yield "[serve]"
    yield '# score = "click * (1 + 0.1 * watch)"    # combines labels; without it the first label counts'
    yield '# explore = { policy = "epsilon", share = 0.02 }    # a share of requests in random order'


def _is_time(leaf: Leaf) -> bool:
    logical = (leaf.type.logical if isinstance(leaf.type, Primitive) else None) or ""
    return "timestamp" in logical or logical == "date" or leaf.words[-1] in ("ts", "timestamp", "at")


def _symbols(leaf: Leaf) -> tuple[str, ...]:
    branches = leaf.type.branches if isinstance(leaf.type, Union) else (leaf.type,)
    return next((b.symbols for b in branches if isinstance(b, Enum)), ())


def _window(symbol: str) -> str:
    return next((w for word, w in WINDOWS.items() if word in symbol.lower()), "10m")


def _label_name(symbol: str) -> str:
    name = re.sub(r"\W", "_", symbol, flags=re.ASCII).lower().lstrip("_0123456789")[:60] or "label"
    return f"{name}_" if name in RESERVED else name


def _free_name(path: str, taken: set[str]) -> str:
    """Return a free name for the feature: the field's name, with its parents' names as needed."""
    parts = path.split(".")
    for n in range(1, len(parts) + 1):
        name = "_".join(parts[-n:]).lstrip("_0123456789")[-60:].lstrip("_0123456789")
        if name and name not in taken and not (n == 1 and name.lower() in IDENTIFIER and len(parts) > 1):
            return name
    return next(numbered for i in range(2, 10_000) if (numbered := f"{name or 'field'}_{i}") not in taken)


def _model_name(found: Guess) -> str:
    record = found.stream("served").schema.name
    name = re.sub(r"[^a-z0-9]+", "-", record.rpartition(".")[0].rpartition(".")[2].lower() or record.lower())
    return name.strip("-0123456789")[:60] or "model"
