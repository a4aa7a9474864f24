"""Schemas for requests, and the protocol's tensors as rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, field_at, parse_schema, sample_schema, to_json
from freshet.config.spec.parse import load_spec
from freshet.config.spec.schemas import feature_fields
from freshet.errors import BadInput, ConfigError
from freshet.features import JsonTranscoder
from freshet.inference.oip import Tensor, parse_infer
from freshet.inference.oip_model import Input, Step, inputs_of, limits_of, metadata, model_config, rows_of
from freshet.inference.schemas import request_schema, row_schema

EXAMPLES = Path(__file__).parents[3] / "examples"
FEED = load_spec(EXAMPLES / "feed/freshet.toml")
RANKED = parse_schema((EXAMPLES / "feed/ranked.avsc").read_text())
SAMPLE = sample_schema(RANKED, "items")
INPUTS = inputs_of(FEED, SAMPLE)


def names(record: Any) -> list[str]:
    assert isinstance(record, Record)
    return [f.name for f in record.fields]


def tensor(name: str, values: Any, dtype: Any = np.int64) -> Tensor:
    return Tensor(name, "?", np.array(values, dtype))


def rows(*tensors: Tensor) -> list[dict[str, Any]]:
    return rows_of({t.name: t for t in tensors}, INPUTS, 10)


def test_request_schema_has_features_key_and_time_only() -> None:
    schema = request_schema(FEED, RANKED)

    assert names(schema) == ["request_id", "ts", "user", "items"]
    assert names(field_at(schema, "user").type) == ["id", "country", "last_items"]


def test_everything_but_the_exploded_array_may_be_missing() -> None:
    schema = request_schema(FEED, RANKED)

    assert [f.has_default for f in schema.fields] == [True, True, True, False]
    assert field_at(schema, "items.pos").nullable
    assert field_at(schema, "user.last_items").nullable


def test_the_schema_is_one_that_avro_readers_accept() -> None:
    schema = request_schema(FEED, RANKED)

    assert parse_schema(to_json(schema)) == schema
    assert sample_schema(schema, "items").field("items") is not None


def test_a_missing_field_has_the_default_of_its_schema() -> None:
    inner = {"type": "record", "name": "I", "fields": [{"name": n, "type": "long"} for n in "ab"]}
    fields: list[tuple[Any, ...]] = [
        ("s", "string", "x"),
        ("n", ["double", "null"], 0.5),
        ("f", ["null", "long"], None),
        ("r", inner, {"a": 1, "b": 2}),
        ("h", {"type": "array", "items": "I"}, [{"a": 3, "b": 4}]),
        ("g", "long"),
    ]
    keys = ("name", "type", "default")
    written = [dict(zip(keys, field, strict=False)) for field in fields]

    made = row_schema(
        parse_schema({"type": "record", "name": "R", "fields": written}), ["s", "n", "f", "r.b", "h.a", "g"]
    )

    assert [f.default for f in made.fields] == ["x", 0.5, None, {"b": 2}, [{"a": 3}], None]
    assert [field_at(made, f.name).nullable for f in made.fields] == [True] * 6
    assert parse_schema(to_json(made)) == made
    readable = fastavro.parse_schema(to_json(made))
    (bytes_,) = JsonTranscoder(made).body(b"[{}]").records
    assert fastavro.schemaless_reader(io.BytesIO(bytes_), readable, None) == {
        "s": "x", "n": 0.5, "f": None, "r": {"b": 2}, "h": [{"a": 3}], "g": None,
    }  # fmt: skip


def test_a_row_has_the_requested_fields_and_no_others() -> None:
    schema = row_schema(SAMPLE, feature_fields(FEED))

    assert names(schema) == ["user", "items"]
    assert names(field_at(schema, "items").type) == ["id", "age_s", "ctr_1h", "pos"]


def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="country"):
        row_schema(SAMPLE, ["user.contry"])


def test_a_field_within_what_is_no_record_is_refused() -> None:
    with pytest.raises(ConfigError):
        row_schema(SAMPLE, ["user.id.x"])


def test_maps_unions_and_arrays_of_records_are_entered() -> None:
    schema = parse_schema(
        {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "m", "type": {"type": "map", "values": "long"}},
                {"name": "u", "type": ["null", "long", "string"]},
                {
                    "name": "h",
                    "type": {
                        "type": "array",
                        "items": {
                            "type": "record",
                            "name": "H",
                            "fields": [{"name": "a", "type": "long"}, {"name": "b", "type": "long"}],
                        },
                    },
                },
            ],
        }
    )

    made = row_schema(schema, ["m.x", "u", "h.b"])

    assert parse_schema(to_json(made)) == made
    assert field_at(made, "h.b").repeated
    assert names(field_at(made, "h").type.items) == ["b"]  # type: ignore[union-attr]


def test_there_is_an_input_for_each_field_and_the_time() -> None:
    described = metadata("feed", "3", INPUTS, ("click", "watch"))

    assert [(t["name"], t["datatype"], t["shape"]) for t in described["inputs"]] == [
        ("user.id", "INT64", [-1]),
        ("user.id.null", "BOOL", [-1]),
        ("items.id", "INT64", [-1]),
        ("items.id.null", "BOOL", [-1]),
        ("user.last_items", "INT64", [-1, 50]),
        ("user.last_items.length", "INT32", [-1]),
        ("user.country", "BYTES", [-1]),
        ("user.country.null", "BOOL", [-1]),
        ("items.age_s", "FP32", [-1]),
        ("items.ctr_1h", "FP32", [-1]),
        ("items.pos", "INT64", [-1]),
        ("items.pos.null", "BOOL", [-1]),
        ("ts", "INT64", [-1]),
        ("ts.null", "BOOL", [-1]),
    ]
    assert [t["name"] for t in described["outputs"]] == ["score", "click", "watch"]
    assert model_config(described)["input"][6]["data_type"] == "TYPE_STRING"


def test_tensors_become_rows_and_what_is_missing_stays_missing() -> None:
    assert rows(tensor("user.id", [1, 1]), tensor("items.id", [7, 8])) == [
        {"user": {"id": 1}, "items": {"id": 7}},
        {"user": {"id": 1}, "items": {"id": 8}},
    ]


def test_lists_are_cut_to_their_lengths() -> None:
    found = rows(
        tensor("user.last_items", [[1, 2, 3], [4, 5, 6]]), tensor("user.last_items.length", [2, 0], np.int32)
    )

    assert [row["user"]["last_items"] for row in found] == [[1, 2], []]


@pytest.mark.parametrize("shape", [[3], [3, 1]])
def test_one_row_without_a_value_is_null_in_it_alone(shape: list[int]) -> None:
    by_json = parse_infer(
        orjson.dumps(
            {
                "inputs": [
                    {"name": "user.country", "datatype": "BYTES", "shape": shape, "data": ["DE", None, ""]},
                    {"name": "items.id", "datatype": "INT64", "shape": shape, "data": [None, 0, 7]},
                    {"name": "items.age_s", "datatype": "FP32", "shape": shape, "data": [0.0, None, 1.5]},
                ]
            }
        ),
        None,
        limits_of(INPUTS, 10),
    ).tensors
    no_country, no_id = [False, True, False], [True, False, False]
    by_companion = (
        tensor("user.country", np.array([b"DE", b"x", b""], object).reshape(shape), object),
        tensor("user.country.null", np.array(no_country).reshape(shape), np.bool_),
        tensor("items.id", np.array([9, 0, 7]).reshape(shape)),
        tensor("items.id.null", no_id, np.bool_),
        tensor("items.age_s", np.array([0.0, np.nan, 1.5]).reshape(shape), np.float32),
    )

    expected = [
        {"user": {"country": "DE"}, "items": {"id": None, "age_s": 0.0}},
        {"user": {"country": None}, "items": {"id": 0, "age_s": None}},
        {"user": {"country": ""}, "items": {"id": 7, "age_s": 1.5}},
    ]
    assert rows_of(by_json, INPUTS, 10) == expected
    assert rows(*by_companion) == expected


def test_a_list_that_is_null_is_null_in_its_row() -> None:
    asked = {"name": "user.last_items", "datatype": "INT64", "shape": [2, 2], "data": [None, [1, 2]]}
    found = parse_infer(orjson.dumps({"inputs": [asked]}), None, limits_of(INPUTS, 10)).tensors

    assert rows_of(found, INPUTS, 10) == [{"user": {"last_items": None}}, {"user": {"last_items": [1, 2]}}]


def test_a_number_that_is_none_is_null() -> None:
    found = rows(tensor("items.age_s", [1.5, np.nan, np.inf], np.float32))

    assert [row["items"]["age_s"] for row in found] == [1.5, None, None]


def test_texts_are_utf_8() -> None:
    assert rows(tensor("user.country", ["é".encode()], object)) == [{"user": {"country": "é"}}]
    with pytest.raises(BadInput, match="UTF-8"):
        rows(tensor("user.country", [b"\xff"], object))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "no inputs"),
        ([tensor("user.age", [1])], "expected one of user.id, items.id"),
        ([tensor("user.id", [1]), tensor("items.id", [1, 2])], "one number of rows"),
        ([tensor("user.id", [1] * 11)], "1 to 10 rows, found 11"),
        ([tensor("user.id", [[1, 2]])], r"expected shape \[-1\], found \[1, 2\]"),
        ([tensor("user.id", [1]), tensor("user.id.null", [0])], "1 values of BOOL"),
        ([tensor("user.id.null", [True], np.bool_)], "describes 'user.id', which is missing"),
        ([tensor("items.age_s.null", [True], np.bool_)], "expected one of"),
        ([tensor("user.last_items", [1])], r"expected shape \[-1, 50\]"),
        ([tensor("user.id", [1.0], np.float32)], "expected INT64"),
        ([tensor("user.id", [2**63], np.uint64)], "beyond its range"),
        ([tensor("user.country", [1])], "expected BYTES"),
        ([tensor("user.last_items.length", [1])], "which is missing"),
        ([tensor("user.last_items", [[1]]), tensor("user.last_items.length", [2])], "integers from 0 to 1"),
        (
            [tensor("user.last_items", [[1]]), tensor("user.last_items.length", [1.0], np.float32)],
            "from 0 to 1",
        ),
    ],
)
def test_what_does_not_fit_the_metadata_is_refused(tensors: list[Tensor], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rows(*tensors)


def test_elements_of_an_array_of_records_are_spread_over_it() -> None:
    array = Step("h", arrays=1, is_key=False)
    inputs = tuple(
        Input(f"h.{name}", "INT64", 5, (array, Step(name, arrays=0, is_key=False)), latin=False)
        for name in "ab"
    )
    found = rows_of({"h.a": tensor("h.a", [[1, 2]]), "h.b": tensor("h.b", [[3, 4]])}, inputs, 10)

    assert found == [{"h": [{"a": 1, "b": 3}, {"a": 2, "b": 4}]}]


@given(
    st.dictionaries(
        st.sampled_from([one.name for one in INPUTS] + ["user.last_items.length", "x"]),
        st.tuples(
            st.sampled_from([np.int32, np.float64, object, bool, np.uint64]), st.integers(0, 3), st.booleans()
        ),
    )
)
def test_any_tensors_are_rows_or_bad_input(shapes: dict[str, tuple[Any, int, bool]]) -> None:
    tensors = {}
    for name, (dtype, size, flat) in shapes.items():
        values = np.ones((size,) if flat else (size, 2), dtype)
        if dtype is object:
            values[...] = b"a"
        tensors[name] = Tensor(name, "?", values)
    try:
        found = rows_of(tensors, INPUTS, 10)
    except BadInput:
        return
    assert len(found) == next(iter(shapes.values()))[1]
