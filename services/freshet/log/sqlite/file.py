"""File of the SQLite log: the topics of one group, their chunks of records, offsets and writers' epochs.

A chunk's rowid is (partition id << 46) + first offset, so the chunks of a partition are in order in one
B-tree, and an offset is found without an index. N records. A chunk's body, little-endian:

| at | type | field |
|---|---|---|
| 0 | u8 | magic 0xB0 |
| 1 | u8 | version 1 |
| 2 | u16 | flags: 1 has keys, 2 has times |
| 4 | u32 | n records, >= 1 |
| 8 | u32 | bytes of keys |
| 12 | u32 | CRC-32 of bytes 0 to 12, the times, the ends and the keys |
| 16 | u32 | CRC-32 of the values |
| 20 | u32 | 0 |
| 24 | i64[n] | record times, if flag 2; otherwise all are the chunk's `min_ms` |
| | u32[n] | ends of the values |
| | u32[n] | ends of the keys, if flag 1; otherwise all are empty |
| | bytes | keys, then values |
"""

from __future__ import annotations

import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from freshet import _native
from freshet.errors import Corrupt, DataLost, Fenced, FreshetError, TooLarge, Unavailable
from freshet.log import Bounds, TopicInfo
from freshet.sqlite import FileFormat, connect, open_file, transaction, translated
from freshet.types import I64, BytesColumn, LogId

CHUNK_BYTES = 1 << 20
"""Size above which an append is split; bounds the read of a single record."""

MAX_RECORD_BYTES = 64 << 20
"""Largest record: far above any block of samples, far below SQLite's limit of a row."""

SELF_CHECKED_BYTES = 4096
"""Average record size above which values are not checked: such records are blocks and deltas with a CRC of
their own, and a second CRC-32 at 2.4 GB/s would halve the reading speed."""

_HEAD = struct.Struct("<BBHIIIII")
_MAGIC, _VERSION, _HAS_KEYS, _HAS_TIMES = 0xB0, 1, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """Records of one partition without their offsets."""

    values: BytesColumn  # (N,)
    keys: BytesColumn  # (N,)
    times_ms: I64  # (N,)

    def __len__(self) -> int:
        return len(self.times_ms)

    def slice(self, start: int, stop: int) -> Contents:
        """Return records [start, stop), which share memory."""
        return Contents(
            self.values.slice(start, stop), self.keys.slice(start, stop), self.times_ms[start:stop]
        )

    @classmethod
    def concat(cls, parts: list[Contents]) -> Contents:
        """Concatenate; a single part is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            BytesColumn.concat([p.values for p in parts]),
            BytesColumn.concat([p.keys for p in parts]),
            np.concatenate([p.times_ms for p in parts]),
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A packed chunk with the columns stored beside it."""

    count: int
    min_ms: int
    max_ms: int
    body: bytes


def split(contents: Contents) -> Iterator[Contents]:
    """Split into pieces of at most CHUNK_BYTES of keys and values; a larger record gets a piece of its own.

    Raises TooLarge for a record above MAX_RECORD_BYTES.
    """
    if len(contents.values.data) + len(contents.keys.data) <= CHUNK_BYTES:
        if len(contents):
            yield contents
        return
    sizes = contents.values.ends + contents.keys.ends  # running bytes after each record
    if len(contents) and int(np.diff(sizes, prepend=0).max()) > MAX_RECORD_BYTES:
        largest = int(np.diff(sizes, prepend=0).max())
        raise TooLarge(f"a record of {largest:,} bytes; the log accepts at most {MAX_RECORD_BYTES:,}")
    start, before = 0, 0
    while start < len(contents):
        stop = max(int(np.searchsorted(sizes, before + CHUNK_BYTES, side="right")), start + 1)
        yield contents.slice(start, stop)
        start, before = stop, int(sizes[stop - 1])


def pack(contents: Contents) -> Chunk:
    """Pack one piece of `split`."""
    times, keys, values = contents.times_ms, contents.keys, contents.values
    low, high = int(times.min()), int(times.max())
    flags = (_HAS_KEYS if len(keys.data) else 0) | (_HAS_TIMES if low != high else 0)
    index = [values.ends.astype("<u4").tobytes()]
    if flags & _HAS_TIMES:
        index.insert(0, times.astype("<i8").tobytes())
    if flags & _HAS_KEYS:
        index += [keys.ends.astype("<u4").tobytes(), keys.data.tobytes()]
    payload = np.ascontiguousarray(values.data)
    head = _HEAD.pack(_MAGIC, _VERSION, flags, len(times), len(keys.data), 0, 0, 0)
    crc = zlib.crc32(head[:12])
    for part in index:
        crc = zlib.crc32(part, crc)
    values_crc = _native.crc32(payload, 0)
    head = _HEAD.pack(_MAGIC, _VERSION, flags, len(times), len(keys.data), crc, values_crc, 0)
    return Chunk(len(times), low, high, b"".join([head, *index, payload.data]))


