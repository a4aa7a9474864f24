"""uvicorn under our lifecycle: a socket bound first, a stop event, a drain with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import resource
import socket
import sys
import termios
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

import structlog
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from freshet.errors import ConfigError, Unavailable
from freshet.runtime import tls
from freshet.runtime.http import App, HttpError, Response, TakerRoute, error_response
from freshet.runtime.ports import owner_of_port
from freshet.runtime.tls_listener import Connected, TlsListener

__all__ = ["BACKLOG", "UVICORN", "Beside", "bind", "run_server", "serve"]

log = structlog.get_logger(__name__)

BACKLOG = 1024
UVICORN: Mapping[str, Any] = {
    "ws": "none",
    "lifespan": "off",
    "interface": "asgi3",
    "log_config": None,
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "date_header": False,
    "backlog": BACKLOG,
    "timeout_keep_alive": 30,
}
"""Of every server; the benchmark's bare server takes the same, so that only our own work differs."""
FIRST_BYTE_TIMEOUT_S = 10.0
"""A connection that has not sent a request's head by then is closed: idle ones would use up descriptors."""

HEAD_TIMEOUT_S = 10.0
"""From a head's first bytes to its last; and for what comes after an answer, such as the rest of a body that
was refused. A byte now and then would else hold the connection for ever."""

HEAD_BYTES = 64 << 10
"""Of a head that comes in pieces, beyond the first."""

MAX_CONNECTIONS = 2_000
"""Where nobody says otherwise."""

SPARE_FILES = 256
"""Descriptors that a process needs for other things than connections."""

STALLED_S = 30.0
"""A connection whose client takes nothing of what waits for it for so long is cut off. What waits, and the
descriptor, would else stay for as long as the client does: a close waits until the rest is sent."""

UNREAD_S = 0.2
"""How long a client that has stopped reading may still begin to, once the server stops."""


def bind(host: str, port: int) -> socket.socket:
    """A listening address; port 0 takes a free one. Raises ConfigError if the port cannot be had."""
    sock: socket.socket | None = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise ConfigError(
            "listen",
            "port",
            f"{host}:{port}",
            f"a free port ({error.strerror})",
            owner_of_port(port) or "choose another with FRESHET_<SERVICE>_PORT",
        ) from None
    return sock


class Beside(Protocol):
    """Another listener on the same loop."""

    async def start(self) -> None:
        """Begin to listen. Raises ConfigError if its address cannot be had."""

    async def serve(self, stop: threading.Event, drain_s: float) -> None:
        """Answer until `stop` is set; then what is in work, for at most `drain_s`."""


CLOSE = (b"connection", b"close")


class _Taken:
    """A request that was handed to `App.take`: to uvicorn, this connection's cycle until it is answered."""

    message_event = asyncio.Event()  # uvicorn sets it when the connection goes; nobody waits for it here

    def __init__(self, answer: Callable[[_Taken, Response], None]) -> None:
        self._answer = answer
        self.response_complete = self.disconnected = False
        self.keep_alive = True  # False once the server stops

    def reply(self, response: Response) -> None:
        """Give the answer, unless one was given: the drain may be over before the handler is done."""
        if not self.response_complete:
            self.response_complete = True
            self._answer(self, response)


