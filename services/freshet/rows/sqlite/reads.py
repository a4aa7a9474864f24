"""Reads of the SQLite row store: the sources of a bucket's rows, and their merged rows.

A bucket's sources are its base parts and the segments of its span above its `since`; the newest one that
contains a key is valid. B buckets of the model, R runs, N keys.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.rows.sqlite.file import Entry, find, parse_directory, read_keys
from freshet.tables.runs import DamagedRuns, merge_runs, widths_of
from freshet.types import I64, U8, U32, U64, Bool, RowRuns, Run

_SPARSE = 16
"""Records are read one by one if less than this fraction (1 in 16) is wanted."""


@dataclass(frozen=True)
class Shape:
    """Layout of a store: each span is an equal number of consecutive buckets."""

    path: Path
    buckets: int
    spans: int
    record_bytes: Mapping[int, int]

    @cached_property
    def widths(self) -> U32:
        """(256,) uint32 bytes of a record by table id."""
        return widths_of(self.record_bytes)

    def span_of(self, bucket: int) -> int:
        """Return the span of a bucket."""
        return bucket * self.spans // self.buckets

    def buckets_of(self, span: int) -> range:
        """Return the buckets of a span."""
        first = -(-span * self.buckets // self.spans)
        return range(first, -(-(span + 1) * self.buckets // self.spans))


class Source:
    """One blob of runs, a base part or a segment; read in pieces, or from its whole body if given."""

    def __init__(
        self,
        db: sqlite3.Connection,
        shape: Shape,
        table: str,
        row_id: int,
        directory: bytes,
        body: bytes | None = None,
    ) -> None:
        self._db, self._shape, self._table, self.id, self._body = db, shape, table, row_id, body
        self.where = f"{shape.path}: {table} {row_id}"
        self.directory = parse_directory(directory, self.where)
        buckets, tables = self.directory["bucket"], self.directory["table"]
        if len(buckets) and (buckets.max() >= shape.buckets or tables.max() >= len(shape.widths)):
            raise Corrupt(f"{self.where}: rows of a bucket or table that the store does not have")

    def costs(self, live: Bool) -> NDArray[np.float64]:
        """Return (B,) float64 bytes of each bucket's runs among those that are `live`, (R,) bool."""
        sizes = RowRuns(self.directory, _NOTHING, self._shape.widths).sizes()
        buckets = self.directory["bucket"][live]
        return np.bincount(buckets, sizes[live], self._shape.buckets).astype(np.float64, copy=False)

    def runs(self, chosen: Bool) -> RowRuns:
        """Return the runs chosen by (R,) bool, unchecked and with gaps, as `merge_runs` accepts them."""
        directory = self.directory[chosen]
        if not len(directory):
            return RowRuns(directory, _NOTHING, self._shape.widths)
        first, last = directory[0], directory[-1]
        width = int(self._shape.widths[last["table"]])
        end = int(last["at"]) + 8 * (int(last["rows"]) + int(last["removed"])) + int(last["rows"]) * width
        body = self._read(int(first["at"]), end - int(first["at"]))
        return RowRuns(directory, np.frombuffer(body, np.uint8), self._shape.widths)

    def entries(self, bucket: int, table: int) -> list[Entry]:
        """Return the directory entries of one table of one bucket."""
        low, high = np.searchsorted(self.directory["bucket"], [bucket, bucket + 1])
        chosen = self.directory[low:high]
        return [Entry(*entry) for entry in chosen[chosen["table"] == table].tolist()]

    def keys(self, entry: Entry) -> tuple[U64, U64]:
        """Return (keys, removed keys) of a run, uint64, after a check of their CRC."""
        return read_keys(entry, self._read(entry.at, entry.keys_bytes), self.where)

    def records(self, entry: Entry, rows: NDArray[np.intp], width: int) -> U8:
        """Return records (N, width) uint8 of a run at rows (N,) intp; their CRC is not checked."""
        start = entry.at + entry.keys_bytes
        if len(rows) * _SPARSE >= entry.rows:
            whole = np.frombuffer(self._read(start, entry.rows * width), np.uint8)
            return whole.reshape(entry.rows, width)[rows]
        pieces = [self._read(start + int(row) * width, width) for row in rows]
        return np.frombuffer(b"".join(pieces), np.uint8).reshape(len(rows), width)

    def _read(self, at: int, size: int) -> bytes | memoryview:
        """Return bytes of the body. Raises Corrupt if it is shorter."""
        if self._body is not None:
            self._check(at, size, len(self._body))
            return memoryview(self._body)[at : at + size]
        try:
            blob = self._db.blobopen(self._table, "body", self.id, readonly=True)
        except OverflowError:  # Python before 3.11.4 opens no blob with an id above 32 bits
            return self._read_by_query(at, size)
        with blob:
            self._check(at, size, len(blob))
            blob.seek(at)
            return blob.read(size)

    def _read_by_query(self, at: int, size: int) -> bytes:
        """Read by a query, for which SQLite copies the whole body: 25 ms for 32 MiB."""
        query = f"SELECT length(body), substr(body, ?, ?) FROM {self._table} WHERE id = ?"  # nosec B608
        ((found, piece),) = self._db.execute(query, (at + 1, max(size, 0), self.id)).fetchall()
        self._check(at, size, found)
        return bytes(piece)

    def _check(self, at: int, size: int, found: int) -> None:
        if size < 0 or at + size > found:
            raise Corrupt(f"{self.where}: expected at least {at + max(size, 0)} bytes, found {found}")


