"""What lies in the SQLite row store's file, and how its parts are read and written inside a transaction.

A bucket's rows are its base (parts of its own) and the segments of its span that are newer than `since`,
newest first. Replacing a bucket, or compacting it, writes a new base and raises `since`; a segment is
deleted when no bucket needs it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.seams.rowstore import StoreIdentity
from freshet.seams.rowstore.segments import Entry, Run, pack, parse_directory, read_keys, read_run
from freshet.seams.sqlite import FileFormat
from freshet.types import U8, U64, Bucket, BucketMeta, Fence, TimeMs

__all__ = [
    "FORMAT",
    "PART_BYTES",
    "Source",
    "Stamp",
    "bucket_runs",
    "insert_segment",
    "read_identity",
    "read_metas",
    "read_stamps",
    "sources",
    "write_base",
    "write_identity",
    "write_metas",
    "write_segment",
]

PART_BYTES = 32 << 20
"""A base part or segment is cut at about this size: far below SQLite's limit of 1 GB, one read of some 10
ms."""

Stamp = tuple[int, int]
"""(fence, seq): what a flush is compared by."""

_META = "SELECT bucket, fence, seq, rows, applied, rows_offset, clock_ms, format FROM metas"

_FEW = 64
"""Up to this many metas are read one by one, more in one scan."""

_SPARSE = 16
"""Records are read one by one if fewer than one in this many are wanted."""

FORMAT = FileFormat(
    what="a row store",
    application_id=0x46525253,
    version=1,
    page_bytes=16384,
    schema="""
CREATE TABLE identity (one INTEGER PRIMARY KEY CHECK (one = 1), json TEXT NOT NULL);
CREATE TABLE metas (bucket INTEGER PRIMARY KEY, fence INTEGER NOT NULL, seq INTEGER NOT NULL, rows INTEGER
NOT NULL,
                    applied TEXT NOT NULL, rows_offset INTEGER NOT NULL, clock_ms INTEGER NOT NULL,
                    format INTEGER NOT NULL, since INTEGER NOT NULL DEFAULT 0);
CREATE TABLE bases (id INTEGER PRIMARY KEY, bucket INTEGER NOT NULL, bytes INTEGER NOT NULL, directory BLOB
NOT NULL,
                    body BLOB NOT NULL);
CREATE INDEX bases_of_bucket ON bases (bucket, bytes);
CREATE TABLE segments (id INTEGER PRIMARY KEY, span INTEGER NOT NULL, level INTEGER NOT NULL, bytes INTEGER
NOT NULL,
                       directory BLOB NOT NULL, body BLOB NOT NULL);
