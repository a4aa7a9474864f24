"""JSON events reach the bytes that fastavro writes; what does not fit is named by field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.errors import ConfigError
from freshet.features import JsonTranscoder, RefusedEvent
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle
from tests.fixtures.samples import SAMPLE, SAMPLES

EVENT = parse_schema(
    {
        "type": "record",
        "name": "Event",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "name", "type": ["null", "string"]},
            {"name": "score", "type": "double", "default": 0.5},
            {"name": "small", "type": "int", "default": 7},
            {"name": "kind", "type": {"type": "enum", "name": "K", "symbols": ["A", "B"]}, "default": "B"},
            {"name": "raw", "type": {"type": "fixed", "name": "F", "size": 2}, "default": "\u00ff\u0001"},
            {"name": "either", "type": ["null", "long", "string"], "default": None},
            {
                "name": "items",
                "type": {
                    "type": "array",
                    "items": {
                        "type": "record",
                        "name": "Item",
                        "fields": [
                            {"name": "id", "type": "string"},
                            {"name": "w", "type": "float", "default": 1},
                        ],
                    },
                },
                "default": [],
            },
            {"name": "more", "type": {"type": "map", "values": "boolean"}, "default": {"a": True}},
        ],
    }
)


def one(event: str | bytes, schema: Record = EVENT, **options: Any) -> Any:
    """The event as fastavro reads it back, or why it was refused."""
    made = JsonTranscoder(schema, **options).body(event if isinstance(event, bytes) else event.encode())
    assert made.total == 1
    return made.bad[0] if made.bad else oracle.read(schema, made.records[0])


def in_json(value: Any) -> Any:
    """As a client would write it: bytes as characters."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {k: in_json(v) for k, v in value.items()}
    return [in_json(v) for v in value] if isinstance(value, list) else value


def finite(value: Any) -> Any:
    """Without the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


@given(st.lists(SAMPLES, max_size=4), st.booleans(), st.booleans())
def test_json_becomes_the_bytes_that_fastavro_writes(
    samples: list[Any], ascii_only: bool, shuffled: bool
) -> None:
    samples = [finite(s) for s in samples]
    values = [in_json(s) for s in samples]
    if shuffled:
        values = [dict(reversed(v.items())) for v in values]
    texts = [json.dumps(v, ensure_ascii=ascii_only).encode() for v in values]
    transcoder = JsonTranscoder(SAMPLE)
    expected = list(oracle.write(SAMPLE, samples))
    assert list(transcoder.column(BytesColumn.of(texts)).records) == expected
    assert list(transcoder.body(b"[" + b",".join(texts) + b"]").records) == expected
    if texts:
        assert list(transcoder.body(b"\n".join(texts)).records) == expected


def test_missing_fields_take_their_defaults_and_null() -> None:
    assert one('{"id": 1}') == {
        "id": 1,
        "name": None,
        "score": 0.5,
        "small": 7,
        "kind": "B",
        "raw": b"\xff\x01",
        "either": None,
        "items": [],
        "more": {"a": True},
    }


@pytest.mark.parametrize(("text", "value"), [("5", 5), ('"x"', "x"), ("null", None)])
def test_a_union_takes_the_branch_that_fits(text: str, value: Any) -> None:
    assert one(f'{{"id": 1, "either": {text}}}')["either"] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.0", 1), ("-0.0", 0), ("1e3", 1000), ("5E0", 5), ("-9007199254740991.0", 1 - 2**53), ("0.05e2", 5)],
)
def test_a_whole_number_may_have_a_fraction_of_zero(text: str, value: int) -> None:
    assert one(f'{{"id": {text}}}')["id"] == value


def test_a_fraction_of_zero_is_no_whole_number_beside_doubles() -> None:
    schema = {"type": "record", "name": "E", "fields": [{"name": "n", "type": ["long", "double", "string"]}]}
    made = JsonTranscoder(parse_schema(schema)).column(BytesColumn.of([b'{"n": 5}', b'{"n": 5.0}']))
    assert [value[0] for value in made.records] == [0, 2]  # branches long and double, zigzag


@pytest.mark.parametrize(
    ("event", "path", "expected", "found"),
    [
        ("{}", "id", "a long", "nothing"),
        ('{"id": "1"}', "id", "a long", '"1"'),
        ('{"id": 1.5}', "id", "a long", "1.5"),
        ('{"id": 9007199254740992.0}', "id", "a long", "9007199254740992.0"),
        ('{"id": -1e300}', "id", "a long", "-1e300"),
        ('{"id": 1e-3}', "id", "a long", "1e-3"),
        ('{"id": true}', "id", "a long", "true"),
        ('{"id": 9223372036854775808}', "id", "a long", "9223372036854775808"),
        ('{"id": 1, "small": 2147483648}', "small", "an int", "2147483648"),
        ('{"id": 1, "name": 5}', "name", "null or a string", "5"),
        ('{"id": 1, "score": "x"}', "score", "a number", '"x"'),
        ('{"id": 1, "score": 1e999}', "score", "a number", "1e999"),
        ('{"id": 1, "kind": "C"}', "kind", "one of A, B", '"C"'),
        ('{"id": 1, "raw": "abc"}', "raw", "2 bytes", '"abc"'),
        ('{"id": 1, "either": []}', "either", "null or a long", "an array"),
        ('{"id": 1, "items": {}}', "items", "an array", "an object"),
        ('{"id": 1, "items": [{"id": "a"}, {"w": 1}]}', "items[1].id", "a string", "nothing"),
        ('{"id": 1, "items": [{"id": "a", "x": 1}]}', "items[0].x", "one of id, w", "does not have"),
        ('{"id": 1, "items": [{"id": "a", "w": 1e39}]}', "items[0].w", "a number (float)", "1e39"),
        ('{"id": 1, "more": {"a": 1}}', "more.a", "true or false", "1"),
        ('{"id": 1, "id": 2}', "id", "each field once", "again"),
        ('{"id": 1, "nmae": "x"}', "nmae", "one of id, name", "does not have"),
        ("[[]]", "", "an object", "an array"),
        ('"x"', "", "an object", '"x"'),
    ],
)
def test_what_does_not_fit_is_refused_by_field(event: str, path: str, expected: str, found: str) -> None:
    refused = one(event)
    assert isinstance(refused, RefusedEvent)
    assert refused.path == path
    assert expected in refused.expected
    assert found in refused.found


def test_unknown_fields_are_skipped_on_request() -> None:
    assert one('{"id": 1, "nmae": {"x": [1]}}', ignore_unknown=True)["id"] == 1


def test_of_several_events_only_the_wrong_ones_are_refused() -> None:
    made = JsonTranscoder(EVENT).body(b'[{"id": 1}, {"id": "x"}, {"id": 3}]')
    assert (made.events.tolist(), [b.index for b in made.bad], made.total) == ([0, 2], [1], 3)
    made = JsonTranscoder(EVENT).body(b'{"id": 1}\n{"id": 2,}\n\n{"id": 3}\n')
    assert (made.events.tolist(), [b.index for b in made.bad], made.total) == ([0, 2], [1], 3)
    column = BytesColumn.of([b'{"id": 1} x', b"", b'{"id": 3}'])
    made = JsonTranscoder(EVENT).column(column)
    assert (made.events.tolist(), [b.index for b in made.bad], made.total) == ([2], [0, 1], 3)


def test_a_frame_is_put_before_each_record() -> None:
    made = JsonTranscoder(EVENT, schema_id=258).body(b'{"id": 1}')
    assert made.records[0][:5] == b"\0\0\0\1\2"


def test_a_default_of_another_type_is_refused_with_the_schema() -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "long", "default": "x"}]}
    with pytest.raises(ConfigError, match=r"(?s)a\.default = 'x'.*type, long"):
        JsonTranscoder(parse_schema(schema))


STRING = parse_schema({"type": "record", "name": "R", "fields": [{"name": "f", "type": "string"}]})
DOUBLE = parse_schema({"type": "record", "name": "R", "fields": [{"name": "f", "type": "double"}]})
ANYTHING = parse_schema({"type": "record", "name": "R", "fields": []})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def python_reads(text: bytes) -> bool:
    """Whether Python's json takes it, with the strictness of RFC 8259 that it lacks."""

    def never(_: str) -> None:
        raise ValueError("NaN and Infinity are no JSON")

    try:
        value = json.loads(text.decode("utf-8"), parse_constant=never)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair cannot be encoded
    except (ValueError, RecursionError):
        return False
    return True


