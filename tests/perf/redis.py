"""Speed of the Redis row store beside what redis-benchmark reaches on the same servers, and memory a row.

    python -m tests.perf.redis [--quick] [--json]

Three masters with a replica each, all on this machine and without a file on disk: what is measured is Redis's
and our work, on whatever cores there are. `limit`: redis-benchmark with pipelines of HSET and HMGET of 50
fields, the same again and again. A flush is the store's own: 1,024 buckets, some 400 rows each,
compare-and-set; first of mostly new rows, then of the same once more. Bound by the servers' and the client's
work, which share the cores here.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from freshet.seams.rowstore import StoreIdentity
from freshet.seams.rowstore.redis import open_url
from freshet.types import Bucket, BucketMeta, Fence, TimeMs
from tests.perf.report import Figures, command
from tests.perf.rowstore import BUCKETS, PARTITIONS, RECORD_BYTES, random_flush
from tests.servers.redis_cluster import RedisCluster

FIELDS = 50
"""Of one command of redis-benchmark."""
HASHES, ROWS = 256, 400

IN_MEMORY = {"appendonly": "no", "cluster-node-timeout": "15000"}


def measure(quick: bool = False) -> Figures:
    """Rows a second, and bytes a row."""
    turns = 3 if quick else 6
    commands = 20_000 if quick else 60_000
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, RedisCluster(Path(folder), IN_MEMORY) as cluster:
        limit_set, limit_get = _limits(cluster, commands)
        cluster_memory = _memory(cluster)
        store = open_url(f"redis://{cluster.addresses}/perf")
        meta = BucketMeta(Fence(0), 0, 0, dict.fromkeys(range(PARTITIONS), 0), 0, TimeMs(0))
        metas = {Bucket(b): meta for b in range(BUCKETS)}
        store.create(StoreIdentity("m", "h", BUCKETS, {"t": 0}, {0: RECORD_BYTES}, "log"), metas)
        new: list[float] = []
        changed: list[float] = []
        for i in range(0, 2 * turns, 2):
            flush = random_flush(random, ROWS, seq=i + 1)
            for rates in (new, changed):
                rates.append(flush.runs.rows / _seconds(partial(store.flush, flush)))
                flush = replace(flush, seqs=flush.seqs + 1)
        empty = _seconds(lambda: store.flush(random_flush(random, 0, seq=2 * turns + 1)))
        rows = 0

        def scan() -> None:
            nonlocal rows
            rows = sum(piece.rows for piece in store.scan(list(metas)))

        scanned = _seconds(scan)
        per_row = (_memory(cluster) - cluster_memory) / rows
        keys = random.integers(0, 10 * ROWS, FIELDS, np.uint64)
        read = _seconds(lambda: [store.read(Bucket(b), 0, keys) for b in range(200)]) / 200
        store.close()
    return {
        "limit_hset_rows_per_s": limit_set,
        "flush_new_rows_per_s": statistics.median(new),
        "flush_changed_rows_per_s": statistics.median(changed),
        "flush_changed_of_limit": statistics.median(changed) / limit_set,
        "flush_of_no_rows_ms": empty * 1e3,
        "limit_hmget_rows_per_s": limit_get,
        "scan_rows_per_s": rows / scanned,
        "scan_of_limit": rows / scanned / limit_get,
        f"read_of_{FIELDS}_keys_us": read * 1e6,
        "record_bytes": RECORD_BYTES,
        "memory_bytes_per_row": per_row,
    }


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _limits(cluster: RedisCluster, commands: int) -> tuple[float, float]:
    """Rows a second of HSET and HMGET by redis-benchmark, over all masters; leaves the servers empty."""
    key = "limit:{tag}:__rand_int__"
    fields = [f"field{i:04}" for i in range(FIELDS)]  # 9 bytes, as ours
    value = "v" * RECORD_BYTES
    pairs = [text for field in fields for text in (field, value)]
    found = []
    for words in (["HSET", key, *pairs], ["HMGET", key, *fields]):
        port, of = str(cluster.nodes[0].port), ["-n", str(commands), "-r", str(HASHES)]
        tool = ["redis-benchmark", "-p", port, "--cluster", "--csv", "-c", "6", "-P", "16", *of, *words]
        done = subprocess.run(tool, capture_output=True, text=True, check=True)
        found.append(float(list(csv.reader(done.stdout.splitlines()))[-1][1]) * FIELDS)
    for node in cluster.nodes:
        if node.ask("ROLE")[0] == "master":
            node.ask("FLUSHALL")
    return found[0], found[1]


def _memory(cluster: RedisCluster) -> int:
    """Bytes that masters use for data."""
    total = 0
    for node in cluster.nodes:
        if node.ask("ROLE")[0] == "master":
            stats = node.ask("MEMORY", "STATS")
            total += int(dict(zip(stats[::2], stats[1::2], strict=True))["dataset.bytes"])
    return total


def main() -> None:
    """Measure and print."""
    command(measure, __doc__)


if __name__ == "__main__":
    main()
