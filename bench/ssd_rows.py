"""Rows on a local disk, beside rows in memory and beside RocksDB.

    python -m bench.ssd_rows [--rows 20000000] [--share 0.1] [--ids 26] [--folder build] [--quick] [--json]

Batches of 2048 samples whose ids are drawn by Zipf's law (1.05) over all rows: each is looked up, then
pushed, by two threads with a partition each. Rows are vectors of 16 in fp32 with row-wise Adagrad. `memory`
holds all rows; `ssd` may take a share of those bytes, past the page cache; `rocksdb` has the same bytes as
block cache and write buffers, reads and writes the same unique keys (`MultiGet`, `Write` without a log,
direct I/O), and computes nothing. It needs `pip install rocksdict`, and is left out without.

Bound by the disk: a row that is not in memory costs a read of one page of 4 KiB.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Figures, command
from bench.table import BUCKETS, mixed, planned, seconds
from bench.table_sizes import vectors, zipf
from freshet.config.spec.layout import Layout
from freshet.tables import Store
from freshet.types import U64, OffsetRange

SAMPLES, LANES, FILL = 2048, 2, 100_000
ROUNDS, BATCHES = 4, 30  # of a round and thread; the first round warms up


def keys_of(first: int, last: int) -> U64:
    """Return the keys of rows `first` up to `last`."""
    return mixed(np.arange(first, last, dtype=np.uint64))


def of_store(rows: int, ids: int, folder: Path | None, memory_bytes: int, batches: int) -> Figures:
    """Measure a store that holds all rows in memory, or `memory_bytes` of them."""
    store = Store(Layout((vectors(),), ()), buckets=BUCKETS, partitions=LANES, seed=0, changes=False)
    if folder is not None:
        store.native.keep_cold(str(folder), memory_bytes, 0)
    offsets = [0] * LANES
    gradient = np.full((FILL, 16), 0.01, np.float32)

    def push(lane: int, keys: U64) -> None:
        batch = planned(keys)
        span = OffsetRange(lane, offsets[lane], offsets[lane] + 1)
        store.push([span], offsets[lane], [batch], [gradient[: len(batch.keys)]])
        offsets[lane] += 1

    began = time.perf_counter()
    for first in range(0, rows, FILL):
        push(0, keys_of(first, min(first + FILL, rows)))
    figures: Figures = {"fill_rows_per_s": rows / (time.perf_counter() - began)}
    draws = [np.random.default_rng(lane) for lane in range(LANES)]
    out = np.empty((LANES, FILL, 16), np.float32)

    def work(lane: int) -> None:
        for _ in range(batches):
            keys = mixed(zipf(draws[lane], SAMPLES * ids, rows))
            batch = planned(keys)
            store.lookup(0, batch, out[lane, : len(batch.keys)])
            push(lane, keys)

    best = 0.0
    for _ in range(ROUNDS):
        before = store.ssd_rows()
        best = LANES * batches * SAMPLES / seconds(work, LANES)
    after = store.ssd_rows()
    figures |= {
        "samples_per_s": best,  # of the last round
        "memory_bytes_per_row": store.memory_bytes / rows,
        "disk_bytes_per_row": after.bytes_in_use / rows,
        "fetched_per_sample": (after.fetched - before.fetched) / (LANES * batches * SAMPLES),
        "pages_read_per_sample": (after.pages_read - before.pages_read) / (LANES * batches * SAMPLES),
        "pages_written_per_sample": (after.pages_written - before.pages_written)
        / (LANES * batches * SAMPLES),
    }
    return figures


def of_rocksdb(rows: int, ids: int, folder: Path, memory_bytes: int, batches: int) -> Figures:
    """Measure reads and writes of the same keys in RocksDB, whose values have the bytes of a row."""
    rocks: Any = importlib.import_module("rocksdict")
    options, table, writes = rocks.Options(raw_mode=True), rocks.BlockBasedOptions(), rocks.WriteOptions()
    options.create_if_missing(True)
    options.increase_parallelism(LANES)
    options.set_use_direct_reads(True)
    options.set_use_direct_io_for_flush_and_compaction(True)
    options.set_write_buffer_size(memory_bytes // 8)
    options.set_compression_type(rocks.DBCompressionType.none())
    table.set_block_cache(rocks.Cache(memory_bytes * 3 // 4))
    table.set_bloom_filter(10, False)
    table.set_cache_index_and_filter_blocks(True)
    options.set_block_based_table_factory(table)
    writes.disable_wal = True
    db = rocks.Rdict(str(folder / "rocks"), options)
    db.set_write_options(writes)
    value = bytes(76)

    def write(keys: list[bytes]) -> None:
        batch = rocks.WriteBatch(raw_mode=True)
        for key in keys:
            batch.put(key, value)
        db.write(batch)

    def encoded(keys: U64) -> list[bytes]:
        data = np.unique(keys).astype(">u8").tobytes()
        return [data[at : at + 8] for at in range(0, len(data), 8)]

    began = time.perf_counter()
    for first in range(0, rows, FILL):
        write(encoded(keys_of(first, min(first + FILL, rows))))
    figures: Figures = {"fill_rows_per_s": rows / (time.perf_counter() - began)}
    draws = [np.random.default_rng(lane) for lane in range(LANES)]

    def work(lane: int) -> None:
        for _ in range(batches):
            keys = encoded(mixed(zipf(draws[lane], SAMPLES * ids, rows)))
            assert None not in db[keys]
            write(keys)

    db.compact_range(None, None)
    for _ in range(ROUNDS):
        figures["samples_per_s"] = LANES * batches * SAMPLES / seconds(work, LANES)
    db.close()
    return figures


def measure(
    quick: bool = False, rows: int = 20_000_000, share: float = 0.1, ids: int = 26, folder: str = "build"
) -> Figures:
    """Measure all three, one after the other."""
    rows = min(rows, 1_000_000) if quick else rows
    figures: Figures = {"memory": of_store(rows, ids, None, 0, BATCHES)}
    memory_bytes = int(figures["memory"]["memory_bytes_per_row"] * rows * share)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        figures["ssd"] = of_store(rows, ids, Path(name), memory_bytes, BATCHES)
        if importlib.util.find_spec("rocksdict") is not None:
            figures["rocksdb"] = of_rocksdb(rows, ids, Path(name), memory_bytes, BATCHES)
            figures["ssd_of_rocksdb"] = figures["ssd"]["samples_per_s"] / figures["rocksdb"]["samples_per_s"]
    figures["ssd_of_memory"] = figures["ssd"]["samples_per_s"] / figures["memory"]["samples_per_s"]
    return {**figures, "rows": rows, "share": share, "ids": ids}


if __name__ == "__main__":
    command(measure, __doc__)
