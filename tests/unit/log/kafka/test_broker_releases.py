"""Which brokers named writers are refused on, by the settings that these brokers have (ADR 0024)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from freshet.errors import Mismatch
from freshet.log.kafka import event_log as kafka_event_log
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.event_log import KafkaEventLog, open_url

UP_TO_4_2 = frozenset({"log.dirs", "broker.id"})
SINCE_4_3 = UP_TO_4_2 | {"cordoned.log.dirs"}
UNKNOWN = frozenset[str]()


class Sender:
    """In the place of `TransactionalSender`: nothing is sent."""

    def __init__(self, client: object, name: str) -> None:
        self.name = name

    def close(self) -> None:
        """Nothing is held."""


class Brokers:
    """Return their settings, and count the requests."""

    def __init__(self, settings: dict[int, frozenset[str]]) -> None:
        self.settings, self.asked = settings, 0

    def __call__(self) -> dict[int, frozenset[str]]:
        self.asked += 1
        return self.settings


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[KafkaEventLog]:
    """A log of absent brokers; the fixture's parameter is the URL's query."""
    monkeypatch.setattr(kafka_event_log, "TransactionalSender", Sender)
    opened = open_url("kafka://127.0.0.1:1/x" + getattr(request, "param", ""))
    yield opened
    opened.close()


def answering(monkeypatch: pytest.MonkeyPatch, settings: dict[int, frozenset[str]]) -> Brokers:
    brokers = Brokers(settings)
    monkeypatch.setattr(KafkaAdmin, "broker_settings", brokers)
    return brokers


def events(logs: list[Any]) -> list[tuple[str, list[int]]]:
    return [(line["event"], line["brokers"]) for line in logs]


def test_named_writers_are_refused_with_a_broker_of_4_3(
    log: KafkaEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = answering(monkeypatch, {1: UP_TO_4_2, 2: SINCE_4_3, 3: SINCE_4_3, 4: UNKNOWN})

    for _ in range(2):
        with pytest.raises(
            Mismatch, match=r"4\.3 or later on broker 2, 3\n.*take 4\.2\.1\n.*accept_kafka_20734=true"
        ):
            log.writer("joiner-m-0")
    assert brokers.asked == 2


def test_earlier_brokers_are_queried_once(log: KafkaEventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = answering(monkeypatch, {1: UP_TO_4_2, 2: UP_TO_4_2})

    with capture_logs() as logs:
        log.writer("joiner-m-0")
        log.writer("joiner-m-1")
    assert (brokers.asked, events(logs)) == (1, [])


def test_brokers_of_unknown_release_are_logged(log: KafkaEventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, {1: UP_TO_4_2, 2: UNKNOWN})

    with capture_logs() as logs:
        log.writer("joiner-m-0")
        log.writer("joiner-m-1")
    assert events(logs) == [
        ("the release of brokers is not known: 4.3.0, 4.3.1 and 4.4.0 double or lose samples", [2])
    ]


@pytest.mark.parametrize("log", ["?accept_kafka_20734=true"], indirect=True)
def test_the_url_accepts_brokers_of_any_release(log: KafkaEventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = answering(monkeypatch, {1: SINCE_4_3})

    log.writer("joiner-m-0")
    assert brokers.asked == 0


@pytest.mark.parametrize("log", ["?accept_kafka_20734=false"], indirect=True)
def test_a_writer_without_a_name_asks_nothing(log: KafkaEventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = answering(monkeypatch, {1: SINCE_4_3})

    log.writer()
    assert brokers.asked == 0
