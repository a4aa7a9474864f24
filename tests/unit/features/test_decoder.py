"""Samples decoded natively have the keys and numbers that the features' definition gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import Record
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.errors import ConfigError
from freshet.features import SampleDecoder, key_of
from freshet.types import F32, BytesColumn
from tests.fixtures import feature_oracle as oracle
from tests.fixtures.samples import LAYOUT, SAMPLE, SAMPLES, SPEC, TIMES, decoder, sample_of


def same_floats(found: F32, expected: list[float]) -> None:
    wanted = np.array(expected, np.float32).reshape(found.shape)
    np.testing.assert_allclose(found, wanted, rtol=2e-7, atol=0, equal_nan=True)


@given(st.lists(st.tuples(SAMPLES, TIMES), max_size=5), st.booleans())
def test_decoded_samples_have_the_keys_and_numbers_of_the_oracle(
    rows: list[tuple[Any, int]], serving: bool
) -> None:
    samples, times = [s for s, _ in rows], [t for _, t in rows]
    got = decoder().decode(oracle.write(SAMPLE, samples), 1, np.array(times, np.int64), serving=serving)

    assert got.size == len(rows)
    assert not len(got.bad)
    assert oracle.decoded_keys(got) == oracle.group_keys(SPEC, LAYOUT, samples, times, serving)
    dense = [oracle.dense_value(SPEC.features[i], s, serving) for s in samples for i in LAYOUT.dense]
    with np.errstate(over="ignore"):
        same_floats(got.dense, dense)
    for name, keys in got.segments.items():
        f = SPEC.feature(name)
        assert keys.tolist() == [oracle.feature_key(SPEC, f, s, t, serving=False, salt=0) for s, t in rows]
    for i, name in enumerate(("click", "buy")):
        served = [s["items"]["freshet_served"] for s in samples]
        same_floats(got.served[name], [math.nan if v is None else v["predictions"][i] for v in served])
    logged = [s["items"]["freshet_served"] for s in samples]
    assert got.explored.tolist() == [v is not None and v["explored"] for v in logged]


@given(st.lists(SAMPLES, min_size=1, max_size=4), st.data())
def test_a_damaged_record_is_read_as_by_fastavro_or_named_bad(
    samples: list[Any], data: st.DataObject
) -> None:
    records = list(oracle.write(SAMPLE, samples))
    i = data.draw(st.integers(0, len(records) - 1))
    changed = bytearray(records[i])
    for _ in range(data.draw(st.integers(0, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    records[i] = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    got = decoder().decode(BytesColumn.of(records), 1, np.zeros(len(records), np.int64))
    whole = [k for k in range(len(records)) if k != i]
    if len(got.bad):
        assert got.bad.tolist() == [i]
        assert got.why[0].startswith(f"record {i}: ")
    else:
        whole.append(i)
    alone = decoder().decode(
        BytesColumn.of([records[k] for k in sorted(whole)]), 1, np.zeros(len(whole), np.int64)
    )
    assert oracle.decoded_keys(got) == oracle.decoded_keys(alone)
    assert got.dense.tobytes() == alone.dense.tobytes()
    assert got.size == len(whole)


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_read_or_named_bad(records: list[bytes]) -> None:
    got = decoder().decode(BytesColumn.of(records), 1, np.zeros(len(records), np.int64))
    assert got.size + len(got.bad) == len(records)
    assert len(got.why) == len(got.bad)


def test_each_sample_is_read_by_the_schema_that_wrote_it() -> None:
    reordered = Record(SAMPLE.name, tuple(reversed(SAMPLE.fields)))
    sample = sample_of()
    both = BytesColumn.concat([oracle.write(SAMPLE, [sample]), oracle.write(reordered, [sample])] * 2)
    schemas = {1: SAMPLE, 2: reordered}
    asked: list[int] = []

    def lookup(schema_id: int) -> Record:
        asked.append(schema_id)
        return schemas[schema_id]

    made = SampleDecoder(SPEC, LAYOUT, lookup)
    got = made.decode(both, np.array([1, 2, 1, 2], np.uint32), np.zeros(4, np.int64))
    assert oracle.decoded_keys(got) == oracle.group_keys(SPEC, LAYOUT, [sample] * 4, [0] * 4)
    assert asked == [1, 2]


def test_null_is_not_the_empty_string() -> None:
    empty, null = sample_of(), sample_of()
    empty["user"]["country"], null["user"]["country"] = "", None
    got = decoder().decode(oracle.write(SAMPLE, [empty, null]), 1, np.zeros(2, np.int64))
    assert got.segments["country"].tolist() == [key_of("", 0), 0]


def test_a_missing_field_is_named_with_its_feature() -> None:
    fields = tuple(f for f in SAMPLE.fields if f.name != "device")
    with pytest.raises(
        ConfigError, match=r"(?s)schema 1, wanted by feature 'device'.*a field of Served: request_id"
    ):
        decoder(Record(SAMPLE.name, fields)).program(1)


def test_a_field_of_a_type_that_a_feature_cannot_take_is_refused() -> None:
    spec = parse_spec(SPEC_WITH_PRICE.replace("FIELD", "request_id"))
    with pytest.raises(
        ConfigError, match=r"(?s)request_id = 'string'.*boolean, int, long, float, double.*'price'"
    ):
        SampleDecoder(spec, layout_of(spec), lambda _: SAMPLE).program(1)
    spec = parse_spec(SPEC_WITH_PRICE.replace("FIELD", "items.tags.weight"))
    with pytest.raises(ConfigError, match="an array on the way"):
        SampleDecoder(spec, layout_of(spec), lambda _: SAMPLE).program(1)


def test_a_batch_of_nothing_is_nothing() -> None:
    got = decoder().decode(BytesColumn.of([]), 1, np.empty(0, np.int64))
    assert got.size == 0
    assert got.dense.shape == (0, 2)


SPEC_WITH_PRICE = """
name = "shop"
[events]
served.topic = "served"
served.schema = "served.avsc"
served.explode = "items"
served.key = ["request_id", "items.id"]
served.time = "ts:ms"
action = { topic = "a", schema = "a.avsc", key = ["request_id", "item_id"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'", window = "2m" }
[tables]
user = { dim = 8 }
[features]
user = { field = "user.id", table = "user" }
price = { field = "FIELD", dense = "log1p" }
"""
