"""Our parameter table beside FBGEMM's CPU kernels in one run: lookups and row-wise Adagrad steps of dim 16.

    python -m bench.peers.setup torchrec         first, once
    python -m bench.table_beside_fbgemm [--resident 20000000] [--rounds 7] [--quick] [--json]

Both use 2 threads and batches of 46,000 unique rows, drawn uniformly over the resident ones. FBGEMM's ids are
positions in a matrix; ours are hashed keys of rows that come and go. FBGEMM runs as one table and as 26 (a
table a feature), with ids of 32 bits and of 64; each ratio is to the fastest of the four. FBGEMM's
steps follow untimed lookups of the same rows, which are then in a cache; ours do not.
"""

from __future__ import annotations

import contextlib

import numpy as np

from bench.peers.running import Job
from bench.report import Figures, command
from bench.rounds import figures_by_key
from bench.table import BUCKETS, fill, mixed, planned, seconds
from freshet.types import OffsetRange
from tests.fixtures.tables import group, rule, store_of

UNIQUE, DIM, THREADS = 46_000, 16, 2
KEYS = ("lookups_per_s", "updates_per_s")


class OurTable:
    """Vectors of 16 with row-wise Adagrad; every thread has its own batches, as a lane has."""

    def __init__(self, resident: int, batches: int) -> None:
        self.store = store_of(group(("vector", DIM, rule("rowwise_adagrad"), 0.01)), buckets=BUCKETS)
        fill(self.store, resident)
        rng = np.random.default_rng(0)
        draw = [rng.integers(0, resident, UNIQUE).astype(np.uint64) for _ in range(THREADS * batches)]
        plans = [planned(mixed(numbers)) for numbers in draw]
        self.work = [plans[thread::THREADS] for thread in range(THREADS)]
        self.rows = sum(len(batch.keys) for batch in plans)
        width = self.store.layout.groups[0].width
        self.outs = [np.empty((UNIQUE, width), np.float32) for _ in range(THREADS)]
        self.gradients = np.full((UNIQUE, width), 1e-3, np.float32)

    def measured(self) -> dict[str, float]:
        """Measure both rates."""
        return {"lookups_per_s": self.lookups_per_s(), "updates_per_s": self.updates_per_s()}

    def lookups_per_s(self) -> float:
        """Look all batches up."""

        def look(thread: int) -> None:
            out = self.outs[thread]
            for b in self.work[thread]:
                self.store.lookup(0, b, out[: len(b.keys)])

        return self.rows / seconds(look, THREADS)

    def updates_per_s(self) -> float:
        """Push gradients of all batches; dirty rows are collected outside of the time."""

        def step(thread: int) -> None:
            for b in self.work[thread]:
                at = self.store.applied_of(0)[thread]
                ranges = [OffsetRange(thread, at, at + 1)]
                self.store.push(ranges, at, [b], [self.gradients[: len(b.keys)]])

        rate = self.rows / seconds(step, THREADS)
        self.store.collect_publish(1 << 60)
        self.store.collect_flush()
        return rate


def measure(quick: bool = False, resident: int | None = None, rounds: int | None = None) -> Figures:
    """Measure both sides in turns.

    Raises:
        JobError: the environment of torchrec is not installed.
    """
    resident = resident or (1_000_000 if quick else 20_000_000)
    rounds = rounds or (3 if quick else 7)
    batches = 10 if quick else 20
    words = [f"--resident={resident}", f"--unique={UNIQUE}", f"--batches={batches}", f"--threads={THREADS}"]
    with contextlib.ExitStack() as stack:
        jobs = {
            f"fbgemm_{tables}_tables_{index}": stack.enter_context(
                Job("fbgemm_kernels", "torchrec", [*words, f"--tables={tables}", f"--index={index}"], KEYS)
            )
            for tables in (1, 26)
            for index in ("int32", "int64")
        }
        ours = OurTable(resident, batches)
        for job in jobs.values():
            job.ready()
        rates_of = figures_by_key(
            {"freshet": ours.measured, **{n: job.measured for n, job in jobs.items()}}, rounds
        )
    rates: Figures = {name: {key: of[key].median for key in KEYS} for name, of in rates_of.items()}
    best = {key: max(rates[name][key] for name in jobs) for key in KEYS}
    ratios = {f"{key.removesuffix('_per_s')}_ratio": rates["freshet"][key] / best[key] for key in KEYS}
    return {"resident": resident, "unique": UNIQUE, "threads": THREADS, **rates, **ratios}


if __name__ == "__main__":
    command(measure, __doc__)
