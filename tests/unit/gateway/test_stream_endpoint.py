"""Requests of one batch that are submitted one by one: each has the outcome of its own events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from prometheus_client import CollectorRegistry, Counter

from freshet.config.spec.topics import RecordLimits, topics_of
from freshet.features import AcceptedBodies
from freshet.gateway.codec import StreamCodec
from freshet.gateway.group_commit import Committer, QueueLimits
from freshet.gateway.service import codecs_of
from freshet.gateway.stream_endpoint import JSON, Acks, Rules, StreamEndpoint
from freshet.log import EventLog
from freshet.log.sqlite.event_log import open_url
from freshet.log.topics import ensure_topics
from freshet.testing.clock import SettableClock
from freshet.types import TopicPartition
from tests.fixtures.gateway import NOW, SCHEMAS, SPEC, action

EVENT_BYTES = 200
LARGE = orjson.dumps(action(9, eventId="x" * EVENT_BYTES))


class Client:
    """Records its outcomes."""

    in_columns = True

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def acknowledged(self, body: bytes) -> None:
        raise AssertionError("only for clients that take no columns")

    def answered(self, acks: Acks) -> None:
        self.outcomes.append(f"{len(acks.offsets)} durable")

    def failed(self, error: Exception) -> None:
        self.outcomes.append(type(error).__name__)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = open_url(f"sqlite:{tmp_path}/log")
    ensure_topics(log, SPEC)
    yield log
    log.close()


@pytest.fixture
def codec(log: EventLog) -> StreamCodec:
    return codecs_of(SPEC, SCHEMAS, log, SettableClock(NOW))["action"]


def outcomes(log: EventLog, codec: StreamCodec, bodies: list[bytes], queue_events: int) -> list[list[str]]:
    """Outcomes of requests that are validated together."""
    stream, registry = SPEC.events.action, CollectorRegistry()
    rules = Rules(
        partitions=SPEC.partitions,
        refused_topic=topics_of(SPEC).refused,
        max_events=100,
        max_ahead_ms=SPEC.join.max_ahead_ms,
        limits=RecordLimits({"action": EVENT_BYTES}, *[1 << 20] * 5),
        labels=1,
    )
    counter = Counter("events", "", ["stream", "outcome"], registry=registry)
    clients = [Client() for _ in bodies]

    async def main() -> None:
        limits = QueueLimits(queue_events, 1 << 20)
        committer = Committer(log.group_writer(), limits, registry, wait_s=0.0, batch_events=100)
        committer.start()
        endpoint = StreamEndpoint(stream, codec, committer, rules, clock=SettableClock(NOW), counter=counter)
        for body, client in zip(bodies, clients, strict=True):
            endpoint.submit_body(body, JSON, client)
        assert await committer.close(20) == 0

    asyncio.run(main())
    return [client.outcomes for client in clients]


def durable(log: EventLog) -> int:
    topic = SPEC.events.action.topic
    return sum(log.bounds(TopicPartition(topic, p)).end for p in range(SPEC.partitions))


def test_a_full_queue_fails_no_request_that_was_taken(log: EventLog, codec: StreamCodec) -> None:
    one, four = orjson.dumps(action(1)), orjson.dumps([action(i) for i in range(2, 6)])

    found = outcomes(log, codec, [one, four, LARGE], queue_events=4)

    assert found == [["1 durable"], ["Overloaded"], ["Overloaded"]]
    assert durable(log) == 1


def test_a_fault_fails_no_other_request_of_a_batch(
    log: EventLog, codec: StreamCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, spoiled, accept = orjson.dumps(action(1)), orjson.dumps(action(2)), codec.accept_json

    def accept_json(bodies: list[bytes], *, latest_ms: int, max_events: int) -> AcceptedBodies:
        if bodies == [spoiled]:
            raise RuntimeError("injected")
        return accept(bodies, latest_ms=latest_ms, max_events=max_events)

    monkeypatch.setattr(codec, "accept_json", accept_json)

    found = outcomes(log, codec, [one, spoiled, LARGE, one], queue_events=100)

    assert found == [["1 durable"], ["RuntimeError"], ["0 durable"], ["1 durable"]]
    assert durable(log) == 2
