"""Answers of a writer of groups to Kafka when its client fails, or reports nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, KafkaException

from freshet.errors import Unavailable
from freshet.log import GroupOutcome
from freshet.log.kafka import group_writer, writer
from freshet.log.kafka.group_writer import KafkaGroupWriter
from freshet.log.kafka.writer import IdempotentClient
from freshet.testing.clock import SettableClock
from freshet.types import Append, BytesColumn


class Reported:
    """A record in its report."""

    def offset(self) -> int:
        return 7


class Client:
    """librdkafka's producer, which reports records of partition 0 at once, and others when it is purged."""

    started: ClassVar[list[Client]] = []
    fault: ClassVar[Exception | None] = None

    def __init__(self, settings: object) -> None:
        self.unreported: list[Callable[..., None]] = []
        self.started.append(self)

    def produce(self, topic: str, value: bytes, key: object, partition: int, report: Any, *rest: Any) -> None:
        if value == b"fault" and self.fault is not None:
            raise self.fault
        if partition:
            self.unreported.append(report)
        else:
            report(None, Reported())

    def flush(self, within_s: float) -> int:
        fault, Client.fault = self.fault, None
        if fault is not None:
            raise fault
        return len(self.unreported)

    def purge(self) -> None:
        for report in self.unreported:
            report(KafkaError(KafkaError._PURGE_QUEUE), None)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> KafkaGroupWriter:
    monkeypatch.setattr(writer, "Producer", Client)
    monkeypatch.setattr(Client, "started", [])
    monkeypatch.setattr(Client, "fault", None)
    return KafkaGroupWriter(IdempotentClient({}), lambda at: at.topic, 1000)


class Answers(dict[int, list[GroupOutcome]]):
    """Outcomes by group."""

    def __call__(self, index: int, outcome: GroupOutcome) -> None:
        self.setdefault(index, []).append(outcome)

    def texts(self) -> dict[int, str]:
        """Return the only outcome of each group."""
        return {index: str(outcome) for index, (outcome,) in sorted(self.items())}


def group(partition: int, value: bytes = b"a") -> list[Append]:
    return [Append("t", partition, BytesColumn.of([value]))]


def test_a_group_without_reports_delays_no_other(groups: KafkaGroupWriter) -> None:
    answers = Answers()
    groups.append([group(1), group(0), [*group(0), *group(1)], group(0)], answers)
    groups.wait(0.1)
    assert answers.texts() == {1: "[7]", 3: "[7]"}
    groups.close()
    assert {index: type(outcome) for index, (outcome,) in answers.items()} == {
        **{1: list, 3: list},
        **{0: Unavailable, 2: Unavailable},
    }
    assert "nothing was written" in answers.texts()[0]
    assert "not known to be written" in answers.texts()[2]


@pytest.mark.parametrize("fault", [KeyError("t"), MemoryError("injected"), SystemError("injected")])
def test_a_fault_of_the_client_fails_one_group(
    groups: KafkaGroupWriter, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    monkeypatch.setattr(Client, "fault", fault)
    groups.append([group(0), group(0, b"fault"), group(0)], answers)
    assert answers == {0: [[7]], 1: [fault], 2: [[7]]}


@pytest.mark.parametrize("while_sending", [False, True])
def test_an_error_that_ends_the_client_answers_all(
    groups: KafkaGroupWriter, while_sending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    groups.append([group(1)], answers)
    monkeypatch.setattr(Client, "fault", KafkaException(KafkaError(KafkaError._FATAL, "out of order")))
    if while_sending:
        groups.append([group(0, b"fault")], lambda _, outcome: answers(1, outcome))
        assert "Unavailable" in repr(answers[1][0])
    groups.wait(0.1)
    assert "not known to be written" in answers.texts()[0]
    assert len(Client.started) == 2, "a new client"
    groups.append([group(0)], lambda _, outcome: answers(2, outcome))
    assert answers.texts()[2] == "[7]"


def test_a_group_that_is_never_reported_fails_late(
    groups: KafkaGroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, answers = SettableClock(0), Answers()
    monkeypatch.setattr(group_writer, "monotonic", clock.monotonic)
    groups.append([group(1), group(1)], answers)
    groups.wait(0.1)
    assert answers == {}
    clock.advance(16)  # beyond message.timeout.ms and some slack
    groups.wait(0.1)
    assert [("not known to be written" in text) for text in answers.texts().values()] == [True, True]
    groups.close()
    assert len(answers.texts()) == 2, "the reports of its end change nothing"
