"""Speed of the SQLite row store: flushes of many rows over all buckets, scans, reads by key.

`python tests/perf/rowstore.py [FOLDER]`. Budget: a flush costs under 0.2 µs a row
(upserts by key cost 1.6 to 5.1).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from freshet.seams.rowstore import StoreIdentity
from freshet.seams.rowstore.sqlite import SqliteRowStore
from freshet.types import Bucket, BucketDelta, BucketMeta, Fence, PackedRows, TimeMs

BUCKETS, RECORD_BYTES, ROWS, FLUSHES = 1024, 112, 400, 6


def main() -> None:
    """Measure and print one JSON object; µs a row."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        store = SqliteRowStore(Path(folder) / "rows.sqlite")
        meta = BucketMeta(Fence(0), 0, 0, dict.fromkeys(range(8), 0), 0, TimeMs(0))
        metas = {Bucket(b): meta for b in range(BUCKETS)}
        store.create(StoreIdentity("m", "h", BUCKETS, {"t": 0}, {0: RECORD_BYTES}, "log"), metas)
        flushes, empty = [], 0.0
        records = random.integers(0, 256, (ROWS, RECORD_BYTES), np.uint8)
        for i in range(FLUSHES + 1):
            count = ROWS if i < FLUSHES else 0
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
    figures = {
        "flush_us_per_row": [round(x, 3) for x in flushes],
        "flush_of_no_rows_ms": round(empty * 1e3, 2),
        "scan_us_per_row": round(scan, 3),
        "read_of_4_keys_us": round(read, 1),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
