"""File of the SQLite row store: its schema, segments of rows, and writes inside a transaction.

A bucket's rows are its base and the newer segments of its span. A segment's body is `RowRuns.body`; its
directory is that of the runs, followed by a CRC-32. If several runs of a table and bucket contain a key, the
newest one is valid. Replacing or compacting a bucket writes a new base and raises its `since`, the newest
segment that the base includes. A segment is deleted when no bucket needs it.

N keys, R runs, K buckets of a flush.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.rows.store import (
    StoreIdentity,
    identity_text,
    offsets_text,
    offsets_texts,
    parse_identity,
    parse_offsets,
)
from freshet.sqlite import FileFormat
from freshet.tables.runs import merge_runs
from freshet.types import (
    I64,
    ROW_FORMAT,
    RUN,
    U8,
    U64,
    Bool,
    Bucket,
    BucketMeta,
    Fence,
    Flush,
    RowRuns,
    TimeMs,
)

Directory = NDArray[np.void]
"""(R,) of RUN."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a directory: one run in a segment's body."""

    bucket: int
    table: int
    rows: int
    removed: int
    at: int
    keys_crc: int
    records_crc: int

    @property
    def keys_bytes(self) -> int:
        """Bytes of the keys and removed keys."""
        return 8 * (self.rows + self.removed)


def write_directory(runs: RowRuns) -> bytes:
    """Encode the directory of a segment that has the body of `runs`."""
    entries = runs.directory.copy()
    entries["at"] -= runs.start
    data = entries.tobytes()
    return data + zlib.crc32(data).to_bytes(4, "little")


def parse_directory(data: bytes, where: str) -> Directory:
    """Decode a directory; users must check its offsets. Raises Corrupt if it fails its CRC."""
    entries = data[:-4]
    if len(data) < 4 or len(entries) % RUN.itemsize or zlib.crc32(entries).to_bytes(4, "little") != data[-4:]:
        raise Corrupt(f"{where}: the directory of a segment fails its CRC; restore the store from a backup")
    return np.frombuffer(entries, RUN)


def read_keys(entry: Entry, data: bytes | memoryview, where: str) -> tuple[U64, U64]:
    """Decode (keys, removed keys), uint64, from a run's first `keys_bytes` bytes. Raises Corrupt."""
    if len(data) != entry.keys_bytes or zlib.crc32(data) != entry.keys_crc:
        raise Corrupt(f"{where}: keys of table {entry.table}, bucket {entry.bucket} fail their CRC")
    keys = np.frombuffer(data, "<u8")
    return keys[: entry.rows], keys[entry.rows :]


def gapped(runs: RowRuns, chosen: Bool) -> RowRuns:
    """Return the runs chosen by (R,) bool without copying the body; with gaps, so only for `merge_runs`."""
    directory = runs.directory[chosen]
    skipped = int(directory["at"][0]) - runs.start if len(directory) else 0
    return RowRuns(directory, runs.body[skipped:], runs.widths)


def parts_of(runs: RowRuns, most_bytes: int) -> Iterator[RowRuns]:
    """Yield slices of about `most_bytes`, at least one run each; longer runs are split first."""
    sizes = runs.sizes()
    if len(sizes) and sizes.max() > most_bytes:
        runs = merge_runs([runs], ["a flush"], runs.widths, keep_removed=True, most_bytes=most_bytes)
        sizes = runs.sizes()
    ends = np.cumsum(sizes)
    low, done = 0, 0
    while low < len(sizes):
        high = max(low + 1, int(np.searchsorted(ends, done + most_bytes, side="right")))
        yield runs.slice(low, high)
        low, done = high, int(ends[high - 1])


def find(keys: U64, wanted: U64) -> tuple[Bool, NDArray[np.intp]]:
    """Search (N,) uint64 keys in rising `keys`.

    Returns:
        (found (N,) bool, index (N,) intp; undefined where not found).
    """
    at = np.searchsorted(keys, wanted)
    if not len(keys):
        return np.zeros(len(wanted), np.bool_), at
    at = np.minimum(at, len(keys) - 1)
    return keys[at] == wanted, at


PART_BYTES = 32 << 20
"""Approximate size at which base parts and segments are split: far below SQLite's limit of 1 GB, and read in
some 10 ms."""

NO_STAMP = -(1 << 62)
"""Fence and seq of a bucket without a meta: lower, by more than one, than those of any flush."""

_META = "SELECT bucket, fence, seq, rows, applied, rows_offset, clock_ms, format FROM metas"

_FEW = 64
"""Up to this many metas are read by single queries, more by one scan."""

_WRITE_META = (
    "INSERT INTO metas (bucket, fence, seq, rows, applied, rows_offset, clock_ms, format) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (bucket) DO UPDATE SET fence = excluded.fence, "
    "seq = excluded.seq, rows = excluded.rows, applied = excluded.applied, "
    "rows_offset = excluded.rows_offset, clock_ms = excluded.clock_ms, format = excluded.format"
)

