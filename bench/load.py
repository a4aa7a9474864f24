"""Events of other readers at a fixed rate, from a process of its own.

    python -m bench.load PORT EVENTS_PER_S

An open loop: the time of each request is drawn beforehand and does not depend on answers. Bodies are made
beforehand, too, so that the load takes little of the cores; only times and request ids are filled in. Each
round, 50 a second, is a request with pages and one with clicks on the pages of ten rounds before. Prints its
figures as a line of JSON for each line of its standard input, and ends with that.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROUNDS_PER_S = 50
CLICKS_SHARE = 0.3  # of the events
PAGE_ITEMS = 4
READERS, ARTICLES, TOPICS = 5_000, 2_000, 50
CLICKED_AFTER = 10  # rounds
TEMPLATES = 64
CONNECTIONS = 64
"""The most requests on their way at once. A further one waits, and is counted as late."""

ID, NOW = b"@@@@@@@@@", b"1111111111111"
"""Placeholders in a body for the number of its round, and for the time in milliseconds."""


class Background:
    """The load, as a context manager; `rate` is 0 for none."""

    def __init__(self, port: int, rate: float) -> None:
        self._port, self._rate = port, rate

    def __enter__(self) -> Background:
        words = [sys.executable, "-m", "bench.load", str(self._port), str(self._rate)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def begin(self) -> None:
        """Start counting anew."""
        self.figures()

    def figures(self) -> dict[str, float]:
        """Return the figures since the last call, see `Load.figures`.

        Raises RuntimeError if the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the load ended with status {self._process.wait()}")
        figures: dict[str, float] = json.loads(line)
        return figures


def page(request: str, reader: str, articles: list[int], now_ms: int) -> dict[str, Any]:
    """Return an impression of the quickstart: articles shown to a reader."""
    items = [{"article": f"article-{n}", "topic": f"topic-{n % TOPICS}", "age_s": float(n)} for n in articles]
    return {"request_id": request, "ts": now_ms, "reader": reader, "items": items}


def click(page_: dict[str, Any], now_ms: int) -> dict[str, Any]:
    """Return a click on a page's first article."""
    request, article = page_["request_id"], page_["items"][0]["article"]
    event = f"{request}/{article}"
    return {"event_id": event, "request_id": request, "article": article, "type": "click", "ts": now_ms}


@dataclass(frozen=True, slots=True)
class Template:
    """The bodies of a round, and their events."""

    pages: bytes
    n_pages: int
    clicks: bytes  # on these pages
    n_clicks: int


def templates(rate: float) -> list[Template]:
    """Return the rounds to send in turn; together they have the rate, however each of them is rounded."""
    rng = random.Random(1)
    made = []
    for i in range(TEMPLATES):
        events = int(rate * (i + 1) / ROUNDS_PER_S) - int(rate * i / ROUNDS_PER_S)
        clicks = int(events * CLICKS_SHARE + rng.random()) if events > 1 else 0
        pages = [
            page(
                f"b{ID.decode()}-{n}",
                f"reader-{rng.randrange(READERS)}",
                rng.sample(range(ARTICLES), PAGE_ITEMS),
                int(NOW),
            )
            for n in range(events - clicks)
        ]
        clicked = [click(chosen, int(NOW)) for chosen in rng.sample(pages, min(clicks, len(pages)))]
        made.append(
            Template(json.dumps(pages).encode(), len(pages), json.dumps(clicked).encode(), len(clicked))
        )
    return made


@dataclass(slots=True, eq=False)
class Connection:
    """A keep-alive connection; one request at a time."""

    sock: socket.socket
    events: int = 0  # of the request under way
    due: float = 0.0  # when it was to be sent, monotonic
    answer: bytes = b""


