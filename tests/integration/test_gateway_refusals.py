"""What the gateway refuses, in whose words, and where it is kept."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as quick
from hypothesis import strategies as st

from freshet.gateway.api import AVRO, AVRO_BATCH, AVRO_RAW
from tests.fixtures.gateway import NOW, SPEC, Running, action, gateway, ranked, start

__all__ = ["gateway", "start"]  # fixtures


def test_good_events_of_a_batch_are_kept_and_bad_ones_explained(gateway: Running) -> None:
    events = [ranked(1), ranked(2, ts="noon"), ranked(3), {"request_id": 4}, 7]

    answer = gateway.send("impressions", events)

    body = answer.json()
    assert answer.status_code == 422
    assert body["accepted"] == 2
    assert sorted(key for _, _, key, _ in gateway.records("feed.ranked")) == [b"1", b"3"]
    assert [r["index"] for r in body["refused"]] == [1, 3, 4]
    assert body["refused"][0]["path"] == "ts"


def test_refused_events_are_dead_letters_before_the_answer(gateway: Running) -> None:
    gateway.send("impressions", [ranked(1, ts="noon")])

    [(_, _, _, value)] = gateway.records("feed.refused")
    letter = orjson.loads(value)
    assert orjson.loads(base64.b64decode(letter["value"]))["ts"] == "noon"
    assert (letter["kind"], letter["topic"], letter["path"]) == ("refused", "feed.ranked", "ts")


@pytest.mark.parametrize(
    ("ts", "found"),
    [
        (NOW // 1_000, 'seconds: send milliseconds, or say time = "ts:s" in events.served of the spec'),
        (NOW * 1_000, 'microseconds: send milliseconds, or say time = "ts:us" in events.served of the spec'),
        (NOW * 10**6, 'nanoseconds: send milliseconds, or say time = "ts:ns" in events.served of the spec'),
    ],
)
def test_a_time_in_another_unit_is_refused_with_the_unit(gateway: Running, ts: int, found: str) -> None:
    answer = gateway.send("impressions", ranked(3, ts=ts))

    assert answer.status_code == 422
    [refused] = answer.json()["refused"]
    assert refused["path"] == "ts"
    assert refused["found"].endswith(f"the number looks like {found}")


def test_an_old_event_is_taken_where_its_unit_is_right(gateway: Running) -> None:
    for ts in (5, 86_400_000, NOW - 40 * 366 * 86_400_000):  # old, and late to the joiner
        assert gateway.send("impressions", ranked(4, ts=ts)).status_code == 202


def test_an_event_dated_ahead_is_refused_beyond_the_limit(gateway: Running) -> None:
    ahead = SPEC.join.max_ahead_ms
    assert gateway.send("impressions", ranked(1, ts=NOW + ahead)).status_code == 202

    answer = gateway.send("impressions", ranked(2, ts=NOW + ahead + 1_000))

    assert answer.status_code == 422
    [refused] = answer.json()["refused"]
    assert (refused["path"], refused["found"]) == ("ts", "61 s ahead")


@pytest.mark.parametrize("others", [[], [ranked(1)]])
@pytest.mark.parametrize(
    ("ts", "found"),
    [
        (-1, "1 ms before 1970"),
        (-5_000, "5000 ms before 1970"),
        (2**53 + 1, "an event time that cannot be read, or outside the years 1 to 9999, at byte "),
    ],
)
def test_a_time_the_joiner_would_refuse_is_refused(
    gateway: Running, others: list[dict[str, Any]], ts: int, found: str
) -> None:
    answer = gateway.send("impressions", [*others, ranked(2, ts=ts)])

    assert (answer.status_code, answer.json()["accepted"]) == (422, len(others))
    [refused] = answer.json()["refused"]
    assert (refused["path"], refused["expected"]) == ("ts", "a time since 1970 (unit ms)")
    assert refused["found"].startswith(found)


BOTH = pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])


def kept(gateway: Running) -> list[bytes]:
    """The values of the refused events' dead letters."""
    letters = [orjson.loads(value) for *_, value in gateway.records("feed.refused")]
    return [base64.b64decode(letter["value"]) for letter in letters]


