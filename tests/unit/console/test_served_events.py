"""Served events for people: requests to try again, texts by the keys that training computes, dead letters."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import parse_schema, sample_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.console.segments import texts_of_buckets, texts_of_times
from freshet.console.served_events import (
    ServedSample,
    grouped,
    leaves,
    plain,
    request_of,
    without_logical_types,
)
from freshet.console.service import rank_request
from freshet.console.topic_readers import LONGEST_TEXT, dead_letter_of
from freshet.errors import BadInput
from freshet.features import EventExtractor, SampleDecoder, key_of
from freshet.log.schema_ids import SchemaRegistry, frame
from freshet.log.sqlite.event_log import open_url
from freshet.recordings.sources import json_events
from freshet.types import Append, BytesColumn

SPEC = parse_spec("""
name = "shop"
[events]
served = { explode = "page.items", key = ["meta.request", "page.items.id"], time = "meta.at:ms" }
action = { key = ["request", "item"], time = "at:ms" }
[labels]
buy = { on = "action.kind == 'buy'" }
[tables]
small = { dim = 4 }
[features]
hour = { time = "hour", table = "small" }
day  = { time = "weekday", table = "small" }
week = { time = "hour_of_week", table = "small" }
age  = { field = "page.items.age", buckets = [1, 10, 100], table = "small" }
[train]
segments = ["hour", "day", "week", "age"]
""")
STREAM = SPEC.events.served


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


AT = {"type": "long", "logicalType": "timestamp-millis"}
META = record("Meta", request="string", at=AT)
PAGE = record("Page", items={"type": "array", "items": record("Item", id="long", age="double")})
SERVED = record("Served", meta=META, page=PAGE)
SCHEMA = parse_schema(SERVED)


def written(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(without_logical_types(schema)), value)
    return out.getvalue()


def event(at_ms: int, ages: list[float]) -> dict[str, Any]:
    items = [{"id": i, "age": age} for i, age in enumerate(ages)]
    return {"meta": {"request": "r1", "at": at_ms}, "page": {"items": items}}


def test_a_served_event_becomes_the_request_that_led_to_it() -> None:
    served = event(5, [1.5, 2.5])
    served["user"] = {"id": 7, "raw": b"\x00\xff"}
    served["page"]["items"][0]["freshet_served"] = {"score": 1}

    request = request_of(served, STREAM)

    assert request == {
        "request_id": "r1",
        "context": {"meta": {}, "page": {}, "user": {"id": 7, "raw": "\x00\xff"}},
        "candidates": [{"id": 0, "age": 1.5}, {"id": 1, "age": 2.5}],
    }
    assert "freshet_served" in served["page"]["items"][0], "the event is as it was"
    assert served["meta"]["request"] == "r1"


SHOP = """
name = "shop"
[events]
served = { topic = "served", format = "json", schema = "s.avsc", key = ["r", "id"], time = "ts:ms" }
action = { topic = "actions", key = ["r", "id"], time = "ts:ms" }
[labels]
buy = { on = "action.kind == 'buy'" }
[tables]
reader = { dim = 4 }
[features]
reader = { field = "reader", table = "reader" }
[train]
segments = ["reader"]
"""


def test_a_number_that_no_feature_can_have_hides_nothing_else(tmp_path: Path) -> None:
    log = open_url(f"sqlite:{tmp_path}/log")
    unreadable: list[int] = []
    sample = ServedSample(parse_spec(SHOP), log, "served", lambda: unreadable.append(1))
    log.create_topic("served", partitions=parse_spec(SHOP).partitions, retention_ms=None)
    log.create_topic("schemas", partitions=1, retention_ms=None)
    events = [
        b'{"r": "a", "id": 1, "reader": 18446744073709551615}',
        b"[]",
        b'{"r": "b", "id": 1, "reader": 7}',
    ]
    log.writer().append([Append("served", 0, BytesColumn.of(events))])

    sample.look()

    assert [r["request_id"] for r in sample.requests] == ["b", "a"]
    assert sample.text("reader", key_of(7, 0)) == "7"
    assert len(unreadable) == 1
    log.close()


@pytest.mark.parametrize("default", [None, "none", 1.5])
def test_a_default_that_its_field_cannot_have_hides_no_event(tmp_path: Path, default: Any) -> None:
    fields: list[Any] = [{"name": n, "type": "string"} for n in ("r", "id", "reader")]
    fields += [{"name": "ts", "type": "long"}, {"name": "n", "type": "long", "default": default}]
    schema = parse_schema({"type": "record", "name": "Page", "fields": fields})
    values = {"r": "a", "id": "b", "reader": "c", "ts": 1, "n": 2}
    payload = written(
        {"type": "record", "name": "Page", "fields": [*fields[:-1], fields[-1] | {"default": 0}]}, values
    )
    log = open_url(f"sqlite:{tmp_path}/log")
    spec = parse_spec(SHOP.replace('format = "json", ', ""))
    sample = ServedSample(spec, log, "served", reader=schema)
    log.create_topic("served", partitions=spec.partitions, retention_ms=None)
    framed = frame(SchemaRegistry(log).register(schema), payload)
    log.writer().append([Append("served", 0, BytesColumn.of([framed]))])

    sample.look()

    assert [r["candidates"] for r in sample.requests] == [[{"id": "b", "reader": "c", "n": 2}]]
    assert list(json_events(BytesColumn.of([payload]), schema)) == [orjson.dumps(values)]
    log.close()


@pytest.mark.parametrize(
    "broken", [{}, {"page": None}, {"page": {}}, {"page": {"items": []}}, {"page": {"items": 3}}]
)
def test_an_event_that_served_nothing_is_no_request(broken: dict[str, Any]) -> None:
    assert request_of(broken, STREAM) is None


def test_events_of_one_item_each_share_a_context() -> None:
    def one(request: str, item: int) -> dict[str, Any]:
        return {
            "meta": {"request": request, "at": 3},
            "user": 7,
            "item": item,
            "freshet_served": {"score": 1},
        }

    found = grouped([one("a", 1), one("b", 5), one("a", 2)], STREAM)

    assert found == [
        {"request_id": "a", "context": {"meta": {}, "user": 7}, "candidates": [{"item": 1}, {"item": 2}]},
        {"request_id": "b", "context": {}, "candidates": [{"meta": {}, "user": 7, "item": 5}]},
    ]


def test_times_stay_the_numbers_that_rank_requests_take() -> None:
    schema = record("R", at=["null", AT])
    raw = io.BytesIO(written(schema, {"at": 1_700_000_000_123}))

    read: Any = fastavro.schemaless_reader(raw, fastavro.parse_schema(without_logical_types(schema)), None)

    assert read == {"at": 1_700_000_000_123}


whole = st.integers(-(2**62), 2**62)
tree = st.recursive(
    st.none() | whole | st.binary(max_size=4) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=10,
)


@given(tree, st.lists(st.sampled_from("abc"), max_size=3))
def test_leaves_of_any_tree_are_found_without_an_error(value: Any, path: list[str]) -> None:
    assert all(not isinstance(leaf, list) for leaf in leaves(value, path))


@given(st.dictionaries(st.sampled_from(["meta", "page", "items"]), tree, max_size=3))
def test_any_event_is_a_request_in_json_or_none(served: dict[str, Any]) -> None:
    told = [request_of(served, STREAM), grouped([served, served], STREAM), plain(served)]

    orjson.dumps(told)


def test_texts_of_times_and_buckets_have_the_keys_of_training() -> None:
    tuesday = 1_700_000_000_000 // 86_400_000 * 86_400_000  # 00:00 UTC
    times = [tuesday + hour * 3_600_000 for hour in range(24 * 8)]
    ages = [0.0, 1.0, 5.0, 99.9, 1e9]
    out = [written(SERVED, event(at, [ages[i % 5]])) for i, at in enumerate(times)]
    column = BytesColumn.of(out)
    columns = EventExtractor(STREAM, SCHEMA).extract(column, framed=False)
    decoder = SampleDecoder(SPEC, layout_of(SPEC), lambda _: sample_schema(SCHEMA, STREAM.explode))
    segments = decoder.decode(columns.samples(column), 0, np.array(times)).segments

    hours, days, weeks = (texts_of_times(part) for part in ("hour", "weekday", "hour_of_week"))
    buckets = texts_of_buckets((1, 10, 100))

    assert [hours[int(k)] for k in segments["hour"][:3]] == ["00:00", "01:00", "02:00"]
    assert [days[int(k)] for k in segments["day"][::24]] == [
        "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday",
    ]  # fmt: skip
    assert [weeks[int(k)] for k in segments["week"][22:25]] == ["Tue 22:00", "Tue 23:00", "Wed 00:00"]
    assert [buckets[int(k)] for k in segments["age"][:5]] == [
        "below 1", "1 to 10", "1 to 10", "10 to 100", "100 and more",
    ]  # fmt: skip


# --- dead letters


def test_a_sample_that_the_trainer_refused_names_it() -> None:
    refused = {"v": 1, "kind": "sample", "reason": "cut short", "bytes": "AA=="}

    letter = dead_letter_of(orjson.dumps(refused), "gateway")

    assert letter is not None
    assert (letter["from"], letter["reason"], letter["time_ms"]) == ("trainer", "cut short", None)


def test_a_long_event_is_cut_and_says_so() -> None:
    value = base64.b64encode(b"a" * 10_000).decode()

    letter = dead_letter_of(orjson.dumps({"v": 1, "kind": "refused", "value": value}), "gateway")

    assert letter is not None
    assert (len(letter["text"]), letter["text"][-1]) == (LONGEST_TEXT, "…")


letters = st.dictionaries(
    st.sampled_from(["reason", "value", "bytes", "time_ms", "path", "expected", "topic"]),
    st.none() | whole | st.text(max_size=9) | st.lists(whole, max_size=2),
).map(lambda rest: orjson.dumps({"v": 1, "kind": "refused", **rest}))


@given(st.binary(max_size=200) | letters)
def test_no_dead_letter_breaks_the_list(value: bytes) -> None:
    letter = dead_letter_of(value, "joiner")

    orjson.dumps(letter)
    assert letter is None or len(letter["text"]) <= 2 * LONGEST_TEXT


@given(st.binary(max_size=60))
def test_a_try_is_always_a_dry_run(body: bytes) -> None:
    try:
        asked = orjson.loads(rank_request(body))
    except BadInput:
        return
    assert asked["dry_run"] is True
    assert asked["explain"] is True


def test_a_try_that_is_nested_too_deep_is_refused_not_a_fault() -> None:
    with pytest.raises(BadInput, match="too deep"):
        rank_request(b'{"context":' + b"[" * 300 + b"]" * 300 + b"}")
