"""Event log on SQLite: a folder with one file for each group of topics, shared by several processes.

`catalog.sqlite` has the topics, their files and the epochs of named writers. Everything else about a topic is
in its file, including log id and offsets: a lost file takes its log id with it, so a new file cannot pass for
it.
"""

from __future__ import annotations

import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from weakref import WeakSet

import numpy as np
import structlog

from freshet.clock import STEADY_CLOCK, Clock
from freshet.errors import ConfigError, DataLost, FreshetError, Unavailable
from freshet.log import Bounds, LogTraits, TopicInfo
from freshet.log.records import CombinedWriter, check_append
from freshet.log.sqlite.file import MAX_RECORD_BYTES, OFFSET_BITS, Contents, LogFile, Piece, Request, unpack
from freshet.log.sqlite.reader import SqliteReader
from freshet.log.topics import check_new_topic, check_partitions
from freshet.sqlite import FileFormat, connect, folder_of, open_file, transaction, translated
from freshet.types import I64, Append, BytesColumn, LogId, TopicPartition

_log = structlog.get_logger(__name__)

_RETENTION_EVERY_S = 30.0
"""Interval of retention in a process that appends."""

_RETENTION_SOON_S = 1.0
"""Interval of retention while there is more to remove than one run removes."""

_CHUNK_OVERHEAD = 4096
"""Upper bound of a row's size beyond its record: the chunk's head and index."""

_CATALOG = FileFormat(
    what="the catalog of an event log",
    application_id=0x4652434C,
    version=1,
    page_bytes=4096,
    schema="""
CREATE TABLE topics (name TEXT PRIMARY KEY, file TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE writers (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
""",
)


def open_url(url: str) -> SqliteEventLog:
    """Open the log of `sqlite:/path/of/a/folder`; creates a missing folder."""
    return SqliteEventLog(folder_of(url))


