"""Avro schemas of a spec's streams, read from their files, and the check of the spec against them.

The check runs at the start of a service, before the first event: the fields of the spec exist, and have the
types that their use needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freshet.config.avro.schema import (
    Array,
    Enum,
    Fixed,
    Located,
    Primitive,
    Record,
    Type,
    Union,
    field_at,
    is_null,
    parse_schema,
    paths,
    sample_schema,
    served_schema,
    spell,
)
from freshet.config.avro.types import decimal_scale, is_uuid, leaf_name, time_unit
from freshet.config.expression import compile_condition, compile_value
from freshet.config.expression.compile import Kind, comparisons
from freshet.config.options import nearest_hint
from freshet.config.spec.inputs import UNIT_OF_NS
from freshet.config.spec.model import Feature, Label, Spec, Stream, TimeField
from freshet.errors import ConfigError

MOST_BYTES = 4 << 20
"""Limit on the size of a spec or schema file. The largest known have a few hundred KiB; a device may be
endless."""


def read_small(path: Path) -> bytes:
    """Read a spec or schema file. Raises OSError if it is unreadable or larger than MOST_BYTES."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(0, f"more than {MOST_BYTES >> 20} MiB")
    return content


@dataclass(frozen=True, slots=True)
class Schemas:
    """The user's schemas, one for each stream."""

    served: Record
    action: Record
    shown: Record | None = None

    def of(self, role: str) -> Record:
        """Return the schema of a stream. Raises KeyError if there is no such stream."""
        found: Record | None = {"served": self.served, "action": self.action, "shown": self.shown}[role]
        if found is None:
            raise KeyError(role)
        return found


def streams_of(spec: Spec) -> Iterator[Stream]:
    """Yield the streams that the spec declares."""
    yield from (s for s in (spec.events.served, spec.events.shown, spec.events.action) if s is not None)


def written_by_us(spec: Spec) -> Spec:
    """Return the spec with format avro for topics of external writers, as a replay writes them."""
    streams = {s.role: replace(s, format="avro") if s.external else s for s in streams_of(spec)}
    return replace(spec, events=replace(spec.events, **streams))


def readers_of(spec: Spec, schemas: Schemas) -> dict[str, Record]:
    """Return the reader schema of each stream, by role; that of served events includes `freshet_served`.

    Raises ConfigError if the array that `explode` names is no array of records.
    """
    found: dict[str, Record] = {stream.role: schemas.of(stream.role) for stream in streams_of(spec)}
    found["served"] = served_schema(schemas.served, spec.events.served.explode)
    return found


def sample_reader(spec: Spec, schemas: Schemas) -> Record:
    """Return the reader schema of samples. Raises ConfigError as `readers_of`."""
    explode = spec.events.served.explode
    return sample_schema(served_schema(schemas.served, explode), explode)


def load_schemas(spec: Spec, where: str = "freshet.toml") -> Schemas:
    """Read the schema of every stream; paths are relative to the spec's folder.

    Raises:
        ConfigError: a stream names no schema, a file cannot be read, or does not hold a record's schema.
    """
    return Schemas(**{s.role: load_schema(spec, s, where) for s in streams_of(spec)})


def load_schema(spec: Spec, stream: Stream, where: str = "freshet.toml") -> Record:
    """Read the schema of one stream. Raises as `load_schemas`."""
    key = f"events.{stream.role}.schema"
    if stream.schema is None:
        raise ConfigError(
            where,
            key,
            None,
            "the path of an .avsc file",
            "the schema declares the fields of your events; JSON events need one too. "
            "Only freshet backtest reads files without one",
        )
    path = Path(spec.folder) / stream.schema
    try:
        text = read_small(path)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            where, key, stream.schema, "a file that can be read", f"{path}: {reason}"
        ) from error
    return parse_schema(text, str(path))


# --- The check of a spec against its schemas.

# A kind is the part of a type that keys and numbers depend on; the rest may change during a model's life.
KINDS = {
    "int": "integer",
    "long": "integer",
    "float": "fraction",
    "double": "fraction",
    "boolean": "truth",
    "string": "text",
    "bytes": "text",
}


