"""The row store on SQLite: one file, shared by several processes; a flush of many buckets is one transaction.

Rows are not upserted by key (1.6 to 5.1 µs a row) but appended as segments, sorted blobs (under 0.2 µs a
row), which are merged behind the flush; see `compact`.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from freshet.errors import Fenced, Mismatch, Unavailable
from freshet.seams.rowstore import FlushOutcome, StoreIdentity
from freshet.seams.rowstore.compact import Shape, compact_span, crowded_levels, full_spans, merge_level
from freshet.seams.rowstore.segments import Run, find, make_run, merge
from freshet.seams.rowstore.sqlite_file import (
    FORMAT,
    Stamp,
    bucket_runs,
    read_identity,
    read_metas,
    read_stamps,
    sources,
    write_base,
    write_identity,
    write_metas,
    write_segment,
)
from freshet.seams.sqlite import connect, folder_of, open_file, transaction, translated
from freshet.types import U8, U64, Bool, Bucket, BucketDelta, BucketMeta, Fence, PackedRows

__all__ = ["SqliteRowStore", "decide", "open_url"]

Answer = TypeVar("Answer")

SPANS = 16
"""Segments a flush writes at most: few enough that each is worth a write, enough that a bucket's reader
skips most."""

SCAN_BYTES = 16 << 20
"""Pieces of a scan are at most about this size."""

_WRITER_CACHE_KIB = 64 << 10
"""Page cache of the writing connection: with SQLite's 2 MiB, compaction takes twice as long."""

_LEAST_COMPACTION_BYTES = 8 << 20
_COMPACTION_PER_FLUSHED_BYTE = 4
"""A new base costs up to 3 bytes for each byte of segments it takes up; 4 let it catch up with any flush
rate."""


def open_url(url: str) -> SqliteRowStore:
    """Open the store of `sqlite:/path/of/a/file`, which is made if it is not there."""
    return SqliteRowStore(folder_of(url))


