"""Speed of the parameter table: plan, lookup, row-wise Adagrad.

    python -m bench.table [--resident 1000000] [--quick] [--json]

Bound by memory: a lookup of a resident row is a miss of the caches for its slot and one for the row. Rows are
those of the default model: two scalars and a vector of 16, 128 bytes. Keys of a batch are unique and drawn
uniformly over the resident rows, the worst case for the caches. Medians of repeated runs.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from bench.report import Figures, command
from freshet.tables import Plan, Store
from freshet.types import F32, U64, OffsetRange
from tests.fixtures.tables import BatchKeys, group, hedge_group, rule, store_of

BUCKETS = 1024
FEATURES = 26


def mixed(numbers: U64) -> U64:
    """Return well spread keys, none 0."""
    x = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(32)
    return x * np.uint64(0xD6E8FEB86659FD93)


def planned(keys: U64) -> BatchKeys:
    plan = Plan(tables=np.zeros(1, np.uint8), buckets=BUCKETS)
    plan.build(keys, np.array([0, len(keys)], np.uint32))
    return BatchKeys(0, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy(), plan.keys)


def seconds(run: Callable[[int], None], threads: int) -> float:
    """Return the wall time of `run(thread)` on several threads at once."""
    workers = [threading.Thread(target=run, args=(t,)) for t in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def plans(quick: bool) -> Figures:
    figures: Figures = {}
    for rows in (4096, 256):
        n = rows * FEATURES
        rng = np.random.default_rng(1)
        keys = mixed(np.minimum(rng.zipf(1.2, n), 10**7).astype(np.uint64))
        keys += np.repeat(np.arange(FEATURES, dtype=np.uint64), rows) << np.uint64(40)
        plan = Plan(tables=np.arange(FEATURES, dtype=np.uint8), buckets=BUCKETS)
        starts = np.arange(0, n + 1, rows, dtype=np.uint32)
        for name, column in (("zipf", keys), ("uniform", mixed(rng.integers(0, 10**7, n).astype(np.uint64)))):
            times = []
            for _ in range((200 if rows == 256 else 60) // (4 if quick else 1)):
                start = time.perf_counter()
                plan.build(column, starts)
                times.append(time.perf_counter() - start)
            took = statistics.median(times)
            figures[f"{name}_of_{n}"] = {"ids_per_s": n / took, "ms": took * 1e3, "unique": len(plan.keys)}
    return figures


def fill(store: Store, resident: int) -> Figures:
    out = np.empty((100_000, store.layout.groups[0].width), np.float32)
    worst = total = 0.0
    for first in range(0, resident, 100_000):
        batch = planned(mixed(np.arange(first, min(first + 100_000, resident), dtype=np.uint64)))
        start = time.perf_counter()
        store.lookup(0, batch, out[: len(batch.keys)])
        took = time.perf_counter() - start
        total, worst = total + took, max(worst, took)
    return {"rows_per_s": resident / total, "worst_batch_of_100000_ms": worst * 1e3}


def steps(store: Store, resident: int, unique: int, batches: int, rounds: int) -> Figures:
    figures: Figures = {"resident": resident, "create": fill(store, resident)}
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
                store.lookup(0, b, outs[t][: len(b.keys)])

        def step(t: int, work: list[list[BatchKeys]] = work, gradient: F32 = gradient) -> None:
            for b in work[t]:
                at = store.applied_of(0)[t]
                store.push([OffsetRange(t, at, at + 1)], at, [b], [gradient[: len(b.keys)]])

        for what, run in (("lookup", look), ("push", step)):
            rates = []
            for _ in range(rounds):
                rates.append(rows / seconds(run, threads))
                store.collect_publish(1 << 60)
                store.collect_flush()
            figures[f"{what}_{threads}_threads"] = {"rows_per_s": statistics.median(rates)}
    figures["bytes_per_row"] = store.memory().bytes / resident
    return figures


def measure(quick: bool = False, resident: int | None = None) -> Figures:
    """Measure plans, and rows of the default model and of plain vectors in fp32 and bf16."""
    resident = resident or (200_000 if quick else 1_000_000)
    rounds, share = (3, 2) if quick else (5, 1)
    vector = group(("vector", 16, rule("rowwise_adagrad"), 0.01))
    half = hedge_group((0,), precision="bf16")
    return {
        "plan": plans(quick),
        "hedge_of_46000": steps(
            store_of(hedge_group((0,)), buckets=BUCKETS), resident, 46_000, 10 // share, rounds
        ),
        "hedge_of_5000": steps(
            store_of(hedge_group((0,)), buckets=BUCKETS), resident, 5_000, 90 // share, rounds
        ),
        "vectors_of_46000": steps(store_of(vector, buckets=BUCKETS), resident, 46_000, 10 // share, rounds),
        "hedge_bf16_of_46000": steps(store_of(half, buckets=BUCKETS), resident, 46_000, 10 // share, rounds),
    }


if __name__ == "__main__":
    command(measure, __doc__)
