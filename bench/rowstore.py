"""Speed of the SQLite row store: flushes of many rows over all buckets, scans, reads by key.

    python -m bench.rowstore [--folder FOLDER] [--quick] [--json]

A flush is one transaction: bound by copying its blobs into SQLite's pages, the write-ahead log and one fsync
of the disk under FOLDER (default: that of temporary files). Budget: under 0.2 µs a row (upserts by key cost
1.6 to 5.1).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.report import Figures, command
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rows.store import StoreIdentity
from freshet.tables.runs import runs_of, widths_of
from freshet.types import Bucket, BucketMeta, Fence, Flush, Run, TimeMs

BUCKETS, PARTITIONS, RECORD_BYTES, ROWS = 1024, 8, 112, 400


def random_flush(random: np.random.Generator, most: int, *, seq: int) -> Flush:
    """Return a flush of about `most` random rows in each bucket."""
    records = random.integers(0, 256, (most, RECORD_BYTES), np.uint8)
    none = np.empty(0, np.uint64)
    runs = []
    for bucket in range(BUCKETS) if most else ():
        keys = np.unique(random.integers(0, 10 * ROWS, most, np.uint64))
        runs.append(Run(bucket, 0, keys, none, records[: len(keys)]))
    zeros = np.zeros(BUCKETS, np.int64)
    return Flush(
        buckets=np.arange(BUCKETS),
        fences=zeros,
        seqs=zeros + seq,
        rows=zeros,
        applied=np.zeros((BUCKETS, PARTITIONS), np.int64),
        rows_offsets=zeros,
        clocks_ms=zeros,
        runs=runs_of(runs, widths_of({0: RECORD_BYTES})),
    )


def measure(quick: bool = False, folder: Path | None = None) -> Figures:
    """Measure flushes, scans and reads by key."""
    turns = 3 if quick else 6
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        store = SqliteRowStore(Path(temporary) / "rows.sqlite")
        meta = BucketMeta(Fence(0), 0, 0, dict.fromkeys(range(PARTITIONS), 0), 0, TimeMs(0))
        metas = {Bucket(b): meta for b in range(BUCKETS)}
        store.create(StoreIdentity("m", "h", BUCKETS, {"t": 0}, {0: RECORD_BYTES}, "log"), metas)
        flushes, empty = [], 0.0
        for i in range(turns + 1):
            flush = random_flush(random, ROWS if i < turns else 0, seq=i + 1)
            begin = time.perf_counter()
            store.flush(flush)
            took = time.perf_counter() - begin
            if flush.runs.rows:
                flushes.append(took / flush.runs.rows * 1e6)
            else:
                empty = took
        begin = time.perf_counter()
        scanned = sum(piece.rows for piece in store.scan(list(metas)))
        scan = (time.perf_counter() - begin) / scanned * 1e6
        begin = time.perf_counter()
        for number in range(200):
            store.read(Bucket(number), 0, np.arange(4, dtype=np.uint64))
        read = (time.perf_counter() - begin) / 200 * 1e6
        store.close()
    return {
        "flush_us_per_row": statistics.median(flushes),
        "flush_us_per_row_worst": max(flushes),
        "flush_rows_per_s": 1e6 / statistics.median(flushes),
        "flush_of_no_rows_ms": empty * 1e3,
        "scan_us_per_row": scan,
        "read_of_4_keys_us": read,
    }


if __name__ == "__main__":
    command(measure, __doc__)
