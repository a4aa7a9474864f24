"""Events whose shape would cost more than their bytes: time, memory and stack follow the bytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.model import Stream, TimeField
from freshet.features import EventExtractor, JsonTranscoder
from freshet.features.transcode import AvroValidator
from freshet.features.writer import write_long
from freshet.types import BytesColumn

TIME_MS = 1_780_000_000_000


def pair(name: str, operator: str, side: Any) -> dict[str, Any]:
    operators = {"type": "enum", "name": f"{name}Op", "symbols": [operator]}
    fields = [{"name": "left", "type": side}, {"name": "op", "type": operators}]
    return {"type": "record", "name": name, "fields": fields}


CONDITIONS = parse_schema(
    {
        "type": "record",
        "name": "Query",
        "fields": [
            {
                "name": "where",
                "type": [
                    "null",
                    pair("And", "and", ["string", "And", pair("Or", "or", ["string", "And", "Or"])]),
                    "Or",
                ],
            }
        ],
    }
)


@pytest.mark.parametrize("leaf", ['"a"', "1"])
def test_unions_in_unions_take_no_exponential_time(leaf: str) -> None:
    # Each level is tried as `And`, which fails behind all that it holds: 2^60 times if tries were repeated.
    value = leaf
    for _ in range(60):
        value = f'{{"left":{value},"op":"or"}}'
    made = JsonTranscoder(CONDITIONS).body(f'{{"where":{value}}}'.encode())
    if leaf == "1":
        assert [bad.path for bad in made.bad] == ["where"]
        return
    # branch 2 of `where` and of each `left`, then the leaf as branch 0, and each level's operator
    assert made.records[0] == b"\x04" * 60 + b"\x00\x02a" + b"\x00" * 60


def test_a_refused_branch_is_tried_anew_for_the_next_event() -> None:
    transcoder = JsonTranscoder(CONDITIONS)
    first, second = (f'{{"where":{{"left":{{"left":"a","op":"{op}"}},"op":"and"}}}}' for op in ("or", "and"))
    made = transcoder.body(f"{first}\n{second}".encode())
    assert list(made.records) == [b"\x02\x04\x00\x02a\x00\x00", b"\x02\x02\x00\x02a\x00\x00"]


def exploded() -> EventExtractor:
    item = {"type": "record", "name": "Item", "fields": [{"name": "id", "type": "string"}]}
    schema = parse_schema(
        {
            "type": "record",
            "name": "Shown",
            "fields": [
                {"name": "request", "type": "string"},
                {"name": "time", "type": "long"},
                {"name": "items", "type": {"type": "array", "items": item}},
            ],
        }
    )
    stream = Stream(
        role="served",
        topic="shown",
        explode="items",
        key=("request", "items.id"),
        time=TimeField(path="time", unit="ms"),
    )
    return EventExtractor(stream, schema)


@pytest.mark.parametrize("blocks", [[32_768], [30_000, 2_768], [32_769], [30_000, 2_769], [4_000_000]])
def test_elements_are_bounded_before_they_are_read(blocks: list[int]) -> None:
    event = b"\x02r" + write_long(TIME_MS)
    event += b"".join(write_long(n) + b"\x00" * n for n in blocks) + b"\x00"
    found = exploded().extract(BytesColumn.of([event]), framed=False)
    if sum(blocks) <= 32_768:
        assert len(found) == sum(blocks)
        assert not len(found.bad)
        return
    assert len(found) == 0
    read = len(b"\x02r" + write_long(TIME_MS)) + sum(len(write_long(n)) + n for n in blocks[:-1])
    read += len(write_long(blocks[-1]))
    assert found.why == [f"record 0: items (array of record Item): more than 32,768 elements, at byte {read}"]


def deep(arrays: int, records: int) -> Any:
    """Return the schema of an event that holds itself within `records` records of `arrays` arrays each."""
    fields: list[dict[str, Any]] = []
    inner: Any = ["null", "A"]
    for number in range(records):
        for _ in range(arrays):
            inner = {"type": "array", "items": inner}
        name = f"R{number}"
        level = {"type": "record", "name": name, "fields": [{"name": "x", "type": inner}]}
        fields.append({"name": f"r{number}", "type": ["null", level]})
        inner = name
    event = [
        {"name": "id", "type": "string"},
        {"name": "time", "type": "long"},
        {"name": "a", "type": {"type": "record", "name": "A", "fields": fields}},
    ]
    return parse_schema({"type": "record", "name": "Event", "fields": event})


@pytest.mark.parametrize(("arrays", "records", "levels"), [(1, 1, 499), (26, 3, 499), (26, 2, 499)])
def test_depth_within_a_recursion_is_bounded_too(arrays: int, records: int, levels: int) -> None:
    before = b"\x00" * (records - 1) + b"\x02" + b"\x02" * (arrays * records)
    after = b"\x00" * (arrays * records)
    event = b"\x02x" + write_long(TIME_MS)
    event += (before + b"\x02") * levels + before + b"\x00" + after * (levels + 1)
    schema = deep(arrays, records)
    extractor = EventExtractor(
        Stream(role="action", topic="a", key=("id",), time=TimeField(path="time", unit="ms")), schema
    )
    reasons: list[str] = []

    def read() -> None:
        events = BytesColumn.of([event])
        reasons.extend(extractor.extract(events, framed=False).why)
        reasons.extend(bad.found for bad in AvroValidator(schema).refused(events, framed=False))

    old = threading.stack_size(8 << 20)
    try:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(old)
    if arrays == 1:
        assert not reasons
        return
    assert len(reasons) == 2
    assert all("values inside each other more than 4,000" in reason for reason in reasons)
