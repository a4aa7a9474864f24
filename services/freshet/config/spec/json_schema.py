"""JSON Schema of `freshet.toml` (draft 7, for editors): keys, values, defaults and meanings.

`freshet check --json-schema` generates it from the parser's options. The parser also refuses all values that
the schema refuses, and more: sizes of durations, undeclared names, invalid expressions, fields that the Avro
schemas lack.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field
from importlib.metadata import entry_points
from typing import Any

from freshet.config.expression import RESERVED
from freshet.config.options import Duration, duration_text, key_of, options_of
from freshet.config.spec.inputs import NAME, Parameter
from freshet.config.spec.layout import CROSSES, DEFAULT_ROW_OPTIMIZER, DEFAULT_SCALAR_OPTIMIZER, OPTIMIZERS
from freshet.config.spec.model import (
    Explore,
    Feature,
    Files,
    Gate,
    Join,
    Label,
    Model,
    Retention,
    Serve,
    Spec,
    Stream,
    Table,
    Train,
)
from freshet.config.spec.parse import CROSSES_KEYS, KEYS_OF_KIND
from freshet.config.spec.rules import TIME_VALUES
from freshet.config.spec.transforms import GROUP, TRANSFORMS

FILE_NAME = "freshet.schema.json"
"""File name for `freshet init`, which writes it beside the spec and names it in the spec's first line."""

ABOUT = """\
A feature spec of freshet: events, labels, features, model and serving. Keys are of three kinds. A change of
an identity key needs a new model; a tunable key may change during the life of a model; a deployment key
decides where and how it runs."""

Schema = dict[str, Any]


def schema_text() -> str:
    """Return the schema as text."""
    return json.dumps(json_schema(), indent=1) + "\n"


def json_schema() -> Schema:
    """Return the schema."""
    sections = {
        "events": _events(),
        "join": _object(Join),
        "labels": _named(_label(), 1, 32, {"not": {"enum": sorted(RESERVED)}}),
        "tables": _tables(),
        "features": _named(_feature(), 1, 1_000),
        "model": _model(),
        "train": _train(),
        "serve": _serve(),
        "retention": _object(Retention),
        "files": _object(Files),
    }
    top = _object(Spec, sections, ("name", "events", "labels", "features"), ABOUT)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "Written by `freshet check --json-schema`; write it again after an upgrade of freshet.",
        "title": "freshet.toml",
        **top,
        "allOf": [
            _if(
                _has("join", _has("require")),
                {"properties": {"events": {"required": ["shown"]}}},
            ),
            _if(
                {"anyOf": [_has("model", _has("crosses", {"maxItems": 0})), _has("model", _experts_alone())]},
                {"properties": {"tables": {"properties": {CROSSES: False}}}},
            ),
        ],
    }


def _experts_alone() -> Schema:
    """Match a model that names experts but no crosses, so has no crosses."""
    return {**_has("experts"), "not": _has("crosses")}


def _events() -> Schema:
    def stream(doc: str, *without: str) -> Schema:
        schema = _object(Stream, required=("key", "time"), description=doc)
        schema["properties"]["key"]["anyOf"][1]["uniqueItems"] = True
        for key in without:
            del schema["properties"][key]
        return schema

    streams = {
        "served": stream("served impressions with their features"),
        "action": stream("actions", "explode"),
        "shown": stream("items that a person has seen", "explode"),
    }
    return _closed(streams, ("served", "action"), description="The streams of events.")


def _label() -> Schema:
    label = _object(Label, required=("on",))
    logloss = {"properties": {"loss": {"enum": ["huber", "mse"]}}}
    without = {"properties": {"loss": {"enum": ["huber", "mse"]}}, "anyOf": [_has("value"), _has("loss")]}
    return {**label, "allOf": [_if(_has("value"), logloss), _if(_has("bounds"), without)]}


def _tables() -> Schema:
    vectors = _optimizer(DEFAULT_ROW_OPTIMIZER, "of the vectors")
    scalars = _optimizer(DEFAULT_SCALAR_OPTIMIZER, "of the linear scalars")
    table = _object(Table, {"optimizer": vectors, "scalar_optimizer": scalars})
    crosses = _closed({k: table["properties"][k] for k in CROSSES_KEYS})
    return {**_named(table, 0, 254), "properties": {CROSSES: crosses}}


def _optimizer(default: str, part: str) -> Schema:
    tables = [
        _closed({"name": {"const": rule.name}, **_parameters(rule.parameters)}, ("name",))
        for rule in OPTIMIZERS.values()
    ]
    about = f"update rule {part}: a name, or a table of its name and parameters (identity)"
    return {"anyOf": [{"enum": list(OPTIMIZERS)}, *tables], "default": default, "description": about}


def _parameters(parameters: tuple[Parameter, ...]) -> Schema:
    schemas = {}
    for p in parameters:
        form = p.form.json_schema()
        schemas[p.name] = {**form, "description": p.doc, **_finite_default(p.default)}
    return schemas


def _finite_default(value: float) -> Schema:
    return {"default": value} if abs(value) < float("inf") else {}


def _feature() -> Schema:
    feature = _object(Feature)
    step = _transform()
    feature["properties"]["dense"]["anyOf"] = [
        step,
        {"type": "array", "items": step, "minItems": 1, "maxItems": 8},
    ]
    return {**feature, "allOf": list(_kinds())}


