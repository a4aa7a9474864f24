"""Topics that others write, on a real Kafka with a schema registry beside it: read as they are."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import fastavro
import orjson
import pytest
from confluent_kafka import Producer

from freshet.adapters import open_eventlog
from freshet.config.avro.schema import Written, spell
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec
from freshet.errors import ConfigError, Mismatch, Unavailable
from freshet.features import read_blocks
from freshet.joiner.decoder import ExternalSchemas
from freshet.joiner.service import Intervals, JoinerService
from freshet.joiner.start import make
from freshet.log import EventLog
from freshet.log.records import newest
from freshet.log.schema_registry import Access, RestRegistry
from freshet.testing.clock import SettableClock
from freshet.types import BytesColumn, TopicPartition
from tests.servers.kafka import Kafka
from tests.servers.schema_registry import SchemaRegistryServer

SPEC = """
name = "shop"
partitions = 1
[events]
served = { topic = "views", format = "confluent", schema = "v.avsc", key = ["r"], time = "ts:ms" }
action = { topic = "deeds", format = "bare", schema = "a.avsc", key = ["r"], time = "ts:ms" }
[join]
emit = "window"
grace = "1s"
[labels]
click = { on = "action.type == 'click'", window = "2s" }
[tables]
item = { dim = 4 }
[features]
item = { field = "item.id", table = "item" }
[serve]
score = "click"
log_served = false
"""
ITEM: dict[str, Any] = {
    "type": "record",
    "name": "Item",
    "namespace": "shop",
    "fields": [{"name": "id", "type": "long"}],
}
VIEW: dict[str, Any] = {
    "type": "record",
    "name": "View",
    "namespace": "shop",
    "fields": [
        {"name": "r", "type": "string"},
        {"name": "ts", "type": "long"},
        {"name": "item", "type": "shop.Item"},
    ],
}
WHOLE_VIEW = {**VIEW, "fields": [*VIEW["fields"][:2], {"name": "item", "type": ITEM}]}
DEED: dict[str, Any] = {
    "type": "record",
    "name": "Deed",
    "fields": [
        {"name": "r", "type": "string"},
        {"name": "ts", "type": "long"},
        {"name": "type", "type": "string"},
    ],
}
REFERENCE = {"name": "shop.Item", "subject": "item", "version": 1}
DEADLINE_S = 60.0
CALM = Intervals(end_check_interval_ms=10**9, retry_ms=50)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[SchemaRegistryServer]:
    with SchemaRegistryServer(tmp_path) as server:
        yield server


def view_id(registry: SchemaRegistryServer) -> int:
    registry.register("item", ITEM)
    return registry.register("views-value", VIEW, [REFERENCE])


def encoded(schema: Any, **fields: Any) -> bytes:
    """Bare Avro of a view or a deed."""
    whole = fastavro.parse_schema(WHOLE_VIEW if schema is VIEW else schema)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, whole, fields)
    return out.getvalue()


class Patient:
    """A registry that records absent answers, and is queried again only with its schemas back."""

    def __init__(self, inner: RestRegistry) -> None:
        self._inner, self.refused, self.back = inner, threading.Event(), threading.Event()

    def get(self, schema_id: int) -> Written:
        if self.refused.is_set():
            assert self.back.wait(DEADLINE_S)
        try:
            return self._inner.get(schema_id)
        except Unavailable:
            self.refused.set()
            raise


class Shop:
    """Topics of a shop, not written for freshet, and the model that reads them."""

    def __init__(self, kafka: Kafka, folder: Path) -> None:
        (folder / "v.avsc").write_text(json.dumps(WHOLE_VIEW))
        (folder / "a.avsc").write_text(json.dumps(DEED))
        (folder / "freshet.toml").write_text(SPEC)
        self.spec: Spec = load_spec(folder / "freshet.toml")
        self.prefix = uuid4().hex
        self.log: EventLog = open_eventlog(f"kafka://{kafka.bootstrap}/{self.prefix}")
        for topic in ("views", "deeds"):
            self.log.create_topic(topic, partitions=1, retention_ms=12_345_678)
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})

    def write(self, topic: str, *values: bytes) -> None:
        for value in values:
            self._producer.produce(f"{self.prefix}.{topic}", value, timestamp=10_000)
        assert self._producer.flush(60) == 0

    def joiner(self, theirs: ExternalSchemas) -> JoinerService:
        return make(self.spec, self.log, external_schemas=theirs, intervals=CALM)

    def values(self) -> list[float]:
        """Return the counts of all samples. A commit is answered before its markers are there; opening the
        writer waits for them."""
        self.log.writer("joiner-shop-0").close()
        blocks = newest(self.log, TopicPartition("shop.samples", 0), 100)
        return sorted(read_blocks(BytesColumn.of([block for _, block in blocks])).values.tolist())

    def reasons(self) -> list[str]:
        """Why records are dead letters."""
        letters = newest(self.log, TopicPartition("shop.dead-letters", 0), 100)
        return [orjson.loads(letter)["reason"] for _, letter in letters]


@pytest.fixture
def shop(kafka: Kafka, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(kafka, tmp_path)
    yield shop
    shop.log.close()


def framed(schema_id: int, payload: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + payload


def test_topics_of_others_are_joined_as_they_are(shop: Shop, registry: SchemaRegistryServer) -> None:
    schema_id = view_id(registry)
    for i, r in enumerate("abc"):
        shop.write("views", framed(schema_id, encoded(VIEW, r=r, ts=5_000, item={"id": i})))
    shop.write("views", framed(4_711, b"whatever"), b"no frame")
    shop.write("deeds", encoded(DEED, r="b", ts=5_500, type="click"), b"\x80")

    shop.joiner(RestRegistry(Access(registry.url))).run(until_end=True)

    assert shop.values() == [0.0, 0.0, 1.0]
    reasons = shop.reasons()
    assert len(reasons) == 3
    assert any("4711 is not in the schema registry" in reason for reason in reasons)
    assert registry.requests(f"/schemas/ids/{schema_id}") == 1
    assert shop.log.topics()["views"].retention_ms == 12_345_678  # only its owners set it


def test_events_wait_for_an_absent_registry(shop: Shop, registry: SchemaRegistryServer) -> None:
    schema_id = view_id(registry)
    shop.write("views", framed(schema_id, encoded(VIEW, r="a", ts=5_000, item={"id": 1})))
    registry.kill()
    patient = Patient(RestRegistry(Access(registry.url)))
    joiner = shop.joiner(patient)
    thread = threading.Thread(target=joiner.run, kwargs={"until_end": True})
    thread.start()
    assert patient.refused.wait(DEADLINE_S)

    registry.start()
    assert view_id(registry) == schema_id
    patient.back.set()
    thread.join(DEADLINE_S)

    assert shop.values() == [0.0]
    assert shop.reasons() == []


def test_an_external_topic_with_other_partitions_is_refused(kafka: Kafka, shop: Shop) -> None:
    spec = parse_spec(SPEC.replace("partitions = 1", "partitions = 2"), folder=shop.spec.folder)
    with pytest.raises(Mismatch, match=r"views: expected 2 partitions or more, found 1"):
        make(spec, shop.log, external_schemas=RestRegistry(Access("http://127.0.0.1:1")))


def test_a_start_without_a_registry_names_the_setting(shop: Shop) -> None:
    with pytest.raises(ConfigError, match="FRESHET_REGISTRY_URL"):
        make(shop.spec, shop.log)


def test_an_unknown_schema_is_requested_again_later(registry: SchemaRegistryServer) -> None:
    clock = SettableClock()
    client = RestRegistry(Access(registry.url), clock)
    with pytest.raises(KeyError):
        client.get(100_001)
    assert registry.register("s", DEED) == 100_001
    with pytest.raises(KeyError):
        client.get(100_001)
    clock.advance(11.0)
    assert spell(client.get(100_001)) == "record Deed"
    assert spell(client.get(100_001)) == "record Deed"
    assert registry.requests("/schemas/ids/100001") == 2


def test_a_schema_of_another_kind_is_refused(registry: SchemaRegistryServer) -> None:
    schema_id = registry.register("s", DEED, kind="PROTOBUF")
    with pytest.raises(ConfigError, match="PROTOBUF"):
        RestRegistry(Access(registry.url)).get(schema_id)


def test_an_unknown_reference_is_requested_again(
    registry: SchemaRegistryServer,
) -> None:
    clock = SettableClock()
    client = RestRegistry(Access(registry.url), clock)
    schema_id = registry.register("s", VIEW, [REFERENCE])
    for _ in range(2):
        with pytest.raises(KeyError):
            client.get(schema_id)
    assert registry.requests("/subjects/item/versions/1") == 1
    registry.register("item", ITEM)
    clock.advance(11.0)
    assert spell(client.get(schema_id)).endswith("View")


@pytest.mark.parametrize("kind", ["basic", "bearer"])
def test_secrets_come_from_files_that_may_change(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    right = base64.b64encode(b"ann:open sesame").decode()
    wanted = f"Basic {right}" if kind == "basic" else "Bearer open sesame"
    with SchemaRegistryServer(tmp_path, wanted) as server:
        schema_id = server.register("s", DEED)
        user = (
            {"user": "ann", "password_file": str(secret)} if kind == "basic" else {"token_file": str(secret)}
        )
        client = RestRegistry(Access(server.url, **user))
        with pytest.raises(Unavailable, match="No such file"):
            client.get(schema_id)
        secret.write_text("wrong word\n")
        with pytest.raises(Unavailable, match="401") as refused:
            client.get(schema_id)
        assert "wrong" not in str(refused.value)
        secret.write_text("open sesame\n")
        assert spell(client.get(schema_id)) == "record Deed"


def test_the_next_registry_answers_for_an_absent_one(registry: SchemaRegistryServer) -> None:
    schema_id = registry.register("s", DEED)
    assert spell(RestRegistry(Access(f"http://127.0.0.1:1,{registry.url}")).get(schema_id)) == "record Deed"


def test_a_server_that_is_no_registry_is_unavailable(
    registry: SchemaRegistryServer,
) -> None:
    with pytest.raises(Unavailable, match="404"):
        RestRegistry(Access(f"{registry.url}/elsewhere")).get(1)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://ann:secret@host", "http://host?x=1"])
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Access(url)
    assert "secret" not in str(refused.value)
