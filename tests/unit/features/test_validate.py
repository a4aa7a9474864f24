"""Whatever bytes come: the walker and fastavro agree on what is Avro of a schema."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.features import AvroValidator
from freshet.features.writer import write_long
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle
from tests.unit.features.schemas import schemas_with_records


def refused(schema: Record, records: list[bytes], *, framed: bool = False) -> list[int]:
    return [r.index for r in AvroValidator(schema).refused(BytesColumn.of(records), framed=framed)]


def of(type_: Any) -> Record:
    return parse_schema({"type": "record", "name": "R", "fields": [{"name": "f", "type": type_}]})


@given(schemas_with_records())
def test_what_fastavro_writes_is_accepted(drawn: tuple[Record, list[Any]]) -> None:
    schema, values = drawn
    records = list(oracle.write(schema, values))
    assert refused(schema, records) == []
    assert refused(schema, [b"\0\0\0\0\7" + r for r in records], framed=True) == []


@given(schemas_with_records(), st.data())
def test_what_is_accepted_after_a_change_fastavro_reads_too(
    drawn: tuple[Record, list[Any]], data: st.DataObject
) -> None:
    schema, values = drawn
    for record in oracle.write(schema, values):
        changed = bytearray(record)
        for _ in range(data.draw(st.integers(0, 3)) if record else 0):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        cut = bytes(changed[: data.draw(st.integers(0, len(changed)))])
        try:
            oracle.read(schema, cut)
            readable = True
        except Exception:  # fastavro has many ways to say no
            readable = False
        accepted = refused(schema, [cut]) == []
        # fastavro is laxer (a boolean of 2, an int beyond 32 bits, a negative index); it is never stricter.
        assert readable or not accepted


@given(schemas_with_records(), st.lists(st.binary(max_size=40), max_size=5))
def test_any_bytes_are_accepted_or_refused_with_a_place(
    drawn: tuple[Record, list[Any]], records: list[bytes]
) -> None:
    for r in AvroValidator(drawn[0]).refused(BytesColumn.of(records), framed=False):
        assert r.found


@pytest.mark.parametrize(
    ("type_", "record", "says"),
    [
        ("long", b"", "ends inside"),
        ("long", b"\x80" * 9, "ends inside"),
        ("long", b"\x80" * 10 + b"\x01", "10 bytes"),
        ("long", b"\xff" * 9 + b"\x02", "10 bytes"),
        ("int", write_long(2**31), "32 bits"),
        ("boolean", b"\x02", "neither 0 nor 1"),
        ("string", write_long(-1), "negative length"),
        ("string", write_long(5) + b"abc", "ends inside"),
        ("string", write_long(2**62), "ends inside"),
        ("string", write_long(2) + b"\xc0\xaf", "not UTF-8"),
        ("string", write_long(3) + b"\xed\xa0\x80", "not UTF-8"),
        (["null", "long"], write_long(2), "union branch"),
        (["null", "long"], write_long(-1), "union branch"),
        (["null", "long", "string"], write_long(3), "union branch"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, write_long(1), "enum symbol"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, write_long(-1), "enum symbol"),
        ({"type": "array", "items": "long"}, write_long(2**61), "block"),
        ({"type": "array", "items": "null"}, write_long(2**61), "block"),
        ({"type": "array", "items": "null"}, (write_long(60_000) * 2) + b"\0", "block"),
        ({"type": "array", "items": "long"}, write_long(-(2**63)), "block"),
        ({"type": "array", "items": "long"}, write_long(-1) + write_long(5), "ends inside"),
        ({"type": "array", "items": "long"}, write_long(-1) + write_long(2) + b"\x02\0\0", "block"),
        ({"type": "map", "values": "null"}, write_long(2**61), "block"),
        ("null", b"\0", "after the last field"),
    ],
)
def test_what_attacks_a_reader_is_refused(type_: Any, record: bytes, says: str) -> None:
    (found,) = AvroValidator(of(type_)).refused(BytesColumn.of([record]), framed=False)
    assert says in found.found


def test_a_block_with_its_size_is_read_as_one_without() -> None:
    schema = of({"type": "array", "items": "long"})
    assert refused(schema, [write_long(-2) + write_long(2) + b"\x02\x04\0"]) == []


def test_a_record_without_frame_is_refused_where_one_is_expected() -> None:
    assert refused(of("long"), [b"\0\0\0\0\1\2", b"\1\0\0\0\1\2", b"\0\0"], framed=True) == [1, 2]