def kind_of(type_: Type) -> str:
    """Return the kind of a type.

    It is `integer`, `fraction`, `truth`, `text`, `list of ...`, `record`, `map` or `null`.
    Several kinds of a union are joined by " or ".
    """
    scale = decimal_scale(type_)
    if scale is not None:
        return "fraction" if scale else "integer"
    match type_:
        case Array(items):
            return f"list of {kind_of(items)}"
        case Union(branches):
            return " or ".join(sorted({kind_of(b) for b in branches if not is_null(b)}))
        case Primitive(name):
            return KINDS.get(name, name)
        case Enum() | Fixed():
            return "text"
        case _:
            return leaf_name(type_)


def reading_of(type_: Type) -> str:
    """Return the kind of a type, with the part of its logical types that rescales numbers or changes keys.

    Hashes of models have no such part, as former releases computed them by kind; `diff` compares it.
    """
    match type_:
        case Array(items):
            return f"list of {reading_of(items)}"
        case Union(branches):
            return " or ".join(sorted({reading_of(b) for b in branches if not is_null(b)}))
    unit, scale, kind = time_unit(type_), decimal_scale(type_), kind_of(type_)
    if unit is not None:
        return f"{kind} ({'time of day' if unit.of_day else 'time'} in {UNIT_OF_NS[unit.ns]})"
    if scale:
        return f"{kind} (decimal of scale {scale})"
    return f"{kind} (uuid of 16 bytes)" if is_uuid(type_) else kind


def wrong_unit(type_: Type, time: TimeField) -> tuple[str, str] | None:
    """Return expectation and hint if an event's time has another unit in the schema than in the spec.

    Returns None if they agree, or if the type has no unit.
    """
    unit = time_unit(type_)
    if unit is None:
        return None
    if unit.of_day:
        return (
            f"a date or timestamp, found {spell(type_)}",
            "a time of day has no date: name another field",
        )
    right = UNIT_OF_NS[unit.ns]
    if time.unit == right:
        return None
    return (
        f'"{time.path}:{right}", as the field is {spell(type_)}',
        "change the spec's unit, or the schema's logicalType",
    )


def action_fields(label: Label) -> tuple[str, ...]:
    """Return the distinct paths of the action's fields that a label reads."""
    used = compile_condition(label.on).fields()
    if label.value is not None:
        used += compile_value(label.value).fields()
    return tuple(dict.fromkeys(used))


def label_fields(spec: Spec) -> tuple[str, ...]:
    """Return the distinct paths of the fields of actions that labels read."""
    return tuple(dict.fromkeys(path for label in spec.labels for path in action_fields(label)))


def feature_fields(spec: Spec) -> tuple[str, ...]:
    """Return the distinct paths of the fields of served events that features read."""
    return tuple(dict.fromkeys(f.field for f in spec.features if f.field is not None))


def fields_read(spec: Spec, role: str) -> tuple[tuple[str, ...], dict[str, bool]]:
    """Return the paths that the joiner reads of a stream's events beside key, time and id.

    They are those of columns, and of values that are checked, with whether a feature reads them as ids. The
    gateway takes them, too: an event that it accepts without them is a dead letter in the joiner.
    """
    ids = {f.field for f in spec.features if f.kind in ("id", "list")}
    checked = {path: path in ids for path in feature_fields(spec)} if role == "served" else {}
    return label_fields(spec) if role == "action" else (), checked


def field_kinds(spec: Spec, schemas: Schemas, kind: Callable[[Type], str] = kind_of) -> dict[str, str]:
    """Return the kind of each field that the spec uses: `served.user.id` -> `integer`, `list of text`, ...

    `kind` is `kind_of` or `reading_of`; the unit of an event's time is the spec's.

    Raises ConfigError for a field that its schema lacks.
    """
    found: dict[str, str] = {}
    for stream in streams_of(spec):
        schema = schemas.of(stream.role)
        found[f"{stream.role}.{stream.time.path}"] = kind_of(field_at(schema, stream.time.path).type)
        for path in (*stream.key, *([stream.id] if stream.id else [])):
            found[f"{stream.role}.{path}"] = kind(field_at(schema, path).type)
    sample = sample_schema(schemas.served, spec.events.served.explode)
    for feature in spec.features:
        if feature.field is not None:
            found[f"served.{feature.field}"] = kind(field_at(sample, feature.field).type)
    for path in label_fields(spec):
        found[f"action.{path}"] = kind(field_at(schemas.action, path).type)
    return dict(sorted(found.items()))


