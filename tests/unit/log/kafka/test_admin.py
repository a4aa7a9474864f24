"""What brokers answer about offsets, while they start."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from freshet.errors import Unavailable
from freshet.log.kafka import admin as kafka_admin
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.url import parse_url
from freshet.types import TopicPartition

AT, OTHER = TopicPartition("samples", 0), TopicPartition("samples", 1)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> KafkaAdmin:
    """Of a broker that is not there; nothing is sent."""
    made = KafkaAdmin(
        parse_url("kafka://127.0.0.1:1/x"), {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    )
    monkeypatch.setattr(made, "ask_ids", lambda topics: {})
    return made


def answered(offset: int) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(SimpleNamespace(offset=offset))
    return future


def test_offsets_are_told(admin: KafkaAdmin) -> None:
    assert admin.offsets({AT: answered(0), OTHER: answered(7)}) == {AT: 0, OTHER: 7}


def test_a_time_that_no_record_has_reached_has_no_offset(admin: KafkaAdmin) -> None:
    assert admin.offsets({AT: answered(-1)}) == {AT: -1}


def test_a_partition_that_no_broker_answered_for_has_no_end_instead_of_one_before_its_start(
    admin: KafkaAdmin,
) -> None:
    with pytest.raises(Unavailable, match=r"samples\[1\]"):
        admin.offsets({AT: answered(5), OTHER: answered(-1001)})


def test_the_end_of_a_topic_that_a_broker_has_not_heard_of_yet_is_asked_for_again_later(
    admin: KafkaAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown: Future[Any] = Future()
    unknown.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
    monkeypatch.setattr(admin, "ask_ends", lambda *_, **__: {AT: unknown})
    monkeypatch.setattr(kafka_admin, "_ELECTION_S", 0.0)

    with pytest.raises(Unavailable, match="samples"):
        admin.ends([AT], committed=True)
