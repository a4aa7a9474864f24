"""Swaps of the dense version under load: what clients of /v1/rank see of them.

    python -m bench.swaps [SECONDS BEFORE]      needs wrk on the PATH

Starts the quickstart's whole system, trains a little, then lets wrk rank 100 candidates a request over 8
connections while `stable` moves 20 times between the newest versions, as `freshet version` moves it. The
trainer goes on: what wrk is served is logged, joined and trained on. Prints one JSON object: answers that
were not 2xx (there must be none), errors of sockets, latencies without and with swaps, how long a swap took.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from examples.quickstart.demo import World, play
from freshet.adapters import open_versions
from freshet.apps.local import Local, local
from freshet.cli.version import command as version_command
from freshet.config.spec.parse import load_spec

ROOT = Path(__file__).parents[1]
SWAPS = 20
CONNECTIONS = 8
SWAP_WAIT_S = 10.0

LUA = """
local bodies = {}
for b = 1, 64 do
  local items = {}
  for i = 1, 100 do
    items[i] = string.format('{"article":"article-%d","topic":"sport","age_s":%d}', (b * 7 + i) % 120, i)
  end
  bodies[b] = string.format('{"context":{"reader":"reader-%d"},"k":10,"candidates":[%s]}', b % 25,
    table.concat(items, ","))
end
local turn = 0
wrk.headers["Content-Type"] = "application/json"
request = function()
  turn = turn % #bodies + 1
  return wrk.format("POST", "/v1/rank", nil, bodies[turn])
end
done = function(summary, latency, requests)
  local e = summary.errors
  print(string.format('{"requests":%d,"seconds":%.2f,"not_2xx":%d,"socket_errors":%d,"timeouts":%d,' ..
    '"p50_ms":%.2f,"p99_ms":%.2f,"max_ms":%.2f}', summary.requests, summary.duration / 1e6, e.status,
    e.connect + e.read + e.write, e.timeout, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    latency.max / 1e3))
end
"""


def wrk(port: int, script: Path, seconds: int) -> subprocess.Popen[str]:
    """Start wrk on one thread."""
    where = f"http://127.0.0.1:{port}"
    return subprocess.Popen(
        ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), where],
        stdout=subprocess.PIPE,
        text=True,
    )


def figures(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What wrk's last line says, once it has ended."""
    out, _ = process.communicate()
    made: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return made


def served(system: Local) -> int:
    """The version that the inference server serves now."""
    return int(system.status()["services"]["inference"]["figures"]["version"])


def swap(system: Local) -> float:
    """Move `stable` to the newest version that is not it; seconds until that version is served."""
    versions = open_versions(f"file:{system.folder / 'versions'}")
    stable = versions.aliases()["stable"]
    target = max(number for number in versions.numbers() if number != stable)
    began = time.monotonic()
    # `rollback` pins: the gate must not move `stable` in between
    asked = CliRunner().invoke(version_command, ["rollback", str(target), "--folder", str(system.folder)])
    if asked.exit_code:
        raise RuntimeError(asked.output)
    pause = threading.Event()
    while served(system) != target:
        if time.monotonic() > began + SWAP_WAIT_S:
            raise RuntimeError(f"version {target} is not served after {SWAP_WAIT_S} s")
        pause.wait(0.02)
    return time.monotonic() - began


def main() -> None:
    before = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    spec = load_spec(ROOT / "examples" / "quickstart" / "freshet.toml")
    spec = replace(spec, train=replace(spec.train, version_interval_ms=2_000))
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.lua"
        script.write_text(LUA)
        with local(spec, folder=Path(folder) / "run") as system:
            play(system, World(), 15, 40.0)
            port = system.ports["inference"]
            without = figures(wrk(port, script, before))
            load = wrk(port, script, 10 * before)  # longer than the swaps take; ended below
            try:
                took = sorted(swap(system) for _ in range(SWAPS))
            finally:
                load.send_signal(signal.SIGINT)  # wrk prints its figures when it is interrupted
                during = figures(load)
            restarts = sum(s["restarts"] for s in system.status()["services"].values())
        print(
            json.dumps(
                {
                    "swaps": SWAPS,
                    "not_2xx": without["not_2xx"] + during["not_2xx"],
                    "swap_p50_s": round(took[len(took) // 2], 2),
                    "swap_max_s": round(took[-1], 2),
                    "without_swaps": without,
                    "during_swaps": during,
                    "restarts": restarts,
                    "cores": os.cpu_count(),
                    "load_average": os.getloadavg()[0],
                }
            )
        )


if __name__ == "__main__":
    main()
