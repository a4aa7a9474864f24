"""Rank requests to a server with a share of the rows in memory, beside one that has all of them.

    python -m bench.tiered_serving [--items 5000000] [--share 0.05] [--skew 1.15] [--rate 50]
        [--store sqlite|redis] [--quick]

The feed example without its crosses, on a row store whose rows were all learned once. Requests have
100 candidates, drawn by Zipf's law (`skew`) over the items, and come at `rate` a second whether earlier ones
are answered or not; those of the first seconds, which fill the cache, do not count. Both servers are
processes, one after the other. `equal` is the share of answers of the cache that equal those of all rows to
the bit.

Bound by reads of the row store, one for each request that lacks a row.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from bench import open_loop
from bench.report import Figures, command
from bench.table_sizes import zipf
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.inference.pipeline import Pipeline
from freshet.inference.row_cache import MissingKeys, RowCache
from freshet.process.memory import shorten_pauses
from freshet.tables import KeyGroup
from freshet.types import F32, I64, OffsetRange, bucket_of
from tests.fixtures.inference import CONTEXT, NOW, RANKED, greedy, serving
from tests.fixtures.serving import FEED
from tests.fixtures.trained_model import World
from tests.servers.redis_cluster import RedisCluster

CANDIDATES, BUCKETS = 100, 1024
AT_ONCE, FLUSHED = 10_000, 50  # items learned by a push, and pushes before a flush
FILL_RATE, FILL_S, SECONDS = 200.0, 30.0, 20.0
CROSSES = 'crosses = [["user", "item"], ["country", "item"]]'
EXPERTS = 'experts = ["wide", "cross", "fm", "deep"]'


def spec() -> Spec:
    """Return the feed example's spec without crosses, which does not explore."""
    text = (FEED / "freshet.toml").read_text().replace(CROSSES, "crosses = []")
    return greedy(parse_spec(text.replace(EXPERTS, 'experts = ["wide", "fm", "deep"]')))


def candidates(ids: I64) -> list[dict[str, Any]]:
    """Return candidates with these ids."""
    return [{"id": i, "age_s": float(i % 1000), "ctr_1h": 0.1} for i in ids.tolist()]


def bodies(count: int, items: int, skew: float) -> list[bytes]:
    """Draw rank requests; nothing is logged."""
    rng = np.random.default_rng(5)
    return [
        orjson.dumps(
            {
                "context": {**CONTEXT, "user": user(int(rng.integers(items)))},
                "candidates": candidates(zipf(rng, CANDIDATES, items, skew).astype(np.int64)),
                "k": 10,
                "dry_run": True,
            }
        )
        for _ in range(count)
    ]


def user(number: int) -> dict[str, Any]:
    """Return a user who has seen nothing."""
    return {"id": number, "country": "DE", "last_items": []}


def learn(folder: Path, url: str, items: int) -> None:
    """Fill a row store."""
    world = World(folder, spec(), RANKED, BUCKETS, url)
    world.create()
    pipeline = Pipeline(world.spec, RANKED)
    partitions = world.spec.partitions
    probe = RowCache(world.layout, buckets=BUCKETS, partitions=partitions, seed=0, memory_bytes=0)
    rng = np.random.default_rng(0)
    group = world.layout.groups[0]
    for n, first in enumerate(range(0, items, AT_ONCE)):
        items_here = candidates(np.arange(first, min(first + AT_ONCE, items)))
        event = {**CONTEXT, "user": user(first), "request_id": 1}
        encoded = pipeline.encoded([{**event, "items": items_here}], len(items_here))
        keys = pipeline.missing(pipeline.requests([encoded]), probe)
        world.rows.push(
            [OffsetRange(0, n, n + 1)], NOW, [grouped(keys)], [noise(rng, len(keys), group.width)]
        )
        if n % FLUSHED == FLUSHED - 1:
            world.flush()
    world.publish()
    world.flush()
    world.put_version(0, event_time_ms=NOW)
    world.promote(0)
    world.close()


def grouped(keys: MissingKeys) -> KeyGroup:
    """Return keys of the first store group as those of a push."""
    starts = np.searchsorted(bucket_of(keys.keys, BUCKETS), np.arange(BUCKETS + 1)).astype(np.uint32)
    return KeyGroup(0, keys.keys, keys.tables, starts)


def noise(rng: np.random.Generator, rows: int, width: int) -> F32:
    """Draw (rows, width) gradients."""
    return rng.normal(0, 1, (rows, width)).astype(np.float32)