def _transform() -> Schema:
    """Describe the built-in transforms, those of installed distributions, and the user's code."""
    added = [point.name for point in entry_points(group=GROUP)]
    code = {"type": "string", "pattern": ":"}
    names = {"anyOf": [{"enum": [*TRANSFORMS, *sorted(added)]}, code]}
    tables = [
        _closed({"name": {"const": t.name}, **_parameters(t.parameters)}, ("name",))
        for t in TRANSFORMS.values()
    ]
    own = {
        "type": "object",
        "properties": {"name": {"anyOf": [code, {"enum": sorted(added)}] if added else [code]}},
        "required": ["name"],
        "additionalProperties": {"type": "number"},
    }
    return {"anyOf": [names, *tables, own]}


def _kinds() -> Iterator[Schema]:
    """Yield the constraints of each kind of feature; the first key that is present decides the kind."""
    signs = {
        "dense": ("dense",),
        "time": ("time",),
        "bucket": ("buckets",),
        "list": ("max", "pool"),
        "id": (),
    }
    before: list[str] = []
    for kind, keys in signs.items():
        here: Schema = {"anyOf": [{"required": [k]} for k in keys]} if keys else {}
        passed: Schema = {"not": {"anyOf": [{"required": [k]} for k in before]}} if before else {}
        required = [k for k in ("field", "table") if k in KEYS_OF_KIND[kind]]
        then: Schema = {"propertyNames": {"enum": list(KEYS_OF_KIND[kind])}, "required": required}
        if "serve_as" in KEYS_OF_KIND[kind] and kind != "time":
            served = {"type": "number"} if kind in ("dense", "bucket") else {"type": ["string", "integer"]}
            then["properties"] = {"serve_as": served}
        yield _if({"allOf": [here, passed]}, then)
        before += keys
    for time, count in TIME_VALUES.items():
        among = {"type": "integer", "minimum": 0, "maximum": count - 1}
        alone = {"allOf": [_has("time", {"const": time}), {"not": {"required": ["dense"]}}]}
        yield _if(alone, {"properties": {"serve_as": among}})


def _model() -> Schema:
    options = {"type": "object", "description": "arguments of a class of your own (identity)"}
    model = _object(Model, {"options": options})
    model["properties"]["crosses"]["uniqueItems"] = True
    model["properties"]["crosses"]["items"]["uniqueItems"] = True
    model["properties"]["experts"]["uniqueItems"] = True
    some = _has("crosses", {"minItems": 1})
    cross, deep = {"contains": {"const": "cross"}}, {"contains": {"const": "deep"}}
    return {
        **model,
        "allOf": [
            _if(
                _has("kind", {"not": {"const": "hedge"}}),
                _without("mix", "experts", "crosses", "hedge_discount"),
            ),
            _if(_has("kind", {"const": "linear"}), _without("deep")),
            _if({"not": _has("kind", {"pattern": ":"})}, _without("options")),
            _if(_has("experts", {"not": deep}), _without("deep")),
            _if({"allOf": [_has("experts", {"not": cross}), some]}, _without("crosses")),
            _if(_has("experts", cross), some),
        ],
    }


def _train() -> Schema:
    train = _object(Train)
    train["properties"]["segments"]["uniqueItems"] = True
    return train


def _serve() -> Schema:
    explore = _object(Explore, description="Exploration in serving.")
    explores = _has("policy", {"const": "epsilon"})
    explore["allOf"] = [
        _if(explores, {"required": ["share"], "properties": {"share": {"exclusiveMinimum": 0}}}),
        _if({"not": explores}, {"properties": {"share": {"const": 0}}}),
    ]
    gate = _object(Gate, description="Conditions for the promotion of a version.")
    low, high = (
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "minimum": 1, "maximum": 1_000},
    )
    gate["properties"]["calibration"] |= {"items": [low, high], "additionalItems": False}
    return _object(Serve, {"explore": explore, "gate": gate})


def _object(
    cls: type, more: Mapping[str, Any] | None = None, required: tuple[str, ...] = (), description: str = ""
) -> Schema:
    """Describe a table with the options of a class; dotted keys are in nested tables."""
    properties: Schema = {}
    for option in options_of(cls):
        head, _, rest = key_of(option).partition(".")
        if rest:
            properties.setdefault(head, _closed({}))["properties"][rest] = _option(option)
        else:
            properties[head] = _option(option)
    about = description or " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
    return _closed({**properties, **(more or {})}, required, description=about)


def _option(option: Field[Any]) -> Schema:
    """Describe one value: its form, meaning and default."""
    form, kind = option.metadata["form"], option.metadata["kind"]
    about = f"{option.metadata['doc']} ({kind}). Expected: {form.expected}."
    schema = {**form.json_schema(), "description": about}
    default = option.default
    if default is NO_DEFAULT or default is None or default in ((), ""):
        return schema
    if isinstance(form, Duration):
        default = duration_text(default)
    return {**schema, "default": list(default) if isinstance(default, tuple) else default}


def _closed(properties: Schema, required: tuple[str, ...] = (), **more: str) -> Schema:
    """Describe a table with only these keys."""
    schema = {"type": "object", **more, "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def _named(values: Schema, low: int, high: int, *more: Schema) -> Schema:
    """Describe a table with names chosen by the user as keys."""
    names = NAME.json_schema()
    return {
        "type": "object",
        "propertyNames": {"allOf": [names, *more]} if more else names,
        "additionalProperties": values,
        "minProperties": low,
        "maxProperties": high,
    }


def _if(condition: Schema, then: Schema) -> Schema:
    return {"if": condition, "then": then}


def _has(key: str, schema: Any = None) -> Schema:
    """Match a table that has the key, with a value of this schema."""
    return {"required": [key], **({"properties": {key: schema}} if schema else {})}


def _without(*keys: str) -> Schema:
    return {"properties": dict.fromkeys(keys, False)}
