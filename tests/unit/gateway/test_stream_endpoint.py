"""Requests of one batch that are submitted one by one: each has the outcome of its own events."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from prometheus_client import CollectorRegistry, Counter

from freshet.config.spec.topics import RecordLimits, topics_of
from freshet.errors import Unavailable
from freshet.features import AcceptedBodies, partition_of
from freshet.gateway.codec import StreamCodec
from freshet.gateway.group_commit import Committer, QueueLimits
from freshet.gateway.service import codecs_of
from freshet.gateway.stream_endpoint import JSON, Acks, Rules, StreamEndpoint
from freshet.log import EventLog, GroupWriter
from freshet.log.sqlite.event_log import open_url
from freshet.log.topics import ensure_topics
from freshet.testing.clock import SettableClock
from freshet.types import BytesColumn, TopicPartition
from tests.fixtures.gateway import NOW, SCHEMAS, SPEC, action
from tests.unit.gateway.slow_partition import SlowPartition

EVENT_BYTES = 200
LARGE = orjson.dumps(action(9, eventId="x" * EVENT_BYTES))


class Client:
    """Records its outcomes."""

    def __init__(self, in_columns: bool = True) -> None:
        self.in_columns = in_columns
        self.outcomes: list[str] = []
        self.places: list[tuple[int, int]] = []  # (partition, offset)

    def acknowledged(self, body: bytes) -> None:
        assert not self.in_columns
        self.places = [(ack["partition"], ack["offset"]) for ack in orjson.loads(body)["acks"]]
        self.outcomes.append(f"{len(self.places)} durable")

    def answered(self, acks: Acks) -> None:
        assert self.in_columns or acks.refused
        self.places = list(zip(acks.partitions, acks.offsets, strict=True))
        self.outcomes.append(f"{len(self.places)} durable")

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


def endpoint_of(
    writer: GroupWriter, codec: StreamCodec, queue_events: int = 100
) -> tuple[StreamEndpoint, Committer]:
    """An endpoint of actions, and its committer, which runs on the present loop."""
    registry = CollectorRegistry()
    rules = Rules(
        partitions=SPEC.partitions,
        refused_topic=topics_of(SPEC).refused,
        max_events=100,
        max_ahead_ms=SPEC.join.max_ahead_ms,
        limits=RecordLimits({"action": EVENT_BYTES}, *[1 << 20] * 5),
        labels=1,
    )
    counter = Counter("events", "", ["stream", "outcome"], registry=registry)
    committer = Committer(writer, QueueLimits(queue_events, 1 << 20), registry, wait_s=0.0, batch_events=100)
    committer.start()
    clock = SettableClock(NOW)
    return StreamEndpoint(
        SPEC.events.action, codec, committer, rules, clock=clock, counter=counter
    ), committer


def outcomes(log: EventLog, codec: StreamCodec, bodies: list[bytes], queue_events: int) -> list[list[str]]:
    """Outcomes of requests that are validated together."""
    clients = [Client() for _ in bodies]

    async def main() -> None:
        endpoint, committer = endpoint_of(log.group_writer(), codec, queue_events)
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


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("in_columns", [True, False])
def test_a_slow_partition_delays_only_requests_with_its_events(
    log: EventLog, codec: StreamCodec, in_columns: bool, fails: bool
) -> None:
    writer = SlowPartition(log.group_writer())
    writer.error = Unavailable("no leader") if fails else None
    keys = BytesColumn.of(b"%d" % i for i in range(20))
    partitions = partition_of(keys, SPEC.partitions).tolist()
    fast, slow = partitions.index(0), partitions.index(1)
    clients = [Client(in_columns) for _ in range(4)]
    events = ([fast], [slow], [slow, fast], [fast, fast])
    found = []

    async def main() -> None:
        endpoint, committer = endpoint_of(writer, codec)
        for numbers, client in zip(events, clients, strict=True):
            endpoint.submit_body(orjson.dumps([action(n) for n in numbers]), JSON, client)
        while not clients[0].outcomes:
            await asyncio.sleep(0)
        found.append([client.outcomes[:] for client in clients])
        assert endpoint.counts["accepted"] == 3
        gc.collect()
        held = [o for o in gc.get_objects() if isinstance(o, AcceptedBodies) and len(o.records)]
        assert not held, "what waits holds no events of others, whose reservations are released"
        writer.released.set()
        assert await committer.close(20) == 0
        assert endpoint.counts["accepted"] == (3 if fails else 6)

    asyncio.run(main())
    assert found == [[["1 durable"], [], [], ["2 durable"]]]
    last = [["Unavailable"], ["Unavailable"]] if fails else [["1 durable"], ["2 durable"]]
    assert [client.outcomes for client in clients] == [["1 durable"], *last, ["2 durable"]]
    assert clients[0].places + clients[3].places == [(0, 0), (0, 2), (0, 3)], "one of the third is between"
