"""The JSON Schema of freshet.toml against the parser, which refuses all values that the schema refuses."""

import copy
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from freshet.config.options import Duration, Form, Integer, Wrong, key_of, options_of
from freshet.config.spec.json_schema import json_schema
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
from freshet.config.spec.parse import parse_spec
from freshet.errors import ConfigError
from tests.fixtures.effort import examples
from tests.unit.config.spec.random_specs import specs, text_of

ROOT = Path(__file__).parents[4]
SPECS = sorted(
    path
    for folder in ("examples", "services", "tests")
    for path in (ROOT / folder).rglob("*.toml")
    if "[events]" in path.read_text()
)
SCHEMA = json_schema()
VALIDATOR = Draft7Validator(SCHEMA)
CLASSES = (Spec, Stream, Join, Label, Table, Feature, Model, Train, Serve, Explore, Gate, Retention, Files)
FEED = (ROOT / "examples" / "feed" / "freshet.toml").read_text()


def refusal(values: Mapping[str, Any]) -> ConfigError | None:
    try:
        parse_spec(text_of(dict(values)), folder=str(ROOT / "examples" / "feed"))
    except ConfigError as error:
        return error
    return None


def test_schema_is_a_valid_json_schema() -> None:
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_spec_of_the_repository_validates(path: Path) -> None:
    assert [e.message for e in VALIDATOR.iter_errors(tomllib.loads(path.read_text()))] == []


def schema_of(cls: type) -> dict[str, Any]:
    """Return the part of the schema for a class."""
    p = SCHEMA["properties"]
    parts = {
        Spec: SCHEMA,
        Stream: p["events"]["properties"]["served"],
        Label: p["labels"]["additionalProperties"],
        Table: p["tables"]["additionalProperties"],
        Feature: p["features"]["additionalProperties"],
        Explore: p["serve"]["properties"]["explore"],
        Gate: p["serve"]["properties"]["gate"],
    }
    found: dict[str, Any] = parts[cls] if cls in parts else p[cls.__name__.lower()]
    return found


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_schema_has_every_key_with_meaning_and_default(cls: type) -> None:
    for option in options_of(cls):
        part = schema_of(cls)
        for name in key_of(option).split("."):
            assert part["additionalProperties"] is False
            part = part["properties"][name]
        assert option.metadata["doc"] in part["description"]
        if isinstance(option.default, int | str) and option.default != "":
            written = part["default"]
            assert option.metadata["form"].read(written) == option.default


def around(form: Form) -> Iterator[Any]:
    """Yield values at the bounds of a form, and values of other types."""
    yield from (
        True,
        False,
        0,
        1,
        -1,
        2,
        3.5,
        1e-9,
        1e300,
        "",
        "x",
        "ts:ms",
        "ts:h",
        "a b",
        "a.b",
        "ü",
        "é:ms",
    )
    yield from (
        "30s",
        "1.5m",
        "30 s",
        "30",
        "s",
        "٣s",
        "1e3s",
        "hedge",
        "a:b",
        "log1p",
        "x" * 1_001,
        "x" * 65,
    )
    yield from ([], ["x"], ["x", "y"], [1], [1, 2], [[]], [["a", "b"]], {}, {"name": "x"}, {"nome": "x"})
    yield from ({"name": "clip", "low": 1}, {"name": "a.b:c", "d": "e"}, ["log1p"] * 9, ["ts"] * 9)
    for bound in ("low", "high"):
        value = getattr(form, bound, None)
        if isinstance(value, int | float) and math.isfinite(value):
            yield from (value, value - 1, value + 1, float(value) + 0.5)


