"""What the fields that a spec uses hold, by the users' schemas: integers, fractions, truths, text, or lists
of these.

That is all of a type that keys and numbers depend on; the rest of it may change while a model lives.
"""

from __future__ import annotations

from freshet.spec.avro import Array, Enum, Fixed, Primitive, Type, Union, field_at, is_null, sample_schema
from freshet.spec.expression import compile_condition, compile_value
from freshet.spec.model import Label, Spec
from freshet.spec.schemas import Schemas, streams_of

__all__ = ["action_fields", "field_kinds", "kind_of"]

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
            return type(type_).__name__.lower()


def action_fields(label: Label) -> tuple[str, ...]:
    """Paths of the action's fields that a label reads, each once."""
    used = compile_condition(label.on).fields()
    if label.value is not None:
        used += compile_value(label.value).fields()
    return tuple(dict.fromkeys(used))


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
