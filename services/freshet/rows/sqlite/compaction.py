"""Keeping reads of the SQLite row store short: small segments merged into larger ones, and those into bases.

A span holds at most some 16 segments of a level (a level's segment is 16 of the level below); when all of
them together outgrow half of the bases, buckets get new bases, those that waited longest first, a bounded
amount at a time.
"""

from __future__ import annotations

import sqlite3

from freshet.rows.sqlite.file import PART_BYTES, insert_segment, write_bases
from freshet.rows.sqlite.reads import Shape, Source, read_since, rows_of
from freshet.rows.sqlite.segments import write_directory
from freshet.tables.runs import merge_runs

__all__ = ["compact_span", "crowded_levels", "drop_dead_segments", "full_spans", "merge_level"]

FAN_IN = 16
"""Segments of a level before they become one of the next."""

_SMALLEST_BYTES = 16 << 20
"""Spans with fewer bytes of segments are left to `merge_level`: else the bases of a small model, of which
every flush changes most rows, would be rewritten all the time. Worst case: 256 MiB more to read when buckets
are claimed."""


def crowded_levels(db: sqlite3.Connection) -> list[tuple[int, int]]:
    """(span, level) of FAN_IN or more segments that fit into one, lower levels first."""
    return db.execute(
        "SELECT span, level FROM segments GROUP BY span, level "
        "HAVING count(*) >= ? AND sum(bytes) <= ? ORDER BY level",
        (FAN_IN, PART_BYTES),
    ).fetchall()


def merge_level(db: sqlite3.Connection, shape: Shape, span: int, level: int) -> int:
    """Merge a span's segments of a level into one of the next, in the caller's transaction; returns bytes
    written.

    It takes the largest id of those it replaces, so the order of segments stays what it was.
    """
    rows = db.execute(
        "SELECT id, directory, body FROM segments WHERE span = ? AND level = ? ORDER BY id DESC",
        (span, level),
    ).fetchall()
    since = read_since(db, shape)
    sources = [Source(db, shape, "segments", *row) for row in rows]
    merged = merge_runs(
        [source.runs(source.id > since[source.directory["bucket"]]) for source in sources],
        [source.where for source in sources],
        shape.widths,
        keep_removed=True,
        most_bytes=PART_BYTES,
    )
    db.executemany("DELETE FROM segments WHERE id = ?", ((source.id,) for source in sources))
    if len(merged.directory):
        directory, segment = write_directory(merged), sources[0].id
        insert_segment(db, segment, span=span, level=level + 1, directory=directory, body=merged.body)
    return len(merged.body)


def full_spans(db: sqlite3.Connection, shape: Shape) -> list[int]:
    """Spans whose segments exceed half of their bases."""
    bases = dict.fromkeys(range(shape.spans), 0)
    for bucket, size in db.execute("SELECT bucket, sum(bytes) FROM bases GROUP BY bucket"):
        bases[shape.span_of(bucket)] += size
    segments = db.execute("SELECT span, sum(bytes) FROM segments GROUP BY span").fetchall()
    return [span for span, size in segments if size > max(bases[span] // 2, _SMALLEST_BYTES)]


def compact_span(db: sqlite3.Connection, shape: Shape, span: int, budget: int) -> int:
    """Give buckets of a span new bases until about `budget` bytes are written, in the caller's transaction.

    Returns bytes written.
    """
    buckets = shape.buckets_of(span)
    rows = db.execute(
        "SELECT bucket FROM metas WHERE bucket >= ? AND bucket < ? ORDER BY since, bucket",
        (buckets.start, buckets.stop),
    ).fetchall()
    waiting = [bucket for (bucket,) in rows]
    written = 0
    while waiting and written < budget:
        most_bytes = min(PART_BYTES, budget - written)
        n, runs = rows_of(db, shape, waiting, most_bytes=most_bytes, run_bytes=PART_BYTES)
        written += write_bases(db, waiting[:n], runs)
        del waiting[:n]
    drop_dead_segments(db, shape, span)
    return written


def drop_dead_segments(db: sqlite3.Connection, shape: Shape, span: int) -> None:
    """Delete segments of a span that no bucket reads any more, in the caller's transaction."""
    buckets = shape.buckets_of(span)
    db.execute(
        "DELETE FROM segments WHERE span = ? AND id <= "
        "(SELECT min(since) FROM metas WHERE bucket >= ? AND bucket < ?)",
        (span, buckets.start, buckets.stop),
    )
