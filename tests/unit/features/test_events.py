"""Events to columns: identities that meet across streams, times, spans to splice, columns of conditions."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet import _native
from freshet.config.avro.schema import Record, parse_schema, sample_schema
from freshet.config.expression import Column, compile_condition
from freshet.config.spec.model import Stream, TimeField
from freshet.errors import ConfigError
from freshet.features import EventExtractor, add_frames, frame_ids, hash_text, rows_by_id, take
from freshet.features.writer import write_long
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle
from tests.fixtures.samples import ITEM, LONG, SERVED, TEXT

Unit = Literal["s", "ms", "us", "iso"]


def stream(**changes: Any) -> Stream:
    given_: dict[str, Any] = {
        "role": "served",
        "topic": "served",
        "explode": "items",
        "key": ("request_id", "items.id"),
        "time": TimeField(path="ts", unit="ms"),
    }
    return Stream(**{**given_, **changes})


def action_schema(request: Any = "string", item: Any = "string", time: Any = "long") -> Record:
    fields = [
        {"name": "at", "type": time},
        {"name": "what", "type": ["null", {"type": "enum", "name": "What", "symbols": ["click", "buy"]}]},
        {"name": "item", "type": {"type": "record", "name": "Ref", "fields": [{"name": "id", "type": item}]}},
        {"name": "req", "type": request},
        {"name": "id", "type": ["null", "string"], "default": None},
        {"name": "seconds", "type": ["null", "float", "long"]},
        {"name": "note", "type": ["null", "string"]},
    ]
    return parse_schema({"type": "record", "name": "Action", "fields": fields})


def action(**changes: Any) -> dict[str, Any]:
    base = {
        "at": 1,
        "what": "click",
        "item": {"id": "i"},
        "req": "r",
        "id": None,
        "seconds": 2.5,
        "note": None,
    }
    return {**base, **changes}


def actions(unit: Unit = "ms", **changes: Any) -> Stream:
    changes = {"role": "action", "explode": None, "key": ("req", "item.id"), **changes}
    return stream(time=TimeField(path="at", unit=unit), **changes)


SERVED_EVENTS = st.fixed_dictionaries(
    {
        "request_id": TEXT,
        "noise": st.none() | st.dictionaries(TEXT, st.none() | TEXT, max_size=2),
        "ts": st.integers(-(10**12), 10**13),
        "user": st.none(),
        "device": st.sampled_from(["PHONE", "TV"]),
        "items": st.lists(ITEM, max_size=4),
        "experiments": st.dictionaries(TEXT, TEXT, max_size=2),
        "raw": st.binary(max_size=5),
    }
)


@given(st.lists(SERVED_EVENTS, max_size=4), st.booleans())
def test_spliced_samples_are_records_of_the_sample_schema(events: list[Any], framed: bool) -> None:
    values = oracle.write(SERVED, events, b"\0\0\0\0\7" if framed else b"")
    got = EventExtractor(stream(), SERVED, ["device", "items.price", "items.freshet"][:2]).extract(
        values, framed=framed
    )

    samples = [{**e, "items": item} for e in events for item in e["items"]]
    assert list(got.samples(values)) == list(oracle.write(sample_schema(SERVED, "items"), samples))
    assert got.event_index.tolist() == [i for i, e in enumerate(events) for _ in e["items"]]
    assert got.times_ms.tolist() == [s["ts"] for s in samples]
    assert list(got.request_keys) == [e["request_id"].encode() for e in events]
    assert got.events.tolist() == list(range(len(events)))
    assert got.columns["device"].values.tolist() == [hash_text(s["device"]) for s in samples]
    prices = [s["items"]["price"] for s in samples]
    assert got.columns["items.price"].null.tolist() == [p is None or math.isnan(p) for p in prices]
    identities = [(s["request_id"], s["items"]["id"]) for s in samples]
    hashes = [tuple(h) for h in got.impression.tolist()]
    assert len(set(hashes)) == len(set(identities))
    assert len(set(zip(identities, hashes, strict=True))) == len(set(identities))


@given(st.lists(st.tuples(TEXT, LONG), min_size=1, max_size=5))
def test_an_action_meets_its_impression_by_any_schema(ids: list[tuple[str, int]]) -> None:
    hashes = set()
    for request, item in ids:
        found = set()
        for item_type in ("long", ["null", "long"], ["string", "long"]):
            schema = action_schema(item=item_type)
            values = oracle.write(schema, [action(req=request, item={"id": item})])
            found.add(
                tuple(EventExtractor(actions(), schema).extract(values, framed=False).impression[0].tolist())
            )
        assert len(found) == 1
        hashes |= found
    assert len(hashes) == len(set(ids))


def test_a_decimal_string_is_another_identity_than_its_integer() -> None:
    def identity(item_type: str, value: Any) -> list[int]:
        schema = action_schema(item=item_type)
        values = oracle.write(schema, [action(item={"id": value})])
        got = EventExtractor(actions(), schema).extract(values, framed=False)
        return [int(half) for half in got.impression[0]]

    assert identity("int", 5) == identity("long", 5) != identity("string", "5")
    assert identity("string", "5") == identity("bytes", b"5")


def test_a_number_as_request_id_keys_the_record_in_decimal() -> None:
    schema = action_schema(request="long")
    values = oracle.write(schema, [action(req=-42)])
    assert list(EventExtractor(actions(), schema).extract(values, framed=False).request_keys) == [b"-42"]


@pytest.mark.parametrize(
    ("unit", "type_", "value", "ms"),
    [
        ("ms", "long", 1_700_000_000_123, 1_700_000_000_123),
        ("s", "long", 1_700_000_000, 1_700_000_000_000),
        ("s", "int", 1_700_000_000, 1_700_000_000_000),
        ("s", "double", 1_700_000_000.5, 1_700_000_000_500),
        ("us", "long", 1_700_000_000_123_999, 1_700_000_000_123),
        ("us", "long", -1, -1),
        ("iso", "string", "2026-11-21T13:10:33.5Z", 1_795_266_633_500),
        ("iso", "string", "2026-11-21 14:10:33,500+01:00", 1_795_266_633_500),
    ],
)
def test_times_are_read_in_their_unit(unit: Unit, type_: str, value: Any, ms: int) -> None:
    schema = action_schema(time=type_)
    got = EventExtractor(actions(unit), schema).extract(
        oracle.write(schema, [action(at=value)]), framed=False
    )
    assert got.times_ms.tolist() == [ms]


@pytest.mark.parametrize(
    ("unit", "type_", "value"),
    [
        ("ms", "long", 2**62),
        ("s", "long", -(2**63)),
        ("s", "double", float("nan")),
        ("s", "double", float("inf")),
        ("iso", "string", ""),
        ("iso", "string", "2026-02-30"),
        ("iso", "string", "2026-11-21T25:00:00Z"),
        ("iso", "string", "2026-11-21T10:00:00+1"),
        ("iso", "string", "2026-11-21T10:00:00Zx"),
    ],
)
def test_a_time_that_is_none_is_named_bad(unit: Unit, type_: str, value: Any) -> None:
    schema = action_schema(time=type_)
    got = EventExtractor(actions(unit), schema).extract(
        oracle.write(schema, [action(at=value)]), framed=False
    )
    assert (got.bad.tolist(), len(got)) == ([0], 0)
    assert "event time" in got.why[0]


@given(
    st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),
    st.sampled_from([None, UTC, timezone(timedelta(hours=-7, minutes=-30)), timezone(timedelta(hours=14))]),
    st.sampled_from(["T", " "]),
    st.sampled_from(["auto", "minutes", "seconds", "milliseconds", "microseconds"]),
)
def test_iso_times_are_read_as_python_reads_them(when: datetime, zone: Any, sep: str, spec: str) -> None:
    text = when.replace(tzinfo=zone).isoformat(sep, spec)
    read = datetime.fromisoformat(text)
    read = read if read.tzinfo else read.replace(tzinfo=UTC)
    assert _native.parse_iso_time(text) == (read - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(
        milliseconds=1
    )


@given(st.text(alphabet="0123456789-:T.Z+ ", max_size=30))
def test_a_text_that_is_read_as_a_time_is_one(text: str) -> None:
    if _native.parse_iso_time(text) is not None:
        assert len(text) >= 10


def test_events_are_identified_by_id_or_else_by_content() -> None:
    schema = action_schema()
    values = oracle.write(schema, [action(id="a"), action(id="a", note="x"), action(id="b"), action(id="a")])
    by_id = EventExtractor(actions(id="id"), schema).extract(values, framed=False).event_id.tolist()
    assert by_id[0] == by_id[1] == by_id[3] != by_id[2]
    by_content = EventExtractor(actions(), schema).extract(values, framed=False).event_id.tolist()
    assert by_content[0] == by_content[3] not in by_content[1:3]
    framed = add_frames(values, 9)
    assert EventExtractor(actions(), schema).extract(framed, framed=True).event_id.tolist() == by_content


def test_elements_of_one_event_have_ids_of_their_own() -> None:
    item = {"id": "i", "ratio": 0.5, "price": None, "blob": b"abc", "age": None, "tags": [], "pos": 1}
    event = {"request_id": "r", "noise": None, "ts": 0, "user": None, "device": "TV", "items": [item, item]}
    values = oracle.write(SERVED, [{**event, "experiments": {}, "raw": b""}])
    got = EventExtractor(stream(), SERVED).extract(values, framed=False)
    assert got.impression[0].tolist() == got.impression[1].tolist()
    assert got.event_id[0].tolist() != got.event_id[1].tolist()
    assert len(set(got.request.tolist())) == 1


def test_what_is_missing_from_the_envelope_is_named() -> None:
    schema = action_schema(request=["null", "string"], time=["null", "long"])
    values = oracle.write(schema, [action(req=None), action(at=None), action(), action(id="x")])
    got = EventExtractor(actions(id="id"), schema).extract(values, framed=False)
    assert got.bad.tolist() == [0, 1, 2]
    assert [("key" in w, "time" in w, "id" in w) for w in got.why] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


@pytest.mark.parametrize("type_", ["long", ["null", "long"], ["null", "long", "int"]])
@pytest.mark.parametrize("sign", ["", "-"])
def test_conditions_compare_neighbouring_long_ids_exactly(type_: Any, sign: str) -> None:
    camp = parse_schema({"type": "record", "name": "C", "fields": [{"name": "camp", "type": type_}]})
    schema = replace(action_schema(), fields=(*action_schema().fields, *camp.fields))
    ids = [int(f"{sign}{2**53 + i}") for i in (0, 1, 2)] + [int(f"{sign}{2**63 - 1}")]
    values = oracle.write(schema, [action(camp=i) for i in ids])
    got = EventExtractor(actions(), schema, ["camp"]).extract(values, framed=False)
    columns = {path: Column(c.values, c.null) for path, c in got.columns.items()}
    one, last = f"{sign}9007199254740993", f"{sign}9223372036854775807"
    for condition, rows in (
        (f"action.camp == {one}", [1]),
        (f"action.camp != {one}", [0, 2, 3]),
        (f"action.camp in [{one}, 0.5]", [1]),
        (f"action.camp not in [{one}, {last}]", [0, 2]),
        (f"action.camp == {last}", [3]),
        (f"action.camp {'<=' if sign else '>='} {one}", [1, 2, 3]),
    ):
        assert np.flatnonzero(compile_condition(condition).true(columns)).tolist() == rows, condition


def test_columns_of_conditions_are_numbers_or_texts() -> None:
    schema = action_schema()
    values = oracle.write(
        schema, [action(), action(what=None, seconds=None, note=""), action(seconds=7, note="ä")]
    )
    got = EventExtractor(actions(), schema, ["what", "seconds", "note"]).extract(values, framed=False)
    assert got.columns["what"].values.tolist() == [hash_text("click"), 0, hash_text("click")]
    assert got.columns["what"].null.tolist() == [False, True, False]
    assert got.columns["seconds"].values.tolist() == [2.5, 0, 7]
    assert got.columns["seconds"].null.tolist() == [False, True, False]
    assert got.columns["note"].values.tolist() == [0, hash_text(""), hash_text("ä")]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"key": ("req", "nosuch")}, "nosuch"),
        ({"key": ("seconds",)}, "events.action.key"),
        ({"unit": "iso"}, "iso"),
        ({"explode": "item"}, "explode"),
        ({"columns": ["item"]}, "condition"),
    ],
)
def test_an_envelope_that_the_schema_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    columns = changes.pop("columns", [])
    with pytest.raises(ConfigError, match=says):
        EventExtractor(actions(**changes), action_schema(), columns)


def test_the_request_must_not_be_a_part_of_an_element() -> None:
    with pytest.raises(ConfigError, match="decides the partition"):
        EventExtractor(stream(key=("items.id",)), SERVED)


def test_a_nullable_array_is_exploded_without_its_union() -> None:
    items = {"type": "array", "items": "string"}
    fields = [
        {"name": "r", "type": "long"},
        {"name": "i", "type": ["null", items]},
        {"name": "t", "type": "long"},
    ]
    schema = parse_schema({"type": "record", "name": "E", "fields": fields})
    values = oracle.write(schema, [{"r": 1, "i": ["a", "b"], "t": 5}, {"r": 2, "i": None, "t": 6}])
    envelope = stream(explode="i", key=("r", "i"), time=TimeField(path="t", unit="ms"))
    got = EventExtractor(envelope, schema).extract(values, framed=False)
    assert [oracle.read(sample_schema(schema, "i"), s) for s in got.samples(values)] == [
        {"r": 1, "i": "a", "t": 5},
        {"r": 1, "i": "b", "t": 5},
    ]
    assert got.events.tolist() == [0, 1]


@given(st.lists(st.binary(max_size=60), max_size=6), st.booleans())
def test_any_bytes_are_events_or_named_bad(records: list[bytes], framed: bool) -> None:
    values = BytesColumn.of(records)
    got = EventExtractor(stream(), SERVED).extract(values, framed=framed)
    assert sorted([*got.events.tolist(), *got.bad.tolist()]) == list(range(len(records)))
    got.samples(values)


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(0, 2**32 - 1))
def test_frames_put_on_are_taken_off(values: list[bytes], schema_id: int) -> None:
    framed = add_frames(BytesColumn.of(values), schema_id)
    assert list(framed) == [b"\0" + schema_id.to_bytes(4, "big") + v for v in values]
    assert frame_ids(framed).tolist() == [schema_id] * len(values)
    assert list(take(framed, np.arange(len(values)), skip=5)) == values
    assert list(take(framed, frame_ids(framed).nonzero()[0])) == (list(framed) if schema_id else [])


@given(st.lists(st.integers(-1, 4), max_size=20))
def test_rows_are_grouped_by_their_ids(ids: list[int]) -> None:
    found = {one: rows.tolist() for one, rows in rows_by_id(np.array(ids, np.int64))}

    assert found == {one: [i for i, other in enumerate(ids) if other == one] for one in sorted(set(ids))}


def test_records_without_a_frame_have_no_schema_id() -> None:
    assert frame_ids(BytesColumn.of([b"", b"\1\0\0\0\1x", b"\0\0\0\0", b"\0\0\0\0\5"])).tolist() == [
        -1,
        -1,
        -1,
        5,
    ]


def test_an_array_in_several_blocks_is_exploded_whole() -> None:
    items = {"type": "array", "items": "long"}
    fields = [{"name": "r", "type": "long"}, {"name": "i", "type": items}]
    schema = parse_schema({"type": "record", "name": "E", "fields": fields})
    record = write_long(3) + b"\x02\x04" + write_long(-2) + write_long(2) + b"\x06\x08" + b"\0"
    envelope = stream(explode="i", key=("r", "i"), time=TimeField(path="r", unit="ms"))
    got = EventExtractor(envelope, schema).extract(BytesColumn.of([record]), framed=False)
    assert [s[1:] for s in got.samples(BytesColumn.of([record]))] == [b"\x04", b"\x06", b"\x08"]
