"""What tests of HTTP services share: a server on a thread, conditions with deadlines, the feed example."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.settings import Settings, load_settings
from freshet.http.app import App
from freshet.http.server import MAX_CONNECTIONS, bind, run_server, serve
from freshet.http.tokens import digest_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FEED = EXAMPLES / "feed"


TOKEN = "a-token-that-tests-show"
JSON = {"content-type": "application/json"}
"""The header of requests whose body is JSON."""


def write_tokens(path: Path, *tokens: tuple[str, ...]) -> Path:
    """A file of (name, scopes, token, what else is said) lines."""
    lines = [
        " ".join((n, scopes, f"sha256:{digest_of(t.encode()).hex()}", *more))
        for n, scopes, t, *more in tokens
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def bearer(token: str = TOKEN) -> dict[str, str]:
    """The header that shows a token."""
    return {"authorization": f"Bearer {token}"}


def schema(name: str) -> Record:
    """A schema of the feed example."""
    return parse_schema((FEED / f"{name}.avsc").read_text(), name)


def settings(**variables: str) -> Settings:
    """Settings with a free port for every service."""
    ports = {f"FRESHET_{s}_PORT": "0" for s in ("GATEWAY", "INFERENCE")}
    return load_settings({**ports, **{f"FRESHET_{k.upper()}": v for k, v in variables.items()}})


@contextmanager
def running(
    run: Callable[[threading.Event, Callable[[str], None]], None],
) -> Iterator[tuple[str, threading.Event]]:
    """Run a service on a thread; yields its address and its stop event."""
    stop, up = threading.Event(), threading.Event()
    urls: list[str] = []
    errors: list[BaseException] = []

    def ready(url: str) -> None:
        urls.append(url)
        up.set()

    def target() -> None:
        try:
            run(stop, ready)
        except BaseException as error:
            errors.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=target, name="service")
    thread.start()
    try:
        assert up.wait(20), "the service did not start"
        assert urls, errors
        yield urls[0], stop
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive(), "the service did not stop"
    assert not errors, errors


@dataclass
class Answering:
    """An app that answers on a thread of its own."""

    port: int
    stop: threading.Event
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def answering(
    app: App,
    sock: socket.socket | None = None,
    *,
    drain_s: float = 5.0,
    max_connections: int = MAX_CONNECTIONS,
) -> Iterator[Answering]:
    """Have an app answer, at this socket or one of its own, until the block is left or it is told to stop."""
    bound = bind("127.0.0.1", 0) if sock is None else sock
    stop, ready = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await serve(app, bound, stop, started=ready.set, drain_s=drain_s, max_connections=max_connections)

    thread = threading.Thread(target=run_server, args=(main,), name="app")
    thread.start()
    try:
        assert ready.wait(20), "the app does not answer"
        yield Answering(bound.getsockname()[1], stop, loops[0], thread)
    finally:
        stop.set()
        thread.join(drain_s + 10)
        bound.close()
    assert not thread.is_alive(), "the app did not stop"
