"""Clients of the benchmark of rank requests.

Two kinds, as they answer two questions. `closed` (wrk) sends the next request when an answer is there: how
many requests the server can answer. `opened` sends requests at moments that were drawn before, whether
answers come or not, and counts each latency from the moment that was drawn: how long people wait at a given
rate. A server that stands still for 100 ms delays one request of a closed client, and all of those 100 ms of
an open one; only the open client's percentiles tell what users see.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import select
import shutil
import socket
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.report import Figures
from freshet.types import F64

CONNECTIONS = 32
"""Of the open client: more requests than these are never on their way; those due meanwhile wait, and their
latency counts from when they were due."""

SCRIPT = """
local bodies = {}
for i = 0, %d do
  local file = assert(io.open(string.format("%s/%%d", i), "rb"))
  bodies[i] = wrk.format("POST", "/v1/rank", {["Content-Type"] = "application/json"}, file:read("*a"))
  file:close()
end
local next = 0
request = function()
  next = (next + 1) %% %d
  return bodies[next]
end
"""


def closed(port: int, bodies: Sequence[bytes], clients: int, seconds: float, folder: Path) -> Figures:
    """wrk with so many keep-alive connections. Raises RuntimeError without wrk, or if a request fails."""
    if shutil.which("wrk") is None:
        raise RuntimeError("this needs wrk: apt install wrk")
    for i, body in enumerate(bodies):
        (folder / str(i)).write_bytes(body)
    script = folder / "post.lua"
    script.write_text(SCRIPT % (len(bodies) - 1, folder, len(bodies)))
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", "-s", str(script)]
    said = subprocess.run(
        [*command, f"http://127.0.0.1:{port}"], check=True, capture_output=True, text=True
    ).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise RuntimeError(f"requests failed:\n{said}")
    found = re.search(r"(\d+) requests in", said)
    assert found is not None, said
    return {
        "requests": int(found[1]),
        **{f"p{p}_ms": _ms(said, p) for p in (50, 99)},
    }


def _ms(said: str, percentile: int) -> float:
    found = re.search(rf"{percentile}%\s+([\d.]+)(us|ms|s)\b", said)
    assert found is not None, said
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    due: float = 0.0
    answer: bytes = b""

    def complete(self) -> bool:
        """Whether the answer is whole. Raises RuntimeError if it is no 200."""
        head, found, rest = self.answer.partition(b"\r\n\r\n")
        if not found:
            return False
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a request failed: {self.answer[:500]!r}")
        return len(rest) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


PR_SET_TIMERSLACK = 29  # prctl(2)


def wake_in_time() -> None:
    """Have the calling thread's sleeps end when they are due: Linux lets them end 50 µs late, which is no
    latency of the server's."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def opened(port: int, bodies: Sequence[bytes], rate: float, seconds: float, seed: int = 0) -> Figures:
    """Requests that come by chance (Poisson), `rate` a second, whatever becomes of those before."""
    due: F64 = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds)))
    requests = [
        b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(b), b)
        for b in bodies
    ]
    connections = [_Connection(_connected(port)) for _ in range(CONNECTIONS)]
    wake_in_time()
    try:
        latencies = _run(connections, requests, due.tolist())
    finally:
        for one in connections:
            one.socket.close()
    p50, p99, p999 = np.percentile(np.array(latencies) * 1e3, [50, 99, 99.9])
    return {"rate_per_s": rate, "requests": len(due), "p50_ms": p50, "p99_ms": p99, "p999_ms": p999}


def _connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def _run(connections: list[_Connection], requests: Sequence[bytes], due: Sequence[float]) -> list[float]:
    """Seconds from when each request was due to its answer's last byte."""
    idle, busy = deque(connections), dict[socket.socket, _Connection]()
    latencies: list[float] = []
    sent = 0
    began = time.perf_counter()
    while len(latencies) < len(due):
        now = time.perf_counter() - began
        while sent < len(due) and due[sent] <= now and idle:
            one = idle.popleft()
            one.due, one.answer = due[sent], b""
            one.socket.sendall(requests[sent % len(requests)])
            busy[one.socket] = one
            sent += 1
        pause = max(0.0, due[sent] - (time.perf_counter() - began)) if sent < len(due) and idle else None
        readable, _, _ = select.select(list(busy), [], [], pause)
        for client in readable:
            one = busy[client]
            piece = client.recv(65_536)
            if not piece:
                raise RuntimeError("the server has closed a connection")
            one.answer += piece
            if one.complete():
                latencies.append(time.perf_counter() - began - one.due)
                del busy[client]
                idle.append(one)
    return latencies
