"""Logical types: decimals are numbers, times have their unit, a UUID in bytes is its text."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.errors import ConfigError
from freshet.features import Decoded, JsonTranscoder, SampleDecoder
from freshet.features.writer import write_long
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle

SPEC = """
name = "x"
[events]
served = {{ schema = "s", key = ["v"], time = "v:ms" }}
action = {{ schema = "s", key = ["v"], time = "v:ms" }}
[labels]
c = {{ on = "action.v == 1", window = "2s" }}
[tables]
t = {{ dim = 4 }}
[features]
a = {{ field = "v", {} }}
"""
DENSE, ID = 'dense = "raw"', 'table = "t"'


def one(type_: Any) -> Record:
    return parse_schema({"type": "record", "name": "R", "fields": [{"name": "v", "type": type_}]})


def decoded(how: str, written: Any, raw: bytes, read: Any = None) -> Decoded:
    spec = parse_spec(SPEC.format(how))
    decoder = SampleDecoder(
        spec, layout_of(spec), lambda _: one(written), one(written if read is None else read)
    )
    return decoder.decode(BytesColumn.of([raw]), 1, np.zeros(1, np.int64))


def key_of(how: str, written: Any, raw: bytes, read: Any = None) -> int:
    got = decoded(how, written, raw, read)
    assert list(got.why) == []
    return int(oracle.decoded_keys(got)[0][0][0][0])


def decimal(scale: int, precision: int = 40, size: int = 0) -> Any:
    made: dict[str, Any] = {"logicalType": "decimal", "precision": precision, "scale": scale}
    return {**made, "type": "fixed", "name": "D", "size": size} if size else {**made, "type": "bytes"}


def in_bytes(unscaled: int, size: int = 0) -> bytes:
    n = size or unscaled.bit_length() // 8 + 1
    return (b"" if size else write_long(n)) + unscaled.to_bytes(n, "big", signed=True)


@given(st.integers(-(10**38), 10**38) | st.integers(-(10**9), 10**9), st.integers(0, 30), st.booleans())
def test_a_decimal_is_the_nearest_number(unscaled: int, scale: int, fixed: bool) -> None:
    size = 24 if fixed else 0
    got = decoded(DENSE, decimal(scale, size=size), in_bytes(unscaled, size))

    assert got.dense[0, 0] == np.float32(float(Decimal(unscaled).scaleb(-scale)))


@given(st.integers(-(2**63), 2**63 - 1))
def test_decimal_without_fraction_has_the_key_of_the_integer(value: int) -> None:
    assert key_of(ID, decimal(0), in_bytes(value)) == key_of(ID, "long", write_long(value))


@given(st.integers(-(10**15) + 1, 10**15 - 1), st.integers(1, 15), st.booleans())
def test_an_id_with_a_fraction_has_the_key_of_the_double(unscaled: int, scale: int, fixed: bool) -> None:
    size = 8 if fixed else 0
    number = struct.pack("<d", float(Decimal(unscaled).scaleb(-scale)))

    assert key_of(ID, decimal(scale, 15, size), in_bytes(unscaled, size)) == key_of(ID, "double", number)


def test_ids_that_would_change_their_key_are_refused_by_schema() -> None:
    with pytest.raises(ConfigError, match=r"precision 16(.|\n)*at most 15 digits, or of scale 0"):
        decoded(ID, decimal(2, 16), in_bytes(1))
    for written, said in ((decimal(0, 15), "scale 0"), (decimal(2, 16), "precision 16")):
        with pytest.raises(ConfigError, match=said):
            decoded(ID, written, in_bytes(1), decimal(2, 15))
    assert decoded(DENSE, decimal(0), in_bytes(7), decimal(2, 38)).dense[0, 0] == 7


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_id_of_more_than_64_bits_is_refused(value: int) -> None:
    got = decoded(ID, decimal(0), in_bytes(value))

    assert "64 bits of an id" in got.why[0]
    assert decoded(DENSE, decimal(0), in_bytes(value)).dense[0, 0] == np.float32(value)


@given(st.integers(-(10**12), 10**12), st.integers(0, 9), st.integers(0, 9))
def test_a_decimal_in_json_is_the_one_in_avro(unscaled: int, written: int, scale: int) -> None:
    number = Decimal(unscaled).scaleb(-written)
    fits = (number * 10**scale) % 1 == 0
    for size in (0, 16):
        made = JsonTranscoder(one(decimal(scale, size=size))).body(b'{"v": %s}' % str(number).encode())
        assert [r.path for r in made.bad] == ([] if fits else ["v"])
        if fits:
            assert made.records[0] == in_bytes(int(number * 10**scale), size)


def test_json_decimal_with_too_many_digits_is_refused() -> None:
    made = JsonTranscoder(one(decimal(2, precision=4))).body(
        b'[{"v": 99.99}, {"v": 100}, {"v": 1e-3}, {"v": 1e9999999999}]'
    )

    assert [r.index for r in made.bad] == [1, 2, 3]
    assert made.bad[0].expected == "a number (decimal of 4 digits, 2 of them behind the point)"


def timestamp(unit: str, family: str = "timestamp") -> Any:
    return {"type": "long", "logicalType": f"{family}-{unit}"}


@pytest.mark.parametrize(
    ("written", "raw", "read", "value"),
    [
        (timestamp("micros"), 1_999, timestamp("millis"), 1),
        (timestamp("micros"), -1, timestamp("millis"), -1),
        (timestamp("millis"), 5, timestamp("nanos"), 5_000_000),
        (timestamp("nanos", "local-timestamp"), 7_000, timestamp("micros"), 7),
        ({"type": "int", "logicalType": "date"}, 2, timestamp("millis"), 172_800_000),
        (timestamp("millis"), 5, "long", 5),
        ("long", 5, timestamp("micros"), 5),
    ],
)
def test_a_time_is_read_in_the_unit_of_the_specs_schema(
    written: Any, raw: int, read: Any, value: int
) -> None:
    assert key_of(ID, written, write_long(raw), read) == key_of(ID, "long", write_long(value))


def test_a_time_beyond_64_bits_in_the_specs_unit_is_refused() -> None:
    got = decoded(ID, timestamp("millis"), write_long(2**60), timestamp("nanos"))

    assert "beyond 64 bits" in got.why[0]


def test_a_uuid_in_bytes_has_the_key_of_its_text() -> None:
    raw, text = bytes(range(16)), b"00010203-0405-0607-0809-0a0b0c0d0e0f"
    fixed = {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}

    assert key_of(ID, fixed, raw) == key_of(ID, "string", write_long(36) + text)
