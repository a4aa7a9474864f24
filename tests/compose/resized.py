"""A stack full of rows gets more memory while readers come, step by step as docs/compose.md says.

    python -m tests.compose.resized [ROWS]    # 5500000

Sizes are those of the table's next row. Prints how long each step took, how many requests of simulated
readers failed in it, and what masters, shards and inference servers have at the end. A benchmark, no test;
needs a docker engine and built images.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from freshet.demo import DEMO_SPEC
from freshet.testing.conditions import wait_until
from tests.compose.figures import memory_mb
from tests.compose.filled import fill, wait_for_rows
from tests.compose.prometheus import Prometheus
from tests.compose.stack import Stack

SIZES = {
    "STACK_SHARD_BYTES": "1342177280",
    "STACK_SHARD_LIMIT": "3g",
    "STACK_REDIS_BYTES": "1610612736",
    "STACK_REDIS_LIMIT": "2304m",
    "STACK_INFERENCE_LIMIT": "3g",
}
NODES = [f"redis-{i}" for i in range(6)]
ROOM = (
    'export REDISCLI_AUTH="$(cat /run/freshet/admin/redis.admin-password)"; for i in 0 1 2 3 4 5; '
    f"do redis-cli --user admin -h redis-$i config set maxmemory {SIZES['STACK_REDIS_BYTES']}; done"
)
REPLICATED = (
    'export REDISCLI_AUTH="$(cat /run/freshet/admin/redis.admin-password)"; '
    "redis-cli --user admin -h {node} info replication"
)

__all__: list[str] = []


def main(rows: int) -> None:
    """Start, fill, have readers come, change sizes, print."""
    with tempfile.TemporaryDirectory(prefix="freshet-resized-") as made:
        folder = Path(made)
        stack = Stack(DEMO_SPEC.parent, folder)
        stack.down(volumes=True)
        try:
            fill(stack, folder, rows)
            stack.up()
            print(*wait_for_rows(stack), sep=", ", flush=True)
            stack.up("simulator")
            wait_until(
                "readers are learned from", lambda: sum(stack.applied().values()) > 1_000, within_s=300
            )
            _resize(stack)
            _tell(stack)
        finally:
            stack.keep_words(Path(tempfile.gettempdir()))
            stack.down(volumes=True)
            stack.close()


def _resize(stack: Stack) -> None:
    stack.change(SIZES)
    _step(stack, "Redis has room", lambda: _give_room(stack))
    for service in ("inference-0", "inference-1", "shard-0", "shard-1"):
        _step(stack, service, lambda service=service: _made_anew(stack, service))  # type: ignore[misc]
    for node in NODES:
        _step(stack, node, lambda node=node: _node_made_anew(stack, node))  # type: ignore[misc]
    _step(stack, "up finds nothing to do", stack.up)


def _give_room(stack: Stack) -> None:
    for node in NODES:
        stack.engine("update", "--memory", "2304m", "--memory-swap", "4608m", stack.container(node))
    said = stack.docker(
        "run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "sh", "form-cluster", "-c", ROOM
    )
    assert said.split() == ["OK"] * len(NODES), said


def _made_anew(stack: Stack, service: str) -> None:
    stack.docker("up", "--detach", "--no-build", "--wait", "--no-deps", service, within_s=300)
    stack.forget(service)


def _node_made_anew(stack: Stack, node: str) -> None:
    _made_anew(stack, node)
    wait_until(
        "the cluster is whole",
        lambda: _is_whole(stack),
        within_s=180,
        poll_s=1,
    )
    wait_until(f"{node} has caught up", lambda: _has_caught_up(stack, node), within_s=180, poll_s=1)


def _is_whole(stack: Stack) -> bool:
    try:
        stack.docker("run", "--rm", "--no-deps", "--no-TTY", "form-cluster", within_s=120)
    except AssertionError:
        return False
    return True


def _has_caught_up(stack: Stack, node: str) -> bool:
    said = stack.docker(
        *("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "sh", "form-cluster", "-c"),
        REPLICATED.format(node=node),
    )
    return "master_link_status:up" in said or "slave0:" in said


def _step(stack: Stack, what: str, do: Callable[[], object]) -> None:
    before, began, learned = _counts(stack), time.monotonic(), sum(stack.applied().values())
    do()
    took = time.monotonic() - began
    wait_until("training goes on", lambda: sum(stack.applied().values()) > learned, within_s=300, poll_s=0.2)
    on = time.monotonic() - began
    after = _counts(stack)
    told = ", ".join(f"{name} {after[name] - before[name]:,.0f}" for name in after)
    print(f"{what:24} {took:5.1f} s, learning at {on:5.1f} s; readers: {told}", flush=True)


def _counts(stack: Stack) -> dict[str, float]:
    """What simulated readers have done, and what of it failed."""
    page = httpx.get(f"{stack.url('simulator')}/metrics", timeout=10).text
    found = re.findall(r"^freshet_simulator_(\w+?)_total(?:\{[^}]*\})? ([0-9.e+]+)$", page, re.M)
    return {name: float(value) for name, value in found}


def _tell(stack: Stack) -> None:
    for name, mb in sorted(memory_mb(stack).items()):
        print(f"  {name:14} {mb:6.0f} MB")
    prometheus = Prometheus(stack.prometheus)
    for expr in (
        "freshet_paramserver_bytes",
        "freshet_paramserver_memory_limit_bytes",
        "max by (server) (freshet_paramserver_store_limit_bytes)",
    ):
        print(expr, [f"{float(series['value'][1]):,.0f}" for series in prometheus.query(expr)])
    print("firing:", prometheus.firing() or "nothing", flush=True)
    prometheus.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_500_000)
