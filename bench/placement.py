"""How evenly shards share the rows of a batch: by slices, as they do, and by whole tables or by columns.

    python -m bench.placement [--batches 50] [--quick] [--json]

Computed, not timed. A batch has 2,048 samples of 26 ids, one of each table; tables have the cardinalities of
the Criteo Kaggle set, ids follow Zipf's law in each, no two tables share ids. A key is looked up once a
batch, however often it occurs, and each shard holds a run of the 1,024 buckets of all tables. `busiest` is
the rows of the shard that has most of them, over the mean, averaged over batches: the time of a lookup is
that of its slowest shard. `hottest_key` is the share of a batch's rows that its most frequent key is. By
tables each table goes to one shard, the busiest tables first, to the shard with the least so far. By columns
each shard has its part of every row: `column_bytes` are the bytes of keys and values of all requests over
those of rows that are whole. `bytes_to_device` are those of rows and positions, which a torch network on a
GPU is sent, over those of each sample's vectors and the sum of its weights.
"""

from __future__ import annotations

import numpy as np

from bench.report import Figures, command
from bench.table import mixed
from bench.table_sizes import zipf
from freshet.tables import Plan
from freshet.types import I64

CARDINALITIES = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992,
    5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
BATCH, BUCKETS, DIM = 2_048, 1_024, 16
SHARDS = (2, 4, 16, 64)
SKEWS = (1.05, 1.5)
KEY_BYTES, POSITION_BYTES, VALUE_BYTES = 8, 4, 4


def rows_of(plan: Plan, rng: np.random.Generator, skew: float) -> tuple[I64, I64, int]:
    """Draw a batch; returns its rows by bucket (BUCKETS,), by table (T,), and in all."""
    ids = [zipf(rng, BATCH, n, skew) + np.uint64(t << 40) for t, n in enumerate(CARDINALITIES)]
    plan.build(mixed(np.concatenate(ids)), np.arange(len(CARDINALITIES) + 1, dtype=np.uint32) * BATCH)
    by_table = np.bincount(plan.tables, minlength=len(CARDINALITIES))
    starts = plan.bucket_starts.astype(np.int64)
    return starts[1:] - starts[:-1], by_table, len(plan.keys)


def busiest(rows: I64) -> float:
    """Return the mean over batches of the largest share over the mean share; rows (batches, shards)."""
    return float((rows.max(axis=1) / rows.mean(axis=1)).mean())


def by_tables(rows: I64, shards: int) -> I64:
    """Deal tables to shards by their mean rows; returns rows (batches, shards) of (batches, T)."""
    placed = np.zeros((len(rows), shards), np.int64)
    for table in np.argsort(-rows.mean(axis=0)):
        placed[:, placed.mean(axis=0).argmin()] += rows[:, table]
    return placed


def measure(quick: bool = False, batches: int = 50) -> Figures:
    """Measure each skew and number of shards."""
    figures: Figures = {}
    for skew in SKEWS:
        rng = np.random.default_rng(0)
        plan = Plan(tables=np.arange(len(CARDINALITIES), dtype=np.uint8), buckets=BUCKETS)
        drawn = [rows_of(plan, rng, skew) for _ in range(5 if quick else batches)]
        of_buckets, of_tables = (np.stack([batch[i] for batch in drawn]) for i in (0, 1))
        unique = float(np.mean([batch[2] for batch in drawn]))
        ids = BATCH * len(CARDINALITIES)
        sent = unique * VALUE_BYTES * (DIM + 1) + ids * POSITION_BYTES  # a weight beside each vector
        found: Figures = {
            "rows_of_a_batch": unique,
            "hottest_key": 1 / unique,
            "bytes_to_device": sent / (VALUE_BYTES * (ids * DIM + BATCH)),
        }
        for shards in SHARDS:
            starts = np.arange(shards) * BUCKETS // shards
            found[f"{shards}_shards"] = {
                "busiest_by_slices": busiest(np.add.reduceat(of_buckets, starts, axis=1)),
                "busiest_by_tables": busiest(by_tables(of_tables, shards)),
                "column_bytes": (KEY_BYTES * shards + VALUE_BYTES * DIM) / (KEY_BYTES + VALUE_BYTES * DIM),
            }
        figures[f"zipf_{skew}"] = found
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
