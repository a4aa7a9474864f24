"""Generator of a commented `freshet.toml` for the user's schemas, for `freshet init`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from freshet.config.avro.schema import Enum, Primitive, Record, Union
from freshet.config.expression import RESERVED
from freshet.config.options import Section
from freshet.config.spec.guess import IDENTIFIER, ITEM, USER, Guess, Leaf, guess, leaves, sample_of
from freshet.config.spec.model import MODEL_NAME
from freshet.config.spec.render import toml_value

__all__ = ["generate_spec"]

NOT_A_SUCCESS = {
    "view",
    "impression",
    "shown",
    "seen",
    "cancel",
    "adjust",
    "skip",
    "hide",
    "dislike",
    "other",
    "unknown",
}
WINDOWS = {
    "buy": "24h",
    "purchase": "24h",
    "order": "24h",
    "convert": "24h",
    "play": "10m",
    "watch": "10m",
    "click": "2m",
}
ENTITY = {"id", "uuid", "guid"}
"""Words at the end of the names of identifiers, which have many values."""
FREE_TEXT = {"title", "description", "url", "text", "query", "comment", "agent", "referrer", "message", "doc"}
CODES = IDENTIFIER | {
    "category",
    "type",
    "position",
    "rank",
    "zip",
    "version",
    "segment",
    "group",
    "brand",
    "hour",
    "day",
}
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
    yield "# time: in s, ms, us or iso. key: the request first; the same fields in this order in all streams."
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
