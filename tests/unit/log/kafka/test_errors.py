"""Kafka's errors as freshet's families, also those that the client reports late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog
from confluent_kafka import KafkaError, KafkaException

from freshet.errors import ConfigError, Fenced, FreshetError, TooLarge
from freshet.log.kafka import writer as kafka_writer
from freshet.log.kafka.connection import LastError, family
from freshet.log.kafka.writer import KafkaWriter, Piece, Request, TransactionalSender
from freshet.types import Append, BytesColumn

FENCED = KafkaError(KafkaError._FENCED, "fenced by a newer instance", fatal=True)


def test_absent_brokers_are_reported_with_settings_to_check() -> None:
    last_error = LastError()
    last_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert "security.protocol" in str(last_error)


def test_an_error_that_ends_the_client_hides_no_message() -> None:
    last_error = LastError()

    def ended() -> None:
        raise KafkaException(FENCED)

    last_error.serve = ended
    found = family(FENCED, "a commit failed", last_error)
    assert isinstance(found, Fenced)
    assert "a commit failed" in str(found)
    assert "reported 0.0 s ago: fenced by a newer instance" in str(found)


def test_an_error_within_a_report_hides_no_message() -> None:
    last_error = LastError()

    def ended() -> None:
        raise SystemError("a report's call") from KafkaException(FENCED)

    last_error.serve = ended
    assert isinstance(family(FENCED, "a commit failed", last_error), Fenced)


def test_a_reason_is_kept_while_its_broker_counts_as_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("freshet.log.kafka.connection.time.monotonic", lambda: now[0])
    last_error = LastError()
    last_error(KafkaError(KafkaError._AUTHENTICATION, "authentication failed"))
    now[0] += 4.0
    last_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert str(last_error) == "; reported 4.0 s ago: authentication failed"
    now[0] += 2.0
    last_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert str(last_error).startswith("; reported 0.0 s ago: 1/1 brokers are down ("), "that was long ago"


def test_other_errors_of_the_client_are_raised() -> None:
    last_error = LastError()

    def broken() -> None:
        raise SystemError("no client")

    last_error.serve = broken
    with pytest.raises(SystemError, match="no client"):
        str(last_error)


TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "too large")
ACKNOWLEDGED = type("Acknowledged", (), {"offset": lambda record: 7})()


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(
    ("earlier", "outcome"),
    [
        (None, "not known to be written"),
        (KafkaError(KafkaError._MSG_TIMED_OUT, "no answer"), "not known to be written"),
        (TOO_LARGE, "nothing was written"),
    ],
)
def test_nothing_was_written_holds_for_each_record(
    earlier: KafkaError | None, outcome: str, pieces: int
) -> None:
    """One that is refused for ever stays TooLarge, so that a client that sends again is not kept at it."""
    made = [Piece(Append("t", i, BytesColumn.of([b"a"] * (3 - pieces))), "t", 1 << 20) for i in range(pieces)]
    made[0](earlier, ACKNOWLEDGED)
    made[-1](TOO_LARGE, ACKNOWLEDGED)
    with pytest.raises(FreshetError, match=outcome) as found:
        Request(made).check("")
    if earlier is None or earlier is TOO_LARGE:
        assert isinstance(found.value, TooLarge)


class EndedClient:
    """librdkafka's producer that was fenced during a flush, after a report has cleared the exception."""

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
        """Nothing is left to report."""


def test_a_fenced_writer_raises_fenced_without_the_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_writer, "Producer", EndedClient)
    writer = KafkaWriter(TransactionalSender({}, "joiner-m-0"), lambda at: at.topic, 1000)
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
        """Allowed."""

    def poll(self, within_s: float) -> None:
        """Nothing is left to report."""

    def produce(self, *record: Any) -> None:
        report: Callable[..., None] = record[4]
        report(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not authorized"), None)

    def flush(self, within_s: float) -> int:
        return 0

    def abort_transaction(self, within_s: float) -> None:
        """Nothing to undo."""


def test_a_named_writer_without_rights_names_the_acl_to_add(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_writer, "Producer", WithoutRight)
    writer = KafkaWriter(TransactionalSender({}, "joiner-m-0"), lambda at: at.topic, 1000)
    with pytest.raises(ConfigError, match="add an ACL"):
        writer.append([Append("samples", 0, BytesColumn.of([b"a"]))])


def test_absent_brokers_are_logged_rarely_and_changes_at_once() -> None:
    last_error = LastError()
    away = [KafkaError(code, "no broker") for code in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)]
    with structlog.testing.capture_logs() as logs:
        for error in away * 10:
            last_error(error)
        for _ in range(2):
            last_error(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    assert [entry["reason"] for entry in logs] == ["no broker", "wrong password"]
    assert "wrong password" in str(last_error)
