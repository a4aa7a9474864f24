"""Accepting connections that begin with a TLS handshake, so that each counts from its first moment.

asyncio's own server tells of a connection once its handshake is over; until then it would hold a descriptor
that no bound knows of.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

import structlog

from freshet.http.tls import HttpTls

__all__ = ["GOODBYE_S", "HANDSHAKE_S", "Bound", "Connected", "TlsListener"]

log = structlog.get_logger("freshet.tls")

HANDSHAKE_S = 10.0
"""A connection whose TLS handshake is not over by then is closed."""

GOODBYE_S = 1.0
"""How long TLS waits for the client to say that it has heard of the end: less than any drain."""

AT_ONCE = 64
"""Connections accepted before others have their turn."""

PAUSE_S = 1.0
"""Before the next try, where the system has no descriptor or memory for a connection."""


class Connected(asyncio.Protocol):
    """A protocol that knows whether its connection has begun."""

    connected = False
    """Whether its `connection_made` was called; then its `connection_lost` gives back what was taken."""


class Bound(Protocol):
    """How many connections there may be. Called from the loop."""

    def taken(self) -> bool:
        """Count one that has been accepted; False: there are too many, it is not counted and closed."""

    def given_back(self) -> None:
        """One that was taken has ended before its protocol knew of it."""


class TlsListener:
    """Accepts connections of a socket until closed; to uvicorn, a server of asyncio. Of one loop."""

    def __init__(
        self, sock: socket.socket, secure: HttpTls, made: Callable[[], Connected], bound: Bound
    ) -> None:
        """`sock` listens, and stays the caller's. `made`: the protocol of a connection."""
        self._sock, self._secure, self._made, self._bound = sock, secure, made, bound
        self._loop = asyncio.get_running_loop()
        self._greeted: set[asyncio.Task[None]] = set()  # handshakes that are under way
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more, and end handshakes that are under way."""
        self._loop.remove_reader(self._sock)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._greeted:
            task.cancel()

    async def wait_closed(self) -> None:
        """Until handshakes have ended."""
        await asyncio.gather(*self._greeted, return_exceptions=True)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connections can be accepted for now", reason=str(error))
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(PAUSE_S, self._resume)
                return
            if not self._bound.taken():
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._greet(connection))
            self._greeted.add(task)
            task.add_done_callback(self._greeted.discard)

    async def _greet(self, connection: socket.socket) -> None:
        protocol = self._made()
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._secure.listener(),
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=GOODBYE_S,
            )
        except OSError:  # counted and logged where handshakes are, or the client went away
            connection.close()
        except BaseException:
            connection.close()
            raise
        finally:
            if not protocol.connected:
                self._bound.given_back()