def unpack(body: bytes, min_ms: int, where: str) -> Contents:
    """Read a chunk; its arrays are views of `body`. `where` names it in errors.

    Raises Corrupt for bytes that `pack` did not write.
    """
    if len(body) < _HEAD.size:
        raise Corrupt(f"{where}: expected a chunk of at least {_HEAD.size} bytes, found {len(body)}")
    magic, version, flags, n, key_bytes, crc, values_crc, zero = _HEAD.unpack_from(body)
    if (magic, version) != (_MAGIC, _VERSION) or flags > 3 or zero:
        raise Corrupt(
            f"{where}: expected a chunk of version {_VERSION},"
            f" found magic {magic:#x}, version {version}, flags {flags}"
        )
    times_at = _HEAD.size
    ends_at = times_at + (8 * n if flags & _HAS_TIMES else 0)
    key_ends_at = ends_at + 4 * n
    keys_at = key_ends_at + (4 * n if flags & _HAS_KEYS else 0)
    values_at = keys_at + key_bytes
    view = memoryview(body)
    if n == 0 or values_at > len(body) or zlib.crc32(view[times_at:values_at], zlib.crc32(view[:12])) != crc:
        raise Corrupt(f"{where}: the chunk's index fails its CRC; the disk has changed it")
    values = BytesColumn(
        np.frombuffer(body, np.uint8, offset=values_at),
        np.frombuffer(body, "<u4", n, ends_at).astype(np.int64),
    )
    if flags & _HAS_KEYS:
        key_ends = np.frombuffer(body, "<u4", n, key_ends_at).astype(np.int64)
        keys = BytesColumn(np.frombuffer(body, np.uint8, key_bytes, keys_at), key_ends)
    else:
        keys = BytesColumn(np.empty(0, np.uint8), np.zeros(n, np.int64))
    _check_ends(values, where)
    _check_ends(keys, where)
    _check_values(values, values_crc, where)
    if flags & _HAS_TIMES:
        times = np.frombuffer(body, "<i8", n, times_at).astype(np.int64, copy=False)
    else:
        times = np.full(n, min_ms, np.int64)
    return Contents(values, keys, times)


def _check_ends(column: BytesColumn, where: str) -> None:
    """Check the ends, which readers of the column trust: a changed file cannot cause a read out of bounds."""
    if int(column.ends[-1]) != len(column.data) or bool(np.any(column.ends[1:] < column.ends[:-1])):
        raise Corrupt(f"{where}: expected rising ends up to {len(column.data)} bytes; the chunk was damaged")


def _check_values(values: BytesColumn, crc: int, where: str) -> None:
    size = len(values.data)
    if size <= SELF_CHECKED_BYTES * len(values) and _native.crc32(values.data, 0) != crc:
        raise Corrupt(f"{where}: the chunk's values fail their CRC; the disk has changed them")


OFFSET_BITS = 46
"""7e13 records a partition (2,000 years at a million a minute) and 131,071 partitions a file."""

_BATCH_BYTES = 16 << 20
"""Approximate size of waiting appends in one commit, which bounds the wait of each."""

_STATEMENT_ROWS = 32
"""Rows of one statement. Every step of a statement releases the GIL, and in a process with busy threads it
takes milliseconds to get it again, so a commit of eight partitions should have few steps."""

TRIM_CHUNKS = 64
"""Chunks deleted in one transaction: at most 64 MiB, some tens of milliseconds."""

FORMAT = FileFormat(
    what="an event log",
    application_id=0x46524C47,
    version=1,
    page_bytes=16384,
    schema="""
CREATE TABLE topics (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
                     partitions INTEGER NOT NULL, log_id TEXT NOT NULL, retention_ms INTEGER);
CREATE TABLE partitions (id INTEGER PRIMARY KEY, topic INTEGER NOT NULL REFERENCES topics,
                         number INTEGER NOT NULL,
                         start INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 0,
                         top_ms INTEGER NOT NULL
                         DEFAULT -9223372036854775808, UNIQUE (topic, number));
CREATE TABLE chunks (id INTEGER PRIMARY KEY, count INTEGER NOT NULL, min_ms INTEGER NOT NULL,
                     max_ms INTEGER NOT NULL, top_ms INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE writers (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE holds (name TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
                    PRIMARY KEY (name, partition)) WITHOUT ROWID;
""",
)


