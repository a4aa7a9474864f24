"""Events that come to the gateway as Avro, and the ids of their schemas."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fastavro
import pytest

from freshet.config.avro.schema import Written, parse_schema, to_json
from freshet.errors import Unavailable
from freshet.gateway.api import AVRO, AVRO_BATCH, AVRO_RAW
from freshet.gateway.service import codecs_of
from freshet.log.schema_ids import REREAD_S, SchemaRegistry, frame
from freshet.log.sqlite.event_log import open_url
from freshet.testing.clock import SettableClock
from freshet.types import TopicPartition
from tests.fixtures.gateway import NOW, RANKED, SCHEMAS, SPEC, Running, avro, gateway, ranked, start
from tests.fixtures.serving import schema

__all__ = ["gateway", "start"]  # fixtures


def test_avro_is_passed_on_byte_for_byte(gateway: Running) -> None:
    schema_id = SchemaRegistry(gateway.log).register(RANKED)
    one, two = frame(schema_id, avro(ranked(1))), frame(schema_id, avro(ranked(2)))

    assert gateway.post("impressions", one, AVRO).status_code == 202
    batch = b"".join(len(r).to_bytes(4, "big") + r for r in (one, two))
    assert len(gateway.post("impressions", batch, AVRO_BATCH).json()["acks"]) == 2
    raw = gateway.post("impressions", avro(ranked(1)), AVRO_RAW, **{"freshet-schema-id": str(schema_id)})
    assert raw.status_code == 202

    assert sorted(v for _, _, _, v in gateway.records("feed.ranked")) == sorted([one, one, one, two])


def test_avro_of_a_later_schema_is_taken_once_it_is_registered(gateway: Running) -> None:
    tree = to_json(RANKED)
    tree["fields"].append({"name": "page", "type": "string", "default": ""})
    later = parse_schema(tree)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(tree), {**ranked(1), "page": "home"})

    assert gateway.post("impressions", frame(99, out.getvalue()), AVRO).status_code == 422
    many_digits = gateway.post("impressions", avro(ranked()), AVRO_RAW, **{"freshet-schema-id": "1" * 5_000})
    assert (many_digits.status_code, many_digits.json()["error"]["code"]) == (400, "bad_input")
    schema_id = SchemaRegistry(gateway.log).register(later)
    gateway.clock.advance(0.1)
    early = gateway.post("impressions", frame(schema_id, out.getvalue()), AVRO)
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    gateway.clock.advance(REREAD_S)  # since the made-up 99
    assert gateway.post("impressions", frame(schema_id, out.getvalue()), AVRO).status_code == 202


def test_avro_of_an_older_schema_is_read_by_defaults_or_refused(gateway: Running) -> None:
    older = to_json(RANKED)
    (user,) = (f["type"] for f in older["fields"] if f["name"] == "user")
    user["fields"] = [f for f in user["fields"] if f["name"] != "country"]  # null by default in the spec's
    unread = to_json(RANKED)
    (user,) = (f["type"] for f in unread["fields"] if f["name"] == "user")
    user["fields"] = [f for f in user["fields"] if f["name"] != "id"]
    ids = [SchemaRegistry(gateway.log).register(parse_schema(tree)) for tree in (older, unread)]
    answers = []
    for schema_id, tree in zip(ids, (older, unread), strict=True):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(tree), ranked(1))
        answers.append(gateway.post("impressions", frame(schema_id, out.getvalue()), AVRO))

    assert [a.status_code for a in answers] == [202, 422]
    assert (
        f"schema {ids[1]}: schema 'record feed.Ranked' of the served events: user.id = 'no such field'"
        in (answers[1].json()["refused"][0]["found"])
    )


def test_of_a_batch_all_schema_ids_are_known_when_it_comes_again(tmp_path: Path) -> None:
    log, clock = open_url(f"sqlite:{tmp_path}/log"), SettableClock()
    codec = codecs_of(SPEC, SCHEMAS, log, clock)["served"]

    def others_look(made_up: int) -> None:
        clock.advance(REREAD_S)
        assert len(codec.from_avro([frame(made_up, b"\0")]).bad) == 1
        clock.advance(0.1)

    others_look(500)
    batch = [frame(501, b"\0"), frame(502, b"\0")]
    with pytest.raises(Unavailable):
        codec.from_avro(batch)
    others_look(503)
    assert [refused.found for refused in codec.from_avro(batch).bad] == ["501", "502"]
    log.close()


def test_unknown_schema_ids_cost_one_read_of_the_schemas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_url(f"sqlite:{tmp_path}/log")
    codec = codecs_of(SPEC, SCHEMAS, log, SettableClock())["served"]
    looks, bounds = [], log.bounds

    def counted(partition: TopicPartition) -> Any:
        looks.append(partition)
        return bounds(partition)

    monkeypatch.setattr(log, "bounds", counted)

    checked = codec.from_avro([frame(made_up, b"\0") for made_up in range(500, 10_500)])
    codec.accept_avro([frame(499, b"\0")], lengths=False, latest_ms=NOW, max_events=1)

    assert [r.index for r in checked.bad] == list(range(10_000))
    assert looks == [TopicPartition("schemas", 0)]
    log.close()


def test_no_id_is_looked_up_after_the_schemas_were_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, clock = open_url(f"sqlite:{tmp_path}/log"), SettableClock()
    codec = codecs_of(SPEC, SCHEMAS, log, clock)["served"]
    looks, found = [], SchemaRegistry.find

    def away(partition: TopicPartition) -> Any:
        raise Unavailable("no broker answers")

    def find(registry: SchemaRegistry, schema_id: int, came_s: float) -> Written:
        looks.append(schema_id)
        return found(registry, schema_id, came_s)

    monkeypatch.setattr(log, "bounds", away)
    monkeypatch.setattr(SchemaRegistry, "find", find)

    with pytest.raises(Unavailable, match="no broker answers"):
        codec.from_avro([frame(made_up, b"\0") for made_up in range(500, 10_500)])

    assert len(looks) == 1
    log.close()


def test_avro_of_a_schema_that_the_spec_does_not_fit_is_refused(gateway: Running) -> None:
    schema_id = SchemaRegistry(gateway.log).register(schema("viewport"))

    answer = gateway.post("impressions", frame(schema_id, b"\x02\x02\x02a"), AVRO)

    assert answer.status_code == 422
    assert "a schema that the spec fits" in answer.json()["refused"][0]["expected"]


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 20])
def test_truncated_avro_is_refused_in_words(gateway: Running, cut: int) -> None:
    schema_id = SchemaRegistry(gateway.log).register(RANKED)

    answer = gateway.post("impressions", frame(schema_id, avro(ranked()))[:cut] or b"x", AVRO)

    assert answer.status_code == 422
    assert answer.json()["refused"][0]["found"]