class SqliteRowStore:
    """See `freshet.seams.rowstore.RowStore`. Do not carry it across a fork: open it in the child."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._known_shape: Shape | None = None
        self._closed = False
        open_file(path, FORMAT)
        self._writer = connect(path, FORMAT)
        self._writer.execute(f"PRAGMA cache_size=-{_WRITER_CACHE_KIB}")
        self._reader = connect(path, FORMAT)

    def create(self, identity: StoreIdentity, starting: Mapping[Bucket, BucketMeta]) -> None:
        """Create the model's buckets with their starting offsets, or check that they are this model's."""
        if set(starting) != set(range(identity.buckets)):
            raise ValueError(f"starting metas must be those of buckets 0 to {identity.buckets - 1}")
        with self._writing("create the store") as db:
            found = read_identity(db, self._path)
            if found is None:
                write_identity(db, identity)
                write_metas(db, starting)
        if found is not None:
            _check_identity(self._path, identity, found)

    def identity(self) -> StoreIdentity | None:
        """What the store is tied to; None if it was never created."""
        with self._reading() as db:
            return read_identity(db, self._path)

    def metas(self, buckets: Sequence[Bucket]) -> Mapping[Bucket, BucketMeta]:
        """Meta of each bucket."""
        with self._reading() as db:
            return read_metas(db, self._path, buckets)

    def claim(self, buckets: Sequence[Bucket], fence: Fence) -> Mapping[Bucket, BucketMeta]:
        """Write a higher fence into each bucket's meta, or none of them, and return the metas as they then
        are."""
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

    def scan(self, bucket: Bucket) -> Iterator[PackedRows]:
        """All rows of a bucket, in pieces of bounded size, each row once, newest state."""
        shape = self._shape()
        with self._reading() as db:
            found = sources(db, self._path, bucket, shape.span_of(bucket))
            runs = bucket_runs(found, bucket, shape.record_bytes)
        for table, newest_first in sorted(runs.items()):
            merged = merge(newest_first, keep_removed=False)
            step = max(1, SCAN_BYTES // (shape.record_bytes[table] + 8))
            for start in range(0, len(merged.keys), step):
                yield PackedRows(
                    table, merged.keys[start : start + step], merged.records[start : start + step]
                )

    def read(self, bucket: Bucket, table: int, keys: U64) -> tuple[Bool, U8]:
        """Rows by key: (found (N,), records (N, record_bytes); zeros where not found)."""
        shape = self._shape()
        width = shape.record_bytes[table]
        there = np.zeros(len(keys), np.bool_)
        records = np.zeros((len(keys), width), np.uint8)
        open_at = np.arange(len(keys))  # where no source has said anything yet
        with self._reading() as db:
            for source in sources(db, self._path, bucket, shape.span_of(bucket)):
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

    def flush(self, deltas: Sequence[BucketDelta], *, fence: Fence) -> Mapping[Bucket, FlushOutcome]:
        """Write changed rows, removed keys and `meta` of many buckets, all in one transaction."""
        shape = self._shape()
        runs = {delta.bucket: self._runs(delta, fence, shape) for delta in deltas}
        outcomes: dict[Bucket, FlushOutcome] = {}
        written: dict[Bucket, BucketMeta] = {}
        by_span: dict[int, list[Run]] = {}
        size = 0
        with self._writing("flush") as db:
            stored = read_stamps(db)
            for delta in deltas:
                outcomes[delta.bucket], write = decide(stored.get(delta.bucket), delta, fence)
                if not write:
                    continue
                written[delta.bucket] = delta.meta
                if not delta.whole:
                    by_span.setdefault(shape.span_of(delta.bucket), []).extend(runs[delta.bucket])
            write_metas(db, written)
            for delta in deltas:
                if delta.whole and delta.bucket in written:
                    size += write_base(db, delta.bucket, runs[delta.bucket])
            for span, changed in by_span.items():
                size += write_segment(db, span, sorted(changed, key=lambda r: (r.bucket, r.table)))
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
        """Merge behind a flush, in transactions of their own. Its failures are the next flush's to try
        again."""
        budget = max(_LEAST_COMPACTION_BYTES, _COMPACTION_PER_FLUSHED_BYTE * flushed)
        with contextlib.suppress(Unavailable):
            for span, level in self._ask(crowded_levels):
                with self._writing("merge segments") as db:
                    merge_level(db, shape, span, level)
            for span in self._ask(lambda db: full_spans(db, shape)):
                if budget > 0:
                    with self._writing("compact segments") as db:
                        budget -= compact_span(db, shape, span, budget)

    def _runs(self, delta: BucketDelta, fence: Fence, shape: Shape) -> list[Run]:
        if delta.meta.fence != fence:
            raise ValueError(f"bucket {delta.bucket}: meta of fence {delta.meta.fence} flushed under {fence}")
        removed = dict(delta.removed)
        changed = {packed.table: packed for packed in delta.rows}
        if len(changed) != len(delta.rows) or len(removed) != len(delta.removed):
            raise ValueError(f"bucket {delta.bucket}: a table is given twice in one flush")
        runs = []
        for table in sorted({*changed, *removed}):
            width = shape.record_bytes[table]
            rows = changed.get(table, PackedRows(table, _NO_KEYS, np.empty((0, width), np.uint8)))
            if rows.records.shape != (len(rows.keys), width):
                raise ValueError(
                    f"table {table}: expected records of shape ({len(rows.keys)}, {width}), "
                    f"found {rows.records.shape}"
                )
            gone = _NO_KEYS if delta.whole else removed.get(table, _NO_KEYS)
            runs.append(make_run(delta.bucket, table, rows.keys, gone, rows.records))
        return runs

    def _shape(self) -> Shape:
        if self._known_shape is None:
            identity = self.identity()
            if identity is None:
                raise Unavailable(f"{self._path}: the store was not created yet; its first owner does that")
            spans = min(SPANS, identity.buckets)
            self._known_shape = Shape(self._path, identity.buckets, spans, dict(identity.record_bytes))
        return self._known_shape

    def _ask(self, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
        with self._reading() as db:
            return question(db)

    @contextlib.contextmanager
    def _writing(self, doing: str) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            self._check_open()
            with transaction(self._writer, self._path, doing) as db:
                yield db

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One snapshot of the file."""
        with self._read_lock:
            self._check_open()
            with translated(self._path, "read"):
                self._reader.execute("BEGIN")
                try:
                    yield self._reader
                finally:
                    self._reader.execute("ROLLBACK")

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._path}: the store was closed in this process")


_NO_KEYS: U64 = np.empty(0, np.uint64)


def decide(stored: Stamp | None, delta: BucketDelta, fence: Fence) -> tuple[FlushOutcome, bool]:
    """(outcome, whether to write) of one bucket's flush: compare-and-set on (fence, seq), PROTOCOL 11."""
    previous = delta.previous
    if stored is None:
        fresh = delta.whole or previous is None
        return (FlushOutcome.DONE, True) if fresh else (FlushOutcome.REPLACE, False)
    if stored[0] > fence:
        return FlushOutcome.FENCED, False
    if stored == (delta.meta.fence, delta.meta.seq):
        return FlushOutcome.DONE, False
    if delta.whole or (previous and stored == (previous.fence, previous.seq)):
        return FlushOutcome.DONE, True
    return FlushOutcome.REPLACE, False


def _check_identity(path: Path, expected: StoreIdentity, found: StoreIdentity) -> None:
    lines = []
    for field in fields(StoreIdentity):
        wanted, stored = getattr(expected, field.name), getattr(found, field.name)
        if isinstance(wanted, Mapping):
            for key in sorted({*wanted, *stored}, key=str):
                if wanted.get(key) != stored.get(key):
                    lines.append(
                        f"  {field.name}.{key}: expected {wanted.get(key)!r}, found {stored.get(key)!r}"
                    )
        elif wanted != stored:
            lines.append(f"  {field.name}: expected {wanted!r}, found {stored!r}")
    if lines:
        raise Mismatch(
            "\n".join(
                [
                    f"{path}: the row store belongs to another model, spec or log:",
                    *lines,
                    "  identity keys are fixed for a model's life: take another model name, or run folder",
                ]
            )
        )