def chunk_id(partition_id: int, offset: int) -> int:
    """Return the rowid of a chunk of the partition that starts at `offset`."""
    return (partition_id << OFFSET_BITS) + offset


@dataclass(frozen=True, slots=True)
class Piece:
    """An append to a located partition."""

    partition_id: int
    contents: Contents


@dataclass(slots=True)
class Request:
    """One call of `append`."""

    pieces: Sequence[Piece]
    writer: tuple[str, int] | None  # name and epoch; None: nameless
    first_offsets: list[int] = field(default_factory=list)
    error: FreshetError | None = None
    done: bool = False


class LogFile:
    """Thread-safe. Opens two connections on first use and keeps them: one for writes, one for queries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = threading.Lock()  # held by the thread that commits
        self._querying = threading.Lock()  # guards the connection for queries
        self._queue_lock = threading.Lock()
        self._queue: list[Request] = []
        self._write_connection: sqlite3.Connection | None = None
        self._query_connection: sqlite3.Connection | None = None
        self._closed = False

    # Topics

    def create_topic(
        self,
        name: str,
        partitions: int,
        log_id: LogId,
        retention_ms: int | None,
        epochs: Sequence[tuple[str, int]],
    ) -> None:
        """Create a topic unless it exists, and copy the writers' epochs of the catalog."""
        open_file(self.path, FORMAT)
        with self._writing, self._transaction(f"create topic {name}") as db:
            if db.execute("SELECT 1 FROM topics WHERE name = ?", (name,)).fetchone() is None:
                topic = db.execute(
                    "INSERT INTO topics (name, partitions, log_id, retention_ms) VALUES (?, ?, ?, ?)",
                    (name, partitions, log_id, retention_ms),
                ).lastrowid
                db.executemany(
                    "INSERT INTO partitions (topic, number) VALUES (?, ?)",
                    ((topic, i) for i in range(partitions)),
                )
            db.executemany("INSERT OR REPLACE INTO writers VALUES (?, ?)", epochs)

    def set_retention(self, name: str, retention_ms: int | None) -> None:
        """Set how long a topic's records are kept; None: forever."""
        with self._writing, self._transaction(f"change the retention of topic {name}") as db:
            db.execute("UPDATE topics SET retention_ms = ? WHERE name = ?", (retention_ms, name))

    def topics(self) -> dict[str, tuple[TopicInfo, tuple[int, ...]]]:
        """Return {name: (info, partition ids by number)}."""
        rows = self.query(
            "SELECT t.name, t.partitions, t.log_id, t.retention_ms, p.id "
            "FROM topics t JOIN partitions p ON p.topic = t.id ORDER BY t.id, p.number"
        )
        ids: dict[str, list[int]] = {}
        infos: dict[str, TopicInfo] = {}
        for name, partitions, log_id, retention_ms, partition_id in rows:
            infos[name] = TopicInfo(name, partitions, LogId(log_id), retention_ms, MAX_RECORD_BYTES)
            ids.setdefault(name, []).append(partition_id)
        return {name: (info, tuple(ids[name])) for name, info in infos.items()}

    def raise_epoch(self, writer: str, epoch: int) -> None:
        """Refuse earlier writers of that name from now on."""
        with self._writing, self._transaction(f"open writer {writer}") as db:
            db.execute("INSERT OR REPLACE INTO writers VALUES (?, ?)", (writer, epoch))

    # Queries

    def bounds(self, partition_id: int) -> Bounds:
        """Return the partition's offsets."""
        ((start, end),) = self.query("SELECT start, next FROM partitions WHERE id = ?", partition_id)
        return Bounds(start, end)

    def chunk_at(self, partition_id: int, offset: int) -> int:
        """Return the rowid of the chunk that contains `offset`, or of the next one."""
        ((found,),) = self.query(
            "SELECT max(id) FROM chunks WHERE id BETWEEN ? AND ?",
            chunk_id(partition_id, 0),
            chunk_id(partition_id, offset),
        )
        return chunk_id(partition_id, offset) if found is None else int(found)

    def first_chunk_from(self, partition_id: int, time_ms: int) -> int | None:
        """Return the rowid of the first chunk with a record time >= `time_ms`; None if there is none.

        Record times may fall, so each chunk has `top_ms`, the largest time up to its end. `top_ms` never
        falls, so bisection finds the first chunk that reaches `time_ms`.
        """
        end = chunk_id(partition_id + 1, 0)
        low, high = chunk_id(partition_id, 0), end
        while low < high:
            middle = (low + high) // 2
            row = self.query(
                "SELECT id, top_ms FROM chunks WHERE id >= ? AND id < ? ORDER BY id LIMIT 1", middle, end
            )
            if not row or row[0][1] >= time_ms:
                high = middle
            else:
                low = row[0][0] + 1
        return self.next_chunk_with(partition_id, low, time_ms)

    def next_chunk_with(
        self, partition_id: int, chunk: int, from_ms: int = -(1 << 63), to_ms: int = (1 << 63) - 1
    ) -> int | None:
        """Return the rowid of the first chunk from `chunk` on whose record times span some of [from, to]."""
        found = self.query(
            "SELECT id FROM chunks WHERE id >= ? AND id < ? AND max_ms >= ? AND min_ms <= ? "
            "ORDER BY id LIMIT 1",
            chunk,
            chunk_id(partition_id + 1, 0),
            from_ms,
            to_ms,
        )
        return found[0][0] if found else None

    def body(self, chunk: int) -> tuple[bytes, int] | None:
        """Return a chunk's body and `min_ms`; None if retention has removed it meanwhile."""
        rows = self.query("SELECT body, min_ms FROM chunks WHERE id = ?", chunk)
        return rows[0] if rows else None

    def query(self, sql: str, *arguments: object) -> list[tuple]:  # type: ignore[type-arg]
        """Run one query on the connection for queries."""
        with self._querying:
            self._check_open()
            if self._query_connection is None:
                self._query_connection = connect(self.path, FORMAT)
            with translated(self.path, "read"):
                return self._query_connection.execute(sql, arguments).fetchall()

    # Appends

    def submit(self, request: Request) -> None:
        """Append durably, in one commit with the requests that other threads submit meanwhile.

        The thread that gets the lock commits all waiting requests; the others then find their request done.
        Raises the request's error.
        """
        with self._queue_lock:
            self._queue.append(request)
        while not request.done:
            with self._writing:
                if not request.done:
                    self._commit_queue()
        if request.error is not None:
            raise request.error

    def _commit_queue(self) -> None:
        with self._queue_lock:
            size, count = 0, 0
            while count < len(self._queue) and size < _BATCH_BYTES:
                size += sum(len(piece.contents.values.data) for piece in self._queue[count].pieces)
                count += 1
            batch, self._queue = self._queue[:count], self._queue[count:]
        try:
            with self._transaction("append") as db:
                self._write(db, batch)
        except FreshetError as error:
            for request in batch:
                request.error = request.error or error
        except BaseException as error:  # the other threads' requests are not acknowledged either
            for request in batch:
                request.error = request.error or Unavailable(
                    f"{self.path}: not known to be written: {error!r}"
                )
            raise
        finally:
            for request in batch:
                request.done = True

    def _write(self, db: sqlite3.Connection, batch: Sequence[Request]) -> None:
        accepted = [request for request in batch if self._may_write(db, request)]
        contents: dict[int, list[Contents]] = {}
        for request in accepted:
            for piece in request.pieces:
                contents.setdefault(piece.partition_id, []).append(piece.contents)
        if not contents:
            return
        ends = self._ends(db, list(contents))
        next_offset = {partition_id: offset for partition_id, (offset, _) in ends.items()}
        for request in accepted:
            for piece in request.pieces:
                request.first_offsets.append(next_offset[piece.partition_id])
                next_offset[piece.partition_id] += len(piece.contents)
        self._write_chunks(db, ends, {i: Contents.concat(parts) for i, parts in contents.items()})

    def _may_write(self, db: sqlite3.Connection, request: Request) -> bool:
        if request.writer is None:
            return True
        name, epoch = request.writer
        row = db.execute("SELECT epoch FROM writers WHERE name = ?", (name,)).fetchone()
        if row is not None and row[0] > epoch:
            request.error = Fenced(
                f"writer {name!r} of epoch {epoch} was replaced by one of epoch {row[0]}; nothing was written"
            )
        return request.error is None

    def _ends(self, db: sqlite3.Connection, partition_ids: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return {partition id: (next offset, largest record time)}, read as one row (`_STATEMENT_ROWS`)."""
        (found,) = db.execute(
            "SELECT group_concat(id || ' ' || next || ' ' || top_ms, ';') FROM partitions "  # nosec B608  # question marks
            f"WHERE id IN ({', '.join('?' * len(partition_ids))})",
            partition_ids,
        ).fetchone()
        rows = [[int(word) for word in row.split()] for row in (found or "").split(";") if row]
        if len(rows) != len(partition_ids):
            raise DataLost(f"{self.path}: the topic was removed; the log was created anew")
        return {partition_id: (offset, top_ms) for partition_id, offset, top_ms in rows}

    def _write_chunks(
        self, db: sqlite3.Connection, ends: Mapping[int, tuple[int, int]], contents: Mapping[int, Contents]
    ) -> None:
        chunks: list[tuple[object, ...]] = []
        moved: list[tuple[object, ...]] = []
        for partition_id, all_of_it in contents.items():
            offset, top = ends[partition_id]
            for part in split(all_of_it):
                chunk = pack(part)
                top = max(top, chunk.max_ms)
                row_id = chunk_id(partition_id, offset)
                chunks.append((row_id, chunk.count, chunk.min_ms, chunk.max_ms, top, chunk.body))
                offset += chunk.count
            moved.append((partition_id, offset, top))
        _execute_rows(db, "INSERT INTO chunks VALUES {rows}", chunks)
        _execute_rows(
            db,
            "WITH moved (id, next, top_ms) AS (VALUES {rows}) UPDATE partitions SET (next, top_ms) = "
            "(SELECT next, top_ms FROM moved WHERE moved.id = partitions.id) "
            "WHERE id IN (SELECT id FROM moved)",
            moved,
        )

    # Retention

    def trim(self, partition_id: int, before: int) -> bool:
        """Raise the start to `before` (at most the end) and delete chunks that lie completely below it.

        Deletes a bounded number of chunks; returns True if there may be more. Readers see none below the
        start.
        """
        first, last = chunk_id(partition_id, 0), chunk_id(partition_id, before)
        with self._writing, self._transaction("trim") as db:
            db.execute(
                "UPDATE partitions SET start = max(start, min(?, next)) WHERE id = ?",
                (before, partition_id),
            )
            gone = db.execute(
                "DELETE FROM chunks WHERE id IN (SELECT id FROM chunks WHERE id BETWEEN ? AND ? "
                "AND id + count <= ? ORDER BY id LIMIT ?)",
                (first, last, last, TRIM_CHUNKS),
            ).rowcount
        return gone == TRIM_CHUNKS

    def has_below(self, partition_id: int, offset: int) -> bool:
        """Return whether `trim` to this offset would have an effect."""
        if self.bounds(partition_id).start < offset:
            return True
        oldest = self.query(
            "SELECT id + count FROM chunks WHERE id >= ? AND id < ? ORDER BY id LIMIT 1",
            chunk_id(partition_id, 0),
            chunk_id(partition_id, offset),
        )
        return bool(oldest) and oldest[0][0] <= chunk_id(partition_id, offset)

    def set_pin(self, name: str, offsets: Sequence[tuple[int, int]]) -> None:
        """Replace the retention pin of `name` by (partition id, offset) pairs; cheap without a change."""
        wanted = sorted(offsets)
        pinned = self.query("SELECT partition, offset FROM holds WHERE name = ? ORDER BY partition", name)
        if pinned == wanted:
            return
        with self._writing, self._transaction("set a retention pin") as db:
            db.execute("DELETE FROM holds WHERE name = ?", (name,))
            db.executemany("INSERT INTO holds VALUES (?, ?, ?)", ((name, p, o) for p, o in wanted))

    def pinned_from(self, partition_id: int) -> int | None:
        """Return the smallest pinned offset; None if there is no pin."""
        ((offset,),) = self.query("SELECT min(offset) FROM holds WHERE partition = ?", partition_id)
        return offset  # type: ignore[no-any-return]

    # Connections

    def close(self) -> None:
        """Close the connections, after a commit in progress. Idempotent."""
        with self._writing, self._querying:
            self._closed = True
            for connection in (self._write_connection, self._query_connection):
                if connection is not None:
                    connection.close()
            self._write_connection = self._query_connection = None

    def _transaction(self, doing: str) -> AbstractContextManager[sqlite3.Connection]:
        self._check_open()
        if self._write_connection is None:
            self._write_connection = connect(self.path, FORMAT)
        return transaction(self._write_connection, self.path, doing)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.path}: the log was closed in this process")


def _execute_rows(db: sqlite3.Connection, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
    """Execute a statement with `{rows}` for its values, _STATEMENT_ROWS rows at a time."""
    for start in range(0, len(rows), _STATEMENT_ROWS):
        some = rows[start : start + _STATEMENT_ROWS]
        marks = f"({', '.join('?' * len(some[0]))})"
        values = [value for row in some for value in row]
        db.execute(statement.format(rows=", ".join([marks] * len(some))), values)