_NOTHING: U8 = np.empty(0, np.uint8)


def read_since(db: sqlite3.Connection, shape: Shape) -> I64:
    """Return (B,) int64, the newest segment that each bucket's base includes."""
    since = np.zeros(shape.buckets, np.int64)
    rows = np.array(db.execute("SELECT bucket, since FROM metas").fetchall(), np.int64).reshape(-1, 2)
    since[rows[:, 0]] = rows[:, 1]
    return since


def segments_of(db: sqlite3.Connection, shape: Shape, span: int) -> list[Source]:
    """Return the segments of a span, newest first."""
    rows = db.execute(
        "SELECT id, directory FROM segments WHERE span = ? ORDER BY id DESC", (span,)
    ).fetchall()
    return [Source(db, shape, "segments", *row) for row in rows]


def _blobs_of_bucket(db: sqlite3.Connection, shape: Shape, bucket: int) -> list[tuple[str, int, bytes]]:
    """Return (table, row id, directory) of the sources of a bucket's rows, newest first."""
    rows = db.execute(
        "SELECT 'segments', id, directory FROM segments WHERE span = ? "
        "AND id > (SELECT since FROM metas WHERE bucket = ?) ORDER BY id DESC",
        (shape.span_of(bucket), bucket),
    ).fetchall()
    return (
        rows + db.execute("SELECT 'bases', id, directory FROM bases WHERE bucket = ?", (bucket,)).fetchall()
    )


def sources_of_bucket(db: sqlite3.Connection, shape: Shape, bucket: int) -> list[Source]:
    """Return the sources of a bucket's rows, newest first."""
    return [Source(db, shape, *row) for row in _blobs_of_bucket(db, shape, bucket)]


def sound_of_bucket(
    db: sqlite3.Connection, shape: Shape, bucket: int, *, run_bytes: int
) -> tuple[RowRuns, list[str]]:
    """Return (rows of a bucket, fault of each damaged source that was skipped)."""
    runs: list[RowRuns] = []
    where: list[str] = []
    damage: list[str] = []
    for row in _blobs_of_bucket(db, shape, bucket):
        try:
            source = Source(db, shape, *row)
            runs.append(source.runs(source.directory["bucket"] == bucket))
            where.append(source.where)
        except Corrupt as error:
            damage.append(str(error))
    while True:
        try:
            return merge_runs(runs, where, shape.widths, keep_removed=False, most_bytes=run_bytes), damage
        except DamagedRuns as error:
            damage.append(str(error))
            del runs[error.source], where[error.source]


