"""Hot routes, which the router does not find, answer as every other route does, however the bytes arrive."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client import CollectorRegistry

from freshet.errors import BadInput
from freshet.http.app import App
from freshet.http.browser_checks import Sites
from freshet.http.endpoint import Endpoint
from freshet.http.request import Request
from freshet.http.responses import Response
from freshet.http.routes import Reply
from freshet.testing.waiting import wait_for
from tests.fixtures.serving import answering

LIMIT = 1_000


@dataclass
class Running:
    port: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    loop: asyncio.AbstractEventLoop | None = None
    held: list[tuple[Request, Reply]] = field(default_factory=list)  # what `/later` has not answered yet
    is_gone: Callable[[], bool] = lambda: False  # the newest client of `/watched`

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def is_closed(self) -> bool:
        """Whether the server takes no connections any more: its stop has begun."""
        try:
            self.connect().close()
        except OSError:
            return True
        return False

    def let_go(self) -> None:
        """Answer the oldest request that is held, once there is one."""
        wait_for(lambda: bool(self.held))
        request, reply = self.held.pop(0)
        assert self.loop is not None
        self.loop.call_soon_threadsafe(reply, Response(202, b"later " + request.body))

    def now(self, request: Request, reply: Reply) -> None:
        if request.body == b"bad":
            raise BadInput("x: expected a, found b")
        reply(Response(202, b"now " + request.body))

    def later(self, request: Request, reply: Reply) -> None:
        self.held.append((request, reply))

    def watched(self, request: Request, reply: Reply) -> None:
        self.is_gone = request.watch_client()
        self.held.append((request, reply))

    async def routed(self, request: Request) -> Response:
        return Response(200, b"routed " + request.body)


@pytest.fixture
def server() -> Iterator[Running]:
    with running_server() as made:
        yield made


@contextmanager
def running_server(*, body_timeout_s: float = 20.0, drain_s: float = 1.0) -> Iterator[Running]:
    made = Running()
    app = App(CollectorRegistry(), max_body_bytes=LIMIT, body_timeout_s=body_timeout_s, admit=Sites().admit)
    app.route_hot(Endpoint("POST", "/now", "At once.", ()), made.now)
    app.route_hot(Endpoint("POST", "/later", "When told.", ()), made.later)
    app.route_hot(Endpoint("POST", "/watched", "When told.", ()), made.watched)
    app.route(Endpoint("POST", "/routed", "By the router.", ()), made.routed)
    with answering(app, drain_s=drain_s) as at:
        made.port, made.stop, made.loop = at.port, at.stop, at.loop
        yield made


def asking(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def bodies(client: socket.socket, count: int) -> list[bytes]:
    """Bodies of the next answers on a connection."""
    found: list[bytes] = []
    read = b""
    while len(found) < count:
        head, end, rest = read.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) if end else 0
        if not end or len(rest) < length:
            piece = client.recv(65_536)
            assert piece, read
            read += piece
            continue
        found.append(rest[:length])
        read = rest[length:]
    return found


def test_a_whole_request_is_answered_with_its_headers(server: Running) -> None:
    answer = httpx.post(f"{server.url}/now", content=b"x")

    assert (answer.status_code, answer.content) == (202, b"now x")
    assert answer.headers["content-type"] == "application/json"


def test_a_body_in_pieces_is_taken_too(server: Running) -> None:
    whole = asking("/now", b"in pieces")
    with server.connect() as client:
        for cut in (1, 30, len(whole) - 3):
            client.sendall(whole[:cut])
            client.sendall(whole[cut:])
            assert bodies(client, 1) == [b"now in pieces"]


def test_a_body_in_chunks_is_taken_too(server: Running) -> None:
    with server.connect() as client:
        client.sendall(
            b"POST /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"
        )
        assert bodies(client, 1) == [b"now abcde"]


def test_an_error_is_answered_as_json(server: Running) -> None:
    answer = httpx.post(f"{server.url}/now", content=b"bad")

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_input")


def test_a_page_of_another_site_is_refused(server: Running) -> None:
    answer = httpx.post(f"{server.url}/now", content=b"x", headers={"sec-fetch-site": "cross-site"})

    assert answer.status_code == 403


def test_a_body_beyond_the_limit_is_413(server: Running) -> None:
    assert httpx.post(f"{server.url}/now", content=b"x" * (LIMIT + 1)).status_code == 413
    assert httpx.post(f"{server.url}/now", content=b"x" * LIMIT).status_code == 202


def test_a_body_that_does_not_come_is_408() -> None:
    with running_server(body_timeout_s=0.3) as server, server.connect() as client:
        client.sendall(asking("/now", b"all of it")[:-3])
        assert b"408" in client.recv(100)


def test_answers_come_in_the_order_of_requests_whatever_takes_longest(server: Running) -> None:
    with server.connect() as client:
        client.sendall(
            asking("/later", b"1") + asking("/now", b"2") + asking("/routed", b"3") + asking("/later", b"4")
        )
        server.let_go()
        server.let_go()
        assert bodies(client, 4) == [b"later 1", b"now 2", b"routed 3", b"later 4"]


def test_a_client_that_wants_the_connection_closed_gets_it_closed(server: Running) -> None:
    with server.connect() as client:
        client.sendall(asking("/now", b"x", "connection: close"))
        read = b""
        while piece := client.recv(1_000):
            read += piece
    assert read.endswith(b"now x")
    assert b"connection: close" in read


def test_a_client_that_went_away_is_not_answered_and_others_are(server: Running) -> None:
    with server.connect() as client:
        client.sendall(asking("/later", b"x"))
        wait_for(lambda: bool(server.held))
    server.let_go()

    assert httpx.post(f"{server.url}/now", content=b"x").status_code == 202


def test_requests_are_counted_by_route_and_status(server: Running) -> None:
    httpx.post(f"{server.url}/now", content=b"x")
    httpx.post(f"{server.url}/now", content=b"bad")
    text = httpx.get(f"{server.url}/metrics").text

    assert 'freshet_http_requests_total{door="passed",route="/now",status="202"} 1.0' in text
    assert 'freshet_http_requests_total{door="passed",route="/now",status="400"} 1.0' in text
    assert 'freshet_http_request_seconds_count{route="/now"} 2.0' in text


def test_a_stop_waits_for_an_answer_and_then_closes() -> None:
    with running_server(drain_s=20) as server, server.connect() as client:
        client.sendall(asking("/later", b"x"))
        wait_for(lambda: bool(server.held))
        server.stop.set()
        wait_for(server.is_closed)
        server.let_go()
        read = b""
        while piece := client.recv(1_000):
            read += piece
    assert read.startswith(b"HTTP/1.1 202")
    assert b"connection: close" in read


def test_what_is_not_answered_when_the_drain_is_over_is_503(server: Running) -> None:
    with server.connect() as client:
        client.sendall(asking("/later", b"x"))
        wait_for(lambda: bool(server.held))
        server.stop.set()
        assert client.recv(1_000).startswith(b"HTTP/1.1 503")


def test_a_request_knows_whether_its_client_went_away(server: Running) -> None:
    with server.connect() as client:
        client.sendall(asking("/watched", b"x"))
        wait_for(lambda: bool(server.held))
        assert not server.is_gone()

    wait_for(server.is_gone)
    server.let_go()  # the answer is dropped
    assert httpx.post(f"{server.url}/now", content=b"y").text == "now y"