@contextmanager
def row_store(folder: Path, kind: str) -> Iterator[str]:
    """Yield the URL of a row store; a Redis Cluster of six servers runs meanwhile."""
    if kind != "redis":
        yield f"sqlite:{folder}/rows"
        return
    with RedisCluster(folder / "redis", {"appendonly": "no"}) as cluster:
        yield f"redis://{cluster.addresses}/bench"


@contextmanager
def server(folder: Path, url: str, memory_bytes: int) -> Iterator[str]:
    """Run a server as a process; yields its address."""
    words = [sys.executable, "-m", "bench.tiered_serving", "--serve", str(folder), url, str(memory_bytes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield next(line for line in process.stdout if line.startswith("http")).strip()
        finally:
            process.stdin.close()


def serve(folder: Path, url: str, memory_bytes: int) -> None:
    """Serve until standard input ends."""
    world = World(folder, spec(), RANKED, BUCKETS, url)
    shorten_pauses()  # as the service does
    with serving(world, inference_memory_bytes=str(memory_bytes)) as running:
        print(running.url, flush=True)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the parent reads one line
        sys.stdin.read()
    world.close()


def counts(url: str) -> dict[str, float]:
    """Return the counts of keys, rows and reads since the start, and the seconds of reads."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = {"here": 0.0, "missing": 0.0, "defaulted": 0.0, "sum": 0.0, "count": 0.0}
    for line in text.splitlines():
        for name in ("sum", "count"):
            if line.startswith(f"freshet_inference_row_read_seconds_{name} "):
                found[name] = float(line.split()[-1])
        for name in ("here", "missing"):
            if line.startswith(f'freshet_inference_row_keys_total{{where="{name}"}}'):
                found[name] = float(line.split()[-1])
        if line.startswith("freshet_inference_defaulted_rows_total{"):
            found["defaulted"] += float(line.split()[-1])
    return found


def loaded(url: str, requests: list[bytes], rate: float, fill_s: float, seconds: float) -> Figures:
    """Measure one server."""
    port = int(url.rsplit(":", 1)[1])
    first = int(FILL_RATE * fill_s)
    open_loop.load(port, requests[:first], FILL_RATE, fill_s, seed=1)
    before = counts(url)
    figures = open_loop.load(port, requests[first:], rate, seconds, seed=2)
    after = counts(url)
    done = {name: after[name] - before[name] for name in after}
    keys = done["here"] + done["missing"]
    status = httpx.get(f"{url}/status", timeout=30).json()
    return {
        **figures,
        "hits": done["here"] / keys if keys else 1.0,
        "missing_a_request": done["missing"] / (rate * seconds),
        "reads_per_s": done["count"] / seconds,
        "read_ms": 1e3 * done["sum"] / max(done["count"], 1),
        "defaulted_rows": done["defaulted"],
        "row_bytes": status["row_bytes"],
        "rows_held": status["rows_held"],
    }


def answers(url: str, requests: list[bytes]) -> list[Any]:
    """Return the items of the answers."""
    headers = {"content-type": "application/json"}
    with httpx.Client(timeout=30) as client:
        return [client.post(f"{url}/v1/rank", content=b, headers=headers).json()["items"] for b in requests]


def measure(
    quick: bool = False,
    items: int = 5_000_000,
    share: float = 0.05,
    skew: float = 1.15,
    rate: float = 50.0,
    store: str = "sqlite",
    folder: str = "build",
) -> Figures:
    """Measure both servers; `store`: sqlite or redis."""
    items = min(items, 100_000) if quick else items
    fill_s, seconds = (3.0, 3.0) if quick else (FILL_S, SECONDS)
    requests = bodies(int(FILL_RATE * fill_s + rate * seconds), items, skew)
    with tempfile.TemporaryDirectory(dir=folder) as name, row_store(Path(name), store) as rows:
        began = time.perf_counter()
        learn(Path(name), rows, items)
        figures: Figures = {"learned_s": time.perf_counter() - began}
        with server(Path(name), rows, 0) as url:
            figures["all_rows"] = loaded(url, requests, rate, fill_s, seconds)
            expected = answers(url, requests[:200])
        memory_bytes = int(figures["all_rows"]["row_bytes"] * share)
        with server(Path(name), rows, memory_bytes) as url:
            figures["cache"] = loaded(url, requests, rate, fill_s, seconds)
            found = answers(url, requests[:200])
        figures["equal"] = np.mean([a == b for a, b in zip(found, expected, strict=True)])
    return {**figures, "memory_bytes": memory_bytes}


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        command(measure, __doc__)
