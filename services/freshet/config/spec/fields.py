"""What the fields that a spec uses hold, by the users' schemas: integers, fractions, truths, text, or lists
of these.

That is all of a type that keys and numbers depend on; the rest of it may change while a model lives.
"""

from __future__ import annotations

from freshet.config.avro.logical_types import decimal_scale, leaf_name, time_unit
from freshet.config.avro.schema import (
    Array,
    Enum,
    Fixed,
    Primitive,
    Type,
    Union,
    field_at,
    is_null,
    sample_schema,
    spell,
)
from freshet.config.expression import compile_condition, compile_value
from freshet.config.spec.events import UNIT_NS
from freshet.config.spec.model import Label, Spec, TimeField
from freshet.config.spec.schemas import Schemas, streams_of

__all__ = ["action_fields", "feature_fields", "field_kinds", "kind_of", "wrong_unit"]

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
    """`integer`, `fraction`, `truth`, `text`, `list of ...`, `record`, `map`, `null`, or several joined by
    " or ".
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


def wrong_unit(type_: Type, time: TimeField) -> tuple[str, str] | None:
    """What was expected of an event's time, and a hint, where the field's logical type says another unit than
    the spec; None if they agree, or the type says none."""
    unit = time_unit(type_)
    if unit is None:
        return None
    if unit.of_day:
        return (
            f"a date or timestamp, found {spell(type_)}",
            "a time of the day says no day: name another field",
        )
    right = next(name for name, ns in UNIT_NS.items() if ns == unit.ns)
    if time.unit == right:
        return None
    return (
        f'"{time.path}:{right}", as the field is {spell(type_)}',
        "write it so, or mend the schema's logicalType",
    )


def action_fields(label: Label) -> tuple[str, ...]:
    """Paths of the action's fields that a label reads, each once."""
    used = compile_condition(label.on).fields()
    if label.value is not None:
        used += compile_value(label.value).fields()
    return tuple(dict.fromkeys(used))


def feature_fields(spec: Spec) -> tuple[str, ...]:
    """Paths of the fields of served events that features read, each once."""
    return tuple(dict.fromkeys(f.field for f in spec.features if f.field is not None))


def field_kinds(spec: Spec, schemas: Schemas) -> dict[str, str]:
    """What each field that the spec uses holds: `served.user.id` -> `integer`, `list of text`, ...

    Raises ConfigError for a field that its schema lacks.
    """
    found: dict[str, str] = {}
    for stream in streams_of(spec):
        schema = schemas.of(stream.role)
        for path in (*stream.key, stream.time.path, *([stream.id] if stream.id else [])):
            found[f"{stream.role}.{path}"] = kind_of(field_at(schema, path).type)
    sample = sample_schema(schemas.served, spec.events.served.explode)
    for feature in spec.features:
        if feature.field is not None:
            found[f"served.{feature.field}"] = kind_of(field_at(sample, feature.field).type)
    for label in spec.labels:
        for path in action_fields(label):
            found[f"action.{path}"] = kind_of(field_at(schemas.action, path).type)
    return dict(sorted(found.items()))
