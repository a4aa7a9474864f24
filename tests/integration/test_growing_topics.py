"""Topics of events that get more partitions while a model lives, on a real Kafka: every event is
joined once, or the joiner names the partitions that no process reads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from confluent_kafka import Producer

from freshet.adapters import open_eventlog
from freshet.config.spec.topics import TopicPlan
from freshet.errors import Mismatch, Unavailable
from freshet.joiner.commit import Commit, Ledger
from freshet.joiner.inputs import PartitionerDetector
from freshet.joiner.service import Intervals, JoinerService
from freshet.log.topics import ensure_topic
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.eventlog import answered
from freshet.types import Append, BytesColumn, TopicPartition
from tests.fixtures.join_events import Action, Event, Served
from tests.fixtures.joiner import World, where_of
from tests.integration.joiner_process import PLAN
from tests.servers.kafka import Kafka

WITHIN_S = 60.0
INTERVALS = Intervals(flush_interval_ms=0, count_interval_ms=0, commit_interval_ms=0, status_interval_ms=0)


@pytest.fixture
def prefix() -> str:
    return uuid4().hex


@pytest.fixture
def world(kafka: Kafka, tmp_path: Path, prefix: str) -> Iterator[World]:
    log = open_eventlog(f"kafka://{kafka.bootstrap}/{prefix}")
    world = World(tmp_path, PLAN, 2, other_log=log)
    yield world
    world.close()


def joiner_of(world: World, partitions: int = 2) -> JoinerService:
    joiner = world.joiner(INTERVALS, replace(world.context(), partitions=range(partitions)))
    joiner.watches_growth = True
    return joiner


def slate(request: str, time_ms: int) -> list[Event]:
    """A request of one item, which was clicked."""
    impression = f"{request}/0"
    return [Served(request, ("0",), time_ms), Action(impression, time_ms + 2, id=f"click-{request}")]


def send(world: World, events: list[Event], partition: int) -> None:
    for event in events:
        topic, _ = where_of(event)
        values = BytesColumn.of([event.record()])
        world.log.writer().append(
            [Append(topic, partition, values, times_ms=np.array([event.time], np.int64))]
        )


def grow(world: World, *topics: str, to: int) -> None:
    for topic in topics:
        world.log.grow_topic(topic, to)


def ledger(world: World) -> Ledger:
    last = {p: Commit.decode(value, "test") for p, value in world.values("m.joiner")}
    return Ledger.total([commit.ledger for commit in last.values()])


def test_partitions_that_topics_get_are_joined_from_their_start(world: World) -> None:
    joiner = joiner_of(world)
    joiner.open()
    send(world, slate("a", 1_000), 0)
    inputs = list(world.inputs.values())
    grow(world, inputs[0], to=3)
    send(world, slate("b", 2_000)[:1], 2)  # before any process reads it

    def steps_until(what: str, done: object) -> None:
        def look() -> bool:
            try:
                joiner.step()
            except Unavailable:  # a broker on a busy machine: as `run` does
                joiner.open()
            assert callable(done)
            return bool(done())

        wait_until(what, look, within_s=WITHIN_S)

    steps_until("the unread partition is told", lambda: joiner.status and joiner.status.trouble)
    assert joiner.status is not None
    assert joiner.status.growth.unread == {inputs[0]: 1}
    grow(world, *inputs[1:], to=3)
    send(world, slate("b", 2_000)[1:], 2)
    steps_until("all are joined", lambda: set(joiner.tasks) == {0, 1, 2} and not joiner.inputs.growth.trouble)
    steps_until("and read", lambda: sum(sum(t.next.values()) for t in joiner.tasks.values()) >= 4)
    joiner.flush(only_due=False)
    assert "grew from 2 to 3" in joiner.inputs.growth.note
    joiner.close()

    again = joiner_of(world, 3)  # one that is started anew rebuilds all three, and doubles nothing
    again.run(until_end=True)
    samples = world.samples()
    assert {s.partition for s in samples} <= {
        0,
        1,
    }  # partition 2 of the events leads to partition 0 of samples
    assert max(Counter((s.id, s.label) for s in samples).values()) == 1
    assert ledger(world).events["actions_matched"] == 2
    assert set(ledger(world).unexplained().values()) == {0}


def test_a_grown_topic_stops_no_start_and_a_smaller_one_does(world: World) -> None:
    name = next(iter(world.inputs.values()))
    grow(world, name, to=3)

    ensure_topic(world.log, TopicPlan(name, 2, None, may_have_more=True))
    assert world.log.topics()[name].partitions == 3
    with pytest.raises(Mismatch, match="expected 2 partitions, found 3"):
        ensure_topic(world.log, TopicPlan(name, 2, None))
    with pytest.raises(Mismatch, match="expected 4 partitions, found 3"):
        ensure_topic(world.log, TopicPlan(name, 4, None, may_have_more=True))


@pytest.mark.parametrize(
    ("partitioner", "name"),
    [("murmur2_random", "murmur2"), ("consistent_random", "crc32"), ("fnv1a_random", "fnv1a")],
)
def test_a_clients_partitioner_is_recognised_by_its_keys(
    kafka: Kafka, world: World, prefix: str, partitioner: str, name: str
) -> None:
    producers = [
        Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0, "partitioner": one})
        for one in ("murmur2_random", partitioner)
    ]
    placing, inputs = PartitionerDetector(), list(world.inputs.values())[:2]
    for topic, producer in zip(inputs, producers, strict=True):
        for i in range(200):
            producer.produce(f"{prefix}.{topic}", value=b"v", key=f"{topic}-{i}".encode())
        producer.flush()
    reader = world.log.reader()
    reader.assign({TopicPartition(topic, p): 0 for topic in inputs for p in (0, 1)})
    seen, now = 0, 0.0
    deadline = time.monotonic() + WITHIN_S
    while seen < 400:
        assert time.monotonic() < deadline
        for at, records in answered(reader, 1_000, 0.5):
            seen += len(records)
            for key in records.keys:
                now += 1.0
                placing.sample(at.topic, at.partition, {2}, BytesColumn.of([key]), now)
    reader.close()

    assert placing.named == {inputs[0]: "murmur2", inputs[1]: name}
    assert set(placing.trouble) == (set() if name == "murmur2" else {inputs[1]})