class _Protocol(HttpToolsProtocol, Connected):
    """Hands requests that arrive whole to the routes that take them, past ASGI: a task, its events and a
    scope cost more than all that the gateway does for one event. Whatever else comes goes uvicorn's way.

    Closes connections whose requests do not come, or come too slowly, whose client stops reading, and those
    that are too many.
    """

    takers: App
    most_connections = 0
    counted = False  # from before its handshake
    _route: TakerRoute | None = None  # of the request that is being read, while it may be taken
    _body = b""
    _first: asyncio.TimerHandle | None = None  # looks once whether a first request has begun
    _stalled: asyncio.TimerHandle | None = None  # runs while more waits to be sent than buffers should hold
    _in_head = False  # a head has begun and is not whole
    _head_bytes = 0  # of it, beyond the first piece
    _late: asyncio.TimerHandle | None = None  # runs while something comes that is no request yet

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._route is not None:  # its body has not come whole: there are deadlines for that in ASGI's way
            self._go_uvicorns_way()
        cycle: Any = self.cycle
        idle = self.timeout_keep_alive_task is None and (cycle is None or cycle.response_complete)
        if self._in_head or idle:
            self._expect_head(len(data))
        elif self._late is not None:
            self._stop_waiting()

    def _expect_head(self, size: int) -> None:
        """Have a head, or the rest of what was refused, come to an end in time."""
        if self._late is None:
            self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._too_late)
            return
        if self._in_head:
            self._head_bytes += size
            if self._head_bytes > HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE, "head_too_large")

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late, self._head_bytes = None, 0

    def _too_late(self) -> None:
        self._refuse(_HEAD_LATE, "head_late" if self._in_head else "body_late")

    def _refuse(self, error: HttpError, why: str) -> None:
        """Close the connection; say why, unless an answer is under way that this would garble."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        self.takers.cut_off(why)
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.write(self._bytes_of(error.response(), CLOSE))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        cycle: Any = self.cycle  # uvicorn types it as always set; it is None until the first request
        parser = self.parser
        route = self.takers.taker_of(parser.get_method(), self.url)
        if (
            route is not None
            and (cycle is None or cycle.response_complete)
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and not self.flow.write_paused
        ):
            self._route, self._body = route, b""
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._route is None:
            super().on_body(body)
        else:
            self._body = self._body + body if self._body else body

    def on_message_complete(self) -> None:
        route = self._route
        if route is not None and self.takers.takes(len(self._body)):
            self._route = None
            self._take(route)
            return
        if route is not None:
            self._go_uvicorns_way()
        super().on_message_complete()

    def _go_uvicorns_way(self) -> None:
        self._route = None
        super().on_headers_complete()
        if self._body:
            super().on_body(self._body)

    def _take(self, route: TakerRoute) -> None:
        taken = _Taken(self._answer)
        self.cycle = cast(Any, taken)
        peer = self.client[0] if self.client else ""
        self.takers.take(route, dict(self.headers), self._body, peer, taken.reply)

    def _answer(self, taken: _Taken, response: Response) -> None:
        if taken.disconnected:
            return
        closing = not taken.keep_alive or CLOSE in response.headers
        self.transport.write(self._bytes_of(response, *([CLOSE] if closing else [])))
        if closing:
            self.transport.close()
        self.on_response_complete()

    def _bytes_of(self, response: Response, *more: tuple[bytes, bytes]) -> bytes:
        headers = [h for h in self.takers.headers_of(response) if h not in more]
        head = b"".join([b"%s: %s\r\n" % header for header in (*headers, *more)])
        return b"%s%s\r\n%s" % (STATUS_LINE[response.status], head, response.body)

    def cut_off(self) -> None:
        """Answer what was taken and is not answered yet: the server's drain is over."""
        if isinstance(self.cycle, _Taken):
            self.cycle.reply(error_response(Unavailable("the server is stopping; send it again")))

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.connected = True
        self.takers = takers = cast(App, self.config.app)
        if not self.counted:
            takers.connections += 1
        if takers.connections > self.most_connections:
            self._refuse(_TOO_MANY, "too_many")
            return
        self._first = self.loop.call_later(FIRST_BYTE_TIMEOUT_S, self._expect_request)

    def _expect_request(self) -> None:
        cycle: Any = self.cycle
        if cycle is None and self._late is None and not self.transport.is_closing():
            self.takers.cut_off("no_request")
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again(self._unread())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        if self._first is not None:
            self._first.cancel()
        self._stop_waiting()
        self.takers.connections -= 1
        super().connection_lost(exc)
        # What knows this connection is let go of: else it stays for the garbage collector, or a timer, with
        # thousands of others where each request has its own.
        self._unset_keepalive_if_required()
        self.cycle = cast(Any, None)

    def _look_again(self, unread: int) -> None:
        self._stalled = self.loop.call_later(STALLED_S, self._expect_reading, unread)

    def _expect_reading(self, before: int) -> None:
        unread = self._unread()
        if unread < before:
            self._look_again(unread)
        else:
            self.takers.cut_off("not_read")
            self.transport.abort()

    def _unread(self) -> int:
        """Bytes that the client has not taken: ours, and those that the kernel keeps for it (some MB)."""
        queued = bytearray(4)
        with contextlib.suppress(OSError):  # the connection is going
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


