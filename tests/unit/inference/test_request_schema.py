"""Requests take the values of fields that events take: nulls at each place, records below keys of maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema, to_json
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.features import JsonTranscoder, RequestDecoder, SampleDecoder
from freshet.inference.schemas import request_schema, row_schema
from tests.fixtures.effort import examples

SPEC = """
name = "nulls"
[events]
served = { key = ["request"], time = "ts:ms" }
action = { key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.request == 'click'" }
[tables]
t = { dim = 4 }
[features]
"""


def schema_of(**fields: Any) -> Record:
    """The schema of an event; a field is its type, or its type and its default."""
    listed: list[dict[str, Any]] = [{"name": "request", "type": "string"}, {"name": "ts", "type": "long"}]
    for name, type_ in fields.items():
        keys = ("name", "type", "default")
        listed.append(
            dict(zip(keys, (name, *type_) if isinstance(type_, tuple) else (name, type_), strict=False))
        )
    return parse_schema({"type": "record", "name": "Event", "fields": listed})


def decoded(features: str, served: Record, event: dict[str, Any]) -> list[Any]:
    """Keys and numbers of an event by training and by a request, which must be equal."""
    spec, body = parse_spec(SPEC + features), orjson.dumps([{"request": "r", "ts": 1, **event}])
    layout, request = layout_of(spec), request_schema(spec, served)
    trained = JsonTranscoder(served).body(body)
    ranked = JsonTranscoder(request, ignore_unknown=True).body(body)
    assert not trained.bad, trained.bad
    assert not ranked.bad, ranked.bad
    one = SampleDecoder(spec, layout, lambda _: served).decode(trained.records, 1, np.array([1], np.int64))
    two = RequestDecoder(spec, layout, request).decode(ranked.records, np.array([1], np.uint32))
    found = [[d.dense.tolist(), *(g.keys.tolist() for g in d.groups)] for d in (one, two)]
    assert found[0] == found[1]
    return found[0]


# Each place inside the other, from the outermost: the kind of container, and whether its content may be null.
# A feature takes no list of lists of which one may be null.
places = st.lists(st.tuples(st.sampled_from(["array", "map", "record"]), st.booleans()), max_size=4).filter(
    lambda made: not any(a == ("array", True) and b[0] == "array" for a, b in pairwise(made))
)


def typed(places: Sequence[tuple[str, bool]], *, null: bool) -> tuple[Any, str, Any, list[Any]]:
    """(type, rest of the path, a value without null, values with null at one place each)."""
    type_: Any = "string"
    path = ""
    value: Any = "x"
    values: list[Any] = []
    for i, (kind, inner_null) in reversed(list(enumerate(places))):
        type_, values = (["null", type_], [*values, None]) if inner_null else (type_, values)
        if kind == "array":
            type_ = {"type": "array", "items": type_}
            value, *values = ([value, v] for v in (value, *values))
        elif kind == "map":
            type_, path = {"type": "map", "values": type_}, f".k{path}"
            value, *values = ({"k": v} for v in (value, *values))
        else:
            fields = [{"name": "x", "type": type_}, {"name": "unused", "type": "long", "default": 0}]
            type_, path = {"type": "record", "name": f"Record{i}", "fields": fields}, f".x{path}"
            value, *values = ({"x": v, "unused": 1} for v in (value, *values))
    return (["null", type_], path, value, [*values, None]) if null else (type_, path, value, values)


@settings(max_examples=examples(60), deadline=None)
@given(places, st.booleans())
def test_requests_take_null_wherever_events_do(places: list[tuple[str, bool]], null: bool) -> None:
    type_, path, value, values = typed(places, null=null)
    many = ", max = 9" if any(kind == "array" for kind, _ in places) else ""
    feature = f'f = {{ field = "f{path}", table = "t"{many} }}'

    for one in [value, *values]:
        expected = decoded(feature, schema_of(f=type_), {"f": one})
        with_default = schema_of(f=(type_, one))
        spec = parse_spec(SPEC + feature)
        request = request_schema(spec, with_default)
        assert parse_schema(to_json(request)) == request
        made = JsonTranscoder(request, ignore_unknown=True).body(b'[{"request": "r", "ts": 1}]')
        found = RequestDecoder(spec, layout_of(spec), request).decode(made.records, np.array([1], np.uint32))
        assert [found.dense.tolist(), *(g.keys.tolist() for g in found.groups)] == expected


def test_null_for_the_impressions_is_refused() -> None:
    item = {"type": "record", "name": "Item", "fields": [{"name": "id", "type": "string"}]}
    served = schema_of(items=["null", {"type": "array", "items": item}])
    text = SPEC.replace('["request"]', '["request", "items.id"]', 1).replace(
        '["request"],', '["request", "item"],'
    )
    text = (
        text.replace("served = {", 'served = { explode = "items",')
        + 'f = { field = "items.id", table = "t" }'
    )
    request = request_schema(parse_spec(text), served)

    made = JsonTranscoder(request).body(b'[{"items": null}, {"items": []}]')

    assert [bad.index for bad in made.bad] == [0]


INNER = {"type": "record", "name": "Inner", "fields": [{"name": n, "type": "double"} for n in "xyz"]}
DEEP = {
    "type": "record",
    "name": "Deep",
    "fields": [
        {"name": "inner", "type": INNER},
        {"name": "more", "type": {"type": "map", "values": "Inner"}},
    ],
}


def test_features_read_other_fields_below_other_keys() -> None:
    served = schema_of(
        stats={"type": "map", "values": ["null", DEEP]},
    )
    paths = ["a.inner.x", "b.inner.y", "a.more.k.x", "b.more.l.z"]
    features = "".join(f'f{i} = {{ field = "stats.{p}", dense = "raw" }}\n' for i, p in enumerate(paths))
    deep = [
        {
            "inner": {"x": 1 + i, "y": 2 + i, "z": 3 + i},
            "more": {k: {"x": 4 + i, "y": 5 + i, "z": 6 + i} for k in "kl"},
        }
        for i in (0, 10)
    ]

    found = decoded(features, served, {"stats": {"a": deep[0], "b": deep[1]}})

    assert found[0] == [[1.0, 12.0, 4.0, 16.0]]
    row = row_schema(served, [f"stats.{p}" for p in paths])
    assert parse_schema(to_json(row)) == row
    assert not JsonTranscoder(row, ignore_unknown=True).body(orjson.dumps([{"stats": {"c": deep[0]}}])).bad