CREATE INDEX segments_of_span ON segments (span, level, bytes);
CREATE TABLE last_segment (one INTEGER PRIMARY KEY CHECK (one = 1), id INTEGER NOT NULL);
INSERT INTO last_segment VALUES (1, 0);
""",
)


class Source:
    """One blob of runs: a base part or a segment, read piece by piece, or from a body that was read whole.

    Who wants all of it reads it whole: a connection of CPython's keeps 80 bytes for each blob it ever opened,
    until it is closed.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        path: Path,
        table: str,
        row_id: int,
        directory: bytes,
        body: bytes | None = None,
    ) -> None:
        self._db, self._table, self._id, self._body = db, table, row_id, body
        self.where = f"{path}: {table} {row_id}"
        self._directory = parse_directory(directory, self.where)

    def entries(self, bucket: int | None = None, table: int | None = None) -> list[Entry]:
        """Entries of a bucket and table, or of all."""
        chosen = self._directory
        if bucket is not None:
            low, high = np.searchsorted(chosen["bucket"], [bucket, bucket + 1])
            chosen = chosen[low:high]
        if table is not None:
            chosen = chosen[chosen["table"] == table]
        return [Entry(*entry) for entry in chosen.tolist()]

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the body. Raises Corrupt if it is shorter."""
        if self._body is not None:
            return self._part(self._body, at, size)
        with self._db.blobopen(self._table, "body", self._id, readonly=True) as blob:
            self._check(at + size, len(blob))
            blob.seek(at)
            return blob.read(size)

    def _part(self, body: bytes, at: int, size: int) -> bytes:
        self._check(at + size, len(body))
        return body[at : at + size]

    def _check(self, wanted: int, found: int) -> None:
        if wanted > found:
            raise Corrupt(f"{self.where}: expected at least {wanted} bytes, found {found}")

    def keys(self, entry: Entry) -> tuple[U64, U64]:
        """(keys, removed keys) of a run, checked."""
        return read_keys(entry, self.read(entry.at, entry.keys_bytes), self.where)

    def records(self, entry: Entry, rows: NDArray[np.intp], width: int) -> U8:
        """(len(rows), width) some records of a run; they are not checked one by one."""
        start = entry.at + entry.keys_bytes
        if len(rows) * _SPARSE >= entry.rows:
            whole = np.frombuffer(self.read(start, entry.rows * width), np.uint8)
            return whole.reshape(entry.rows, width)[rows]
        pieces = [self.read(start + int(row) * width, width) for row in rows]
        return np.frombuffer(b"".join(pieces), np.uint8).reshape(len(rows), width)

    def run(self, entry: Entry, record_bytes: Mapping[int, int]) -> Run:
        """One run, checked."""
        if entry.table not in record_bytes:
            raise Corrupt(f"{self.where}: rows of table {entry.table}, which the store does not have")
        size = entry.keys_bytes + entry.rows * record_bytes[entry.table]
        return read_run(entry, self.read(entry.at, size), record_bytes, self.where)


def sources(db: sqlite3.Connection, path: Path, bucket: int, span: int) -> list[Source]:
    """What holds rows of a bucket, newest first."""
    rows = db.execute(
        "SELECT id, directory FROM segments WHERE span = ? "
        "AND id > (SELECT since FROM metas WHERE bucket = ?) ORDER BY id DESC",
        (span, bucket),
    ).fetchall()
    bases = db.execute("SELECT id, directory FROM bases WHERE bucket = ?", (bucket,)).fetchall()
    return [Source(db, path, "segments", *row) for row in rows] + [
        Source(db, path, "bases", *r) for r in bases
    ]


def bucket_runs(
    newest_first: Sequence[Source], bucket: int, record_bytes: Mapping[int, int]
) -> dict[int, list[Run]]:
    """{table: runs of the bucket, newest first}."""
    found: dict[int, list[Run]] = {}
    for source in newest_first:
        for entry in source.entries(bucket):
            found.setdefault(entry.table, []).append(source.run(entry, record_bytes))
    return found


def write_segment(db: sqlite3.Connection, span: int, runs: Iterable[Run]) -> int:
    """Append segments of a span; returns bytes written."""
    written = 0
    for part in parts_of(runs):
        directory, body = pack(part)
        insert_segment(db, next_segment(db), span=span, level=0, directory=directory, body=body)
        written += len(body)
    return written


def insert_segment(
    db: sqlite3.Connection, segment: int, *, span: int, level: int, directory: bytes, body: bytes
) -> None:
    """Write one segment under a chosen id."""
    db.execute(
        "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)", (segment, span, level, len(body), directory, body)
    )


def next_segment(db: sqlite3.Connection) -> int:
    """A number larger than any segment's so far, deleted ones included."""
    ((segment,),) = db.execute("UPDATE last_segment SET id = id + 1 RETURNING id").fetchall()
    return int(segment)


def write_base(db: sqlite3.Connection, bucket: int, runs: Iterable[Run]) -> int:
    """Replace all that a bucket holds; returns bytes written."""
    db.execute("DELETE FROM bases WHERE bucket = ?", (bucket,))
    db.execute("UPDATE metas SET since = (SELECT id FROM last_segment) WHERE bucket = ?", (bucket,))
    written = 0
    for part in parts_of(runs):
        directory, body = pack(part)
        db.execute(
            "INSERT INTO bases (bucket, bytes, directory, body) VALUES (?, ?, ?, ?)",
            (bucket, len(body), directory, body),
        )
        written += len(body)
    return written


