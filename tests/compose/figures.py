"""Figures of the compose file: from `up` to the first served prediction, and the memory of each container.

    python -m tests.compose.figures [EVENTS_PER_S [RANKS_PER_S]]    # 2000 and 200

Needs a docker engine and built images. Prints a table: MB at rest, a minute after all was healthy, and after
three minutes under load; sizes of the images. A benchmark, no test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from freshet.testing.conditions import wait_until
from tests.compose.loading import Load
from tests.compose.stack import PROJECT, Stack
from tests.fixtures.commands import LEDGER

REST_S, LOADED_S = 60, 180
UNITS = {"B": 1e-6, "KiB": 2**10 / 1e6, "MiB": 2**20 / 1e6, "GiB": 2**30 / 1e6}


def main(events: float, ranks: float) -> None:
    """Start, ask, load, print."""
    with tempfile.TemporaryDirectory(prefix="freshet-figures-") as made:
        folder = Path(made)
        stack = Stack(LEDGER.parent, folder)
        stack.down(volumes=True)
        try:
            first_s = _first_prediction(stack)
            print(f"first served prediction {first_s:.1f} s after `docker compose up`", flush=True)
            _let_pass(REST_S)
            rest = memory_mb(stack)
            load = Load(stack.gateway, stack.inference, events=events, ranks=ranks, seed=1)
            load.start()
            wait_until("time passes", lambda: len(load.parts) >= LOADED_S, within_s=3 * LOADED_S)
            loaded = memory_mb(stack)
            for name, lane in load.stop().items():
                print(name, json.dumps(lane.as_json()), flush=True)
            print(f"MB of memory: at rest, under {events:g} events/s and {ranks:g} rankings/s")
            for name in sorted(loaded):
                print(f"  {name:14} {rest.get(name, 0):6.0f} {loaded[name]:6.0f}")
        finally:
            stack.down(volumes=True)
            stack.close()
    print(_run(["docker", "images", "localhost/freshet/*", "--format", "{{.Repository}} {{.Size}}"]))


def _first_prediction(stack: Stack) -> float:
    """Seconds from `up` to the first ranking that is answered, by a model that has learned nothing yet."""
    body = {"context": {"user": "user-1"}, "candidates": [{"item": 1, "seq": 1}]}
    began = time.monotonic()
    up = threading.Thread(target=stack.up)
    up.start()

    def answered() -> bool:
        try:
            return client.post(f"{stack.inference}/v1/rank", json=body).status_code == 200
        except httpx.HTTPError:
            return False

    with httpx.Client(timeout=2) as client:
        wait_until("a ranking is answered", answered, within_s=300)
    first_s = time.monotonic() - began
    up.join()
    print(f"all healthy after {time.monotonic() - began:.1f} s")
    return first_s


def memory_mb(stack: Stack) -> dict[str, float]:
    """MB by service, as the engine counts them: without what the kernel could take back of caches."""
    ids = stack.docker("ps", "--quiet").split()
    lines = _run(["docker", "stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}", *ids])
    found = {}
    for line in lines.splitlines():
        name, used = line.split()[:2]
        number = used.rstrip("BKMGi")
        service = name.removeprefix(f"{PROJECT}-").rsplit("-", 1)[0]
        found[service] = float(number) * UNITS[used[len(number) :]]
    return found


def volumes_mb(stack: Stack) -> dict[str, float]:
    """MB on disk by volume. Needs root, as the engine's folders do."""
    found = {}
    for line in _run(["docker", "volume", "ls", "--format", "{{.Name}} {{.Mountpoint}}"]).splitlines():
        name, _, folder = line.partition(" ")
        if name.startswith(f"{PROJECT}_"):
            used = _run(["du", "--summarize", "--block-size=1", folder]).split()[0]
            found[name.removeprefix(f"{PROJECT}_")] = int(used) / 1e6
    return found


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _let_pass(seconds: float) -> None:
    threading.Event().wait(seconds)


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    main(*(given + [2_000.0, 200.0][len(given) :]))