_HEAD_LATE = HttpError(
    408, "head_timeout", "the request did not arrive in time",
    expected=f"a whole head within {HEAD_TIMEOUT_S:g} s", found="a part of it",
)  # fmt: skip
_HEAD_TOO_LARGE = HttpError(
    431, "head_too_large", "the request's head is too large", expected=f"about {HEAD_BYTES} bytes at most",
    found="more",
)  # fmt: skip
_TOO_MANY = HttpError(
    503, "connections", "too many connections are open", expected="fewer at once",
    hint="use connections again; FRESHET_COMMON_MAX_CONNECTIONS allows more",
    headers=((b"retry-after", b"5"),),
)  # fmt: skip


class _Bound:
    """Of connections that begin with a handshake: no answer can be given before it is over."""

    def __init__(self, app: App, most: int) -> None:
        self._app, self._most = app, most

    def taken(self) -> bool:
        if self._app.connections >= self._most:
            self._app.cut_off("too_many")
            return False
        self._app.connections += 1
        return True

    def given_back(self) -> None:
        self._app.connections -= 1


class _Server(uvicorn.Server):
    """Stops when the event is set, by whomever; signals are the caller's."""

    def __init__(
        self, app: App, config: uvicorn.Config, stop: threading.Event, started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._app, self._stop, self._started = app, stop, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        secure = tls.listening()
        await super().startup(sockets if secure is None else [])
        if secure is not None:  # uvicorn's own way counts no handshakes, and has them take 60 s
            self.servers = cast(Any, [self._listen(sock, secure) for sock in sockets or []])
        self._started()

    def _listen(self, sock: socket.socket, secure: tls.HttpTls) -> TlsListener:
        kind = cast(type[_Protocol], self.config.http_protocol_class)

        def made() -> _Protocol:
            protocol = kind(self.config, self.server_state, self.lifespan.state)
            protocol.counted = True
            return protocol

        return TlsListener(sock, secure, made, _Bound(self._app, kind.most_connections))

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._stop.is_set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.end_streams()
        asyncio.get_running_loop().call_later(UNREAD_S, self._cut_off_unread)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            if isinstance(connection, _Protocol):
                connection.cut_off()

    def _cut_off_unread(self) -> None:
        """Close connections whose clients leave unread what was sent; else they would take up the drain."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, _Protocol) and connection.flow.write_paused:
                connection.transport.abort()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)  # not uvicorn's own, which takes over the process's signals


async def serve(
    app: App,
    sock: socket.socket,
    stop: threading.Event,
    *,
    started: Callable[[], None] = lambda: None,
    drain_s: float = 10.0,
    beside: Beside | None = None,
    max_connections: int = MAX_CONNECTIONS,
) -> None:
    """Answer requests until `stop` is set; then those begun, for at most `drain_s`; then return.

    `beside`: another listener, which answers before `started` is called and drains at the same time. One
    connection more than `max_connections` is answered with 503 and closed; over TLS it is closed at once.
    """
    drain = max(1, round(drain_s))
    most = _with_files(max_connections)

    class Protocol(_Protocol):
        most_connections = most

    config = uvicorn.Config(app, http=Protocol, timeout_graceful_shutdown=drain, **UVICORN)
    server = _Server(app, config, stop, started)
    if beside is None:
        await server.serve([sock])
        return
    await beside.start()
    await asyncio.gather(server.serve([sock]), beside.serve(stop, drain_s))


def _with_files(connections: int) -> int:
    """As many connections, or as many as this process may have descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= connections + SPARE_FILES:
        return connections
    with contextlib.suppress(OSError, ValueError):
        soft = min(hard, connections + SPARE_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = min(connections, max(16, soft - SPARE_FILES))
    if most < connections:
        log.warning("fewer connections than set: the limit of files is too low", connections=most, files=soft)
    return most


def run_server(main: Callable[[], Awaitable[None]]) -> None:
    """Run a service's coroutine on uvloop, on the calling thread."""

    async def wrapped() -> None:
        await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(wrapped())