def parts_of(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Group runs to about PART_BYTES; a longer run is cut."""
    part: list[Run] = []
    size = 0
    for run in runs:
        for piece in _cut(run):
            if part and size + piece.size > PART_BYTES:
                yield part
                part, size = [], 0
            part.append(piece)
            size += piece.size
    if part:
        yield part


def _cut(run: Run) -> Iterator[Run]:
    pieces = max(1, -(-run.size // PART_BYTES))
    if pieces == 1:
        if len(run.keys) or len(run.removed):
            yield run
        return
    cuts = zip(
        np.array_split(run.keys, pieces),
        np.array_split(run.removed, pieces),
        np.array_split(run.records, pieces),
        strict=True,
    )
    for keys, removed, records in cuts:
        yield Run(run.bucket, run.table, keys, removed, records)


def read_stamps(db: sqlite3.Connection) -> dict[int, Stamp]:
    """{bucket: (fence, seq)} of every bucket."""
    rows = db.execute("SELECT bucket, fence, seq FROM metas")
    return {bucket: (fence, seq) for bucket, fence, seq in rows}


def read_metas(db: sqlite3.Connection, path: Path, buckets: Sequence[Bucket]) -> dict[Bucket, BucketMeta]:
    """Meta of each bucket. Raises KeyError for one that is not there."""
    rows: list[tuple[Any, ...]] = []
    if len(buckets) <= _FEW:
        for bucket in buckets:
            rows += db.execute(f"{_META} WHERE bucket = ?", (bucket,))
    else:
        wanted = set(buckets)
        rows = [row for row in db.execute(_META) if row[0] in wanted]
    found = {}
    for bucket, fence, seq, count, applied, rows_offset, clock_ms, fmt in rows:
        try:
            offsets = {int(partition): int(offset) for partition, offset in orjson.loads(applied).items()}
        except (orjson.JSONDecodeError, AttributeError, ValueError, TypeError) as error:
            raise Corrupt(
                f"{path}: meta of bucket {bucket}: expected offsets in JSON, found {applied!r}"
            ) from error
        meta = BucketMeta(Fence(fence), seq, count, offsets, rows_offset, TimeMs(clock_ms), fmt)
        found[Bucket(bucket)] = meta
    missing = set(buckets) - set(found)
    if missing:
        raise KeyError(f"{path} has no bucket {min(missing)}")
    return found


def write_metas(db: sqlite3.Connection, metas: Mapping[Bucket, BucketMeta]) -> None:
    """Write metas, keeping each bucket's `since`."""
    db.executemany(
        "INSERT INTO metas (bucket, fence, seq, rows, applied, rows_offset, clock_ms, format) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (bucket) DO UPDATE SET fence = excluded.fence, "
        "seq = excluded.seq, rows = excluded.rows, applied = excluded.applied, "
        "rows_offset = excluded.rows_offset, clock_ms = excluded.clock_ms, format = excluded.format",
        (
            (bucket, m.fence, m.seq, m.rows, _offsets(m), m.rows_offset, m.clock_ms, m.format)
            for bucket, m in metas.items()
        ),
    )


def _offsets(meta: BucketMeta) -> str:
    return orjson.dumps({str(p): int(o) for p, o in meta.applied.items()}).decode()


def read_identity(db: sqlite3.Connection, path: Path) -> StoreIdentity | None:
    """What the store is tied to; None if it was never created."""
    row = db.execute("SELECT json FROM identity").fetchone()
    if row is None:
        return None
    try:
        record = orjson.loads(row[0])
        record["record_bytes"] = {int(table): size for table, size in record["record_bytes"].items()}
        return StoreIdentity(**record)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{path}: expected the store's identity in JSON, found {row[0]!r}") from error


def write_identity(db: sqlite3.Connection, identity: StoreIdentity) -> None:
    """Tie the store to a model, for life."""
    text = orjson.dumps(asdict(identity), option=orjson.OPT_NON_STR_KEYS).decode()
    db.execute("INSERT INTO identity VALUES (1, ?)", (text,))