@dataclass(slots=True, eq=False)
class Load:
    """The loop: one thread that selects among its sockets."""

    port: int
    rate: float
    acknowledged: int = 0
    failed: int = 0
    late: int = 0
    began: float = field(default_factory=time.monotonic)
    delays: list[float] = field(default_factory=list)
    _free: list[Connection] = field(default_factory=list)
    _busy: dict[int, Connection] = field(default_factory=dict)
    _waiting: deque[tuple[float, str, bytes, int]] = field(default_factory=deque)

    def run(self) -> None:
        """Send and receive until standard input ends."""
        rounds = templates(self.rate)
        base = time.time_ns() // 1_000_000 % 1_000_000_000  # ids of two runs on one log differ
        start, number = time.monotonic(), 0
        while True:
            now = time.monotonic()
            due = start + number / ROUNDS_PER_S
            if now >= due:
                self._round(rounds, base, number, due)
                number += 1
                continue
            readable, _, _ = select.select([0, *self._busy], [], [], due - now)
            for fd in readable:
                if fd:
                    self._receive(self._busy[fd])
                elif not self._report():
                    return

    def figures(self) -> dict[str, float]:
        """Return the figures since the last call.

        Events acknowledged a second, events not acknowledged, requests that were late because no connection
        was free, and percentiles of the time from when a request was due to its 202.
        """
        now = time.monotonic()
        p50, p99 = np.percentile(self.delays, [50, 99]) if self.delays else (0.0, 0.0)
        figures = {
            "events_per_s": self.acknowledged / (now - self.began),
            "events_failed": self.failed,
            "requests_late": self.late,
            "ack_p50_ms": float(p50) * 1e3,
            "ack_p99_ms": float(p99) * 1e3,
        }
        self.began, self.acknowledged, self.failed, self.late, self.delays = now, 0, 0, 0, []
        return figures

    def _report(self) -> bool:
        """Answer a line of standard input; False at its end."""
        lines = os.read(0, 4096)
        for _ in range(lines.count(b"\n")):
            print(json.dumps(self.figures()), flush=True)
        return bool(lines)

    def _round(self, rounds: list[Template], base: int, number: int, due: float) -> None:
        now = b"%013d" % (time.time_ns() // 1_000_000)
        shown = rounds[number % TEMPLATES]
        if shown.n_pages:
            self._send(due, "impressions", _filled(shown.pages, base + number, now), shown.n_pages)
        before = number - CLICKED_AFTER
        clicked = rounds[before % TEMPLATES]
        if before >= 0 and clicked.n_clicks:
            self._send(due, "actions", _filled(clicked.clicks, base + before, now), clicked.n_clicks)

    def _send(self, due: float, what: str, body: bytes, events: int) -> None:
        if not self._free and len(self._busy) < CONNECTIONS:
            self._free.append(Connection(socket.create_connection(("127.0.0.1", self.port))))
        if not self._free:
            self.late += 1
            self._waiting.append((due, what, body, events))
            return
        connection = self._free.pop()
        connection.events, connection.due, connection.answer = events, due, b""
        kind = "content-type: application/json"
        head = f"POST /v1/{what} HTTP/1.1\r\nhost: x\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sock.sendall(head.encode() + body)
        self._busy[connection.sock.fileno()] = connection

    def _receive(self, connection: Connection) -> None:
        got = connection.sock.recv(1 << 18)
        connection.answer += got
        head, end, body = connection.answer.partition(b"\r\n\r\n")
        if got and (not end or len(body) < _length(head)):
            return
        del self._busy[connection.sock.fileno()]
        if head.startswith(b"HTTP/1.1 202"):
            self.acknowledged += connection.events
            self.delays.append(time.monotonic() - connection.due)
        else:
            self.failed += connection.events
        if got:
            self._free.append(connection)
        else:
            connection.sock.close()
        if self._waiting:
            self._send(*self._waiting.popleft())


def _length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


def _filled(body: bytes, number: int, now: bytes) -> bytes:
    return body.replace(ID, b"%09d" % (number % 1_000_000_000)).replace(NOW, now)


if __name__ == "__main__":
    Load(int(sys.argv[1]), float(sys.argv[2])).run()