IDS = ("integer", "text", "truth")
"""Kinds of ids. A fraction is none: 0.1 + 0.2 would be another id than 0.3."""


def check_fit(spec: Spec, schemas: Schemas, where: str = "freshet.toml") -> None:
    """Check a spec against its schemas. Raises ConfigError for the first field that does not fit."""
    fit = _Fit(spec, schemas, where)
    for stream in streams_of(spec):
        fit.stream(stream)
    fit.explode()
    for feature in spec.features:
        if feature.field is not None:
            fit.feature(feature, feature.field)
    for label in spec.labels:
        fit.label(label)


class Requirements:
    """Requirements on a spec; one that does not hold raises ConfigError with the key to change."""

    def __init__(self, where: str) -> None:
        """`where`: the spec's file, for errors."""
        self.where = where

    def require(self, holds: bool, key: str, found: Any, expected: str, hint: str = "") -> None:
        """Raise ConfigError unless a requirement holds."""
        if not holds:
            found = list(found) if isinstance(found, tuple) else found
            raise ConfigError(self.where, key, found, expected, hint)


class _Fit(Requirements):
    """The fit of one spec to its schemas; a method checks one part."""

    def __init__(self, spec: Spec, schemas: Schemas, where: str) -> None:
        super().__init__(where)
        self.spec, self.schemas = spec, schemas

    def locate(self, schema: Record, path: str, key: str) -> Located:
        """Return the field at a path. Raises ConfigError with the spec's key and the most similar field."""
        try:
            return field_at(schema, path)
        except ConfigError as error:
            known = paths(schema)
            hint = (
                nearest_hint(path, known)
                or _nearest_leaf(path, known)
                or f"{schema.name} has {', '.join(known)}"
            )
            raise ConfigError(self.where, key, path, error.expected, hint) from None

    def stream(self, stream: Stream) -> None:
        schema = self.schemas.of(stream.role)
        prefix = f"events.{stream.role}"
        for i, path in enumerate(stream.key):
            self._identifies(stream, self.locate(schema, path, f"{prefix}.key[{i}]"), f"{prefix}.key[{i}]")
            self._joins(i, path, schema, f"{prefix}.key[{i}]")
        if stream.id is not None:
            self._identifies(stream, self.locate(schema, stream.id, f"{prefix}.id"), f"{prefix}.id")
        time = self.locate(schema, stream.time.path, f"{prefix}.time")
        wanted = "text" if stream.time.unit == "iso" else "integer"
        written = f"{stream.time.path}:{stream.time.unit}"
        allowed = (wanted, "fraction") if wanted == "integer" else (wanted,)
        self.require(
            kind_of(time.type) in allowed, f"{prefix}.time", written,
            f"a field of {wanted}, found {spell(time.type)}",
            "iso is for text, the other units are for numbers",
        )  # fmt: skip
        wrong = wrong_unit(time.type, stream.time)
        if wrong is not None:
            raise ConfigError(self.where, f"{prefix}.time", written, *wrong)
        once = not time.nullable and not time.repeated
        self.require(once, f"{prefix}.time", written, "one time an event, never null")

    def _identifies(self, stream: Stream, found: Located, key: str) -> None:
        self.require(
            kind_of(found.type) in ("integer", "text"), key, found.path,
            f"a field of integers or text, found {spell(found.type)}",
        )  # fmt: skip
        inside = stream.explode is not None and found.path.startswith(stream.explode + ".")
        self.require(
            inside or not found.repeated, key, found.path,
            "one value an event", "it stands inside an array; explode makes each element an impression",
        )  # fmt: skip

    def _joins(self, i: int, path: str, schema: Record, key: str) -> None:
        served = self.spec.events.served.key[i]
        served_kind = kind_of(self.locate(self.schemas.served, served, f"events.served.key[{i}]").type)
        own_kind = kind_of(field_at(schema, path).type)
        self.require(
            own_kind == served_kind, key, path,
            f"a field of {served_kind}, as {served} of served events is; found {own_kind}",
            'the number 7 and the text "7" are different ids',
        )  # fmt: skip

    def explode(self) -> None:
        served = self.spec.events.served
        if served.explode is None:
            return
        type_ = self.locate(self.schemas.served, served.explode, "events.served.explode").type
        self.require(
            isinstance(type_, Array) and isinstance(type_.items, Record),
            "events.served.explode", served.explode,
            f"an array of records, found {spell(type_)}", "each of its elements is an impression",
        )  # fmt: skip
        sample_schema(self.schemas.served, served.explode)

    def feature(self, feature: Feature, path: str) -> None:
        key = f"features.{feature.name}"
        sample = sample_schema(self.schemas.served, self.spec.events.served.explode)
        found = self.locate(sample, path, f"{key}.field")
        kind = kind_of(found.type)
        is_list = found.repeated or kind.startswith("list of ")
        if feature.kind == "list":
            hint = "without max and pool it is one id"
            self.require(is_list, f"{key}.field", path, f"an array, found {spell(found.type)}", hint)
            self._one_of(feature, found, kind.removeprefix("list of "), IDS)
            return
        self.require(
            not is_list, f"{key}.field", path, f"one value, found {_in_array(found)}",
            'a list of ids is a feature with max and pool: max = 50, pool = "mean"',
        )  # fmt: skip
        if feature.kind in ("dense", "bucket"):
            self._one_of(feature, found, kind, ("integer", "fraction", "truth"))
        else:
            self._one_of(feature, found, kind, IDS)
            self._serve_as(feature, kind)

    def _one_of(self, feature: Feature, found: Located, kind: str, allowed: Sequence[str]) -> None:
        hint = "text is an id: give it a table" if kind == "text" else ""
        if kind == "fraction":
            hint = "a fraction is a number: use dense, or buckets to make ids of it"
        names = {"integer": "integers", "text": "text", "truth": "truths", "fraction": "fractions"}
        self.require(
            set(kind.split(" or ")) <= set(allowed), f"features.{feature.name}.field", found.path,
            f"a field of {', '.join(names[a] for a in allowed)}, found {spell(found.type)}", hint,
        )  # fmt: skip

    def _serve_as(self, feature: Feature, kind: str) -> None:
        if feature.serve_as is None or kind == "truth":
            return
        self.require(
            (kind == "text") == isinstance(feature.serve_as, str),
            f"features.{feature.name}.serve_as", feature.serve_as,
            f"a value of {kind}, as {feature.field} is",
        )  # fmt: skip

    def label(self, label: Label) -> None:
        key = f"labels.{label.name}"
        kinds = _action_kinds(self.schemas.action)
        condition = compile_condition(label.on, kinds=kinds, where=self.where, key=f"{key}.on")
        if label.value is not None:
            compile_value(label.value, kinds=kinds, where=self.where, key=f"{key}.value")
        for field, word, _ in comparisons(condition.node):
            type_ = field_at(self.schemas.action, field).type
            if isinstance(type_, Enum):
                self.require(
                    word in type_.symbols, f"{key}.on", label.on,
                    f"a symbol of {field}: {', '.join(type_.symbols)}",
                    nearest_hint(word, type_.symbols) or f'"{word}" never occurs',
                )  # fmt: skip


def _nearest_leaf(path: str, known: Sequence[str]) -> str:
    """Return a hint with a known path of the same last part: `user.id` for `id`."""
    leaf = path.rpartition(".")[2]
    return next((f'did you mean "{k}"?' for k in known if k.rpartition(".")[2] == leaf), "")


def _in_array(found: Located) -> str:
    return spell(found.type) if isinstance(found.type, Array) else f"{spell(found.type)} inside an array"


def _action_kinds(schema: Record) -> dict[str, Kind]:
    """Return the kinds of the action's fields that expressions may use."""
    names: dict[str, Kind] = {"integer": "number", "fraction": "number", "text": "text", "truth": "boolean"}
    found = {p: field_at(schema, p) for p in paths(schema)}
    return {p: names[k] for p, f in found.items() if (k := kind_of(f.type)) in names and not f.repeated}