def we_read(text: bytes) -> bool:
    made = JsonTranscoder(ANYTHING, ignore_unknown=True).column(BytesColumn.of([text]))
    return not made.bad or made.bad[0].expected == "an object"


@given(JSON, st.booleans(), st.data())
def test_we_read_the_json_that_python_reads_and_no_other(
    value: Any, ascii_only: bool, data: st.DataObject
) -> None:
    text = bytearray(json.dumps(value, ensure_ascii=ascii_only).encode())
    assert we_read(bytes(text))
    for _ in range(data.draw(st.integers(0, 2))):
        byte = data.draw(st.sampled_from(list(b'{}[]",:\\ue+-.0129tfn \n\x00\x80\xc3\xff')))
        text[data.draw(st.integers(0, len(text) - 1))] = byte
    changed = bytes(text[: data.draw(st.integers(0, len(text)))])
    assert we_read(changed) == python_reads(changed), changed


@given(st.text())
def test_strings_are_read_as_python_reads_them(text: str) -> None:
    for ascii_only in (True, False):
        assert one(json.dumps({"f": text}, ensure_ascii=ascii_only), STRING) == {"f": text}


@given(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.from_regex(r"\A-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?\Z")
)
def test_numbers_are_rounded_as_python_rounds_them(number: float | str) -> None:
    text = number if isinstance(number, str) else repr(number)
    assert one(f'{{"f": {text}}}', DOUBLE) == {"f": float(text)}


@pytest.mark.parametrize(
    "text", ["1e-400", "-1e-400", "0." + "0" * 400 + "1", "4.9e-324", "1.7976931348623157e308"]
)
def test_numbers_at_the_edge_of_a_double_are_rounded_to_it(text: str) -> None:
    assert one(f'{{"f": {text}}}', DOUBLE) == {"f": float(text)}


@pytest.mark.parametrize(
    "text", [r'"\ud800"', r'"\udc00"', r'"\ud800\u0041"', r'"\ud800x"', '"\\x"', '"\t"', '"\\u12g4"']
)
def test_strings_that_are_no_text_are_refused(text: str) -> None:
    assert isinstance(one(f'{{"f": {text}}}', STRING), RefusedEvent)


def test_json_nested_without_end_is_refused() -> None:
    for text in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 65 + b"]" * 65):
        made = JsonTranscoder(ANYTHING, ignore_unknown=True).column(BytesColumn.of([text]))
        assert "at most 64" in made.bad[0].expected
