"""Appends of several threads that a writer to Kafka sends together, when the client fails unexpectedly."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, ClassVar

import pytest

from freshet.errors import FreshetError
from freshet.log.kafka import writer as kafka_writer
from freshet.log.kafka.writer import IdempotentClient, IdempotentSender, KafkaWriter, TransactionalSender
from freshet.testing.conditions import wait_for
from freshet.types import Append, BytesColumn


class Reported:
    """A record in its report."""

    def offset(self) -> int:
        return 7


class FaultyClient:
    """librdkafka's producer, which may raise a fault."""

    fault: ClassVar[BaseException | None] = None

    def __init__(self, settings: object) -> None:
        pass

    def init_transactions(self, within_s: float) -> None:
        """Nothing is open."""

    def begin_transaction(self) -> None:
        """Nothing fails here."""

    def commit_transaction(self, within_s: float) -> None:
        """Nothing fails here."""

    def abort_transaction(self, within_s: float) -> None:
        """Nothing to undo."""

    def poll(self, within_s: float) -> None:
        """Nothing is left to report."""

    def produce(self, *record: Any) -> None:
        if self.fault is not None:
            raise self.fault
        record[4](None, Reported())

    def flush(self, within_s: float) -> int:
        return 0


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("fault", [KeyError("t"), MemoryError("injected"), SystemError("injected")])
def test_a_fault_in_a_shared_batch_acknowledges_no_append(
    fault: Exception, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_writer, "Producer", FaultyClient)
    monkeypatch.setattr(FaultyClient, "fault", fault)
    sender: IdempotentSender | TransactionalSender = IdempotentSender(IdempotentClient({}))
    if named:
        sender = TransactionalSender({}, "joiner-m-0")
    writer = KafkaWriter(sender, lambda at: at.topic, 1000)
    outcomes: list[object] = []

    def append() -> None:
        try:
            outcomes.append(list(writer.append([Append("samples", 0, BytesColumn.of([b"a"]))])))
        except (FreshetError, type(fault)) as error:
            outcomes.append(repr(error))

    threads = [threading.Thread(target=append) for _ in range(8)]
    with writer._sending:  # an earlier batch is under way
        for thread in threads:
            thread.start()
        wait_for(lambda: len(writer._waiting) == 8)
    for thread in threads:
        thread.join()

    assert [one for one in outcomes if one == repr(fault)] == [repr(fault)]
    others = Counter(map(str, outcomes)) - Counter([repr(fault)])
    assert others.total() == 7
    assert all(one.startswith("Unavailable") and "not known to be written" in one for one in others)
    monkeypatch.setattr(FaultyClient, "fault", None)
    assert writer.append([Append("samples", 0, BytesColumn.of([b"a"]))]) == [7]


def test_offsets_among_other_writers_are_not_too_low() -> None:
    class At:
        def __init__(self, offset: int) -> None:
            self.offset = lambda: offset

    piece = kafka_writer.Piece(Append("t", 0, BytesColumn.of([b"a", b"b", b"c"])), "t", 1 << 20)
    offsets = [3, 4, 7]
    for offset in offsets:
        piece(None, At(offset))  # type: ignore[arg-type]
    assert all(piece.first + i >= offset for i, offset in enumerate(offsets))
    assert piece.first + 2 == offsets[-1]
