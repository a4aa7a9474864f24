"""Bodies into events, envelopes, queue accounts, answers."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput, TooLarge
from freshet.gateway.core import (
    Candidate,
    Entry,
    Envelope,
    Limits,
    QueueAccount,
    Refusal,
    answer,
    dead_letter,
    envelope_of,
    group_entries,
    offsets_of,
    split_avro_batch,
    split_json,
    time_ms_of,
    too_far_ahead,
)
from freshet.spec.model import Stream, TimeField

CLICKS = Stream(
    role="action", topic="clicks", key=("user.request", "item"), time=TimeField(path="at.ms", unit="ms")
)


def values(body: bytes, *, lines: bool = False) -> list[Any]:
    return [c.value for c in split_json(body, lines=lines, max_events=10)[0]]


def envelope(event: dict[str, Any]) -> Envelope | Refusal:
    return envelope_of(Candidate(0, orjson.dumps(event), event), CLICKS)


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


def test_the_envelope_is_read_where_the_spec_says() -> None:
    assert envelope({"user": {"request": "r1"}, "at": {"ms": 5}}) == Envelope(b"r1", 5)


def test_a_number_is_a_request_id_in_decimal() -> None:
    assert envelope({"user": {"request": -12}, "at": {"ms": 5}}) == Envelope(b"-12", 5)


@pytest.mark.parametrize("request_id", [None, True, 1.5, [], {}])
def test_other_request_ids_are_refused(request_id: Any) -> None:
    refusal = envelope({"user": {"request": request_id}, "at": {"ms": 5}})

    assert isinstance(refusal, Refusal)
    assert refusal.path == "user.request"


def test_a_path_into_what_is_no_object_is_a_missing_field() -> None:
    refusal = envelope({"user": "me", "at": {"ms": 5}})

    assert isinstance(refusal, Refusal)
    assert (refusal.path, refusal.found) == ("user.request", "null")


def test_a_missing_time_is_refused_and_its_field_named() -> None:
    refusal = envelope({"user": {"request": "r"}, "at": {}})

    assert isinstance(refusal, Refusal)
    assert (refusal.path, refusal.found) == ("at.ms", "null")
    assert "milliseconds" in refusal.expected


def test_a_long_value_is_shown_cut() -> None:
    refusal = envelope({"user": {"request": ["x" * 500]}, "at": {"ms": 5}})

    assert isinstance(refusal, Refusal)
    assert len(refusal.found) < 130
    assert refusal.found.endswith("…")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (1.5, "s", 1_500),
        (7, "ms", 7),
        (7.9, "ms", 7),
        (7_999, "us", 7),
        ("1970-01-01T00:00:01Z", "iso", 1_000),
        ("1970-01-01T01:00:01.500+01:00", "iso", 1_500),
        ("1970-01-01T00:00:01", "iso", 1_000),
        ("yesterday", "iso", None),
        (7, "iso", None),
        ("7", "ms", None),
        (True, "ms", None),
        (None, "s", None),
        (1e300, "ms", None),
        (float("nan"), "ms", None),
        (float("inf"), "us", None),
    ],
)
def test_times_are_read_in_their_unit(value: Any, unit: Any, expected: int | None) -> None:
    assert time_ms_of(value, TimeField(path="t", unit=unit)) == expected


@given(st.datetimes(min_value=datetime(1900, 1, 1), timezones=st.just(UTC)))
def test_iso_times_are_exact_to_the_millisecond(moment: datetime) -> None:
    found = time_ms_of(moment.isoformat(), TimeField(path="t", unit="iso"))

    assert found == int(moment.replace(microsecond=0).timestamp()) * 1_000 + moment.microsecond // 1_000


@given(st.one_of(st.integers(), st.floats(), st.text(max_size=30)), st.sampled_from(["s", "ms", "us", "iso"]))
def test_no_value_of_a_time_is_an_accident(value: Any, unit: Any) -> None:
    found = time_ms_of(value, TimeField(path="t", unit=unit))

    assert found is None or isinstance(found, int)


def test_an_event_is_too_far_ahead_only_beyond_the_limit() -> None:
    assert not too_far_ahead(Envelope(b"", 1_060), now_ms=1_000, max_ahead_ms=60)
    assert too_far_ahead(Envelope(b"", 1_061), now_ms=1_000, max_ahead_ms=60)


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