class SqliteEventLog:
    """See `freshet.log.EventLog`. Must not be used across a fork: open it in the child.

    Raises ConfigError if the SQLite library's limit of a row is too low.
    """

    traits = LogTraits(many_hosts=False, append_every_ms=20)

    def __init__(self, folder: Path, clock: Clock = STEADY_CLOCK) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.RLock()  # guards the three below
        self._topics: dict[str, tuple[TopicInfo, LogFile, tuple[int, ...]]] = {}
        self._files: dict[str, LogFile] = {}
        self._readers: WeakSet[SqliteReader] = WeakSet()
        self._retention_due = clock.monotonic() + _RETENTION_EVERY_S
        self._closed = False
        open_file(self._catalog_path, _CATALOG)
        self._catalog = connect(self._catalog_path, _CATALOG)
        longest = self._catalog.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
        if longest < MAX_RECORD_BYTES + _CHUNK_OVERHEAD:
            self._catalog.close()
            raise ConfigError(
                "event log",
                "SQLITE_MAX_LENGTH",
                longest,
                f"at least {MAX_RECORD_BYTES + _CHUNK_OVERHEAD:,}: the log accepts records of up to "
                f"{MAX_RECORD_BYTES:,} bytes",
                "use an SQLite library that was built with its default limit of a row",
            )

    @property
    def _catalog_path(self) -> Path:
        return self._folder / "catalog.sqlite"

    def create_topic(
        self, name: str, *, partitions: int, retention_ms: int | None = None, group: str | None = None
    ) -> TopicInfo:
        """Create a topic, or return the one that exists, with this retention from now on.

        Raises:
            ConfigError: a name or the number of partitions is not allowed.
            Mismatch: the topic exists with another number of partitions.
        """
        check_new_topic(name, partitions, group)
        with self._lock:
            if name not in self._refreshed(name):
                self._create(name, partitions, retention_ms, f"{group or name}.topics.sqlite")
            info, file, _ = self._refreshed(name)[name]
            if info.partitions == partitions and info.retention_ms != retention_ms:
                file.set_retention(name, retention_ms)
                self._learn(file.path.name, {name})
                info = self._topics[name][0]
        check_partitions(info, partitions, f"in {self._folder}")
        return info

    def topics(self) -> Mapping[str, TopicInfo]:
        """Return all topics by name."""
        with self._lock:
            return {name: entry[0] for name, entry in self._refreshed(None).items()}

    def partition_counts(self, topics: Iterable[str]) -> Mapping[str, int]:
        """Return the partition counts of these topics, without topics that do not exist."""
        known = self.topics()
        return {topic: known[topic].partitions for topic in topics if topic in known}

    def grow_topic(self, name: str, partitions: int) -> None:
        """Raise ConfigError if the topic has fewer partitions: only freshet writes it, so it cannot grow."""
        found = self.topics()[name].partitions
        if found < partitions:
            raise ConfigError(
                "event log",
                f"partitions of {name}",
                partitions,
                f"at most {found}, with which the topic was created",
                "topics of an embedded log do not grow",
            )

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Return the partition's offsets."""
        file, partition_id = self._locate(partition)
        return file.bounds(partition_id)

    def all_bounds(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Bounds]:
        """Return the offsets of many partitions."""
        return {at: self.bounds(at) for at in partitions}

    def offset_at(self, partition: TopicPartition, time_ms: int) -> int:
        """Return the smallest offset with a record time >= `time_ms`; the end if there is none."""
        file, partition_id = self._locate(partition)
        bounds = file.bounds(partition_id)
        chunk = file.first_chunk_from(partition_id, time_ms)
        while chunk is not None:
            times = _times(file, chunk, partition)
            if times is None:
                return self.offset_at(partition, time_ms)
            offsets = _first_of(chunk) + np.arange(len(times))
            late_enough = offsets[(times >= time_ms) & (offsets >= bounds.start)]
            if len(late_enough):
                return int(late_enough[0])
            chunk = file.next_chunk_with(partition_id, chunk + 1, time_ms)  # start lies within this one
        return bounds.end

    def reader(self) -> SqliteReader:
        """Open a reader without partitions."""
        with self._lock:
            self._check_open()
            reader = SqliteReader(self._locate)
            self._readers.add(reader)
        return reader

    def writer(self, name: str | None = None) -> SqliteWriter:
        """Open a writer. A named one fences earlier writers of that name, in this and other processes."""
        return SqliteWriter(
            self._locate, self._clock, self._retain, None if name is None else self._open_epoch(name)
        )

    def group_writer(self) -> CombinedWriter:
        """Open a writer of groups, which appends all groups of a call together."""
        return CombinedWriter(self.writer())

    def trim(self, partition: TopicPartition, before: int) -> None:
        """Remove records below `before`; a chunk that also has later records keeps its space."""
        file, partition_id = self._locate(partition)
        while file.trim(partition_id, before):
            pass

    def hold(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Set the retention pin of `name` to these offsets; an empty mapping removes it."""
        located = [(*self._locate(partition), offset) for partition, offset in offsets.items()]
        with self._lock:
            files = {file for _, file, _ in self._refreshed(None).values()}
        for file in files:  # also in files without these partitions, which may have the pin's former offsets
            file.set_pin(name, [(i, offset) for f, i, offset in located if f is file])

    def enforce_retention(self) -> bool:
        """Remove records that are older than their topic's retention. Writers call it at intervals.

        Removes a bounded amount, so that no append waits long; returns True if there is more to remove.
        """
        now = self._clock.now_ms()
        more = False
        with self._lock:
            entries = list(self._refreshed(None).values())
        for info, file, partition_ids in entries:
            if info.retention_ms is not None:
                for number, partition_id in enumerate(partition_ids):
                    partition = TopicPartition(info.name, number)
                    before = self._expired_to(partition, now - info.retention_ms, now)
                    pinned = file.pinned_from(partition_id)
                    before = before if pinned is None else min(before, pinned)
                    if file.has_below(partition_id, before):
                        more |= file.trim(partition_id, before)
        return more

    def _expired_to(self, partition: TopicPartition, oldest_ms: int, now_ms: int) -> int:
        """Return the end of the last record older than `oldest_ms` before the first of [oldest, now].

        Records dated after `now_ms` go with a later one that expires: none holds up retention until its date,
        and what a clock dated that was ahead is kept as long as what came after it.
        """
        file, partition_id = self._locate(partition)
        bounds = file.bounds(partition_id)
        end = past = bounds.start  # records from `end` to `past` are dated ahead
        chunk = file.first_chunk_from(partition_id, oldest_ms)
        while chunk is not None:
            first = _first_of(chunk)
            end = first if first > past else end  # the chunks between have expired
            times = _times(file, chunk, partition)
            if times is None:
                return end  # another process removes records
            first, times = max(first, bounds.start), times[max(0, bounds.start - first) :]
            kept = np.flatnonzero((times >= oldest_ms) & (times <= now_ms))
            expired = np.flatnonzero(times[: kept[0] if len(kept) else None] < oldest_ms)
            end = first + int(expired[-1]) + 1 if len(expired) else end
            after = None if len(kept) else file.next_chunk_with(partition_id, chunk + 1, to_ms=now_ms)
            if after is None:
                return end
            past = max(_first_of(after), bounds.start)
            chunk = file.next_chunk_with(partition_id, after, oldest_ms)
        return bounds.end

    def close(self) -> None:
        """Close files and readers. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for reader in list(self._readers):
                reader.close()
            for file in self._files.values():
                file.close()
            self._catalog.close()

    def _retain(self) -> None:
        with self._lock:
            if self._clock.monotonic() < self._retention_due:
                return
            self._retention_due = self._clock.monotonic() + _RETENTION_EVERY_S
        if self.enforce_retention():
            with self._lock:
                self._retention_due = self._clock.monotonic() + _RETENTION_SOON_S

    def _locate(self, partition: TopicPartition) -> tuple[LogFile, int]:
        with self._lock:
            entry = self._topics.get(partition.topic) or self._refreshed(partition.topic).get(partition.topic)
        if entry is None:
            raise KeyError(f"no topic {partition.topic} in {self._folder}")
        if not 0 <= partition.partition < len(entry[2]):
            raise KeyError(
                f"topic {partition.topic} has partitions 0 to {len(entry[2]) - 1}, not {partition.partition}"
            )
        return entry[1], entry[2][partition.partition]

    def _refreshed(self, wanted: str | None) -> dict[str, tuple[TopicInfo, LogFile, tuple[int, ...]]]:
        """Return the known topics, read again unless `wanted` is among them."""
        self._check_open()
        if wanted is None or wanted not in self._topics:
            with translated(self._catalog_path, "read"):
                rows = self._catalog.execute("SELECT name, file FROM topics").fetchall()
            for file_name in {file_name for name, file_name in rows if name not in self._topics}:
                self._learn(file_name, {name for name, f in rows if f == file_name})
        return self._topics

    def _learn(self, file_name: str, names: set[str]) -> None:
        file = self._file(file_name)
        if not file.path.exists():
            lost = ", ".join(sorted(names))
            raise DataLost(f"{file.path}: the file of topics {lost} is gone; restore it")
        for name, (info, ids) in file.topics().items():
            if name in names:
                self._topics[name] = (info, file, ids)

    def _file(self, file_name: str) -> LogFile:
        return self._files.setdefault(file_name, LogFile(self._folder / file_name))

    def _create(self, name: str, partitions: int, retention_ms: int | None, file_name: str) -> None:
        """Create a topic once, under the catalog's lock, with every writer's epoch in its file."""
        with transaction(self._catalog, self._catalog_path, f"create topic {name}") as db:
            if db.execute("SELECT 1 FROM topics WHERE name = ?", (name,)).fetchone() is None:
                epochs = db.execute("SELECT name, epoch FROM writers").fetchall()
                log_id = LogId(str(uuid.uuid4()))
                self._file(file_name).create_topic(name, partitions, log_id, retention_ms, epochs)
                db.execute("INSERT INTO topics VALUES (?, ?)", (name, file_name))

    def _open_epoch(self, name: str) -> tuple[str, int]:
        with self._lock:
            self._check_open()
            with transaction(self._catalog, self._catalog_path, f"open writer {name}") as db:
                row = db.execute("SELECT epoch FROM writers WHERE name = ?", (name,)).fetchone()
                epoch = (row[0] if row else 0) + 1
                db.execute("INSERT OR REPLACE INTO writers VALUES (?, ?)", (name, epoch))
                for (file_name,) in db.execute("SELECT DISTINCT file FROM topics").fetchall():
                    self._file(file_name).raise_epoch(name, epoch)
        return name, epoch

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._folder}: the log was closed in this process")


