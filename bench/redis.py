"""Speed of the Redis row store beside redis-benchmark on the same servers, and memory a row.

    python -m bench.redis [--quick] [--json]

Three masters with a replica each, all on this machine and without a file on disk: the work measured is that
of Redis and of the store, which share the cores; so their seconds of processor time are separate figures.
`limit`: redis-benchmark with pipelines of HSET and HMGET of 50 fields of a row each, over 12,800 rows (`hot`:
they stay in the processor's cache), and over a million. A flush is the store's own: 1,024 buckets, some 400
rows each, compare-and-set; first of mostly new rows, then of the same once more. Its rate is that of all
rounds together, as only some of them merge pages.
"""

from __future__ import annotations

import csv
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.report import Figures, command
from bench.rowstore import BUCKETS, PARTITIONS, RECORD_BYTES, random_flush
from freshet.rows.redis.row_store import open_url
from freshet.rows.store import StoreIdentity
from freshet.types import Bucket, BucketMeta, Fence, TimeMs
from tests.servers.redis_cluster import RedisCluster

FIELDS = 50  # of one command of redis-benchmark
HOT_HASHES, HASHES, ROWS = 256, 20_000, 400

IN_MEMORY = {"appendonly": "no", "cluster-node-timeout": "15000"}


def measure(quick: bool = False) -> Figures:
    """Measure rows a second, processor seconds a million rows, and bytes a row."""
    turns = 4 if quick else 8
    commands = 20_000 if quick else 40_000
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, RedisCluster(Path(folder), IN_MEMORY) as cluster:
        hot_set, hot_get = _limits(cluster, commands, HOT_HASHES)
        limit_set, limit_get = _limits(cluster, commands, HASHES)
        cluster_memory = _memory(cluster)
        store = open_url(f"redis://{cluster.addresses}/perf")
        meta = BucketMeta(Fence(0), 0, 0, dict.fromkeys(range(PARTITIONS), 0), 0, TimeMs(0))
        metas = {Bucket(b): meta for b in range(BUCKETS)}
        store.create(StoreIdentity("m", "h", BUCKETS, {"t": 0}, {0: RECORD_BYTES}, "log"), metas)
        flushed = Spent()
        for i in range(0, 2 * turns, 2):
            flush = random_flush(random, ROWS, seq=i + 1)
            for _ in range(2):
                flushed.add(cluster, flush.runs.rows, partial(store.flush, flush))
                flush = replace(flush, seqs=flush.seqs + 1)
        empty = _seconds(lambda: store.flush(random_flush(random, 0, seq=2 * turns + 1)))
        rows = sum(piece.rows for piece in store.scan(list(metas)))
        scanned = Spent()
        scanned.add(cluster, rows, lambda: sum(piece.rows for piece in store.scan(list(metas))))
        per_row = (_memory(cluster) - cluster_memory) / rows
        keys = random.integers(0, 10 * ROWS, FIELDS, np.uint64)
        read = _seconds(lambda: [store.read(Bucket(b), 0, keys) for b in range(200)]) / 200
        store.close()
    return {
        "limit_hset_hot_rows_per_s": hot_set,
        "limit_hset_rows_per_s": limit_set,
        **flushed.figures("flush"),
        "flush_of_limit": flushed.rate / limit_set,
        "flush_quickest_round_rows_per_s": max(flushed.rates),
        "flush_slowest_round_rows_per_s": min(flushed.rates),
        "flush_of_no_rows_ms": empty * 1e3,
        "limit_hmget_hot_rows_per_s": hot_get,
        "limit_hmget_rows_per_s": limit_get,
        **scanned.figures("scan"),
        "scan_of_limit": scanned.rate / limit_get,
        f"read_of_{FIELDS}_keys_us": read * 1e6,
        "record_bytes": RECORD_BYTES,
        "rows": rows,
        "memory_bytes_per_row": per_row,
    }


@dataclass(slots=True)
class Spent:
    """Seconds of some work: by the clock, of this process and of the servers."""

    rows: int = 0
    seconds: float = 0
    own_cpu_s: float = 0
    servers_cpu_s: float = 0
    rates: list[float] = field(default_factory=list)  # of each round

    def add(self, cluster: RedisCluster, rows: int, work: Callable[[], object]) -> None:
        """Do one round of work."""
        own, servers = time.process_time(), _servers_cpu_s(cluster)
        took = _seconds(work)
        self.rows, self.seconds = self.rows + rows, self.seconds + took
        self.own_cpu_s += time.process_time() - own
        self.servers_cpu_s += _servers_cpu_s(cluster) - servers
        self.rates.append(rows / took)

    @property
    def rate(self) -> float:
        """Return the rows a second over all rounds."""
        return self.rows / self.seconds

    def figures(self, name: str) -> Figures:
        """Return the figures of all rounds together."""
        return {
            f"{name}_rows_per_s": self.rate,
            f"{name}_our_cpu_s_per_million_rows": self.own_cpu_s / self.rows * 1e6,
            f"{name}_servers_cpu_s_per_million_rows": self.servers_cpu_s / self.rows * 1e6,
        }


def _servers_cpu_s(cluster: RedisCluster) -> float:
    """Return the processor time of all servers."""
    total = 0.0
    for node in cluster.nodes:
        lines = (line.partition(":") for line in node.ask("INFO", "cpu").splitlines())
        total += sum(float(said) for name, _, said in lines if name in ("used_cpu_sys", "used_cpu_user"))
    return total


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _limits(cluster: RedisCluster, commands: int, hashes: int) -> tuple[float, float]:
    """Measure the rows a second of HSET and HMGET by redis-benchmark; leaves the servers empty."""
    key = "limit:{tag}:__rand_int__"
    fields = [f"field{i:04}" for i in range(FIELDS)]  # 9 bytes, as ours
    value = "v" * RECORD_BYTES
    pairs = [text for field in fields for text in (field, value)]
    found = []
    for words in (["HSET", key, *pairs], ["HMGET", key, *fields]):
        port, of = str(cluster.nodes[0].port), ["-n", str(commands), "-r", str(hashes)]
        tool = ["redis-benchmark", "-p", port, "--cluster", "--csv", "-c", "6", "-P", "16", *of, *words]
        done = subprocess.run(tool, capture_output=True, text=True, check=True)
        found.append(float(list(csv.reader(done.stdout.splitlines()))[-1][1]) * FIELDS)
    for node in cluster.nodes:
        if node.ask("ROLE")[0] == "master":
            node.ask("FLUSHALL")
    return found[0], found[1]


def _memory(cluster: RedisCluster) -> int:
    """Return the bytes of data in all masters."""
    total = 0
    for node in cluster.nodes:
        if node.ask("ROLE")[0] == "master":
            stats = node.ask("MEMORY", "STATS")
            total += int(dict(zip(stats[::2], stats[1::2], strict=True))["dataset.bytes"])
    return total


if __name__ == "__main__":
    command(measure, __doc__)
