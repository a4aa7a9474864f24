"""What brokers answer about offsets, while they start."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from freshet.errors import Unavailable
from freshet.log.kafka import admin as module
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.connection import parse_url
from freshet.types import TopicPartition

AT, OTHER = TopicPartition("samples", 0), TopicPartition("samples", 1)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> KafkaAdmin:
    """Requests to an absent broker; nothing is sent."""
    made = KafkaAdmin(
        parse_url("kafka://127.0.0.1:1/x"), {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    )
    monkeypatch.setattr(made, "request_ids", lambda topics: {})
    return made


def answered(offset: int) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(SimpleNamespace(offset=offset))
    return future


def test_offsets_are_returned(admin: KafkaAdmin) -> None:
    assert admin.offsets({AT: answered(0), OTHER: answered(7)}) == {AT: 0, OTHER: 7}


def test_a_time_that_no_record_has_reached_has_no_offset(admin: KafkaAdmin) -> None:
    assert admin.offsets({AT: answered(-1)}) == {AT: -1}


def test_a_partition_without_an_answer_has_no_end(
    admin: KafkaAdmin,
) -> None:
    with pytest.raises(Unavailable, match=r"samples\[1\]"):
        admin.offsets({AT: answered(5), OTHER: answered(-1001)})


def told(names: list[str] | KafkaError) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(names, KafkaError):
        future.set_exception(KafkaException(names))
    else:
        future.set_result(dict.fromkeys(names))
    return future


def test_a_broker_without_an_answer_has_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "1": told(["log.dirs", "cordoned.log.dirs"]),
        "2": told(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED)),
        "3": told(KafkaError(KafkaError._TIMED_OUT)),
    }
    cluster: Future[Any] = Future()
    cluster.set_result(SimpleNamespace(nodes=[SimpleNamespace(id=int(broker)) for broker in answers]))
    client = SimpleNamespace(
        describe_cluster=lambda **_: cluster,
        describe_configs=lambda resources, **_: {one: answers[one.name] for one in resources},
        poll=lambda _: 0,
    )
    monkeypatch.setattr(module, "AdminClient", lambda _: client)

    found = KafkaAdmin(parse_url("kafka://127.0.0.1:1/x"), {}).broker_settings()

    assert found == {1: {"log.dirs", "cordoned.log.dirs"}, 2: set(), 3: set()}
