"""Reads of the SQLite log that fail: no record is lost or repeated, and no error passes unseen."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from freshet.errors import Unavailable
from freshet.log.sqlite import reader as module
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.sqlite import connect
from freshet.testing.contracts.eventlog import T0, T1, append_to
from freshet.types import TopicPartition

U0 = TopicPartition("u", 0)  # in another file


class Disk:
    """Fails chosen reads of chunks, by path and number: the statement itself, or one of its rows."""

    def __init__(self) -> None:
        self.reads = 0
        self.fails: Callable[[Path, int], bool] = lambda path, number: False

    def read(self, path: Path) -> None:
        """Count a read. Raises sqlite3.OperationalError if it is to fail."""
        self.reads += 1
        if self.fails(path, self.reads):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error


class Connection:
    """A connection of a reader on such a disk."""

    def __init__(self, disk: Disk, path: Path, *arguments: Any) -> None:
        self._disk, self._path, self._db = disk, path, connect(path, *arguments)

    def execute(self, statement: str, *arguments: Any) -> Any:
        found = self._db.execute(statement, *arguments)
        if "FROM chunks" not in statement:
            return found
        self._disk.read(self._path)
        return Rows(self._disk, self._path, found)

    def close(self) -> None:
        self._db.close()


class Rows:
    """The rows of a statement on such a disk."""

    def __init__(self, disk: Disk, path: Path, rows: sqlite3.Cursor) -> None:
        self._disk, self._path, self._rows = disk, path, rows

    def __iter__(self) -> Iterator[Any]:
        for row in self._rows:
            self._disk.read(self._path)
            yield row

    def close(self) -> None:
        self._rows.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(module, "connect", lambda *arguments: Connection(disk, *arguments))
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    return disk


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteEventLog]:
    log = SqliteEventLog(tmp_path)
    log.create_topic("t", partitions=2)
    log.create_topic("u", partitions=1)
    yield log
    log.close()


def fill(log: SqliteEventLog, places: Sequence[TopicPartition]) -> None:
    """Append six chunks of two records to each partition; a reader holds two or three of them ahead."""
    writer = log.writer()
    for _ in range(6):
        writer.append([append_to(at, [bytes(200), bytes(200)]) for at in places])


def is_read(nth: int, path: Path, number: int) -> bool:
    return number == nth


@pytest.mark.parametrize("max_records", [1, 7, 100])
@pytest.mark.parametrize("places", [[T0], [T0, T1], [T0, T1, U0]])
def test_a_failed_read_loses_and_repeats_no_record(
    places: Sequence[TopicPartition], max_records: int, log: SqliteEventLog, disk: Disk
) -> None:
    fill(log, places)
    nth, reached = 0, True
    while reached:
        nth += 1
        disk.reads, disk.fails = 0, partial(is_read, nth)
        offsets: dict[TopicPartition, list[int]] = {at: [] for at in places}
        reader = log.reader()
        reader.assign(dict.fromkeys(places, 0))
        for _ in range(300):
            with suppress(Unavailable):
                polled = reader.poll(max_records, 0.0)
                for at, records in polled:
                    offsets[at] += records.offsets.tolist()
                if not polled:
                    break
        reader.close()
        assert offsets == {at: list(range(12)) for at in places}, f"read {nth} failed"
        reached = disk.reads >= nth
    assert nth > 6 * len(places)


def test_a_file_that_stays_unreadable_fails_every_poll(log: SqliteEventLog, disk: Disk) -> None:
    """Only polls before the first error return other partitions, so that a caller's time-out can end it."""
    places = [T0, T1, U0]
    fill(log, places)
    disk.fails = lambda path, number: path.name == "u.topics.sqlite"
    reader = log.reader()
    reader.assign(dict.fromkeys(places, 0))
    offsets: dict[TopicPartition, list[int]] = {at: [] for at in places}
    outcomes: list[str] = []

    def poll() -> None:
        try:
            for at, records in reader.poll(7, 0.0):
                offsets[at] += records.offsets.tolist()
            outcomes.append("read")
        except Unavailable:
            outcomes.append("failed")

    for _ in range(8):
        poll()
    first = outcomes.index("failed")
    assert first <= 3
    assert set(outcomes[first:]) == {"failed"}
    disk.fails = lambda path, number: False
    for _ in range(30):
        poll()
    assert offsets == {at: list(range(12)) for at in places}
