"""A stack that holds the rows that docs/compose.md promises: does it load them, and have memory left?

    python -m tests.compose.filled [ROWS [small]]    # 5500000; small: with compose.small.yml

Rows of the demo's first table are put into Redis as a shard would store them; then all others start on them,
and simulated readers come. Prints how long that took, the memory of each container, what masters of
Redis and shards hold and may, and which alerts fire. A benchmark, no test; needs a docker engine and built
images. STACK_SHARD_BYTES and the other sizes are taken from the environment.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx

from freshet.clock import SYSTEM_CLOCK
from freshet.config.spec import load_spec
from freshet.demo import DEMO_SPEC
from freshet.testing.conditions import wait_until
from tests.compose.figures import memory_mb
from tests.compose.prometheus import Prometheus
from tests.compose.stack import Stack
from tests.fixtures.seeding import seed_rows

READY_WITHIN_S = 600.0
LEARNS_S = 60.0
UNTIL = {
    "shards have loaded": "absent(freshet_paramserver_slices) or freshet_paramserver_loading_buckets > 0",
    "rankings are answered": "absent(freshet_inference_version >= 0)",
}
"""What is waited for -> a query that has no series then."""

GAUGES = (
    "max by (server) (freshet_paramserver_store_used_bytes)",
    "max by (server) (freshet_paramserver_store_limit_bytes)",
    "sum by (instance) (freshet_shard_rows)",
    "freshet_paramserver_bytes",
    "freshet_paramserver_memory_limit_bytes",
    "freshet_process_memory_limit_bytes",
)


def main(rows: int, *, small: bool) -> None:
    """Start, fill, start anew, learn, print."""
    with tempfile.TemporaryDirectory(prefix="freshet-filled-") as made:
        folder = Path(made)
        stack = Stack(DEMO_SPEC.parent, folder, small=small)
        stack.down(volumes=True)
        try:
            fill(stack, folder, rows)
            _start_and_learn(stack)
        finally:
            stack.keep_words(Path(tempfile.gettempdir()))
            stack.down(volumes=True)
            stack.close()


def fill(stack: Stack, folder: Path, rows: int) -> None:
    """Put rows into Redis before any service can write some: only the stores have been started."""
    stack.docker("run", "--rm", "--no-TTY", "prepare", within_s=300)
    os.environ |= stack.settings(folder)
    began = time.monotonic()
    put = seed_rows(load_spec(DEMO_SPEC), folder, rows, seed=1, used_ms=SYSTEM_CLOCK.now_ms())
    print(f"{put:,} rows stored in {time.monotonic() - began:.0f} s", flush=True)


def _start_and_learn(stack: Stack) -> None:
    began = time.monotonic()
    stack.up()
    print(f"all healthy after {time.monotonic() - began:.1f} s", flush=True)
    for what in wait_for_rows(stack):
        print(f"{what} after {time.monotonic() - began:.1f} s", flush=True)
    stack.up("simulator")
    began = time.monotonic()
    wait_until(
        "readers are learned from",
        lambda: sum(stack.applied().values()) > 1_000 and time.monotonic() > began + LEARNS_S,
        within_s=300,
        poll_s=1,
    )
    for name, mb in sorted(memory_mb(stack).items()):
        print(f"  {name:14} {mb:6.0f} MB")
    prometheus = Prometheus(stack.prometheus)
    for expr in GAUGES:
        print(expr)
        for series in prometheus.query(expr):
            labels = {k: v for k, v in series["metric"].items() if k in {"server", "instance"}}
            print(f"  {labels} {float(series['value'][1]):,.0f}")
    for name in stack.of("inference"):
        answer = httpx.get(f"{stack.url(name)}/status", timeout=5).json()
        print(name, {key: value for key, value in answer.items() if "row" in key or "version" in key})
    print("firing:", prometheus.firing() or "nothing", flush=True)
    prometheus.close()


def wait_for_rows(stack: Stack) -> Iterator[str]:
    """What there is by now: shards that have loaded, rankings."""
    prometheus = Prometheus(stack.prometheus)
    for what, missing in UNTIL.items():
        wait_until(what, partial(_none, prometheus, missing), within_s=READY_WITHIN_S, poll_s=1)
        yield what
    prometheus.close()


def _none(prometheus: Prometheus, expr: str) -> bool:
    return not prometheus.query(expr)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_500_000, small="small" in sys.argv[2:])
