"""Closed-loop load by wrk: each connection sends its next request when it has an answer.

So wrk finds how many requests a server can answer. How long users wait at a given rate is the question of an
open loop, see `bench.open_loop`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.report import Figures

DONE = """
function done(summary, latency)
  local e = summary.errors
  print(string.format('{"requests":%d,"seconds":%.3f,"not_2xx":%d,"socket_errors":%d,"p50_ms":%.3f,"p99_ms":%.3f}',
    summary.requests, summary.duration / 1e6, e.status, e.connect + e.read + e.write + e.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
"""
POSTS = """
local requests, turn = {}, 0
for i, body in ipairs({%s}) do
  requests[i] = wrk.format("POST", "%s", {["Content-Type"] = "application/json"}, body)
end
function request()
  turn = turn %% #requests + 1
  return requests[turn]
end
"""


def posts(path: str, bodies: Sequence[bytes]) -> str:
    """Return a script that posts JSON bodies in turn."""
    return POSTS % (",\n".join(f"[==[{body.decode()}]==]" for body in bodies), path)


def load(port: int, script: str, connections: int, seconds: float, words: Sequence[str] = ()) -> Figures:
    """Load a server of this machine from one thread; returns requests, seconds, p50_ms and p99_ms.

    Args:
        port: of the server.
        script: Lua that defines `request`, and may define `init`.
        connections: keep-alive connections.
        seconds: a whole number.
        words: arguments of the script's `init`.

    Raises:
        RuntimeError: wrk is not installed, an answer was not 2xx, or a connection failed.
    """
    if shutil.which("wrk") is None:
        raise RuntimeError("this measurement loads servers with wrk, which is not on the PATH: install it")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "load.lua"
        file.write_text(script + DONE)
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(file)]
        command += [f"http://127.0.0.1:{port}", "--", *words]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: Figures = json.loads(out.strip().splitlines()[-1])
    if found.pop("not_2xx") + found.pop("socket_errors"):
        raise RuntimeError(f"some requests failed:\n{out}")
    return found
