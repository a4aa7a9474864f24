"""Batches, refusals, dead letters, queue accounts and answers of the gateway."""

from __future__ import annotations

import base64

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput, TooLarge
from freshet.gateway.codec import (
    Refusal,
    answer,
    check_count,
    dead_letter,
    refusal_of,
    split_avro_batch,
    too_far_ahead,
)
from freshet.gateway.group_commit import Entry, QueueAccount, QueueLimits, group_entries, offsets_of


def batch(*records: bytes) -> bytes:
    return b"".join(len(r).to_bytes(4, "big") + r for r in records)


def test_a_request_holds_one_to_max_events() -> None:
    check_count(1, 10)
    check_count(10, 10)
    with pytest.raises(BadInput, match="from 1 to 10 events in a request, found 0"):
        check_count(0, 10)
    with pytest.raises(TooLarge, match="at most 10 events"):
        check_count(11, 10)


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=10))
def test_a_batch_is_split_into_its_records(records: list[bytes]) -> None:
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


def test_a_native_reason_is_parsed_to_field_type_and_fault() -> None:
    refusal = refusal_of(
        3, "record 0: user.id (null or long): a number of more than 10 bytes, at byte 7", b"x"
    )

    assert (refusal.index, refusal.path, refusal.expected) == (3, "user.id", "null or long")
    assert refusal.found == "a number of more than 10 bytes, at byte 7"


def test_a_reason_without_a_field_is_kept() -> None:
    assert (
        refusal_of(0, "record 0: no Confluent frame, at byte 0", b"").found == "no Confluent frame, at byte 0"
    )
    assert refusal_of(0, "odd", b"").found == "odd"


def test_an_event_is_too_far_ahead_only_beyond_the_limit() -> None:
    assert not too_far_ahead(1_060, now_ms=1_000, max_ahead_ms=60)
    assert too_far_ahead(1_061, now_ms=1_000, max_ahead_ms=60)


def test_the_queue_takes_no_more_than_its_limits() -> None:
    account = QueueAccount(QueueLimits(events=10, bytes=100))

    assert account.reserve(6, 10)
    assert not account.reserve(5, 10)
    assert not account.reserve(1, 91)
    assert account.reserve(4, 90)
    account.release(6, 10)
    assert (account.events, account.bytes) == (4, 90)
    assert account.reserve(6, 10)


def test_an_empty_queue_accepts_more_than_its_limit() -> None:
    assert QueueAccount(QueueLimits(events=1, bytes=1)).reserve(5, 500)


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


def test_all_taken_is_202() -> None:
    assert answer([{"offset": 1}], [], total=1) == (202, {"accepted": 1, "acks": [{"offset": 1}]})


def test_refusals_are_422_in_the_order_of_events() -> None:
    refusals = [Refusal(2, "b", "int", "x"), Refusal(0, "a", "long", "y")]

    status, body = answer([{"offset": 1}], refusals, total=3)

    assert status == 422
    assert [r["index"] for r in body["refused"]] == [0, 2]
    assert body["accepted"] == 1
    assert "2 of 3" in body["error"]["message"]


def test_a_dead_letter_keeps_the_bytes_and_the_reason() -> None:
    letter = orjson.loads(
        dead_letter(Refusal(3, "p", "e", "f", b"\xff\x00"), topic="clicks", now_ms=9, max_bytes=10_000)
    )

    assert base64.b64decode(letter["value"]) == b"\xff\x00"
    assert letter["index"] == 3
    assert (letter["kind"], letter["path"], letter["topic"], letter["time_ms"]) == (
        "refused",
        "p",
        "clicks",
        9,
    )
