"""uvicorn under the lifecycle of a service: an address bound first, a stop event, a drain with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, cast

import structlog
import uvicorn
import uvloop

from freshet.config.settings import Common
from freshet.errors import ConfigError
from freshet.http import tls
from freshet.http.addresses import Address
from freshet.http.app import App
from freshet.process.lifecycle import Drain
from freshet.process.ports import cannot_listen

log = structlog.get_logger(__name__)

BACKLOG = 1024
UVICORN: Mapping[str, Any] = {
    "http": "httptools",
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
"""Options of every server; the benchmark's bare server has the same, so that only our own work differs."""

MAX_CONNECTIONS = 2_000
"""Default of `serve`."""

SPARE_FILES = 256
"""File descriptors that a process needs besides connections."""

STOP_CHECK_S = 0.1
"""Seconds between two checks of the stop event."""


class Listener(Protocol):
    """A second listener on the same loop."""

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound."""

    async def serve(self, stop: threading.Event, drain_s: float) -> None:
        """Answer calls until `stop` is set, then open calls for at most `drain_s`."""


class HttpListener:
    """An address that is bound at once and refuses connections until `serve` runs.

    So a proxy of several servers tries the next one immediately, instead of waiting for one that starts.
    """

    def __init__(self, common: Common, port: int) -> None:
        """Bind the address. Raises ConfigError if it cannot be bound."""
        self._common, self._sock = common, bind(common.bind_address, port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    async def serve(
        self, app: App, stop: threading.Event, ready: Callable[[str], None], second: Listener | None = None
    ) -> float:
        """Serve an app until `stop` is set, then drain; returns the remaining seconds of the drain.

        `ready` is called with the URL once connections are accepted; `second` is as in `serve`.
        """
        host, port = self._sock.getsockname()[:2]
        return await serve(
            app,
            self._sock,
            stop,
            started=lambda: ready(f"{tls.scheme()}://{Address(host, port)}"),
            drain_s=self._common.drain_ms / 1e3,
            max_connections=self._common.max_connections,
            second=second,
        )


def bind(host: str, port: int) -> socket.socket:
    """Bind an address without listening; port 0 takes a free one. Raises ConfigError if that fails."""
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
    """Accept connections. Raises ConfigError if another process listens at the address by now."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return cannot_listen("listen", host, port, "FRESHET_<SERVICE>_PORT", error)


async def serve(
    app: App,
    sock: socket.socket,
    stop: threading.Event,
    *,
    started: Callable[[], None] = lambda: None,
    drain_s: float = 10.0,
    second: Listener | None = None,
    max_connections: int = MAX_CONNECTIONS,
) -> float:
    """Answer requests until `stop` is set, then open requests for at most `drain_s`.

    Args:
        started: called once connections are accepted.
        second: another listener; it listens before `started` is called, and drains at the same time.
        max_connections: beyond it, each request is answered with 503 and its connection closed.

    Returns:
        The remaining seconds of the drain, for the rest of the service's shutdown.

    Raises:
        ConfigError: another process has begun to listen at the address since it was bound.
    """
    secure = tls.listener_tls()
    config = uvicorn.Config(
        app,
        timeout_graceful_shutdown=cast(int, drain_s),  # uvicorn accepts fractions, but its type does not
        ssl_context_factory=None if secure is None else lambda config, default: secure.server_context(),
        **UVICORN,
    )
    server, drain = uvicorn.Server(config), Drain(drain_s)
    app.bound_connections(lambda: len(server.server_state.connections), _with_files(max_connections))
    _listen(sock)
    if second is not None:
        await second.start()
    with _signals_kept():
        serving = asyncio.create_task(server.serve([sock]))
        await asyncio.sleep(0)  # uvicorn installs its signal handlers
    started()  # the kernel accepts connections since the socket listens

    async def end_with_stop() -> None:
        while not (stop.is_set() or serving.done()):
            await asyncio.sleep(STOP_CHECK_S)
        drain.begin()
        app.end_streams()
        server.should_exit = True

    others = [] if second is None else [second.serve(stop, drain_s)]
    await asyncio.gather(serving, end_with_stop(), *others)
    return drain.left_s()


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers that uvicorn replaces: those of the caller set `stop`."""
    if threading.current_thread() is not threading.main_thread():  # uvicorn replaces none there
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _with_files(connections: int) -> int:
    """Return the number of connections, or fewer if the limit of file descriptors does not allow as many."""
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
