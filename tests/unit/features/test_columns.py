import io
import json

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput
from freshet.features.columns import FileColumn, encode_columns, schema_of_columns
from freshet.spec.avro import canonical
from freshet.types import BytesColumn

I64 = st.integers(-(2**63), 2**63 - 1)


def decoded(columns, rows):
    schema = schema_of_columns(columns, "sample")
    encoded = encode_columns(columns, schema, rows)
    reader = fastavro.parse_schema(json.loads(canonical(schema)))
    return [fastavro.schemaless_reader(io.BytesIO(value), reader, None) for value in encoded]


def integers(values):
    return FileColumn("integer", integers=np.array(values, np.int64))


def test_columns_nest_by_their_paths():
    rows = decoded({"user.id": integers([7]), "ts": integers([9]), "user.age": integers([30])}, 1)

    assert rows == [{"user": {"id": 7, "age": 30}, "ts": 9}]


@given(st.lists(st.tuples(I64, st.floats(allow_nan=False), st.booleans(), st.text()), max_size=30))
def test_every_type_reads_back_as_it_was(rows):
    columns = {
        "i": integers([r[0] for r in rows]),
        "f": FileColumn("real", reals=np.array([r[1] for r in rows], np.float64)),
        "b": FileColumn("truth", truths=np.array([r[2] for r in rows], np.uint8)),
        "s": FileColumn("text", text=BytesColumn.of([r[3].encode() for r in rows])),
    }

    assert [tuple(r.values()) for r in decoded(columns, len(rows))] == rows


@given(st.lists(st.one_of(st.none(), st.text())))
def test_null_is_not_the_empty_text(values):
    texts = BytesColumn.of([(v or "").encode() for v in values])
    column = FileColumn("text", text=texts, valid=np.array([v is not None for v in values], np.bool_))

    assert [r["s"] for r in decoded({"s": column}, len(values))] == values


@given(st.lists(st.one_of(st.none(), st.lists(I64, max_size=5))))
def test_lists_read_back_with_their_nulls(values):
    flat = [v for row in values for v in row or ()]
    ends = np.cumsum([len(row or ()) for row in values], dtype=np.int64)
    column = FileColumn(
        "integer",
        integers=np.array(flat, np.int64),
        list_ends=ends if len(values) else np.empty(0, np.int64),
        valid=np.array([row is not None for row in values], np.bool_),
    )

    assert [r["l"] for r in decoded({"l": column}, len(values))] == values


def test_a_column_cannot_be_a_value_and_a_record():
    with pytest.raises(BadInput, match=r"'user' and 'user\.id'"):
        schema_of_columns({"user.id": integers([1]), "user": integers([1])}, "sample")


def test_columns_of_different_lengths_are_refused():
    columns = {"a": integers([1, 2]), "b": integers([1])}

    with pytest.raises(ValueError, match="equal lengths"):
        encode_columns(columns, schema_of_columns(columns, "sample"), 2)
