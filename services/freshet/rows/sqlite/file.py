"""What lies in the SQLite row store's file, and how its parts are written inside a transaction.

Replacing a bucket, or compacting it, writes a new base and raises its `since`, the segment up to which
segments do not count for it; a segment is deleted when no bucket needs it. `sources` reads them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freshet.rows.checks import (
    identity_text,
    offsets_text,
    offsets_texts,
    parse_identity,
    parse_offsets,
)
from freshet.rows.sqlite.segments import parts_of, write_directory
from freshet.rows.store import StoreIdentity
from freshet.sqlite import FileFormat
from freshet.types import (
    I64,
    ROW_FORMAT,
    U8,
    Bool,
    Bucket,
    BucketMeta,
    Fence,
    Flush,
    RowRuns,
    TimeMs,
)

__all__ = [
    "FORMAT",
    "NO_STAMP",
    "PART_BYTES",
    "insert_segment",
    "read_identity",
    "read_metas",
    "read_stamps",
    "write_bases",
    "write_identity",
    "write_metas",
    "write_metas_of",
    "write_segments",
]

PART_BYTES = 32 << 20
"""A base part or segment is cut at about this size: far below SQLite's limit of 1 GB, one read of some 10
ms."""

NO_STAMP = -(1 << 62)
"""Fence and seq of a bucket that has no meta: below, and one less than, any that is flushed."""

_META = "SELECT bucket, fence, seq, rows, applied, rows_offset, clock_ms, format FROM metas"

_FEW = 64
"""Up to this many metas are read one by one, more in one scan."""

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
    """Append segments of a span; returns bytes written."""
    for part in parts_of(runs, PART_BYTES):
        segment = next_segment(db)
        insert_segment(db, segment, span=span, level=0, directory=write_directory(part), body=part.body)
    return len(runs.body)


def insert_segment(
    db: sqlite3.Connection, segment: int, *, span: int, level: int, directory: bytes, body: U8
) -> None:
    """Write one segment under a chosen id."""
    db.execute(
        "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)", (segment, span, level, len(body), directory, body)
    )


def next_segment(db: sqlite3.Connection) -> int:
    """A number larger than any segment's so far, deleted ones included."""
    ((segment,),) = db.execute("UPDATE last_segment SET id = id + 1 RETURNING id").fetchall()
    return int(segment)


def write_bases(db: sqlite3.Connection, buckets: Sequence[int], runs: RowRuns) -> int:
    """Replace all that these buckets hold; returns bytes written."""
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
    """(buckets, 2) what flushes are compared by: (fence, seq) of every bucket; NO_STAMP where none is
    stored."""
    stamps = np.full((buckets, 2), NO_STAMP, np.int64)
    found = np.array(db.execute("SELECT bucket, fence, seq FROM metas").fetchall(), np.int64).reshape(-1, 3)
    stamps[found[:, 0]] = found[:, 1:]
    return stamps


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
        offsets = parse_offsets(applied, f"{path}: meta of bucket {bucket}")
        meta = BucketMeta(Fence(fence), seq, count, offsets, rows_offset, TimeMs(clock_ms), fmt)
        found[Bucket(bucket)] = meta
    missing = set(buckets) - set(found)
    if missing:
        raise KeyError(f"{path} has no bucket {min(missing)}")
    return found


def write_metas(db: sqlite3.Connection, metas: Mapping[Bucket, BucketMeta]) -> None:
    """Write metas, keeping each bucket's `since`."""
    db.executemany(
        _WRITE_META,
        (
            (bucket, m.fence, m.seq, m.rows, offsets_text(m.applied), m.rows_offset, m.clock_ms, m.format)
            for bucket, m in metas.items()
        ),
    )


def write_metas_of(db: sqlite3.Connection, flush: Flush, chosen: Bool) -> None:
    """Write the metas of a flush's chosen (K,) buckets, keeping each one's `since`."""
    columns = (flush.buckets, flush.fences, flush.seqs, flush.rows, flush.rows_offsets, flush.clocks_ms)
    buckets, fences, seqs, rows, rows_offsets, clocks_ms = (column[chosen].tolist() for column in columns)
    applied = offsets_texts(flush.applied[chosen])
    formats = [ROW_FORMAT] * len(buckets)
    values = (buckets, fences, seqs, rows, applied, rows_offsets, clocks_ms, formats)
    db.executemany(_WRITE_META, zip(*values, strict=True))


def read_identity(db: sqlite3.Connection, path: Path) -> StoreIdentity | None:
    """What the store is tied to; None if it was never created."""
    row = db.execute("SELECT json FROM identity").fetchone()
    if row is None:
        return None
    return parse_identity(row[0], path)


def write_identity(db: sqlite3.Connection, identity: StoreIdentity) -> None:
    """Tie the store to a model, for life."""
    db.execute("INSERT INTO identity VALUES (1, ?)", (identity_text(identity),))
