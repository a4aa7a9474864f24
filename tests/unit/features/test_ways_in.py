"""JSON, columns, Arrow tables and Avro of the same values reach the same keys, to the bit."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Files
from freshet.config.spec.parse import parse_spec
from freshet.errors import ConfigError
from freshet.features import Column, ColumnEncoder, Decoded, JsonTranscoder, SampleDecoder
from freshet.features.arrow import CellFormat, TableEncoder
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle

SPEC = parse_spec("""
name = "ways"
[events]
served = { topic = "s", schema = "s.avsc", key = ["request"], time = "ts:ms" }
action = { topic = "a", schema = "a.avsc", key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'", window = "2m" }
[tables]
t = { dim = 8 }
[features]
user = { field = "user.id", table = "t" }
country = { field = "user.country", table = "t" }
recent = { field = "recent", table = "t", max = 3, pool = "mean" }
tags = { field = "tags.name", table = "t", max = 9, pool = "sum" }
price = { field = "price", dense = "log1p" }
band = { field = "price", buckets = [1.0, 5.0], table = "t" }
[model]
experts = ["wide", "cross", "fm"]
crosses = [["user", "country"]]
""")
LAYOUT = layout_of(SPEC)


def nullable(type_: str) -> dict[str, Any]:
    return {"type": ["null", type_], "default": None}


SCHEMA = parse_schema(
    {
        "type": "record",
        "name": "Row",
        "fields": [
            {"name": "request", "type": "long"},
            {
                "name": "user",
                "type": {
                    "type": "record",
                    "name": "User",
                    "fields": [{"name": "id", "type": "long"}, {"name": "country", **nullable("string")}],
                },
            },
            {"name": "recent", "type": {"type": "array", "items": "long"}},
            {
                "name": "tags",
                "type": {
                    "type": "array",
                    "items": {
                        "type": "record",
                        "name": "Tag",
                        "fields": [{"name": "name", "type": "string"}],
                    },
                },
            },
            {"name": "price", **nullable("double")},
            {"name": "note", "type": "string", "default": "none"},
        ],
    }
)
LONG = st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "request": LONG,
            "user": st.fixed_dictionaries({"id": LONG, "country": st.none() | st.text(max_size=20)}),
            "recent": st.lists(LONG, max_size=5),
            "tags": st.lists(st.fixed_dictionaries({"name": st.text(max_size=5)}), max_size=3),
            "price": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        }
    ),
    max_size=5,
)


def decode(records: BytesColumn, schema: Record) -> Decoded:
    got = SampleDecoder(SPEC, LAYOUT, lambda _: schema).decode(records, 1, np.zeros(len(records), np.int64))
    assert not len(got.bad)
    return got


def columns_of(rows: list[Any]) -> dict[str, Column]:
    countries = [r["user"]["country"] for r in rows]
    prices = [math.nan if r["price"] is None else r["price"] for r in rows]
    recent = [v for r in rows for v in r["recent"]]
    names = [t["name"].encode() for r in rows for t in r["tags"]]

    def ends(field: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.cumsum([len(r[field]) for r in rows], dtype=np.int64)

    return {
        "request": Column(np.array([r["request"] for r in rows], np.int64)),
        "user.id": Column(np.array([r["user"]["id"] for r in rows], np.int64)),
        "user.country": Column(
            BytesColumn.of([(c or "").encode() for c in countries]),
            np.array([c is None for c in countries], np.bool_),
        ),
        "recent": Column(None, ends=ends("recent")),
        "recent[]": Column(np.array(recent, np.int64)),
        "tags": Column(None, ends=ends("tags")),
        "tags[].name": Column(BytesColumn.of(names)),
        "price": Column(np.array(prices, np.float64)),
    }


@given(ROWS)
def test_every_way_in_reaches_the_same_keys_and_numbers(rows: list[Any]) -> None:
    direct = oracle.write(SCHEMA, [{**r, "note": "none"} for r in rows])
    by_json = JsonTranscoder(SCHEMA).body(json.dumps(rows).encode()).records
    columns = columns_of(rows)
    by_columns = ColumnEncoder(SCHEMA, list(columns)).encode(columns, len(rows)).records
    assert list(direct) == list(by_json) == list(by_columns)

    expected = decode(direct, SCHEMA)
    assert oracle.decoded_keys(expected) == oracle.group_keys(SPEC, LAYOUT, rows, [0] * len(rows))
    user = pa.struct([("id", pa.int64()), ("country", pa.string())])
    tags = pa.list_(pa.struct([("name", pa.string())]))
    fields = [("request", pa.int64()), ("user", user), ("recent", pa.list_(pa.int64())), ("tags", tags)]
    table = pa.Table.from_pylist(rows, pa.schema([*fields, ("price", pa.float64())]))
    batch = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    by_arrow = TableEncoder(SCHEMA, CellFormat(Files()), every_column=True).encode(batch[0])
    assert list(by_arrow) == list(direct)


def test_rows_that_do_not_fit_are_refused_alone() -> None:
    schema = parse_schema(
        {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "n", "type": "int"},
                {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A"]}},
            ],
        }
    )
    columns = {
        "n": Column(np.array([1.0, 1.5, math.nan, 2.0**40, 5.0])),
        "e": Column(BytesColumn.of([b"A", b"A", b"A", b"A", b"B"])),
    }
    got = ColumnEncoder(schema, ["n", "e"]).encode(columns, 5)
    assert got.rows.tolist() == [0]
    assert [(r.index, r.path) for r in got.bad] == [(1, "n"), (2, "n"), (3, "n"), (4, "e")]


def test_columns_that_no_field_takes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"(?s)nosuch.*request, user, user\.id"):
        ColumnEncoder(SCHEMA, ["nosuch"])
    with pytest.raises(ConfigError, match="a column for"):
        ColumnEncoder(SCHEMA, ["request"]).encode({"request": Column(BytesColumn.of([b"x"]))}, 1)
    with pytest.raises(ConfigError, match="with ends"):
        ColumnEncoder(SCHEMA, ["tags[].name"])
    with pytest.raises(ValueError, match="no column, no default"):
        ColumnEncoder(SCHEMA, ["request"]).encode({"request": Column(np.array([1]))}, 1)