@BOTH
@pytest.mark.parametrize("wrong", [b'{"at": 1, "at": 2}', b'{"a": "\\ud83d"}', b"{'a': NaN}", b'{"a":'])
def test_refused_events_are_kept_byte_for_byte(gateway: Running, kind: str, wrong: bytes) -> None:
    good = [orjson.dumps(action(i)) for i in (1, 2)]

    answer = gateway.post("actions", b"\n".join((good[0], wrong, good[1])), kind)

    assert (answer.status_code, answer.json()["accepted"]) == (422, 2)
    assert [refused["index"] for refused in answer.json()["refused"]] == [1]
    assert sorted(value for *_, value in gateway.records("app.actions")) == sorted(good)
    assert kept(gateway) == [wrong]


@BOTH
def test_an_element_of_an_array_is_refused_alone(gateway: Running, kind: str) -> None:
    good = [orjson.dumps(ranked(i)) for i in (1, 2)]
    wrong = [b'{"request_id": "half an emoji: \\ud83d", "ts": [1, "]"]}', b"NaN"]

    answer = gateway.post("impressions", b"[" + b" , ".join((wrong[0], *good, wrong[1])) + b"]", kind)

    assert (answer.status_code, answer.json()["accepted"]) == (422, 2)
    assert [refused["index"] for refused in answer.json()["refused"]] == [0, 3]
    assert kept(gateway) == wrong


@BOTH
def test_what_cannot_be_split_is_refused_as_one(gateway: Running, kind: str) -> None:
    good = orjson.dumps(ranked(1))
    rest = b'{"request_id": 2, "ts": "torn}, ' + orjson.dumps(ranked(3)) + b"]"

    answer = gateway.post("impressions", b"[" + good + b"," + rest, kind)

    assert (answer.status_code, answer.json()["accepted"]) == (422, 1)
    assert kept(gateway) == [rest]


def test_refused_events_are_kept_as_sent_not_as_avro(gateway: Running) -> None:
    ahead = b' {"request_id": 1, "ts": %d, "user": {"id": 5, "country": null, "last_items": []}}' % (NOW * 2)
    event = orjson.dumps(ranked(1, ts=NOW * 2))

    assert gateway.post("impressions", b"[" + event + b"]").status_code == 422
    assert gateway.post("impressions", ahead + b"\n").status_code == 422

    assert kept(gateway) == [event, ahead.strip()]


@pytest.mark.parametrize(
    ("kind", "content", "status", "code"),
    [
        ("application/json", b"", 400, "bad_input"),
        ("application/json", b"[]", 400, "bad_input"),
        ("application/x-ndjson", b"\xef\xbb\xbf\r\n", 400, "bad_input"),
        ("text/html", b"{}", 415, "content_type"),
        (AVRO_BATCH, b"\xff\xff\xff\xff", 400, "bad_input"),
        (AVRO_RAW, b"x", 400, "bad_input"),
    ],
)
def test_a_request_without_clear_events_is_refused_whole(
    gateway: Running, kind: str, content: bytes, status: int, code: str
) -> None:
    answer = gateway.post("impressions", content, kind)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert gateway.records("feed.ranked") == []


def test_compressed_bodies_are_refused(gateway: Running) -> None:
    answer = gateway.post("impressions", b"x", **{"content-encoding": "gzip"})

    assert answer.status_code == 415


def test_too_many_events_and_too_many_bytes_are_413(start: Callable[..., Running]) -> None:
    gateway = start(gateway_max_events="2", gateway_max_body_bytes="2000")

    assert gateway.send("impressions", [ranked(i) for i in range(3)]).status_code == 413
    assert gateway.send("impressions", ranked(1, experiment={"a": "x" * 3_000})).status_code == 413


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.binary(max_size=300),
    st.sampled_from(["application/json", "application/x-ndjson", AVRO, AVRO_BATCH, AVRO_RAW, "x"]),
    st.sampled_from(["impressions", "shown", "actions"]),
)
@quick(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
def test_random_bytes_are_never_a_server_error(gateway: Running, body: bytes, kind: str, what: str) -> None:
    assert gateway.post(what, body, kind, **{"freshet-schema-id": "1"}).status_code < 500


@given(st.sampled_from(list(ranked())), json_values)
@quick(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
def test_any_value_of_any_field_is_taken_or_refused(gateway: Running, field: str, value: Any) -> None:
    try:
        body = orjson.dumps({**ranked(), field: value})
    except TypeError:  # integers beyond 64 bits
        return
    assert gateway.post("impressions", body).status_code in (202, 422)
