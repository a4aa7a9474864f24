"""Rank requests to a server with a share of the rows in memory, beside one that has all of them.

    python -m bench.tiered_serving [--items 5000000] [--share 0.05] [--skew 1.15] [--rate 200]
        [--folder build] [--quick]

The feed example without its crosses, on a row store whose rows were all learned once. Requests have
100 candidates, drawn by Zipf's law (`skew`) over the items, and come at `rate` a second whether earlier ones
are answered or not; those of the first seconds, which warm the server, do not count. Both servers are
processes, one after the other; the second has `share` of the first's bytes of rows as memory, and its other
rows on the disk of `folder`. `equal` is the share of its answers that equal those of the first to the bit.

Bound by reads of the disk, one for each row that is not in memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from bench import open_loop
from bench.report import Figures, command
from bench.table_sizes import zipf
from freshet.config.spec.layout import Group, layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.inference.pipeline import Pipeline
from freshet.process.memory import shorten_pauses
from freshet.tables import KeyGroup, Plan
from freshet.testing.conditions import wait_until
from freshet.types import F32, I64, OffsetRange
from tests.fixtures.inference import CONTEXT, NOW, RANKED, greedy, serving
from tests.fixtures.serving import FEED
from tests.fixtures.trained_model import World

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


def learn(folder: Path, items: int) -> None:
    """Fill a row store."""
    world = World(folder, spec(), RANKED, BUCKETS)
    world.create()
    pipeline, group = Pipeline(world.spec, RANKED), world.layout.groups[0]
    plan = plan_of(world.spec, group)
    rng = np.random.default_rng(0)
    for n, first in enumerate(range(0, items, AT_ONCE)):
        items_here = candidates(np.arange(first, min(first + AT_ONCE, items)))
        event = {**CONTEXT, "user": user(first), "request_id": 1}
        encoded = pipeline.encoded([{**event, "items": items_here}], len(items_here))
        keys = pipeline.requests([encoded]).groups[0]
        plan.build(keys.keys, keys.feature_starts)
        grouped = KeyGroup(0, plan.keys, plan.tables, plan.bucket_starts)
        gradients = noise(rng, len(plan.keys), group.width)
        world.rows.push([OffsetRange(0, n, n + 1)], NOW, [grouped], [gradients])
        if n % FLUSHED == FLUSHED - 1:
            world.flush()
    world.publish()
    world.flush()
    world.put_version(0, event_time_ms=NOW)
    world.promote(0)
    world.close()


def plan_of(spec: Spec, group: Group) -> Plan:
    """Return a plan for a store group's features."""
    tables = [spec.table(spec.features[f].table or "").id for f in group.features]
    return Plan(tables=np.array(tables, np.uint8), buckets=BUCKETS)


def unique_keys(requests: list[bytes]) -> float:
    """Return the unique keys of a request, on average."""
    made = spec()
    pipeline = Pipeline(made, RANKED)
    plan = plan_of(made, layout_of(made).groups[0])
    sums = 0
    for body in requests:
        asked = orjson.loads(body)
        event = {**asked["context"], "request_id": 1, "items": asked["candidates"]}
        keys = pipeline.requests([pipeline.encoded([event], CANDIDATES)]).groups[0]
        sums += plan.build(keys.keys, keys.feature_starts)
    return sums / len(requests)


def noise(rng: np.random.Generator, rows: int, width: int) -> F32:
    """Draw (rows, width) gradients."""
    return rng.normal(0, 1, (rows, width)).astype(np.float32)


@contextmanager
def server(folder: Path, memory_bytes: int) -> Iterator[str]:
    """Run a server as a process; yields its address."""
    words = [sys.executable, "-m", "bench.tiered_serving", "--serve", str(folder), str(memory_bytes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            url = next(line for line in process.stdout if line.startswith("http")).strip()
            wait_until("rows are served", partial(is_ready, url), within_s=600)
            yield url
        finally:
            process.stdin.close()


def is_ready(url: str) -> bool:
    """Whether a server serves rows and a version."""
    return httpx.get(f"{url}/health/ready").status_code == 200


def serve(folder: Path, memory_bytes: int) -> None:
    """Serve until standard input ends."""
    world = World(folder, spec(), RANKED, BUCKETS)
    shorten_pauses()  # as the service does
    tier = {"inference_memory_bytes": str(memory_bytes), "inference_ssd_folder": str(folder)}
    with serving(world, **(tier if memory_bytes else {})) as running:
        sys.stdout.write(f"\n{running.url}\n")  # at once: other threads log to it
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the parent reads one line
        sys.stdin.read()
    world.close()


def counts(url: str) -> dict[str, float]:
    """Return the counts of rows and reads since the start, and the seconds of reads."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    names = {
        "freshet_inference_unread_rows_total": "missing",
        "freshet_inference_row_read_seconds_sum": "sum",
        "freshet_inference_row_read_seconds_count": "count",
        "freshet_inference_defaulted_rows_total": "defaulted",
    }
    found = dict.fromkeys(names.values(), 0.0)
    for line in text.splitlines():
        if name := names.get(line.split("{")[0].split(" ")[0]):
            found[name] += float(line.split()[-1])
    return found


def loaded(
    url: str, requests: list[bytes], rate: float, fill_s: float, seconds: float, began: float
) -> Figures:
    """Measure one server, which was started at `began`."""
    port = int(url.rsplit(":", 1)[1])
    first = int(FILL_RATE * fill_s)
    started_s = time.perf_counter() - began
    open_loop.load(port, requests[:first], FILL_RATE, fill_s, seed=1)
    before = counts(url)
    figures = open_loop.load(port, requests[first:], rate, seconds, seed=2)
    after = counts(url)
    done = {name: after[name] - before[name] for name in after}
    missing = done["missing"] / (rate * seconds)
    status = httpx.get(f"{url}/status", timeout=30).json()
    return {
        "started_s": started_s,
        **figures,
        "hits": 1 - missing / unique_keys(requests[first : first + 200]),
        "missing_a_request": missing,
        "reads_per_s": done["count"] / seconds,
        "read_ms": 1e3 * done["sum"] / max(done["count"], 1),
        "defaulted_rows": done["defaulted"],
        "row_bytes": status["row_bytes"],
        "rows_held": status["rows_held"],
        "ssd": status["ssd"],
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
    rate: float = 200.0,
    folder: str = "build",
) -> Figures:
    """Measure both servers."""
    items = min(items, 100_000) if quick else items
    fill_s, seconds = (3.0, 3.0) if quick else (FILL_S, SECONDS)
    requests = bodies(int(FILL_RATE * fill_s + rate * seconds), items, skew)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        learn(Path(name), items)
        figures: Figures = {}
        began = time.perf_counter()
        with server(Path(name), 0) as url:
            figures["all_rows"] = loaded(url, requests, rate, fill_s, seconds, began)
            expected = answers(url, requests[:200])
        memory_bytes = int(figures["all_rows"]["row_bytes"] * share)
        began = time.perf_counter()
        with server(Path(name), memory_bytes) as url:
            figures["tiered"] = loaded(url, requests, rate, fill_s, seconds, began)
            found = answers(url, requests[:200])
        figures["equal"] = np.mean([a == b for a, b in zip(found, expected, strict=True)])
    return {**figures, "memory_bytes": memory_bytes}


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        command(measure, __doc__)
