"""The row store on SQLite: one file for several processes; a flush of many buckets is one transaction.

Rows are appended as sorted segments (under 0.2 µs a row) instead of upserted by key (1.6 to 5.1 µs a row).
Segments are merged after flushes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from freshet.errors import Corrupt, Fenced, Unavailable
from freshet.observability.skipped_state import skip
from freshet.rows.sqlite.file import (
    FORMAT,
    PART_BYTES,
    gapped,
    insert_segment,
    parts_of,
    read_identity,
    read_metas,
    read_stamps,
    write_bases,
    write_directory,
    write_identity,
    write_metas,
    write_metas_of,
    write_segments,
)
from freshet.rows.sqlite.reads import (
    Shape,
    Source,
    known_of,
    picked_of_span,
    read_since,
    rows_of,
    sound_of_bucket,
    sources_of_bucket,
)
from freshet.rows.store import FlushOutcome, Sound, StoreIdentity, check_flush, check_identity
from freshet.sqlite import BlobCounting, connect, folder_of, open_file, transaction, translated
from freshet.tables.runs import merge_runs, runs_of
from freshet.types import I64, U8, U64, Bool, Bucket, BucketMeta, Fence, Flush, RowRuns

# --- Compaction: small segments are merged into larger ones, and those into bases.
#
# A span has at most some 16 segments of a level; a segment is as large as 16 of the level below. Once a
# span's segments exceed half of its bases, buckets get new bases, those with the oldest base first, a
# bounded amount per flush.


FAN_IN = 16
"""Segments of a level that are merged into one of the next level."""

SMALLEST_BYTES = 16 << 20
"""Spans with fewer bytes of segments get no new bases. Otherwise a small model, of which most rows change
with every flush, would rewrite its bases all the time. Cost: at most 256 MiB more to read at a claim."""


def crowded_levels(db: sqlite3.Connection) -> list[tuple[int, int]]:
    """Return (span, level) with FAN_IN or more segments that fit into one, lower levels first."""
    return db.execute(
        "SELECT span, level FROM segments GROUP BY span, level "
        "HAVING count(*) >= ? AND sum(bytes) <= ? ORDER BY level",
        (FAN_IN, PART_BYTES),
    ).fetchall()


def merge_level(db: sqlite3.Connection, shape: Shape, span: int, level: int) -> int:
    """Merge a span's segments of a level into one of the next; returns the bytes written.

    Runs in the caller's transaction. The new segment gets the largest id of the merged ones, which keeps the
    order of segments.
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
    """Return the spans with segments that exceed half of their bases."""
    bases = dict.fromkeys(range(shape.spans), 0)
    for bucket, size in db.execute("SELECT bucket, sum(bytes) FROM bases GROUP BY bucket"):
        bases[shape.span_of(bucket)] += size
    segments = db.execute("SELECT span, sum(bytes) FROM segments GROUP BY span").fetchall()
    return [span for span, size in segments if size > max(bases[span] // 2, SMALLEST_BYTES)]


def compact_span(db: sqlite3.Connection, shape: Shape, span: int, budget: int) -> int:
    """Write new bases of a span's buckets up to about `budget` bytes; returns the bytes written.

    Runs in the caller's transaction.
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
    """Delete the segments of a span that no bucket needs, in the caller's transaction."""
    buckets = shape.buckets_of(span)
    db.execute(
        "DELETE FROM segments WHERE span = ? AND id <= "
        "(SELECT min(since) FROM metas WHERE bucket >= ? AND bucket < ?)",
        (span, buckets.start, buckets.stop),
    )


T = TypeVar("T")

SPANS = 16
"""Spans, and so the most segments of a flush: few enough that each is worth a write, many enough that a read
of one bucket skips most."""

SCAN_BYTES = 16 << 20
"""Approximate size of a scan's pieces."""

BLOBS_A_CONNECTION = 1000
"""Blobs that a connection opens before it is replaced (see `BlobCounting`): at most 88 kB of memory, and some
µs a blob."""

_WRITER_CACHE_KIB = 64 << 10
"""Page cache of the writing connection; with SQLite's default of 2 MiB compaction takes twice as long."""

LEAST_COMPACTION_BYTES = 8 << 20
COMPACTION_PER_FLUSHED_BYTE = 4
"""A new base costs up to 3 bytes per byte of merged segments; 4 keep up with any rate of flushes."""


def open_url(url: str) -> SqliteRowStore:
    """Open the store of `sqlite:/path/of/a/file`, which is created if absent."""
    return SqliteRowStore(folder_of(url))


class SqliteRowStore:
    """Row store in an SQLite file; see `RowStore`. Open it after a fork, in the child."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._known_shape: Shape | None = None
        self._closed = False
        self._damaged: set[int] = set()  # buckets to replace whole
        open_file(path, FORMAT)
        self._writer = self._connect_writer()
        self._reader = connect(path, FORMAT)

    def create(self, identity: StoreIdentity, starting: Mapping[Bucket, BucketMeta]) -> None:
        """Create the model's buckets, or check that the store is this model's; see `RowStore`.

        Raises ValueError if `starting` lacks a bucket.
        """
        if set(starting) != set(range(identity.buckets)):
            raise ValueError(f"starting metas must be those of buckets 0 to {identity.buckets - 1}")
        with self._writing("create the store") as db:
            found = read_identity(db, self._path)
            if found is None:
                write_identity(db, identity)
                write_metas(db, starting)
        if found is not None:
            check_identity(self._path, identity, found)

    def identity(self) -> StoreIdentity | None:
        """Return the identity of the store; None before `create`."""
        with self._reading() as db:
            return read_identity(db, self._path)

    def metas(self, buckets: Sequence[Bucket]) -> Mapping[Bucket, BucketMeta]:
        """Return the meta of each bucket."""
        with self._reading() as db:
            return read_metas(db, self._path, buckets)

    def claim(self, buckets: Sequence[Bucket], fence: Fence) -> Mapping[Bucket, BucketMeta]:
        """Write a higher fence into each bucket's meta and return the new metas.

        Raises Fenced, without a change, if a bucket has a higher fence.
        """
        with self._writing("claim buckets") as db:
            claimed = read_metas(db, self._path, buckets)
            for bucket, meta in claimed.items():
                if meta.fence > fence:
                    raise Fenced(
                        f"bucket {bucket} has fence {meta.fence}, above {fence}; nothing was claimed"
                    )
            claimed = {bucket: replace(meta, fence=fence) for bucket, meta in claimed.items()}
            write_metas(db, claimed)
        return claimed

    def scan(self, buckets: Sequence[Bucket]) -> Iterator[RowRuns]:
        """Yield all rows of these buckets; see `RowStore`."""
        shape = self._shape()
        left: list[int] = sorted(buckets)
        while left:
            with self._reading() as db:
                n, rows = rows_of(db, shape, left, most_bytes=SCAN_BYTES, run_bytes=SCAN_BYTES)
            yield from parts_of(rows, SCAN_BYTES)
            del left[:n]

    def scan_sound(self, bucket: Bucket) -> Sound:
        """Return the rows of a bucket without its damaged segments and bases."""
        shape = self._shape()
        with self._reading() as db:
            return Sound(*sound_of_bucket(db, shape, bucket, run_bytes=SCAN_BYTES))

    def read(self, bucket: Bucket, table: int, keys: U64) -> tuple[Bool, U8]:
        """Return (found (N,) bool, records (N, record_bytes) uint8) of keys (N,); zeros if absent."""
        shape = self._shape()
        width = shape.record_bytes[table]
        with self._reading() as db:
            return known_of(sources_of_bucket(db, shape, bucket), bucket, table, keys, width)

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Iterator[RowRuns]:
        """Yield rows by (N,) buckets, tables and keys, span by span; see `RowStore`."""
        shape = self._shape()
        spans = np.array([shape.span_of(bucket) for bucket in buckets.tolist()], np.int64)
        for span in np.unique(spans).tolist():
            of_span = spans == span
            with self._reading() as db:
                found = list(picked_of_span(db, shape, buckets[of_span], tables[of_span], keys[of_span]))
            yield runs_of(found, shape.widths)

    def flush(self, flush: Flush) -> U8:
        """Write a flush in one transaction; see `RowStore`."""
        shape = self._shape()
        check_flush(flush, shape.buckets, shape.widths)
        size = 0
        with self._writing("flush") as db:
            stored = read_stamps(db, shape.buckets)[flush.buckets]
            outcomes, written = decide(stored, flush)
            if self._damaged and not flush.whole:  # the owner then replaces the bucket, which ends the damage
                again = written & np.isin(flush.buckets, list(self._damaged))
                outcomes[again], written = FlushOutcome.REPLACE, written & ~again
            write_metas_of(db, flush, written)
            buckets = flush.buckets[written]
            runs = flush.runs if written.all() else _runs_of_buckets(flush.runs, buckets)
            if flush.whole:
                size = write_bases(db, buckets.tolist(), runs)
                self._damaged -= set(buckets.tolist())
            else:
                for span in range(shape.spans) if len(runs.directory) else ():
                    within = shape.buckets_of(span)
                    size += write_segments(db, span, runs.of_buckets(within.start, within.stop))
        if size:
            self._compact(shape, size)
        return outcomes

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._write_lock, self._read_lock:
            self._closed = True
            self._writer.close()
            self._reader.close()

    def _compact(self, shape: Shape, flushed: int) -> None:
        """Merge after a flush, in separate transactions; the next flush retries failures."""
        budget = max(LEAST_COMPACTION_BYTES, COMPACTION_PER_FLUSHED_BYTE * flushed)
        with contextlib.suppress(Unavailable):
            for span, level in self._query(crowded_levels):
                with self._damage_found(shape, span), self._writing("merge segments") as db:
                    merge_level(db, shape, span, level)
            for span in self._query(lambda db: full_spans(db, shape)):
                if budget > 0:
                    with self._damage_found(shape, span), self._writing("compact segments") as db:
                        budget -= compact_span(db, shape, span, budget)

    @contextlib.contextmanager
    def _damage_found(self, shape: Shape, span: int) -> Iterator[None]:
        """Record damaged buckets, so that their owner replaces them from memory with its next flush.

        The flush itself succeeds in spite of the damage.
        """
        try:
            yield
        except Corrupt as error:
            with self._writing("drop segments") as db:
                drop_dead_segments(db, shape, span)
            for bucket in map(Bucket, shape.buckets_of(span)):
                try:
                    for _ in self.scan([bucket]):
                        pass
                except Corrupt as damage:
                    self._damaged.add(bucket)
                    skip("row_page", f"{self._path}: bucket {bucket}", f"rewritten by its owner: {damage}")
            if not self._damaged:
                skip("row_page", str(self._path), str(error))

    def _shape(self) -> Shape:
        if self._known_shape is None:
            identity = self.identity()
            if identity is None:
                raise Unavailable(f"{self._path}: the store does not exist yet; its first owner creates it")
            spans = min(SPANS, identity.buckets)
            self._known_shape = Shape(self._path, identity.buckets, spans, dict(identity.record_bytes))
        return self._known_shape

    def _query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        with self._reading() as db:
            return query(db)

    @contextlib.contextmanager
    def _writing(self, doing: str) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            self._check_open()
            if self._writer.blobs >= BLOBS_A_CONNECTION:
                used, self._writer = self._writer, self._connect_writer()
                used.close()
            with transaction(self._writer, self._path, doing) as db:
                yield db

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Read from one snapshot of the file."""
        with self._read_lock:
            self._check_open()
            if self._reader.blobs >= BLOBS_A_CONNECTION:
                used, self._reader = self._reader, connect(self._path, FORMAT)
                used.close()
            with translated(self._path, "read"):
                self._reader.execute("BEGIN")
                try:
                    yield self._reader
                finally:
                    self._reader.execute("ROLLBACK")

    def _connect_writer(self) -> BlobCounting:
        writer = connect(self._path, FORMAT)
        writer.execute(f"PRAGMA cache_size=-{_WRITER_CACHE_KIB}")
        return writer

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._path}: the store was closed in this process")


def decide(stored: I64, flush: Flush) -> tuple[U8, Bool]:
    """Compare a flush with the stored (K, 2) int64 fences and seqs, as in PROTOCOL 11.

    Returns:
        (outcomes (K,) uint8, whether to write (K,) bool) of the flush's buckets.
    """
    fences, seqs = stored.T
    fenced, mine = fences > flush.fences, fences == flush.fences
    done = mine & (seqs == flush.seqs)
    write = ~fenced & ~done & (flush.whole | (mine & (seqs == flush.seqs - 1)))
    outcomes = np.full(len(flush), FlushOutcome.REPLACE, np.uint8)
    outcomes[done | write] = FlushOutcome.DONE
    outcomes[fenced] = FlushOutcome.FENCED
    return outcomes, write


def _runs_of_buckets(runs: RowRuns, buckets: I64) -> RowRuns:
    chosen = np.isin(runs.directory["bucket"], buckets)
    return merge_runs(
        [gapped(runs, chosen)], ["a flush"], runs.widths, keep_removed=True, most_bytes=PART_BYTES
    )
