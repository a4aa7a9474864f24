"""Keeping reads of the SQLite row store short: small segments merged into larger ones, and those into bases.

A span holds at most some 16 segments of a level (a level's segment is 16 of the level below); when all of
them together outgrow half of the bases, buckets get new bases, those that waited longest first, a bounded
amount at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freshet.seams.rowstore.segments import Run, merge, pack
from freshet.seams.rowstore.sqlite_file import (
    PART_BYTES,
    Source,
    bucket_runs,
    insert_segment,
    sources,
    write_base,
)

__all__ = ["Shape", "compact_span", "crowded_levels", "full_spans", "merge_level"]

FAN_IN = 16
"""Segments of a level before they become one of the next."""

_SMALLEST_BYTES = 16 << 20
"""Spans with fewer bytes of segments are left to `merge_level`: else the bases of a small model, of which
every flush changes most rows, would be rewritten all the time. Worst case: 256 MiB more to read when buckets
are claimed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a store is cut: spans are equal runs of buckets."""

    path: Path
    buckets: int
    spans: int
    record_bytes: Mapping[int, int]

    def span_of(self, bucket: int) -> int:
        """Span of a bucket."""
        return bucket * self.spans // self.buckets

    def buckets_of(self, span: int) -> range:
        """Buckets of a span."""
        first = -(-span * self.buckets // self.spans)
        return range(first, -(-(span + 1) * self.buckets // self.spans))


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
    since = dict(db.execute("SELECT bucket, since FROM metas").fetchall())
    runs: dict[tuple[int, int], list[Run]] = {}
    for row_id, directory, body in rows:
        source = Source(db, shape.path, "segments", row_id, directory, body)
        for entry in source.entries():
            if row_id > since.get(entry.bucket, 0):
                runs.setdefault((entry.bucket, entry.table), []).append(source.run(entry, shape.record_bytes))
    db.executemany("DELETE FROM segments WHERE id = ?", ((row_id,) for row_id, *_ in rows))
    merged, packed = pack(merge(newest_first, keep_removed=True) for newest_first in runs.values())
    insert_segment(db, rows[0][0], span=span, level=level + 1, directory=merged, body=packed)
    return len(packed)


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
    waiting = db.execute(
        "SELECT bucket FROM metas WHERE bucket >= ? AND bucket < ? ORDER BY since, bucket",
        (buckets.start, buckets.stop),
    ).fetchall()
    written = 0
    for (bucket,) in waiting:
        if written >= budget:
            break
        runs = bucket_runs(sources(db, shape.path, bucket, span), bucket, shape.record_bytes)
        merged = [merge(newest_first, keep_removed=False) for _, newest_first in sorted(runs.items())]
        written += write_base(db, bucket, merged)
    db.execute(
        "DELETE FROM segments WHERE span = ? AND id <= "
        "(SELECT min(since) FROM metas WHERE bucket >= ? AND bucket < ?)",
        (span, buckets.start, buckets.stop),
    )
    return written
