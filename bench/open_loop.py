"""An open loop of rank requests: how long users wait at a given rate.

Requests are sent at moments that are drawn before, whether answers come or not, and each latency counts from
its moment. A server that stands still for 100 ms delays one request of a closed loop (`bench.wrk`), and all
requests of those 100 ms here; so only these percentiles show what users see.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.report import Figures
from freshet.types import F64

CONNECTIONS = 32
"""The most requests on their way at once. Others that are due wait, and their latency counts from when they
were due."""


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    due: float = 0.0
    answer: bytes = b""

    def complete(self) -> bool:
        """Whether the answer is complete. Raises RuntimeError if it is no 200."""
        head, found, rest = self.answer.partition(b"\r\n\r\n")
        if not found:
            return False
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a request failed: {self.answer[:500]!r}")
        return len(rest) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


PR_SET_TIMERSLACK = 29  # prctl(2)


def wake_in_time() -> None:
    """Let the sleeps of this thread end when they are due.

    Linux ends them 50 µs late by default, which is no latency of the server's.
    """
    with contextlib.suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def load(port: int, bodies: Sequence[bytes], rate: float, seconds: float, seed: int = 0) -> Figures:
    """Send Poisson requests to `/v1/rank`, `rate` a second, whether earlier ones are answered or not."""
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
    """Return the seconds from when each request was due to the last byte of its answer."""
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
