"""uvicorn under our lifecycle: an address taken first, a stop event, a drain with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

import structlog
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from freshet.errors import ConfigError
from freshet.http import tls
from freshet.http.app import App
from freshet.http.connection import Connection
from freshet.http.tls_listener import TlsListener
from freshet.http.uvicorn_release import refuse_other_uvicorn
from freshet.process.lifecycle import Drain
from freshet.process.ports import cannot_listen

refuse_other_uvicorn(HttpToolsProtocol, uvicorn.Server, uvicorn.__version__)

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
MAX_CONNECTIONS = 2_000
"""Where nobody says otherwise."""

SPARE_FILES = 256
"""Descriptors that a process needs for other things than connections."""

UNREAD_S = 0.2
"""How long a client that has stopped reading may still begin to, once the server stops."""


def bind(host: str, port: int) -> socket.socket:
    """An address of ours that nobody listens at yet: until `serve` does, clients are refused, and go to
    another server at once. Port 0 takes a free one. Raises ConfigError if it cannot be had."""
    sock: socket.socket | None = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        if sock is not None:
            sock.close()
        raise _cannot_listen(host, port, error) from None
    return sock


def _listen(sock: socket.socket) -> None:
    """Take connections from now on. Raises ConfigError: somebody else does at this address by now."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return cannot_listen("listen", host, port, "FRESHET_<SERVICE>_PORT", error)


class Beside(Protocol):
    """Another listener on the same loop."""

    async def start(self) -> None:
        """Begin to listen. Raises ConfigError if its address cannot be had."""

    async def serve(self, stop: threading.Event, drain_s: float) -> None:
        """Answer until `stop` is set; then what is in work, for at most `drain_s`."""


class _Bound:
    """Counts connections that begin with a handshake: no answer can be given before it is over."""

    def __init__(self, app: App, most: int) -> None:
        self._app, self._most = app, most

    def taken(self) -> bool:
        if self._app.counts.connections >= self._most:
            self._app.counts.cut_off("too_many")
            return False
        self._app.counts.connections += 1
        return True

    def given_back(self) -> None:
        self._app.counts.connections -= 1


class _Server(uvicorn.Server):
    """Stops when the event is set, by whomever; signals are the caller's."""

    def __init__(
        self,
        app: App,
        config: uvicorn.Config,
        stop: threading.Event,
        started: Callable[[], None],
        drain: Drain,
    ) -> None:
        super().__init__(config)
        self._app, self._stop, self._started = app, stop, started
        self.drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        secure = tls.listening()
        await super().startup(sockets if secure is None else [])
        if secure is not None:  # uvicorn's own way counts no handshakes, and has them take 60 s
            self.servers = cast(Any, [self._listen(sock, secure) for sock in sockets or []])
        self._started()

    def _listen(self, sock: socket.socket, secure: tls.HttpTls) -> TlsListener:
        kind = cast(type[Connection], self.config.http_protocol_class)

        def made() -> Connection:
            protocol = kind(self.config, self.server_state, self.lifespan.state)
            protocol.counted = True
            return protocol

        return TlsListener(sock, secure, made, _Bound(self._app, kind.most_connections))

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._stop.is_set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.drain.begin()
        self._app.end_streams()
        asyncio.get_running_loop().call_later(UNREAD_S, self._cut_off_unread)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.cut_off()

    def _cut_off_unread(self) -> None:
        """Close connections whose clients leave unread what was sent; else they would take up the drain."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and connection.leaves_unread:
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
) -> float:
    """Answer requests until `stop` is set; then those begun, for at most `drain_s`; returns how many seconds
    of these are left for what the service has to do after that. Raises ConfigError: another process has begun
    to listen at the address since it was bound.

    `beside`: another listener, which answers before `started` is called and drains at the same time. One
    connection more than `max_connections` is answered with 503 and closed; over TLS it is closed at once.
    """
    most = _with_files(max_connections)

    class Bounded(Connection):
        most_connections = most

    seconds = cast(int, drain_s)  # uvicorn takes parts of seconds, and does not say so
    config = uvicorn.Config(app, http=Bounded, timeout_graceful_shutdown=seconds, **UVICORN)
    server = _Server(app, config, stop, started, Drain(drain_s))
    _listen(sock)
    if beside is None:
        await server.serve([sock])
    else:
        await beside.start()
        await asyncio.gather(server.serve([sock]), beside.serve(stop, drain_s))
    return server.drain.left_s()


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
