"""uvicorn under the lifecycle of a service: an address bound first, a stop event, a drain with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import structlog
import uvicorn
import uvloop

from freshet.errors import ConfigError
from freshet.http import tls
from freshet.http.app import App
from freshet.process.lifecycle import Drain
from freshet.process.ports import cannot_listen

__all__ = ["BACKLOG", "UVICORN", "Beside", "bind", "run_server", "serve"]

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
"""Of every server; the benchmark's bare server takes the same, so that only our own work differs."""
MAX_CONNECTIONS = 2_000
"""Default of `serve`."""

SPARE_FILES = 256
"""Descriptors that a process needs for other things than connections."""

LOOK_S = 0.1
"""Between two looks whether the server is to stop."""


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

    `beside`: another listener, which answers before `started` is called and drains at the same time. While
    there are more connections than `max_connections`, each request is answered with 503 and its connection
    closed.
    """
    secure = tls.listening()
    config = uvicorn.Config(
        app,
        timeout_graceful_shutdown=cast(int, drain_s),  # uvicorn takes parts of seconds, and does not say so
        ssl_context_factory=None if secure is None else lambda config, default: secure.listener(),
        **UVICORN,
    )
    server, drain = uvicorn.Server(config), Drain(drain_s)
    app.bound_connections(lambda: len(server.server_state.connections), _with_files(max_connections))
    _listen(sock)
    if beside is not None:
        await beside.start()
    with _signals_kept():
        serving = asyncio.create_task(server.serve([sock]))
        await asyncio.sleep(0)  # by now uvicorn has taken the signals
    started()  # the kernel takes connections since the socket listens

    async def end_with_stop() -> None:
        while not (stop.is_set() or serving.done()):
            await asyncio.sleep(LOOK_S)
        drain.begin()
        app.end_streams()
        server.should_exit = True

    others = [] if beside is None else [beside.serve(stop, drain_s)]
    await asyncio.gather(serving, end_with_stop(), *others)
    return drain.left_s()


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of signals that uvicorn takes over: the caller's stop the process by `stop`."""
    if threading.current_thread() is not threading.main_thread():  # uvicorn takes none there
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