def _first_of(chunk: int) -> int:
    """Return the offset of a chunk's first record."""
    return chunk & ((1 << OFFSET_BITS) - 1)


def _times(file: LogFile, chunk: int, partition: TopicPartition) -> I64 | None:
    """Return the times of a chunk's records; None if retention has removed it meanwhile."""
    found = file.body(chunk)
    return None if found is None else unpack(*found, f"{file.path}: {partition}").times_ms


class SqliteWriter:
    """See `freshet.log.Writer`. Appends of several threads share commits."""

    def __init__(
        self,
        locate: Callable[[TopicPartition], tuple[LogFile, int]],
        clock: Clock,
        retain: Callable[[], None],
        epoch: tuple[str, int] | None,
    ) -> None:
        self._locate, self._clock, self._retain, self._epoch = locate, clock, retain, epoch
        self._closed = False

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        """Append all of these; returns the first offset of each, once they are durable on disk.

        Raises:
            ValueError: a named writer's topics lie in several groups: no transaction covers two files.
            Unavailable: nothing was written or this is not known, as the message says; the writer was closed.
        """
        if self._closed:
            raise Unavailable("the writer was closed; nothing was written")
        now = self._clock.now_ms()
        by_file: dict[LogFile, list[tuple[int, Piece]]] = {}
        for i, append in enumerate(appends):
            file, partition_id = self._locate(TopicPartition(append.topic, append.partition))
            by_file.setdefault(file, []).append((i, Piece(partition_id, _contents(append, now))))
        if self._epoch and len(by_file) > 1:
            topics = ", ".join(sorted({a.topic for a in appends}))
            raise ValueError(
                f"a named writer appends to topics of one group; create {topics} with the same `group`"
            )
        first_offsets = [0] * len(appends)
        for number, (file, pieces) in enumerate(by_file.items()):
            request = Request([piece for _, piece in pieces], self._epoch)
            try:
                file.submit(request)
            except Unavailable as error:
                if not number:
                    raise
                written = ", ".join(done.path.name for done in list(by_file)[:number])
                there = str(error).replace("nothing was written", "nothing was written to it")
                raise Unavailable(f"not known to be written: {written} has its records; {there}") from error
            for (i, _), offset in zip(pieces, request.first_offsets, strict=True):
                first_offsets[i] = offset
        try:
            self._retain()
        except FreshetError as error:  # the append itself is durable
            _log.warning("retention failed and is retried later", reason=str(error))
        return first_offsets

    def close(self) -> None:
        """Refuse further appends. Idempotent."""
        self._closed = True


def _contents(append: Append, now_ms: int) -> Contents:
    """Return an append's columns, checked, with defaults for absent keys and times."""
    check_append(append, MAX_RECORD_BYTES)
    n, keys, times = len(append.values), append.keys, append.times_ms
    if keys is None:
        keys = BytesColumn(np.empty(0, np.uint8), np.zeros(n, np.int64))
    return Contents(append.values, keys, np.full(n, now_ms, np.int64) if times is None else times)