def can_know(form: Form, value: Any) -> bool:
    """Return whether JSON Schema can refuse such a value."""
    integral = isinstance(form, Integer) and isinstance(value, float) and value == int(value)
    return not integral and not (isinstance(form, Duration) and isinstance(value, str))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_schema_and_parser_agree_on_every_value_of_a_key(cls: type) -> None:
    for option in options_of(cls):
        form: Form = option.metadata["form"]
        validator = Draft7Validator(form.json_schema())
        for value in around(form):
            try:
                form.read(value)
                read = True
            except Wrong:
                read = False
            if read or can_know(form, value):
                assert validator.is_valid(value) == read, (option.name, value)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=examples(200))
@given(specs())
def test_schema_accepts_all_that_the_parser_accepts(values: dict[str, Any]) -> None:
    errors = [e.message for e in VALIDATOR.iter_errors(values)]

    assert not errors or refusal(values) is not None, errors


WORDS = [
    "x",
    "click",
    "item",
    "user",
    "30s",
    "1ms",
    "mean",
    "hour",
    "hedge",
    "linear",
    "dlrm",
    "a:b",
    "shown",
    "epsilon",
    "raw",
    "log1p",
    "adam",
    "crosses",
]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([0, 1, -1, 3, 7, 300, 2**20, 0.5, -0.5, 2.5, True, False, ""]),
    st.sampled_from(WORDS),
    st.sampled_from([["x"], ["wide"], ["wide", "cross"], [["user", "item"]], ["raw", "log1p"], [0.5, 2.0]]),
    st.sampled_from([{"name": "adam"}, {"name": "sgd", "eps": 1e-8}, {"name": "clip", "high": 3}]),
    st.sampled_from([[], [1], {}, {"policy": "epsilon"}]),
)
KEYS = st.sampled_from(
    [
        "field",
        "table",
        "dense",
        "time",
        "max",
        "pool",
        "buckets",
        "serve_as",
        "missing",
        "value",
        "loss",
        "given",
        "experts",
        "crosses",
        "deep",
        "kind",
        "options",
        "mix",
        "require",
        "explode",
        "share",
        "policy",
        "gate",
        "explore",
        "optimizer",
        "ttl",
        "dim",
        "nome",
        "shown",
        "join",
        "tables",
        "segments",
        "batch",
        "1",
    ]
)


def tables_of(values: Any) -> Iterator[dict[str, Any]]:
    if isinstance(values, dict):
        yield values
        for inner in values.values():
            yield from tables_of(inner)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Return the feed example after one to three edits: a key removed, added, or with another value."""
    values = copy.deepcopy(tomllib.loads(FEED))
    for _ in range(draw(st.integers(1, 3))):
        table = draw(st.sampled_from(list(tables_of(values))))
        what = draw(st.sampled_from(["drop", "add", "change"]))
        if what == "add" or not table:
            table[draw(KEYS)] = copy.deepcopy(draw(VALUES))
        else:
            key = draw(st.sampled_from(sorted(table)))
            if what == "drop":
                del table[key]
            else:
                table[key] = copy.deepcopy(draw(VALUES))
    return values


BEYOND = re.compile(
    r"features\.\w+\.(table|field|buckets|dense.*)|labels\.\w+\.(on|value|given)|tables\.\w+\.dim"
    r"|events\.\w+\.(key|topic|time|id)|model\.crosses\[\d+\]|train\.(segments\[\d+\]|batch\.behind)"
    r"|serve\.(score|gate\.calibration)"
)
"""Keys with a validity that depends on the rest of the spec: references, expressions, orders, sizes."""


def is_beyond_json_schema(refused: ConfigError) -> bool:
    size = "a duration from" in refused.expected
    whole = isinstance(refused.found, float) and "integer" in refused.expected
    return size or whole or BEYOND.fullmatch(refused.key) is not None


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=examples(300))
@given(mutated())
def test_schema_and_parser_agree_on_edits_within_json_schema(values: dict[str, Any]) -> None:
    errors = [(list(e.absolute_path), e.message) for e in VALIDATOR.iter_errors(values)]
    refused = refusal(values)

    if errors:
        assert refused is not None, errors
    elif refused is not None:
        assert is_beyond_json_schema(refused), str(refused)