FORMAT = FileFormat(
    what="a row store",
    application_id=0x46525253,
    version=1,
    page_bytes=65536,
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


def write_segments(db: sqlite3.Connection, span: int, runs: RowRuns) -> int:
    """Append segments of a span; returns the bytes written."""
    for part in parts_of(runs, PART_BYTES):
        segment = next_segment(db)
        insert_segment(db, segment, span=span, level=0, directory=write_directory(part), body=part.body)
    return len(runs.body)


def insert_segment(
    db: sqlite3.Connection, segment: int, *, span: int, level: int, directory: bytes, body: U8
) -> None:
    """Write a segment under a given id; body: shape (bytes,) uint8, that of its runs."""
    db.execute(
        "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)", (segment, span, level, len(body), directory, body)
    )


def next_segment(db: sqlite3.Connection) -> int:
    """Return an id above those of all segments so far, including deleted ones."""
    ((segment,),) = db.execute("UPDATE last_segment SET id = id + 1 RETURNING id").fetchall()
    return int(segment)


def write_bases(db: sqlite3.Connection, buckets: Sequence[int], runs: RowRuns) -> int:
    """Replace the rows of these buckets; returns the bytes written."""
    one_by_one = [(bucket,) for bucket in buckets]
    db.executemany("DELETE FROM bases WHERE bucket = ?", one_by_one)
    db.executemany("UPDATE metas SET since = (SELECT id FROM last_segment) WHERE bucket = ?", one_by_one)
    db.executemany(
        "INSERT INTO bases (bucket, bytes, directory, body) VALUES (?, ?, ?, ?)",
        (
            (bucket, len(part.body), write_directory(part), part.body)
            for bucket in buckets
            for part in parts_of(runs.of_buckets(bucket, bucket + 1), PART_BYTES)
        ),
    )
    return len(runs.body)


def read_stamps(db: sqlite3.Connection, buckets: int) -> I64:
    """Return (buckets, 2) int64, the stored (fence, seq) of every bucket; NO_STAMP where there is none."""
    stamps = np.full((buckets, 2), NO_STAMP, np.int64)
    found = np.array(db.execute("SELECT bucket, fence, seq FROM metas").fetchall(), np.int64).reshape(-1, 3)
    stamps[found[:, 0]] = found[:, 1:]
    return stamps


def read_metas(db: sqlite3.Connection, path: Path, buckets: Sequence[Bucket]) -> dict[Bucket, BucketMeta]:
    """Return the meta of each bucket. Raises KeyError for an absent one."""
    rows: list[tuple[Any, ...]] = []
    if len(buckets) <= _FEW:
        for bucket in buckets:
            rows += db.execute(f"{_META} WHERE bucket = ?", (bucket,))
    else:
        wanted = set(buckets)
        rows = [row for row in db.execute(_META) if row[0] in wanted]
    found = {}
    for bucket, fence, seq, count, applied, rows_offset, clock_ms, fmt in rows:
        offsets = parse_offsets(applied, f"{path}: meta of bucket {bucket}")
        meta = BucketMeta(Fence(fence), seq, count, offsets, rows_offset, TimeMs(clock_ms), fmt)
        found[Bucket(bucket)] = meta
    missing = set(buckets) - set(found)
    if missing:
        raise KeyError(f"{path} has no bucket {min(missing)}")
    return found


def write_metas(db: sqlite3.Connection, metas: Mapping[Bucket, BucketMeta]) -> None:
    """Write metas without changing `since`."""
    db.executemany(
        _WRITE_META,
        (
            (bucket, m.fence, m.seq, m.rows, offsets_text(m.applied), m.rows_offset, m.clock_ms, m.format)
            for bucket, m in metas.items()
        ),
    )


def write_metas_of(db: sqlite3.Connection, flush: Flush, chosen: Bool) -> None:
    """Write the metas of a flush's buckets chosen by (K,) bool, without changing `since`."""
    columns = (flush.buckets, flush.fences, flush.seqs, flush.rows, flush.rows_offsets, flush.clocks_ms)
    buckets, fences, seqs, rows, rows_offsets, clocks_ms = (column[chosen].tolist() for column in columns)
    applied = offsets_texts(flush.applied[chosen])
    formats = [ROW_FORMAT] * len(buckets)
    values = (buckets, fences, seqs, rows, applied, rows_offsets, clocks_ms, formats)
    db.executemany(_WRITE_META, zip(*values, strict=True))


def read_identity(db: sqlite3.Connection, path: Path) -> StoreIdentity | None:
    """Return the identity of the store; None before its creation."""
    row = db.execute("SELECT json FROM identity").fetchone()
    if row is None:
        return None
    return parse_identity(row[0], path)


def write_identity(db: sqlite3.Connection, identity: StoreIdentity) -> None:
    """Write the identity of a new store."""
    db.execute("INSERT INTO identity VALUES (1, ?)", (identity_text(identity),))
