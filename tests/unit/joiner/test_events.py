"""Decoding of a spec's streams to columns: several schemas at once, and refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fastavro
import pytest

from freshet.config.avro.schema import canonical, parse_schema
from freshet.config.spec.parse import parse_spec
from freshet.features import hash_text
from freshet.joiner.core import Joiner
from freshet.joiner.decoder import SpecDecoder
from freshet.joiner.plan import join_plan
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.sqlite.event_log import open_url
from freshet.testing.clock import SettableClock
from tests.unit.joiner.avro_events import (
    ACTION,
    ITEM,
    LEFT_OUT,
    SERVED,
    SHOWN,
    SPEC,
    Fixed,
    action,
    framed,
    records,
    served,
    wider,
)


@pytest.fixture
def schemas() -> Fixed:
    return Fixed()


@pytest.fixture
def decoder(schemas: Fixed) -> SpecDecoder:
    spec = parse_spec(SPEC)
    return SpecDecoder(spec, join_plan(spec, hash_text), schemas)


def test_schema_registered_between_two_batches_is_found(
    tmp_path: Path,
) -> None:
    log = open_url(f"sqlite:{tmp_path}/log")
    spec, clock = parse_spec(SPEC), SettableClock()
    decoder = SpecDecoder(spec, join_plan(spec, hash_text), SchemaRegistry(log, clock), clock=clock)
    made_up = [b"\0" + i.to_bytes(4, "big") for i in range(500, 700)]

    assert decoder.actions(records(*made_up))[1].no_schema == 200
    schema_id = SchemaRegistry(log).register(json.dumps(ACTION))
    clock.advance(0.001)  # a later batch
    good = b"\0" + schema_id.to_bytes(4, "big") + action("a", 1, 5_000)[5:]
    columns, refused = decoder.actions(records(*made_up, good))

    assert (len(columns.times_ms), refused.no_schema) == (1, 200)
    log.close()


def test_events_of_several_schemas_join_in_record_order(decoder: SpecDecoder, schemas: Fixed) -> None:
    spec = parse_spec(SPEC)
    joiner = Joiner(join_plan(spec, hash_text))
    batch, refused = decoder.served(
        records(
            served("a", 1_000, 1, 2), wider("b", 1_000, 1), b"junk", served("c", 1_001), served("d", 1_002, 9)
        )
    )
    assert refused.rows == [2]
    assert batch.offsets[batch.events].tolist() == [100, 100, 101, 104]
    assert batch.schemas[batch.events].tolist() == [6, 6, 7, 6]  # the schemas of the spliced samples
    joiner.on_served(batch)
    deeds, refused = decoder.actions(
        records(action("b", 1, 1_500), action("a", 2, 1_600, "play", 5.0), action("d", 9, 1_700, "play", 0.5))
    )
    assert not len(refused)
    assert deeds.masks.tolist() == [1, 2, 0]
    joiner.on_actions(deeds)
    joiner.advance(10_000)

    samples = joiner.take_samples()
    got = []
    for payload, schema, label, value in zip(
        samples.payloads,
        samples.schemas.tolist(),
        samples.labels.tolist(),
        samples.values.tolist(),
        strict=True,
    ):
        spliced = json.loads(canonical(schemas.get(schema)))
        sample = fastavro.schemaless_reader(io.BytesIO(payload), fastavro.parse_schema(spliced), None)
        got.append((sample["r"], sample["items"]["id"], sample["after"], label, value))  # type: ignore[index,call-overload]
    assert sorted(got) == [
        *(("a", 1, "!", 0, 0.0), ("a", 1, "!", 1, 0.0), ("a", 2, "!", 0, 0.0), ("a", 2, "!", 1, 5.0)),
        *(("b", 1, "?", 0, 1.0), ("b", 1, "?", 1, 0.0)),
        *(("d", 9, "!", 0, 0.0), ("d", 9, "!", 1, 0.0)),
    ]


def test_shown_events_match_impressions_of_another_key_type(decoder: SpecDecoder) -> None:
    batch, _ = decoder.served(records(served("a", 1_000, 1, 2)))
    seen, refused = decoder.shown(records(framed(3, SHOWN, r="a", id=2, ts=1.5), b"\0\0\0"))

    assert seen.keys.tolist() == batch.keys[1:].tolist()
    assert seen.times_ms.tolist() == [1_500]
    assert refused.rows == [1]


@pytest.mark.parametrize(
    ("value", "reason", "counted"),
    [
        (b"", "expected Confluent-framed Avro", "unreadable"),
        (b'{"r": "a"}', "expected Confluent-framed Avro", "unreadable"),
        (b"\0\0\0\0\x63rest", "schema id 99 is not in the topic", "no_schema"),
        (framed(4, ACTION, r="a", id=1, e="", ts=1, type="", seconds=None)[:-4], "", "unreadable"),
        (framed(5, LEFT_OUT, r="a", id=1, e="", ts=1, type=""), "seconds", "no_schema"),
    ],
)
def test_unreadable_events_are_refused_with_a_reason(
    decoder: SpecDecoder, value: bytes, reason: str, counted: str
) -> None:
    deeds, refused = decoder.actions(records(action("a", 1, 5), value, action("a", 2, 5)))

    assert deeds.offsets.tolist() == [100, 102]
    assert refused.rows == [1]
    assert reason in refused.reasons[0]
    assert refused.by_reason() == {"unreadable": 0, "no_schema": 0, "bad_time": 0, "too_large": 0} | {
        counted: 1
    }


def test_nothing_but_junk_is_no_event(decoder: SpecDecoder) -> None:
    assert len(decoder.served(records(b"x"))[0]) == 0
    assert len(decoder.shown(records(b"x"))[0]) == 0
    assert len(decoder.actions(records(b"x"))[0]) == 0


def test_an_unknown_schema_may_become_known(decoder: SpecDecoder, schemas: Fixed) -> None:
    value = b"\0" + (6).to_bytes(4, "big") + served("a", 1_000, 1)[5:]
    assert len(decoder.served(records(value))[1]) == 1
    schemas.known[6] = schemas.known[1]
    assert len(decoder.served(records(value))[0]) == 1


def test_streams_of_json_join_with_those_of_avro() -> None:
    text = SPEC.replace('topic = "actions",', 'topic = "actions", format = "json",')
    spec = parse_spec(text.replace('topic = "served",', 'topic = "served", format = "json",'))
    schemas = {"served": parse_schema(json.dumps(SERVED)), "action": parse_schema(json.dumps(ACTION))}
    decoder = SpecDecoder(spec, join_plan(spec, hash_text), Fixed(), schemas)
    event = {"r": "a", "ts": 1_000, "items": [{"id": 1, "p": 0.5}, {"id": 2, "p": 1}], "after": "!", "new": 1}
    click = {"r": "a", "id": 2, "e": "x", "ts": 1_100, "type": "click"}
    batch, refused = decoder.served(records(b"{", json.dumps(event).encode(), b'{"r": 5}'))
    deeds, wrong = decoder.actions(
        records(json.dumps(click).encode(), json.dumps({**click, "ts": "no"}).encode())
    )
    seen, _ = decoder.shown(records(framed(3, SHOWN, r="a", id=2, ts=1.5)))

    assert sorted(refused.rows) == [0, 2]
    assert wrong.rows == [1]
    assert "ts: expected a long" in wrong.reasons[0]
    assert batch.offsets[batch.events].tolist() == [101, 101]
    assert deeds.keys.tolist() == seen.keys.tolist() == batch.keys[1:].tolist()
    assert deeds.masks.tolist() == [1]
    joiner = Joiner(join_plan(spec, hash_text))
    joiner.on_served(batch)
    joiner.advance(10_000)
    samples = joiner.take_samples()
    assert len(set(samples.schemas.tolist())) == 1
    flat = fastavro.parse_schema(
        {**SERVED, "fields": [{**f, "type": ITEM} if f["name"] == "items" else f for f in SERVED["fields"]]}
    )
    assert [fastavro.schemaless_reader(io.BytesIO(p), flat, None)["items"] for p in samples.payloads] == [  # type: ignore[index,call-overload]
        *[event["items"][0]] * 2,  # type: ignore[index]
        *[event["items"][1]] * 2,  # type: ignore[index]
    ]


def test_an_event_without_a_features_field_is_refused() -> None:
    """Only a feature reads the field; the trainer could not decode the samples."""
    spec = parse_spec(SPEC.replace("[serve]", 'new = { field = "new", table = "item" }\n[serve]'))
    decoder = SpecDecoder(spec, join_plan(spec, hash_text), Fixed())
    batch = records(wider("a", 1_000, 1), served("b", 1_000, 1, 2), b"junk", wider("c", 1_000, 3))
    columns, refused = decoder.served(batch)
    assert len(columns) == 4, "a replay takes what earlier releases took"
    columns = decoder.fitting(columns, batch, refused)
    assert columns.offsets[columns.events].tolist() == [100, 103]
    assert sorted(refused.rows) == [1, 2]
    assert refused.by_reason() == {"unreadable": 1, "no_schema": 1, "bad_time": 0, "too_large": 0}
    assert "new" in refused.reasons[refused.rows.index(1)]
