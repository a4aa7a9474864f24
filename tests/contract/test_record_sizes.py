"""On every log: whatever the gateway accepts leads to records that all topics take, and the joiner goes on.

The largest event that is accepted, and one that is a byte too large, are sent with small ones of other
clients; a foreign writer puts what the gateway would refuse into the topic itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from freshet.adapters import open_eventlog
from freshet.config.settings import Gateway as Settings
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.schemas import load_schemas
from freshet.config.spec.topics import RecordLimits, topics_of
from freshet.errors import ConfigError
from freshet.gateway.api import AVRO
from freshet.gateway.service import Gateway, codecs_of
from freshet.gateway.stream_endpoint import Acks
from freshet.joiner.start import make
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry, frame
from freshet.log.topics import ensure_topics, limits_of
from freshet.testing.contracts.eventlog import answered
from freshet.types import Append, BytesColumn, TopicPartition
from tests.servers.kafka import Kafka

ITEM = {"type": "record", "name": "I", "fields": [{"name": "sku", "type": "long"}]}
SCHEMAS: dict[str, list[tuple[str, object]]] = {
    "served": [
        ("request", "string"),
        ("at", "long"),
        ("note", "string"),
        ("items", {"type": "array", "items": ITEM}),
    ],
    "action": [("request", "string"), ("sku", "long"), ("at", "long"), ("note", "string")],
}
SPEC = """
name = "big"
partitions = 2
[events]
served = { schema = "served.avsc", explode = "items", key = ["request", "items.sku"], time = "at:ms" }
action = { schema = "action.avsc", key = ["request", "sku"], time = "at:ms" }
[join]
emit = "window"
grace = "1s"
[labels]
click = { on = "action.sku > 0", window = "1s" }
[tables]
item = { dim = 4 }
[features]
item = { field = "items.sku", table = "item" }
"""


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EventLog:
    if request.param == "sqlite":
        for module in ("event_log", "file"):  # 64 MiB would take seconds
            monkeypatch.setattr(f"freshet.log.sqlite.{module}.MAX_RECORD_BYTES", 2 << 20)
        return open_eventlog(f"sqlite:{tmp_path}/log")
    kafka: Kafka = request.getfixturevalue("kafka")
    return open_eventlog(f"kafka://{kafka.bootstrap}/{uuid4().hex}?max_record_bytes=1048576")


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    for role, fields in SCHEMAS.items():
        schema = {"type": "record", "name": role, "fields": [{"name": n, "type": t} for n, t in fields]}
        (tmp_path / f"{role}.avsc").write_text(json.dumps(schema))
    return parse_spec(SPEC, folder=str(tmp_path))


def served(request: str, note_bytes: int, items: int) -> bytes:
    """A framed record of the first schema that the topic of schemas takes."""
    body = text(request) + zigzag(1_000) + text("n" * note_bytes) + zigzag(items)
    return body + b"".join(zigzag(sku + 1) for sku in range(items)) + b"\x00"


def zigzag(n: int) -> bytes:
    n, out = n << 1, bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def text(value: str) -> bytes:
    return zigzag(len(value)) + value.encode()


class Client:
    """The responses to one client."""

    in_columns = True

    def __init__(self) -> None:
        self.acks: Acks | None = None
        self.error: Exception | None = None

    def acknowledged(self, body: bytes) -> None:
        raise AssertionError(body)

    def answered(self, acks: Acks) -> None:
        self.acks = acks

    def failed(self, error: Exception) -> None:
        self.error = error


def sent(spec: Spec, log: EventLog, records: Sequence[bytes]) -> list[Client]:
    """Each by a client of its own, at the same moment."""
    clients = [Client() for _ in records]

    async def main() -> None:
        codecs = codecs_of(spec, {r: load_schemas(spec).of(r) for r in ("served", "action")}, log)
        gateway = Gateway(spec, log, codecs, Settings(queue_bytes=1 << 30))
        gateway.committer.start()
        for client, record in zip(clients, records, strict=True):
            gateway.endpoints["served"].submit_body(record, AVRO, client)
        assert await gateway.committer.close(60.0) == 0
        gateway.close()

    asyncio.run(main())
    return clients


def sizes(log: EventLog, topic: str) -> list[int]:
    found: list[int] = []
    for p in range(log.topics()[topic].partitions):
        at = TopicPartition(topic, p)
        reader, end, position = log.reader(), log.bounds(at).end, log.bounds(at).start
        reader.assign({at: position})
        while position < end:
            for _, records in answered(reader, 1_000, 1.0):
                found += [len(value) for value in records.values]
                position = records.next_offset
        reader.close()
    return found


def join(spec: Spec, log: EventLog) -> dict[str, int]:
    joiner = make(spec, log)
    joiner.run(until_end=True)
    assert joiner.status is not None
    ledger = joiner.status.ledger
    return {
        "samples": joiner.status.samples,
        "impressions": ledger.events["impressions"],
        "refused": ledger.refused,
    }


def test_the_largest_accepted_event_is_joined(log: EventLog, spec: Spec) -> None:
    topics, limits = ensure_topics(log, spec), limits_of(log, spec)
    largest, schema = limits.event_bytes["served"], schema_id(spec, log)
    room = largest - len(frame(schema, served("r1", 0, 3))) - len("r1") - 8
    while len(frame(schema, served("r1", room, 3))) + len("r1") < largest:
        room += 1
    events = [("r0", 9, 3), ("r1", room, 3), ("r2", room + 1, 3), ("r3", 9, 3)]
    clients = sent(spec, log, [frame(schema, served(*event)) for event in events])

    assert [len(c.acks.offsets) if c.acks else c.error for c in clients] == [1, 1, 0, 1]
    assert clients[2].acks is not None
    [refusal] = clients[2].acks.refused
    assert (f"{largest:,} bytes" in refusal.expected, refusal.found) == (True, f"{largest + 1:,} bytes")
    assert join(spec, log) == {"samples": 9, "impressions": 9, "refused": 0}
    for plan in topics_of(spec).plans:
        assert max(sizes(log, plan.name), default=0) <= log.topics()[plan.name].max_record_bytes, plan.name
    assert len(sizes(log, topics.refused)) == 1
    log.close()


@pytest.mark.slow
def test_a_request_far_beyond_a_record_becomes_many_blocks(log: EventLog, spec: Spec) -> None:
    topics, schema = ensure_topics(log, spec), schema_id(spec, log)
    clients = sent(spec, log, [frame(schema, served("r1", 30_000, 2_400))])

    assert clients[0].acks is not None
    assert not clients[0].acks.refused
    assert join(spec, log) == {"samples": 2_400, "impressions": 2_400, "refused": 0}
    assert max(sizes(log, topics.samples)) <= 1 << 20
    log.close()


def test_an_event_that_expands_too_far_is_refused(
    log: EventLog, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshet.config.spec.topics.MAX_EXPANDED_BYTES", 1 << 20)
    topics, schema = ensure_topics(log, spec), schema_id(spec, log)
    large = frame(schema, served("r1", 30_000, 100))
    clients = sent(
        spec, log, [frame(schema, served("r0", 9, 3)), large, frame(schema, served("r2", 30_000, 20))]
    )

    assert clients[1].acks is not None
    [refusal] = clients[1].acks.refused
    assert "1,048,576 bytes together" in refusal.expected
    append = Append(topics.served, 0, BytesColumn.of([large]))
    log.writer().append([append])  # by another system
    assert join(spec, log) == {"samples": 23, "impressions": 23, "refused": 1}
    log.close()


def test_a_foreign_record_that_no_sample_can_hold_is_set_aside(log: EventLog, spec: Spec) -> None:
    topics, schema = ensure_topics(log, spec), schema_id(spec, log)
    limit = log.topics()[topics.served].max_record_bytes
    record = frame(schema, served("r1", limit - 30, 1))
    log.writer().append([Append(topics.served, p, BytesColumn.of([record])) for p in range(2)])
    sent(spec, log, [frame(schema, served(f"r{n}", 9, 1)) for n in range(2, 9)])

    assert join(spec, log) == {"samples": 7, "impressions": 7, "refused": 2}
    letters = sizes(log, topics.dead_letters)
    assert len(letters) == 2
    assert limit - 1_000 < max(letters) <= limit
    log.close()


def test_a_topic_that_takes_too_little_is_refused_at_start(kafka: Kafka, spec: Spec) -> None:
    log = open_eventlog(f"kafka://{kafka.bootstrap}/{uuid4().hex}?max_record_bytes=100000")
    with pytest.raises(ConfigError, match=r"max\.message\.bytes"):
        make(spec, log)
    log.close()


def schema_id(spec: Spec, log: EventLog) -> int:
    return SchemaRegistry(log).register(load_schemas(spec).served)


def test_bounds_are_those_of_the_log(log: EventLog, spec: Spec) -> None:
    topics = ensure_topics(log, spec)
    made = limits_of(log, spec)
    known = log.topics()

    assert made == RecordLimits.of(spec, {name: info.max_record_bytes for name, info in known.items()})
    assert made.sample_bytes < known[topics.samples].max_record_bytes
    log.close()
