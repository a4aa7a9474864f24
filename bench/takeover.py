"""How long a shard that takes over all buckets from a Redis Cluster keeps a batch waiting, and until it has
loaded all rows: read whole before it serves (as it was once, and is when rows are doubted), and key by key.

    python -m bench.takeover [--rows 2000000] [--quick] [--json]

Three masters without a file on disk, on this machine. A batch is 256 samples of 26 features, each a table:
6,656 keys, some of which nobody has seen. One of skewed ids, as users and items are, and one of ids that are
all as likely. Bound by the servers' and our copies of pages, and by Redis's and our share of the same cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from bench.codecs import GOLDEN, spec_of
from bench.redis import IN_MEMORY
from bench.report import Figures, command
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import topics_of
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver.shard import Shard, ShardContext
from freshet.rows.redis.row_store import open_url
from freshet.rows.service import KeyGroup, Push
from freshet.tables import Plan
from freshet.testing.waiting import wait_until
from freshet.types import F32, I64, Bucket, Fence, OffsetRange, TimeMs
from tests.servers.redis_cluster import RedisCluster

SAMPLES, TABLES = 256, 26
LOADED_S = 600.0
"""Longer than any number of rows that is worth measuring takes to load."""
PUSHED = 20_000
"""Rows of a table that one push makes."""


def group_of(spec: Spec, ids: I64) -> KeyGroup:
    """(TABLES, N) ids of each table as keys of a batch."""
    plan = Plan(tables=np.arange(TABLES, dtype=np.uint8), buckets=spec.buckets)
    keys = ((ids + 1).astype(np.uint64) * GOLDEN).ravel()
    starts = np.arange(TABLES + 1, dtype=np.uint32) * ids.shape[1]
    plan.build(keys, starts)
    return KeyGroup(0, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy())


def measure(quick: bool = False, rows: int = 2_000_000) -> Figures:
    """Seconds from the claim on, by way and by kind of batch."""
    if quick:
        rows = min(rows, 400_000)
    spec = spec_of(tables=TABLES)
    per_table = rows // TABLES
    random = np.random.default_rng(0)
    skewed = np.minimum(random.zipf(1.2, (TABLES, SAMPLES)) - 1, per_table + per_table // 50)
    even = random.integers(0, per_table + per_table // 50, (TABLES, SAMPLES))
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisCluster(Path(folder) / "redis", IN_MEMORY) as cluster,
    ):
        log = SqliteEventLog(Path(folder) / "log")
        for plan in topics_of(spec).plans:
            log.create_topic(
                plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
            )
        store = open_url(f"redis://{cluster.addresses}/perf")
        fences = count(1)

        def shard() -> Shard:
            return Shard(ShardContext(spec, "hash", log, store), name="perf")

        former = shard()
        former.buckets.create()
        everything = [Bucket(b) for b in range(spec.buckets)]
        former.buckets.claim(everything, Fence(next(fences)), whole=True)
        for first in range(0, per_table, PUSHED):
            ids = np.arange(first, min(first + PUSHED, per_table))
            push_of(former, spec, group_of(spec, np.tile(ids, (TABLES, 1))), first)
            former.flush()
        figures: Figures = {"rows": sum(former.store.memory().rows.values()), "keys": SAMPLES * TABLES}
        for name, ids in (("skewed", skewed), ("even", even)):
            batch = group_of(spec, ids)
            figures[name] = {
                way: taken_over(
                    shard(), everything, Fence(next(fences)), batch, whole=way.startswith("whole")
                )
                for way in ("whole_first", "key_by_key", "whole_first_again", "key_by_key_again")
            } | {"keys_asked": len(batch.keys)}
        store.close()
        log.close()
    return figures


def push_of(shard: Shard, spec: Spec, group: KeyGroup, at: int) -> None:
    """One that makes these rows."""
    gradients = np.full((len(group.keys), layout_of(spec).groups[0].width), 1e-4, np.float32)
    span = (OffsetRange(0, at, at + PUSHED),)
    shard.push(Push(span, Fence(1), TimeMs(1), [group], [gradients]))


def taken_over(shard: Shard, buckets: list[Bucket], fence: Fence, batch: KeyGroup, *, whole: bool) -> Figures:
    """Seconds until the first batch was answered, the same again, and until all rows are here."""
    out: F32 = np.empty((len(batch.keys), shard.store.layout.groups[0].width), np.float32)
    began = time.perf_counter()
    passed: Callable[[], float] = lambda: time.perf_counter() - began  # noqa: E731 - it is used four times
    shard.buckets.claim(buckets, fence, whole=whole)
    figures: Figures = {"served_s": passed()}
    shard.start()
    shard.lookup([batch], [out])
    figures["first_answer_s"] = passed()
    again = time.perf_counter()
    shard.lookup([batch], [out])
    figures["same_batch_again_ms"] = (time.perf_counter() - again) * 1e3
    wait_until("all is loaded", lambda: not shard.buckets.progress.buckets, within_s=LOADED_S, poll_s=0.005)
    figures["loaded_s"] = passed()
    figures["keys_read"] = shard.buckets.keys_read
    shard.stop()
    return figures


def main() -> None:
    """Measure and print."""
    command(measure, __doc__, {"rows": int})


if __name__ == "__main__":
    main()
