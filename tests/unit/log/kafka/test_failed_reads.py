"""Reads of Kafka that fail after the client has handed over records: each is read once nevertheless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.cimpl import Message

from freshet.errors import FreshetError
from freshet.log import Bounds
from freshet.log.kafka import reader as module
from freshet.log.kafka.reader import KafkaReader
from freshet.types import TopicPartition

PLACES = [TopicPartition("t", 0), TopicPartition("t", 1)]
RECORDS = 5


class Client:
    """librdkafka's consumer of two partitions, one of whose calls fails when records were taken."""

    calls: ClassVar[int] = 0
    fails: ClassVar[int] = 0  # number of the call
    fault: ClassVar[BaseException] = MemoryError()

    def __init__(self, settings: object) -> None:
        self._next: dict[int, int] = {}

    def assign(self, places: Sequence[KafkaPartition]) -> None:
        self._next = {place.partition: place.offset for place in places}

    def consume(self, most: int, wait_s: float) -> list[Message]:
        found: list[Message] = []
        for partition in self._next:
            while self._next[partition] < RECORDS and len(found) < min(most, 3):
                offset = self._next[partition]
                found.append(
                    Message(topic="t", partition=partition, offset=offset, value=b"v", timestamp=(1, 5))
                )
                self._next[partition] += 1
        self._count()
        return found

    def position(self, places: object) -> list[KafkaPartition]:
        self._count()
        return [KafkaPartition("t", partition, offset) for partition, offset in self._next.items()]

    def close(self) -> None:
        """Nothing is open."""

    def _count(self) -> None:
        Client.calls += 1
        if Client.calls == self.fails:
            raise self.fault


class Admin:
    """As much of the client for topics as a reader needs."""

    def __init__(self) -> None:
        self.last_error = ""

    def name(self, topic: str) -> str:
        return topic

    def place(self, at: TopicPartition, offset: int = -1001) -> KafkaPartition:
        return KafkaPartition(at.topic, at.partition, offset)

    def ids(self, topics: Iterable[str]) -> dict[str, tuple[str, int]]:
        return {topic: ("id", len(PLACES)) for topic in topics}

    def bounds(self, places: Iterable[TopicPartition], *, committed: bool) -> dict[TopicPartition, Bounds]:
        return {at: Bounds(0, RECORDS) for at in places}

    def request_ids(self, topics: Iterable[str]) -> dict[str, Any]:
        return {topic: SimpleNamespace(done=lambda: True) for topic in topics}

    def described(self, requests: Iterable[str]) -> dict[str, tuple[str, int]]:
        return self.ids(requests)

    def request_ends(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, Any]:
        return {at: SimpleNamespace(done=lambda: True) for at in places}

    def offsets(self, requests: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(requests, RECORDS)


@pytest.mark.parametrize(
    "fault",
    [KafkaException(KafkaError(KafkaError._FATAL, "injected")), MemoryError("injected")],
)
def test_a_failed_read_loses_and_repeats_no_record(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Consumer", Client)
    monkeypatch.setattr(Client, "fault", fault)
    nth, reached = 0, True
    while reached:
        nth += 1
        monkeypatch.setattr(Client, "calls", 0)
        monkeypatch.setattr(Client, "fails", nth)
        reader = KafkaReader(Admin(), lambda at: at.topic, {})  # type: ignore[arg-type]
        reader.assign(dict.fromkeys(PLACES, 0))
        offsets: dict[TopicPartition, list[int]] = {at: [] for at in PLACES}
        for _ in range(20):
            with suppress(FreshetError, MemoryError):
                for at, records in reader.poll(2, 0.0):
                    offsets[at] += records.offsets.tolist()
        reader.close()
        assert offsets == {at: list(range(RECORDS)) for at in PLACES}, f"call {nth} failed"
        reached = Client.calls >= nth
    assert nth > 4
