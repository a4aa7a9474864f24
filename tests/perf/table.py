"""Speed of the parameter table: plan, lookup, row-wise Adagrad; `python -m tests.perf.table [resident rows]`.

Rows are those of the default model: two scalars and a vector of 16, 128 bytes. Keys of a batch are unique and
drawn uniformly over the resident rows, the worst case for the caches. Prints medians of repeated runs.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from freshet._native import instruction_set
from freshet.tables import Plan, Store
from freshet.types import F32, U64, OffsetRange
from tests.unit.tables.building import BatchKeys, group, hedge_group, rule, store_of

BUCKETS = 1024
FEATURES = 26


def mixed(numbers: U64) -> U64:
    """Well spread keys, none 0."""
    x = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(32)
    return x * np.uint64(0xD6E8FEB86659FD93)


def planned(keys: U64) -> BatchKeys:
    plan = Plan(tables=np.zeros(1, np.uint8), buckets=BUCKETS)
    plan.build(keys, np.array([0, len(keys)], np.uint32))
    return BatchKeys(0, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy(), plan.keys)


def seconds(run: Callable[[int], None], threads: int) -> float:
    """Wall time of `run(thread)` on so many threads at once."""
    workers = [threading.Thread(target=run, args=(t,)) for t in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def measure_plan() -> None:
    for rows in (4096, 256):
        n = rows * FEATURES
        rng = np.random.default_rng(1)
        keys = mixed(np.minimum(rng.zipf(1.2, n), 10**7).astype(np.uint64))
        keys += np.repeat(np.arange(FEATURES, dtype=np.uint64), rows) << np.uint64(40)
        plan = Plan(tables=np.arange(FEATURES, dtype=np.uint8), buckets=BUCKETS)
        starts = np.arange(0, n + 1, rows, dtype=np.uint32)
        for name, column in (("zipf", keys), ("uniform", mixed(rng.integers(0, 10**7, n).astype(np.uint64)))):
            times = []
            for _ in range(200 if rows == 256 else 60):
                start = time.perf_counter()
                plan.build(column, starts)
                times.append(time.perf_counter() - start)
            took = statistics.median(times) * 1e3
            print(f"plan {n:7d} ids, {name:8s} {len(plan.keys):6d} unique: {took:.3f} ms")


def fill(store: Store, resident: int) -> None:
    out = np.empty((100_000, store.layout.groups[0].width), np.float32)
    worst = total = 0.0
    for first in range(0, resident, 100_000):
        batch = planned(mixed(np.arange(first, min(first + 100_000, resident), dtype=np.uint64)))
        start = time.perf_counter()
        store.lookup(0, batch.keys, batch.tables, batch.bucket_starts, out[: len(batch.keys)])
        took = time.perf_counter() - start
        total, worst = total + took, max(worst, took)
    print(f"  create {resident / total / 1e6:.1f} M rows/s, worst batch of 100,000: {worst * 1e3:.1f} ms")


def measure(name: str, store: Store, resident: int, unique: int, batches: int) -> None:
    print(f"{name}: {resident:,} resident, batches of {unique:,} unique rows")
    fill(store, resident)
    width = store.layout.groups[0].width
    for threads in (1, 2):
        rng = np.random.default_rng(threads)
        work = [
            [planned(mixed(rng.integers(0, resident, unique).astype(np.uint64))) for _ in range(batches)]
            for _ in range(threads)
        ]
        outs: list[F32] = [np.empty((unique, width), np.float32) for _ in range(threads)]
        gradient = np.full((unique, width), 1e-3, np.float32)
        rows = sum(len(b.keys) for batches_of in work for b in batches_of)

        def look(t: int, work: list[list[BatchKeys]] = work, outs: list[F32] = outs) -> None:
            for b in work[t]:
                store.lookup(0, b.keys, b.tables, b.bucket_starts, outs[t][: len(b.keys)])

        def step(t: int, work: list[list[BatchKeys]] = work, gradient: F32 = gradient) -> None:
            for b in work[t]:
                at = store.applied_of(0)[t]
                store.push([OffsetRange(t, at, at + 1)], at, [b], [gradient[: len(b.keys)]])

        for what, run in (("lookup", look), ("push", step)):
            rates = []
            for _ in range(5):
                rates.append(rows / seconds(run, threads) / 1e6)
                store.collect_publish(1 << 60)
                store.collect_flush()
            median = statistics.median(rates)
            print(f"  {what:6s} {threads} threads: {median:5.1f} M rows/s (best {max(rates):.1f})")
    memory = store.memory()
    print(f"  {memory.bytes / resident:.0f} B a row")


def main() -> None:
    resident = int(float(sys.argv[1])) if len(sys.argv) > 1 else 1_000_000
    print(f"instruction set {instruction_set()}")
    measure_plan()
    for unique, batches in ((46_000, 10), (5_000, 90)):
        default = store_of(hedge_group((0,)), buckets=BUCKETS)
        measure("default model's rows", default, resident, unique, batches)
    vector = group(("vector", 16, rule("rowwise_adagrad"), 0.01))
    measure("vectors only", store_of(vector, buckets=BUCKETS), resident, 46_000, 10)
    half = hedge_group((0,), precision="bf16")
    measure("bf16 vectors", store_of(half, buckets=BUCKETS), resident, 46_000, 10)


if __name__ == "__main__":
    main()
