"""Streamed responses over real sockets: their end, and the cost of unread ones."""

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
from starlette.responses import StreamingResponse

from freshet.errors import BadInput
from freshet.http.app import App
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, Request
from freshet.testing.conditions import wait_until
from tests.fixtures.serving import answering

PIECE = b"x" * 65_536
DRAIN_S = 4
MAX_STREAMS = 5


@dataclass
class Running:
    """A server with streams, and what became of their pieces."""

    port: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    made: int = 0  # pieces of /flood
    closed: int = 0  # generators that were closed
    thread: threading.Thread | None = None
    app: App | None = None
    loop: asyncio.AbstractEventLoop | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)  # until it is set, /held_back does not answer
    waiting: int = 0  # requests that have come to /held_back

    @property
    def streams(self) -> int:
        assert self.app is not None
        return self.app.streams

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

    async def held_back(self) -> AsyncGenerator[bytes]:
        async for piece in self.ticks():
            yield piece

    async def three(self) -> AsyncGenerator[bytes]:
        for piece in (b"a", b"b", b"c"):
            yield piece

    async def broken(self) -> AsyncGenerator[bytes]:
        yield b"so far"
        raise KeyError("secret")

    def release(self) -> None:
        """Let what is held back be answered."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.held.set)

    def ended(self, within_s: float) -> float:
        """Stop the server; how many seconds that took."""
        assert self.thread is not None
        self.stop.set()
        began = time.monotonic()
        self.thread.join(within_s)
        assert not self.thread.is_alive(), f"still running {within_s} s after the stop"
        return time.monotonic() - began


def check(headers: object) -> None:
    if b"x-refused" in dict(headers):  # type: ignore[call-overload]
        raise BadInput("not by this listener")


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Its parameter, if a test gives one, is the drain in seconds."""
    running = Running()
    app = App(
        CollectorRegistry(),
        BodyLimits(1_000, 1),
        headers=((b"x-with-all", b"yes"),),
        check=check,
        max_streams=MAX_STREAMS,
        streams_setting="FRESHET_TEST_MAX_STREAMS",
    )
    running.app = app
    for name in ("ticks", "held_back", "flood", "three", "broken"):

        async def handler(_request: Request, name: str = name) -> StreamingResponse:
            if name == "held_back":
                running.waiting += 1
                await running.held.wait()
            headers = {"content-type": "text/event-stream", "x-own": "1"}
            return StreamingResponse(getattr(running, name)(), headers=headers)

        app.route(Endpoint("GET", f"/{name}", "Pieces.", ()), handler)
    with answering(app, drain_s=getattr(request, "param", DRAIN_S)) as at:
        running.port, running.stop, running.loop, running.thread = at.port, at.stop, at.loop, at.thread
        yield running
        running.ended(60)


def unread(server: Running, path: str, buffer: int = 4_096) -> socket.socket:
    """A client that asks, and then reads nothing by itself."""
    client = socket.create_connection(("127.0.0.1", server.port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


def test_pieces_arrive_as_they_are_made_and_the_end_is_the_end(server: Running) -> None:
    answer = httpx.get(server.url + "/three")

    assert answer.text == "abc"
    assert answer.headers["content-type"] == "text/event-stream"
    assert (answer.headers["x-own"], answer.headers["x-with-all"]) == ("1", "yes")


def test_all_answers_have_the_common_headers(server: Running) -> None:
    missing = httpx.get(server.url + "/nowhere")
    refused = httpx.get(server.url + "/three", headers={"x-refused": "1"})

    assert (missing.status_code, missing.headers["x-with-all"]) == (404, "yes")
    assert (refused.status_code, refused.headers["x-with-all"]) == (400, "yes")


def test_a_client_that_goes_away_ends_its_stream(server: Running) -> None:
    with httpx.stream("GET", server.url + "/ticks") as answer:
        first = next(answer.iter_raw())

    assert first.startswith(b"data: 0")
    wait_until("the pieces are closed", lambda: server.closed == 1, within_s=60)
    assert "freshet_http_streams" in httpx.get(server.url + "/metrics").text


def test_a_client_that_does_not_read_makes_no_pieces(server: Running) -> None:
    client = unread(server, "/flood")
    try:
        wait_until("some pieces are made", lambda: server.made > 1, within_s=60)
        seen, since = server.made, time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since
            if server.made != seen:
                seen, since = server.made, time.monotonic()
            return time.monotonic() - since > 0.5

        wait_until("no more pieces are made", quiet, within_s=60)
    finally:
        client.close()

    assert server.made * len(PIECE) < 32 << 20, "more was made than sockets buffer"
    wait_until("the pieces are closed", lambda: server.closed == 1, within_s=60)


def test_simultaneous_streams_are_counted_one_by_one(server: Running) -> None:
    many = 3 * MAX_STREAMS
    clients = [unread(server, "/held_back") for _ in range(many)]
    try:
        wait_until("all of them wait", lambda: server.waiting == many, within_s=60)
        assert server.streams == 0
        server.release()
        heads = sorted(client.recv(12)[9:] for client in clients)

        assert heads == [b"200"] * MAX_STREAMS + [b"503"] * (many - MAX_STREAMS)
        assert server.streams == MAX_STREAMS
        refused = httpx.get(server.url + "/ticks")
        assert refused.json()["error"]["found"] == MAX_STREAMS
        assert refused.json()["error"]["hint"] == "close some, or raise FRESHET_TEST_MAX_STREAMS"
    finally:
        for client in clients:
            client.close()
    wait_until("all are closed", lambda: server.streams == 0, within_s=60)
    with httpx.stream("GET", server.url + "/ticks") as answer:
        assert answer.status_code == 200


@pytest.mark.parametrize("server", [120], indirect=True)
def test_a_stop_ends_streams_without_the_drain(server: Running) -> None:
    with httpx.stream("GET", server.url + "/ticks", timeout=30) as answer:
        pieces = answer.iter_raw()
        next(pieces)

        server.ended(60)  # half of the drain
        rest = list(pieces)  # to a whole end: no error of the connection

    assert server.closed == 1
    assert rest is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed resource <TCPTransport:ResourceWarning")
def test_a_stop_ends_the_stream_of_a_client_that_does_not_read(
    server: Running,
) -> None:
    client = unread(server, "/flood")
    try:
        wait_until("some pieces are made", lambda: server.made > 1, within_s=60)
        server.stop.set()
        wait_until("the pieces are closed", lambda: server.closed == 1, within_s=60)
        server.ended(60)
    finally:
        client.close()


def test_a_broken_stream_is_incomplete_and_without_details(server: Running) -> None:
    seen: list[bytes] = []

    def read() -> None:
        with httpx.stream("GET", server.url + "/broken") as answer:
            seen.extend(answer.iter_raw())

    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        read()
    assert b"secret" not in b"".join(seen)
