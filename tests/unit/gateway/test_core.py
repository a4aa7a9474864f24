"""Bodies into events, envelopes, queue accounts, answers."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput, TooLarge
from freshet.gateway.core import (
    Entry,
    Limits,
    QueueAccount,
    Refusal,
    answer,
    dead_letter,
    group_entries,
    offsets_of,
    refusal_of,
    split_avro_batch,
    split_json,
    too_far_ahead,
)


def values(body: bytes, *, lines: bool = False) -> list[Any]:
    return [orjson.loads(c.raw) for c in split_json(body, lines=lines, max_events=10)[0]]


def batch(*records: bytes) -> bytes:
    return b"".join(len(r).to_bytes(4, "big") + r for r in records)


def test_a_single_object_is_one_event() -> None:
    assert values(b' {"a": 1} ') == [{"a": 1}]


def test_an_array_is_as_many_events_as_it_holds() -> None:
    assert values(b'[{"a": 1}, {"a": 2}]') == [{"a": 1}, {"a": 2}]


def test_lines_are_events_and_empty_ones_are_nothing() -> None:
    assert values(b'{"a": 1}\n\n{"a": 2}\r\n', lines=True) == [{"a": 1}, {"a": 2}]


def test_lines_are_recognised_without_being_announced() -> None:
    assert values(b'{"a": 1}\n{"a": 2}') == [{"a": 1}, {"a": 2}]


def test_an_object_over_several_lines_is_still_one() -> None:
    assert values(b'{"a":\n 1}') == [{"a": 1}]


def test_a_bad_line_does_not_spoil_the_others() -> None:
    good, bad = split_json(b'{"a": 1}\n{"a": \n{"a": 3}', lines=True, max_events=10)

    assert [c.index for c in good] == [0, 2]
    assert [(r.index, r.raw) for r in bad] == [(1, b'{"a":')]


def test_what_is_no_object_is_refused_by_its_index() -> None:
    good, bad = split_json(b'[{"a": 1}, 7]', lines=False, max_events=10)

    assert [c.index for c in good] == [0]
    assert [(r.index, r.expected, r.found) for r in bad] == [(1, "a JSON object", "7")]


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[1,", b'{"a": 1', b"\xff"])
def test_a_body_that_is_not_json_is_refused_whole(body: bytes) -> None:
    with pytest.raises(BadInput, match="not JSON"):
        split_json(body, lines=False, max_events=10)


DEEP = b"[" * 300 + b"]" * 300


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a":%b}' % DEEP, "event 0: nested too deep; expected at most 254 levels"),
        (b'[{"a":1},{"a":%b}]' % DEEP, "event 1: nested too deep"),
        (DEEP, "event 0: nested too deep"),
        (b'{"a":1}\n%b' % DEEP, "an event: nested too deep"),
    ],
)
def test_what_is_nested_deeper_than_we_write_is_refused_not_a_fault(body: bytes, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        split_json(body, lines=False, max_events=10)


def test_no_events_are_refused() -> None:
    with pytest.raises(BadInput, match="from 1 to 10"):
        split_json(b"[]", lines=False, max_events=10)


def test_too_many_events_are_too_large() -> None:
    with pytest.raises(TooLarge, match="at most 10"):
        split_json(b"[" + b"{}," * 10 + b"{}]", lines=False, max_events=10)


def test_no_lines_are_no_events() -> None:
    with pytest.raises(BadInput, match="found 0"):
        split_json(b"\n \n", lines=True, max_events=10)


@given(st.binary(max_size=80), st.booleans())
def test_any_bytes_are_events_refusals_or_bad_input(body: bytes, lines: bool) -> None:
    try:
        good, bad = split_json(body, lines=lines, max_events=10)
    except BadInput:
        return
    indexes = sorted([c.index for c in good] + [r.index for r in bad])
    assert indexes == list(range(len(indexes)))


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=10))
def test_a_batch_of_records_gives_them_back(records: list[bytes]) -> None:
    assert split_avro_batch(batch(*records), 10) == records


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_of_records_or_bad_input(body: bytes) -> None:
    try:
        records = split_avro_batch(body, 10)
    except BadInput:
        return
    assert batch(*records) == body


def test_a_record_longer_than_the_body_is_refused() -> None:
    with pytest.raises(BadInput, match="says it is 4294967295 bytes long"):
        split_avro_batch(b"\xff\xff\xff\xff12", 10)


def test_a_batch_without_records_is_refused() -> None:
    with pytest.raises(BadInput, match="found 0"):
        split_avro_batch(b"", 10)


def test_bytes_left_over_are_refused() -> None:
    with pytest.raises(BadInput, match="found 3 bytes after record 1"):
        split_avro_batch(batch(b"a") + b"abc", 10)


def test_more_records_than_allowed_are_refused() -> None:
    with pytest.raises(TooLarge, match="at most 1 events"):
        split_avro_batch(batch(b"a", b"b"), 1)


def test_a_reason_of_the_native_core_is_told_field_type_and_fault() -> None:
    refusal = refusal_of(
        3, "record 0: user.id (null or long): a number of more than 10 bytes, at byte 7", b"x"
    )

    assert (refusal.index, refusal.path, refusal.expected) == (3, "user.id", "null or long")
    assert refusal.found == "a number of more than 10 bytes, at byte 7"


def test_a_reason_without_a_field_is_told_as_it_is() -> None:
    assert (
        refusal_of(0, "record 0: no Confluent frame, at byte 0", b"").found == "no Confluent frame, at byte 0"
    )
    assert refusal_of(0, "odd", b"").found == "odd"


def test_an_event_is_too_far_ahead_only_beyond_the_limit() -> None:
    assert not too_far_ahead(1_060, now_ms=1_000, max_ahead_ms=60)
    assert too_far_ahead(1_061, now_ms=1_000, max_ahead_ms=60)


def test_the_queue_takes_no_more_than_its_limits() -> None:
    account = QueueAccount(Limits(events=10, bytes=100))

    assert account.take(6, 10)
    assert not account.take(5, 10)
    assert not account.take(1, 91)
    assert account.take(4, 90)
    account.release(6, 10)
    assert (account.events, account.bytes) == (4, 90)
    assert account.take(6, 10)


def test_an_empty_queue_takes_even_what_is_larger_than_the_limit() -> None:
    assert QueueAccount(Limits(events=1, bytes=1)).take(5, 500)


def test_entries_are_grouped_by_partition_in_their_order() -> None:
    entries = [
        Entry("a", 0, b"k1", b"v1"),
        Entry("a", 1, b"k2", b"v2"),
        Entry("a", 0, b"k3", b"v3"),
        Entry("b", 0, b"", b"v4"),
    ]

    appends, places = group_entries(entries)

    assert [(a.topic, a.partition, list(a.values)) for a in appends] == [
        ("a", 0, [b"v1", b"v3"]),
        ("a", 1, [b"v2"]),
        ("b", 0, [b"v4"]),
    ]
    assert offsets_of([10, 20, 30], places) == [10, 20, 11, 30]
    assert entries[0].size == 4


def test_all_taken_is_202() -> None:
    assert answer([{"offset": 1}], [], total=1) == (202, {"accepted": 1, "acks": [{"offset": 1}]})


def test_any_refused_is_422_with_reasons_in_the_order_of_the_events() -> None:
    refusals = [Refusal(2, "b", "int", "x"), Refusal(0, "a", "long", "y")]

    status, body = answer([{"offset": 1}], refusals, total=3)

    assert status == 422
    assert [r["index"] for r in body["refused"]] == [0, 2]
    assert body["accepted"] == 1
    assert "2 of 3" in body["error"]["message"]


def test_a_dead_letter_keeps_the_bytes_and_the_reason() -> None:
    letter = orjson.loads(dead_letter(Refusal(3, "p", "e", "f", b"\xff\x00"), topic="clicks", now_ms=9))

    assert base64.b64decode(letter["value"]) == b"\xff\x00"
    assert (letter["kind"], letter["path"], letter["topic"], letter["time_ms"]) == (
        "refused",
        "p",
        "clicks",
        9,
    )
