"""The parameter table from 1e5 to 5e7 rows: growth, rates, update rules, small tables, eviction.

    python -m bench.table_sizes [--resident 20000000] [--layout vectors_fp32] [--quick] [--json]

Bound by memory: a lookup is a miss of the caches for the index and one for each line of the row, a step also
writes those back. Keys are well spread 64-bit hashes. A batch holds unique keys, drawn uniformly over the
resident rows, the worst case for the caches, or by Zipf's law with the skew in the figure's name. `pairs`
looks a batch up and then steps it, as training does. Rates are rows a second of all threads together, medians
of interleaved rounds. Sizes without `--resident`: 1e5, 1e6 and 2e7 rows (with `--quick` 1e5 and 1e6); 5e7
rows of `vectors_fp32` take 5 GB.

The same batches are measured once more when their rows are resident: the slowest of these show the machine's
share of the slowest ones while growing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.report import Figures, command
from bench.rounds import interleaved
from bench.table import BUCKETS, FEATURES, mixed, planned, seconds
from freshet.config.spec.layout import Group
from freshet.tables import Plan, Store
from freshet.types import F32, U64, OffsetRange
from tests.fixtures.tables import BatchKeys, group, hedge_group, rule, store_of

BATCH = 46_000  # unique rows of a batch of 2 x 2048 samples of 26 features
GROWTH_BATCH = 2_000  # new rows at once while growing: more than a batch of training has
SKEW = 1.05
RULES = ("sgd", "adagrad", "rowwise_adagrad", "rowwise_rmsprop", "adam", "ftrl")
EVERYTHING = 1 << 60


def vectors(rule_name: str = "rowwise_adagrad", precision: str = "fp32") -> Group:
    """Return the layout of rows of one vector of 16."""
    return group(("vector", 16, rule(rule_name), 0.01), precision=precision)


LAYOUTS: dict[str, tuple[Callable[[], Group], int]] = {
    # name: rows, and the bytes of one's key, optimiser state and values
    "vectors_fp32": (vectors, 76),
    "vectors_bf16": (partial(vectors, precision="bf16"), 44),
    "hedge_fp32": (partial(hedge_group, (0,)), 92),
    "hedge_bf16": (partial(hedge_group, (0,), precision="bf16"), 60),
}


def zipf(rng: np.random.Generator, n: int, cardinality: int, skew: float = SKEW) -> U64:
    """Draw (n,) numbers below `cardinality`; the probability of r is proportional to (r + 1) ** -skew.

    By the inverted integral.
    """
    top = float(cardinality + 1) ** (1 - skew)
    drawn = (1 + rng.random(n) * (top - 1)) ** (1 / (1 - skew))
    ranks: U64 = np.minimum(drawn.astype(np.uint64) - np.uint64(1), np.uint64(cardinality - 1))
    return ranks


def uniform(rng: np.random.Generator, n: int, cardinality: int) -> U64:
    """Draw (n,) numbers below `cardinality`."""
    drawn: U64 = rng.integers(0, cardinality, n, np.uint64)
    return drawn


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def batch_times(store: Store, resident: int, batch: int) -> list[float]:
    """Look the rows up in their order, which creates them; returns the seconds of each batch."""
    out = np.empty((batch, store.layout.groups[0].width), np.float32)
    times = []
    for first in range(0, resident, batch):
        keys = planned(mixed(np.arange(first, min(first + batch, resident), dtype=np.uint64)))
        began = time.perf_counter()
        store.lookup(0, keys, out[: len(keys.keys)])
        times.append(time.perf_counter() - began)
    return times


def grow(store: Store, resident: int) -> Figures:
    """Measure lookups of new keys, which create the rows, and the same lookups again."""
    before = resident_bytes()
    figures: Figures = {}
    for name in ("growing", "resident"):
        times = batch_times(store, resident, GROWTH_BATCH)
        if name == "growing":
            figures["bytes_per_row"] = store.memory().bytes / resident
            figures["rss_bytes_per_row"] = (resident_bytes() - before) / resident
        median, slow = statistics.median(times), float(np.quantile(times, 0.999))
        figures[name] = {
            "rows_per_s": resident / sum(times),
            "batch_p50_ms": median * 1e3,
            "batch_p999_ms": slow * 1e3,
            "p999_of_p50": slow / median,
        }
    return figures


class Load:
    """Batches of one store for some threads, each with a partition of its own."""

    def __init__(self, store: Store, batches: Sequence[Sequence[U64]]) -> None:
        self.store, self.threads = store, len(batches)
        self.work = [[planned(keys) for keys in mine] for mine in batches]
        most = max(len(b.keys) for mine in self.work for b in mine)
        width = store.layout.groups[0].width
        self.outs: list[F32] = [np.empty((most, width), np.float32) for _ in batches]
        self.gradient = np.full((most, width), 1e-3, np.float32)
        self.rows = sum(len(b.keys) for mine in self.work for b in mine)

    def look(self, t: int, batch: BatchKeys) -> None:
        """Look up a batch of a thread."""
        out = self.outs[t][: len(batch.keys)]
        self.store.lookup(0, batch, out)

    def step(self, t: int, batch: BatchKeys) -> None:
        """Push gradients of a batch of a thread."""
        at = self.store.applied_of(0)[t]
        self.store.push([OffsetRange(t, at, at + 1)], at, [batch], [self.gradient[: len(batch.keys)]])

    def cases(self) -> dict[str, Callable[[], float]]:
        """Return cases for `interleaved`; dirty rows are collected outside of the time."""
        calls = {"lookup": (self.look,), "step": (self.step,), "pairs": (self.look, self.step)}
        return {name: partial(self._rate, called) for name, called in calls.items()}

    def _rate(self, calls: Sequence[Callable[[int, BatchKeys], None]]) -> float:
        def each(t: int) -> None:
            for batch in self.work[t]:
                for call in calls:
                    call(t, batch)

        rate = self.rows / seconds(each, self.threads)
        self.store.collect_publish(EVERYTHING)
        self.store.collect_flush()
        return rate


def resident_rows(name: str, resident: int, rounds: int, batches: int) -> Figures:
    """Measure growth to `resident` rows, then one and two threads on uniform and on skewed keys."""
    layout, payload = LAYOUTS[name]
    store = store_of(layout(), buckets=BUCKETS)
    figures = grow(store, resident)
    figures["bytes_of_payload"] = figures["bytes_per_row"] / payload
    for threads in (1, 2):
        rng = np.random.default_rng(threads)
        cases: dict[str, Callable[[], float]] = {}
        for drawn, draw in (("uniform", uniform), (f"zipf_{SKEW}", zipf)):
            keys = [[mixed(draw(rng, BATCH, resident)) for _ in range(batches)] for _ in range(threads)]
            cases |= {f"{drawn} {what}": case for what, case in Load(store, keys).cases().items()}
        for case, figure in interleaved(cases, rounds).items():
            drawn, what = case.split()
            figures.setdefault(f"{drawn}_{threads}_threads", {})[f"{what}_rows_per_s"] = figure.median
    return figures


def update_rules(resident: int, rounds: int, batches: int) -> Figures:
    """Measure steps, and lookups with steps, by two threads for each rule on vectors of 16."""
    cases: dict[str, Callable[[], float]] = {}
    for name in RULES:
        store = store_of(vectors(name), buckets=BUCKETS)
        batch_times(store, resident, BATCH)
        rng = np.random.default_rng(5)
        keys = [[mixed(uniform(rng, BATCH, resident)) for _ in range(batches)] for _ in range(2)]
        cases |= {
            f"{name} {what}": case for what, case in Load(store, keys).cases().items() if what != "lookup"
        }
    figures: Figures = {}
    for case, figure in interleaved(cases, rounds).items():
        name, what = case.split()
        figures.setdefault(name, {})[f"{what}_rows_per_s"] = figure.median
    return figures


def small_tables(rows: int = 1_000) -> Figures:
    """Measure the memory of 26 tables of one layout and `rows` rows each."""
    before = resident_bytes()
    store = store_of(hedge_group(tuple(range(FEATURES))), buckets=BUCKETS)
    for table in range(FEATURES):
        plan = Plan(tables=np.array([table], np.uint8), buckets=BUCKETS)
        numbers = np.arange(table << 32, (table << 32) + rows, dtype=np.uint64)
        plan.build(mixed(numbers), np.array([0, rows], np.uint32))
        out = np.empty((rows, store.layout.groups[0].width), np.float32)
        store.lookup(0, plan, out)
    return {"bytes": store.memory().bytes, "rss_bytes": resident_bytes() - before}


def eviction(resident: int) -> Figures:
    """Measure memory before and after nine of ten rows are removed."""
    before = resident_bytes()
    store = store_of(vectors(), buckets=BUCKETS)
    batch_times(store, resident, BATCH)
    full, held = resident_bytes() - before, store.memory().bytes
    gone = planned(mixed(np.arange(resident // 10, resident, dtype=np.uint64)))
    began = time.perf_counter()
    store.remove(0, gone.keys)
    took = time.perf_counter() - began
    store.collect_publish(EVERYTHING)
    store.collect_flush()
    left = resident_bytes() - before - sum(a.nbytes for a in (gone.keys, gone.tables, gone.bucket_starts))
    return {
        "rows_removed_per_s": len(gone.keys) / took,
        "rss_bytes": {"full": full, "after": left},
        "held_bytes": {"full": held, "after": store.memory().bytes},
    }


def measure(quick: bool = False, resident: int | None = None, layout: str | None = None) -> Figures:
    """Measure all; with `resident` or `layout` only rows, of that number or layout."""
    rounds, batches = (3, 4) if quick else (5, 20)
    sizes = [resident] if resident else [10**5, 10**6] if quick else [10**5, 10**6, 2 * 10**7]
    names = [layout] if layout else list(LAYOUTS)
    if not set(names) <= set(LAYOUTS):
        raise SystemExit(f"no layout {layout!r}; there are {', '.join(LAYOUTS)}")
    figures: Figures = {
        name: {str(size): resident_rows(name, size, rounds, batches) for size in sizes} for name in names
    }
    if resident or layout:
        return figures
    few = 10**5 if quick else 10**6
    return {
        "small_tables": small_tables(),  # first: of memory that was never used
        "eviction": eviction(10 * few),
        "rows": figures,
        "update_rules": update_rules(few, rounds, batches),
    }


if __name__ == "__main__":
    command(measure, __doc__)
