"""Reader of the SQLite log: reads whole chunks, and serves partitions fairly."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet.errors import FreshetError, Unavailable
from freshet.log import Bounds
from freshet.log.records import take_fairly
from freshet.log.sqlite.file import CHUNK_BYTES, FORMAT, Contents, LogFile, chunk_id, unpack
from freshet.sqlite import connect, translated
from freshet.types import Records, TopicPartition

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.020
"""Pause between checks of an idle log. A check is one PRAGMA (2 µs) per file; 20 ms is small against a
freshness of a second."""

_CACHE_KIB = 2048
"""Page cache of a reader, which reads each chunk once."""

Locate = Callable[[TopicPartition], tuple[LogFile, int]]


@dataclass(slots=True)
class _Position:
    """Read position of a partition, with the records read ahead."""

    partition: TopicPartition
    id: int
    offset: int
    chunk: int  # rowid of the next chunk to load
    ahead: deque[tuple[int, Contents]] = field(default_factory=deque)  # (first offset, records), contiguous


class SqliteReader:
    """See `freshet.log.Reader`. Keeps one connection per file, and one or two chunks per partition."""

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
        self._using = threading.Lock()  # the log may be closed while a thread polls
        self._files: dict[LogFile, _FileReader] = {}
        self._turn = 0
        self._failed: _Position | None = None  # the last one that could not be read
        self._pause_s = _SHORTEST_PAUSE_S
        self._closed = False

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read only these partitions, from these offsets. Raises DataLost for an offset out of bounds."""
        chosen: dict[LogFile, list[_Position]] = {}
        for partition, offset in positions.items():
            file, partition_id = self._locate(partition)
            bounds = file.bounds(partition_id)
            if not bounds.start <= offset <= bounds.end:
                raise bounds.lost(partition, offset)
            first = file.chunk_at(partition_id, offset)
            chosen.setdefault(file, []).append(_Position(partition, partition_id, offset, first))
        with self._using:
            self._check_open()
            for file in set(self._files) - set(chosen):
                self._files.pop(file).close()
            for file, wanted in chosen.items():
                if file not in self._files:
                    self._files[file] = _FileReader(file)
                self._files[file].assign(wanted)

    def poll(self, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
        """Return the records of partitions that have some; waits up to `wait_s` for the first.

        Raises:
            ValueError: `max_records` is less than 1.
            DataLost: retention has removed the next offset.
            Corrupt: the next records were damaged.
            Unavailable: the file cannot be read, or the reader was closed. No record was taken.
        """
        if max_records < 1:
            raise ValueError(f"max_records must be at least 1, found {max_records}")
        deadline = time.monotonic() + wait_s
        while True:
            with self._using:
                self._check_open()
                found = self._read_ready(max_records)
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            time.sleep(min(self._pause_s, left))
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with self._using:
            self._closed = True
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the reader was closed")

    def _read_ready(self, max_records: int) -> list[tuple[TopicPartition, Records]]:
        ready = [(file, position) for file in self._files.values() for position in file.ready()]
        if not ready:
            return []
        self._pause_s = _SHORTEST_PAUSE_S
        self._turn += 1
        # A failed one is first until it can be read: as long as its error stays, each poll raises it.
        first = next((i for i, (_, p) in enumerate(ready) if p is self._failed), self._turn)
        found = take_fairly(ready, first, max_records, self._read)
        return [(position.partition, records) for (_, position), records in found]

    def _read(self, source: tuple[_FileReader, _Position], limit: int) -> Records:
        file, self._failed = source
        records = file.read(self._failed, limit)
        self._failed = None
        return records


class _FileReader:
    """The chosen partitions of one file."""

    def __init__(self, file: LogFile) -> None:
        self._path = file.path
        self._db: sqlite3.Connection = connect(file.path, FORMAT)
        self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        self._positions: list[_Position] = []
        self._bounds: dict[int, tuple[int, int]] = {}  # partition id: (start, next), as of `_seen`
        self._seen = -1

    def assign(self, positions: list[_Position]) -> None:
        self._positions, self._seen = positions, -1

    def close(self) -> None:
        self._db.close()

    def ready(self) -> list[_Position]:
        """Return the positions with unread records."""
        with translated(self._path, "read"):
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if version != self._seen:
                rows = self._db.execute("SELECT id, start, next FROM partitions")
                self._bounds = {i: (start, end) for i, start, end in rows}
                self._seen = version
        return [p for p in self._positions if self._bounds.get(p.id, (0, 0))[1] > p.offset]

    def read(self, position: _Position, limit: int) -> Records:
        """Return 1 to `limit` records, of about a chunk's bytes; a single chunk is not copied.

        An error after the first of them is left to the next call. Raises as `poll`; nothing is taken then.
        """
        parts: list[Contents] = []
        first, count, size = position.offset, 0, 0
        while count < limit and size < CHUNK_BYTES:
            try:
                if not position.ahead and not self._load(position):
                    break
            except FreshetError:
                if not parts:
                    raise
                break
            part = _next_part(position, limit - count)
            if parts and size + len(part.values.data) > CHUNK_BYTES:
                break  # the part stays ahead, and is returned alone without a copy
            parts.append(part)
            count += len(part)
            size += len(part.values.data)
            _advance(position, len(part))
        contents = Contents.concat(parts)
        offsets = np.arange(first, position.offset, dtype=np.int64)
        return Records(offsets, contents.times_ms, contents.keys, contents.values, position.offset)

    def _load(self, position: _Position) -> bool:
        """Read about CHUNK_BYTES of chunks ahead; returns False at the end of the partition."""
        start, end = self._bounds[position.id]
        if position.offset >= end:
            return False
        if position.offset < start:
            raise Bounds(start, end).lost(position.partition, position.offset)
        size, expected = 0, position.offset
        with translated(self._path, "read"):
            rows = self._db.execute(
                "SELECT id, count, min_ms, body FROM chunks WHERE id >= ? AND id < ? ORDER BY id",
                (position.chunk, chunk_id(position.id, end)),
            )
            for row_id, count, min_ms, body in rows:
                offset = row_id - chunk_id(position.id, 0)
                if offset + count <= expected and not position.ahead:
                    continue  # the chunk before the assigned offset, which was the end
                if not offset <= expected < offset + count:
                    break
                contents = unpack(body, min_ms, f"{self._path}: {position.partition} at offset {offset}")
                position.ahead.append((offset, contents))
                expected = offset + count
                position.chunk = chunk_id(position.id, expected)
                size += len(body)
                if size >= CHUNK_BYTES:
                    break
            rows.close()
        if not position.ahead:
            raise Bounds(start, end).lost(position.partition, position.offset)
        return True


def _next_part(position: _Position, limit: int) -> Contents:
    first, contents = position.ahead[0]
    start = position.offset - first
    stop = min(len(contents), start + limit)
    return contents if (start, stop) == (0, len(contents)) else contents.slice(start, stop)


def _advance(position: _Position, count: int) -> None:
    first, contents = position.ahead[0]
    position.offset += count
    if position.offset >= first + len(contents):
        position.ahead.popleft()
