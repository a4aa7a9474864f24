"""Newest records of a partition, on a log that does not return them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from freshet.errors import Unavailable
from freshet.log import Reader, records
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.contracts.eventlog import append_to
from freshet.types import Records, TopicPartition

AT = TopicPartition("t", 0)


class Slow:
    """A reader whose first polls get no response, and the next are empty, as after a broker's restart."""

    def __init__(self, reader: Reader, empty: int, silent: int) -> None:
        self._reader, self._empty, self._silent = reader, empty, silent

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    def poll(self, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
        self._silent -= 1
        if self._silent >= 0:
            raise Unavailable("the brokers gave no answer")
        self._empty -= 1
        return [] if self._empty >= 0 else self._reader.poll(max_records, wait_s)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteEventLog]:
    made = SqliteEventLog(tmp_path)
    made.create_topic("t", partitions=1)
    writer = made.writer()
    for n in range(5):
        writer.append([append_to(AT, [b"%d" % n])])
    yield made
    made.close()


def slow(log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch, empty: int = 0, silent: int = 0) -> None:
    reader = log.reader
    monkeypatch.setattr(log, "reader", lambda: Slow(reader(), empty, silent))


def test_an_empty_answer_before_the_end_is_not_the_end(
    log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(log, monkeypatch, empty=3)

    assert [value for _, value in records.newest(log, AT, 2)] == [b"3", b"4"]


def test_missing_records_are_unavailable(log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "STALLED_S", 0.05)
    slow(log, monkeypatch, empty=1_000_000)

    with pytest.raises(Unavailable, match=r"expected records up to 5, found none after 3"):
        records.newest(log, AT, 2)


def test_a_log_that_is_silent_for_some_seconds_is_waited_for(
    log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(log, monkeypatch, silent=9)

    assert [value for _, value in records.newest(log, AT, 2)] == [b"3", b"4"]


def test_a_log_that_stays_silent_is_unavailable(log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(log, monkeypatch, silent=1_000_000)

    with pytest.raises(Unavailable, match="the brokers gave no answer"):
        records.newest(log, AT, 2)


def test_a_partition_without_records_has_no_newest(log: SqliteEventLog) -> None:
    log.create_topic("empty", partitions=1)

    assert records.newest(log, TopicPartition("empty", 0), 3) == []


def test_records_after_known_bounds_are_left_out(log: SqliteEventLog) -> None:
    bounds = log.bounds(AT)
    log.writer().append([append_to(AT, [b"5"])])

    assert [value for _, value in records.newest(log, AT, 2, bounds)] == [b"3", b"4"]
