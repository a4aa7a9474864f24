"""Answers that come piece by piece, over real sockets: who ends them, and what an unread one costs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client import CollectorRegistry

from freshet.errors import BadInput
from freshet.runtime.endpoint import Endpoint
from freshet.runtime.http import App, Request, Stream
from freshet.runtime.server import bind, run_server, serve
from tests.system.waiting import wait_until

PIECE = b"x" * 65_536
DRAIN_S = 20


@dataclass
class Running:
    """A server with streams, and what became of their pieces."""

    port: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    made: int = 0  # pieces of /flood
    closed: int = 0  # generators that were closed
    thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ticks(self) -> AsyncGenerator[bytes]:
        try:
            number = 0
            while True:
                yield b"data: %d\n\n" % number
                number += 1
                await asyncio.sleep(0.01)
        finally:
            self.closed += 1

    async def flood(self) -> AsyncGenerator[bytes]:
        try:
            while True:
                self.made += 1
                yield PIECE
        finally:
            self.closed += 1

    async def three(self) -> AsyncGenerator[bytes]:
        for piece in (b"a", b"b", b"c"):
            yield piece

    async def broken(self) -> AsyncGenerator[bytes]:
        yield b"so far"
        raise KeyError("secret")

    def ended(self, within_s: float) -> float:
        """Stop the server; how many seconds that took."""
        assert self.thread is not None
        self.stop.set()
        began = time.monotonic()
        self.thread.join(within_s)
        assert not self.thread.is_alive(), f"still running {within_s} s after the stop"
        return time.monotonic() - began


def admit(headers: object) -> None:
    if b"x-refused" in dict(headers):  # type: ignore[call-overload]
        raise BadInput("not by this door")


@pytest.fixture
def server() -> Iterator[Running]:
    running, ready = Running(), threading.Event()
    app = App(
        CollectorRegistry(),
        max_body_bytes=1_000,
        body_timeout_s=1,
        headers=((b"x-with-all", b"yes"),),
        admit=admit,
    )
    for name in ("ticks", "flood", "three", "broken"):

        async def handler(_request: Request, name: str = name) -> Stream:
            return Stream(getattr(running, name)(), b"text/event-stream", ((b"x-own", b"1"),))

        app.route(Endpoint("GET", f"/{name}", "Pieces.", ()), handler)
    sock = bind("127.0.0.1", 0)
    running.port = sock.getsockname()[1]

    async def main() -> None:
        await serve(app, sock, running.stop, started=ready.set, drain_s=DRAIN_S)

    running.thread = threading.Thread(target=run_server, args=(main,))
    running.thread.start()
    assert ready.wait(10)
    yield running
    running.ended(DRAIN_S + 5)
    sock.close()


def unread(server: Running, path: str) -> socket.socket:
    """A client that asks, and then never reads."""
    client = socket.create_connection(("127.0.0.1", server.port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


def test_pieces_arrive_as_they_are_made_and_the_end_is_the_end(server: Running) -> None:
    answer = httpx.get(server.url + "/three")

    assert answer.text == "abc"
    assert answer.headers["content-type"] == "text/event-stream"
    assert (answer.headers["x-own"], answer.headers["x-with-all"]) == ("1", "yes")


def test_every_answer_has_the_common_headers_also_errors_and_refusals_at_the_door(server: Running) -> None:
    missing = httpx.get(server.url + "/nowhere")
    refused = httpx.get(server.url + "/three", headers={"x-refused": "1"})

    assert (missing.status_code, missing.headers["x-with-all"]) == (404, "yes")
    assert (refused.status_code, refused.headers["x-with-all"]) == (400, "yes")


def test_a_client_that_goes_away_ends_its_stream(server: Running) -> None:
    with httpx.stream("GET", server.url + "/ticks") as answer:
        first = next(answer.iter_raw())

    assert first.startswith(b"data: 0")
    wait_until("the pieces are closed", lambda: server.closed == 1, within_s=5)
    assert "freshet_http_streams" in httpx.get(server.url + "/metrics").text


def test_a_client_that_does_not_read_makes_no_pieces(server: Running) -> None:
    client = unread(server, "/flood")
    try:
        wait_until("some pieces are made", lambda: server.made > 1, within_s=5)
        seen, since = server.made, time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since
            if server.made != seen:
                seen, since = server.made, time.monotonic()
            return time.monotonic() - since > 0.5

        wait_until("no more pieces are made", quiet, within_s=10)
    finally:
        client.close()

    assert server.made * len(PIECE) < 32 << 20, "more was made than sockets buffer"
    wait_until("the pieces are closed", lambda: server.closed == 1, within_s=5)


def test_a_stop_ends_streams_at_once(server: Running) -> None:
    with httpx.stream("GET", server.url + "/ticks", timeout=30) as answer:
        pieces = answer.iter_raw()
        next(pieces)

        took = server.ended(DRAIN_S)
        rest = list(pieces)  # to a whole end: no error of the connection

    assert took < 3, "it waited for the drain"
    assert server.closed == 1
    assert rest is not None


def test_a_stop_does_not_wait_for_a_client_that_does_not_read(server: Running) -> None:
    client = unread(server, "/flood")
    try:
        wait_until("some pieces are made", lambda: server.made > 1, within_s=5)

        assert server.ended(DRAIN_S) < 5
    finally:
        client.close()


def test_a_stream_that_breaks_off_is_no_whole_answer_and_tells_no_details(server: Running) -> None:
    seen: list[bytes] = []

    def read() -> None:
        with httpx.stream("GET", server.url + "/broken") as answer:
            seen.extend(answer.iter_raw())

    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        read()
    assert b"secret" not in b"".join(seen)
