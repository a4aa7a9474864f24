"""Speed of the SQLite row store: flushes of many rows over all buckets, scans, reads by key.

    python -m tests.perf.rowstore [--folder FOLDER] [--quick] [--json]

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

from freshet.seams.rowstore import StoreIdentity
from freshet.seams.rowstore.sqlite import SqliteRowStore
from freshet.types import Bucket, BucketDelta, BucketMeta, Fence, PackedRows, TimeMs
from tests.perf.report import Figures, command

BUCKETS, RECORD_BYTES, ROWS = 1024, 112, 400


def measure(quick: bool = False, folder: Path | None = None) -> Figures:
    """Microseconds a row of flushes and scans."""
    turns = 3 if quick else 6
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        store = SqliteRowStore(Path(temporary) / "rows.sqlite")
        meta = BucketMeta(Fence(0), 0, 0, dict.fromkeys(range(8), 0), 0, TimeMs(0))
        metas = {Bucket(b): meta for b in range(BUCKETS)}
        store.create(StoreIdentity("m", "h", BUCKETS, {"t": 0}, {0: RECORD_BYTES}, "log"), metas)
        flushes, empty = [], 0.0
        records = random.integers(0, 256, (ROWS, RECORD_BYTES), np.uint8)
        for i in range(turns + 1):
            count = ROWS if i < turns else 0
            deltas = []
            for bucket, old in metas.items():
                new = BucketMeta(Fence(0), old.seq + 1, 0, old.applied, 0, TimeMs(0))
                rows = PackedRows(0, np.unique(random.integers(0, 10 * ROWS, count, np.uint64)), records)
                rows = PackedRows(0, rows.keys, records[: len(rows.keys)])
                deltas.append(BucketDelta(bucket, old, new, [rows] if count else []))
                metas[bucket] = new
            total = sum(len(r.keys) for d in deltas for r in d.rows)
            begin = time.perf_counter()
            store.flush(deltas, fence=Fence(0))
            took = time.perf_counter() - begin
            if count:
                flushes.append(took / total * 1e6)
            else:
                empty = took
        begin = time.perf_counter()
        scanned = sum(len(piece.keys) for bucket in metas for piece in store.scan(bucket))
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


def main() -> None:
    """Measure and print."""
    command(measure, __doc__, {"folder": Path})


if __name__ == "__main__":
    main()
