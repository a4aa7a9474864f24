"""A public gRPC server on a loop and thread of its own, for tests that are its clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from freshet.observability.grpc_metrics import ListenerCounts
from freshet.rpc.channel import Transport
from freshet.rpc.public_server import PublicServer

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that listens."""

    port: int
    counts: ListenerCounts


@contextmanager
def serving(
    add: Callable[[PublicServer], None], transport: Transport | None = None, **limits: Any
) -> Iterator[Served]:
    """Serve the methods that `add` adds until the block ends."""
    opened, stop = threading.Event(), threading.Event()
    made: list[Served] = []

    async def serve() -> None:
        counts = ListenerCounts()
        server = PublicServer(
            "127.0.0.1:0", transport or Transport(max_message_bytes=1 << 20), counts, **limits
        )
        add(server)
        await server.start()
        made.append(Served(server.port, counts))
        opened.set()
        await server.serve(stop, 0.1)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
    thread.start()
    assert opened.wait(DEADLINE_S)
    try:
        yield made[0]
    finally:
        stop.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
