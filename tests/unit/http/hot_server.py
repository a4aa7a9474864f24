"""A server with hot routes, and requests byte by byte."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from freshet.http.app import App, Reply
from freshet.http.browser_checks import AllowedSites
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, Request, Response
from freshet.testing.conditions import wait_for
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
        reply(Response(202, b"now " + request.body))

    def later(self, request: Request, reply: Reply) -> None:
        self.held.append((request, reply))

    def watched(self, request: Request, reply: Reply) -> None:
        self.is_gone = request.watch_client()
        self.held.append((request, reply))

    async def routed(self, request: Request) -> Response:
        return Response(200, b"routed " + request.body)


@contextmanager
def running_server(*, drain_s: float = 1.0) -> Iterator[Running]:
    made = Running()
    app = App(CollectorRegistry(), BodyLimits(LIMIT, 20.0), check=AllowedSites().check)
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
