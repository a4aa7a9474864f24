"""Kafka's errors as freshet's families, also where the client tells them late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog
from confluent_kafka import KafkaError, KafkaException

from freshet.errors import ConfigError, Fenced
from freshet.log.kafka import writer as kafka_writer
from freshet.log.kafka.connection import Heard, family
from freshet.log.kafka.writer import KafkaWriter, Transactions
from freshet.types import Append, BytesColumn

FENCED = KafkaError(KafkaError._FENCED, "fenced by a newer instance", fatal=True)


def test_that_nobody_answers_says_what_to_look_at() -> None:
    heard = Heard()
    heard(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert "security.protocol" in str(heard)


def test_a_client_that_is_ended_while_it_is_asked_for_a_message_does_not_hide_the_message() -> None:
    heard = Heard()

    def ended() -> None:
        raise KafkaException(FENCED)

    heard.serve = ended
    found = family(FENCED, "a commit failed", heard)
    assert isinstance(found, Fenced)
    assert "a commit failed" in str(found)
    assert "heard 0.0 s ago: fenced by a newer instance" in str(found)


def test_so_it_is_if_the_client_is_ended_within_a_report() -> None:
    heard = Heard()

    def ended() -> None:
        raise SystemError("a report's call") from KafkaException(FENCED)

    heard.serve = ended
    assert isinstance(family(FENCED, "a commit failed", heard), Fenced)


def test_a_reason_is_not_hidden_by_the_broker_that_counts_as_away_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("freshet.log.kafka.connection.time.monotonic", lambda: now[0])
    heard = Heard()
    heard(KafkaError(KafkaError._AUTHENTICATION, "authentication failed"))
    now[0] += 4.0
    heard(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert str(heard) == "; heard 4.0 s ago: authentication failed"
    now[0] += 2.0
    heard(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert str(heard).startswith("; heard 0.0 s ago: 1/1 brokers are down ("), "that was long ago"


def test_what_else_goes_wrong_within_the_client_is_raised() -> None:
    heard = Heard()

    def broken() -> None:
        raise SystemError("no client")

    heard.serve = broken
    with pytest.raises(SystemError, match="no client"):
        str(heard)


class EndedClient:
    """librdkafka's producer as it is when a later one has fenced it during a flush, and a report's call has
    cleared the exception."""

    def __init__(self, settings: object) -> None:
        self._flushes = 0

    def init_transactions(self, within_s: float) -> None:
        """Nothing is open."""

    def begin_transaction(self) -> None:
        """Not fenced yet."""

    def produce(self, *record: Any) -> None:
        report: Callable[..., None] = record[4]
        report(KafkaError(KafkaError._PURGE_QUEUE, "purged"), None)

    def flush(self, within_s: float) -> None:
        self._flushes += 1
        if self._flushes == 1:
            raise SystemError("<method 'flush'> returned NULL without setting an exception")

    def abort_transaction(self, within_s: float) -> None:
        raise KafkaException(FENCED)

    def poll(self, within_s: float) -> None:
        """Has told everything."""


def test_a_writer_that_was_fenced_says_so_also_if_the_client_has_lost_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_writer, "Producer", EndedClient)
    writer = KafkaWriter(Transactions({}, "joiner-m-0"), lambda at: at.topic, 1000)
    with pytest.raises(Fenced, match="nothing was written"):
        writer.append([Append("samples", 0, BytesColumn.of([b"a"]))])
    with pytest.raises(Fenced):
        writer.append([Append("samples", 0, BytesColumn.of([b"b"]))])


class WithoutRight:
    """A client that may not write to the topic."""

    def __init__(self, settings: object) -> None:
        pass

    def init_transactions(self, within_s: float) -> None:
        """Nothing is open."""

    def begin_transaction(self) -> None:
        """It may."""

    def poll(self, within_s: float) -> None:
        """Has told everything."""

    def produce(self, *record: Any) -> None:
        report: Callable[..., None] = record[4]
        report(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not authorized"), None)

    def flush(self, within_s: float) -> int:
        return 0

    def abort_transaction(self, within_s: float) -> None:
        """Nothing to undo."""


def test_a_named_writer_without_the_right_to_write_is_told_what_to_add(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_writer, "Producer", WithoutRight)
    writer = KafkaWriter(Transactions({}, "joiner-m-0"), lambda at: at.topic, 1000)
    with pytest.raises(ConfigError, match="add an ACL"):
        writer.append([Append("samples", 0, BytesColumn.of([b"a"]))])


def test_brokers_that_are_away_are_told_of_now_and_then_and_everything_else_when_it_changes() -> None:
    heard = Heard()
    away = [KafkaError(code, "no broker") for code in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)]
    with structlog.testing.capture_logs() as logs:
        for error in away * 10:
            heard(error)
        for _ in range(2):
            heard(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    assert [entry["reason"] for entry in logs] == ["no broker", "wrong password"]
    assert "wrong password" in str(heard)