def known_of(sources: Sequence[Source], bucket: int, table: int, keys: U64, width: int) -> tuple[Bool, U8]:
    """Look keys up in a bucket's sources.

    Args:
        sources: the bucket's, newest first.
        bucket: the bucket.
        table: table id.
        keys: (N,) uint64.
        width: bytes of a record.

    Returns:
        (found (N,) bool, records (N, width) uint8; zeros where not found).
    """
    there, records = np.zeros(len(keys), np.bool_), np.zeros((len(keys), width), np.uint8)
    open_at = np.arange(len(keys))  # keys that no source has contained yet
    for source in sources:
        for entry in source.entries(bucket, table):
            known, removed = source.keys(entry)
            hit, at = find(known, keys[open_at])
            gone, _ = find(removed, keys[open_at])
            if hit.any():
                records[open_at[hit]] = source.records(entry, at[hit], width)
                there[open_at[hit]] = True
            open_at = open_at[~(hit | gone)]
        if not len(open_at):
            break
    return there, records


def picked_of_span(
    db: sqlite3.Connection, shape: Shape, buckets: I64, tables: U8, keys: U64
) -> Iterator[Run]:
    """Yield the rows of keys (N,) uint64, with tables (N,) uint8, of buckets (N,) int64 of one span."""
    since = read_since(db, shape)
    segments = segments_of(db, shape, shape.span_of(int(buckets[0])))
    for bucket in np.unique(buckets).tolist():
        bases = db.execute("SELECT id, directory FROM bases WHERE bucket = ?", (bucket,)).fetchall()
        sources = [source for source in segments if source.id > since[bucket]]
        sources += [Source(db, shape, "bases", *row) for row in bases]
        of_bucket = buckets == bucket
        for table in np.unique(tables[of_bucket]).tolist():
            wanted = keys[of_bucket & (tables == table)]
            there, records = known_of(sources, bucket, table, wanted, int(shape.widths[table]))
            yield Run(bucket, table, wanted[there], wanted[:0], records[there])


def rows_of(
    db: sqlite3.Connection, shape: Shape, buckets: Sequence[int], *, most_bytes: int, run_bytes: int
) -> tuple[int, RowRuns]:
    """Return (n, rows of the first n buckets).

    n is as many buckets of the first one's span as cost about `most_bytes` to read, at least one. Runs longer
    than `run_bytes` are split. Raises Corrupt.
    """
    span = shape.span_of(buckets[0])
    of_span = list(takewhile(lambda b: shape.span_of(b) == span, buckets))
    within = shape.buckets_of(span)
    costs = np.zeros(shape.buckets)
    sizes = "SELECT bucket, sum(bytes) FROM bases WHERE bucket >= ? AND bucket < ? GROUP BY bucket"
    for bucket, size in db.execute(sizes, (within.start, within.stop)):
        costs[bucket] = size
    since = read_since(db, shape)
    segments = segments_of(db, shape, span)
    alive = [source.id > since[source.directory["bucket"]] for source in segments]
    for source, live in zip(segments, alive, strict=True):
        costs += source.costs(live)
    n = max(1, int(np.searchsorted(np.cumsum(costs[of_span]), most_bytes, side="right")))
    wanted = np.zeros(shape.buckets, np.bool_)
    wanted[of_span[:n]] = True
    chosen = [
        (source, live & wanted[source.directory["bucket"]])
        for source, live in zip(segments, alive, strict=True)
    ]
    bases = [source for bucket in of_span[:n] for source in _bases(db, shape, bucket)]
    chosen += [(source, wanted[source.directory["bucket"]]) for source in bases]
    runs = [source.runs(mask) for source, mask in chosen]
    where = [source.where for source, _ in chosen]
    return n, merge_runs(runs, where, shape.widths, keep_removed=False, most_bytes=run_bytes)


def _bases(db: sqlite3.Connection, shape: Shape, bucket: int) -> list[Source]:
    rows = db.execute("SELECT id, directory, body FROM bases WHERE bucket = ?", (bucket,))
    return [Source(db, shape, "bases", *row) for row in rows.fetchall()]
