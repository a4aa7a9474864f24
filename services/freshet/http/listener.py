"""Where a service answers over HTTP: an address that is taken first, and given back last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from freshet.config.settings import Common
from freshet.http import tls
from freshet.http.addresses import Address
from freshet.http.app import App
from freshet.http.server import Beside, bind, serve

__all__ = ["Face"]


class Face:
    """An address that is ours from the start on, where clients are refused until `serve` runs: a proxy before
    several servers goes to the next at once, instead of waiting for one that starts."""

    def __init__(self, common: Common, port: int) -> None:
        """Raises ConfigError: the port cannot be had."""
        self._common, self._sock = common, bind(common.bind_address, port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    async def serve(
        self, app: App, stop: threading.Event, ready: Callable[[str], None], beside: Beside | None = None
    ) -> float:
        """Answer by this app until `stop` is set, then drain; returns the seconds of the drain that are left.

        `ready` is called with the address once connections are taken; `beside` is as in `server.serve`.
        """
        host, port = self._sock.getsockname()[:2]
        return await serve(
            app,
            self._sock,
            stop,
            started=lambda: ready(f"{tls.scheme()}://{Address(host, port)}"),
            drain_s=self._common.drain_ms / 1e3,
            max_connections=self._common.max_connections,
            beside=beside,
        )
