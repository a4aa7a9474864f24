"""A pool of persistent HTTP/1.1 connections for many concurrent requests.

It uses asyncio and httptools: a richer client takes 2.6 times the CPU time (ADR 0031), and on one machine the
load generator's CPU time is missing to the server that it measures.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import httptools

from freshet.errors import ConfigError
from freshet.http.addresses import Address, address_in

LEAST_FINAL = 200

IDLE_S = 20.0
"""Idle time after which a connection is not reused. Servers close idle connections (nginx after 75 s, by
default), and a request sent at that moment gets no answer."""


@dataclass(frozen=True, slots=True)
class Server:
    """The target of requests."""

    address: Address
    tls: bool = False


def server_at(option: str, url: str) -> Server:
    """Parse the URL of a server. Raises ConfigError, with the option, if it names none."""
    try:
        scheme, address = address_in(url, "http", "https")
        return Server(address, scheme == "https")
    except ValueError as error:
        raise ConfigError("load", option, url, str(error), "such as http://gateway-0:7000") from None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; with status 0 there is none, and `problem` is the reason."""

    status: int
    body: bytes = b""
    problem: str = ""
    sent_at: float | None = None  # loop time; None: no connection was available


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0  # loop time
        self._answer: asyncio.Future[Answer] | None = None
        self._parser, self._body = httptools.HttpResponseParser(self), bytearray()

    @property
    def usable(self) -> bool:
        """Report whether the connection is open."""
        return self.transport is not None and not self.transport.is_closing()

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request; the future gets the answer, never an exception."""
        assert self.transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def close(self) -> None:
        """Abort the connection, and a request in progress."""
        if self.transport is not None:
            self.transport.abort()

    # callbacks of asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Answer(0, problem=f"no HTTP came back: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(Answer(0, problem=f"the connection broke: {exc}" if exc else "the connection was closed"))

    # callbacks of httptools
    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        answer = Answer(self._parser.get_status_code(), bytes(self._body))
        if answer.status < LEAST_FINAL:
            return  # 100 Continue: the final answer follows
        self._body.clear()
        if not self._parser.should_keep_alive():
            self.close()
        self._end(answer)

    def _end(self, answer: Answer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)


class Connections:
    """A bounded pool of connections, round robin over servers; further requests wait for a connection."""

    def __init__(
        self,
        servers: Sequence[Server],
        most: int,
        timeout_s: float,
        *,
        token: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the pool without connecting.

        Args:
            servers:   the targets, in turn.
            most:      concurrent connections.
            timeout_s: of a `post`, including its wait for a connection.
            token:     sent with each request.
            tls:       for https servers; by default the certificates that this machine trusts.
        """
        self._servers, self._timeout_s, self._posts = tuple(servers), timeout_s, 0
        self._free: dict[Server, deque[_Connection]] = {server: deque() for server in servers}
        self._slots = asyncio.Semaphore(most)
        self._tls = tls or ssl.create_default_context()
        self._headers = f"Authorization: Bearer {token}\r\n" if token else ""

    async def post(self, path: str, body: bytes) -> Answer:
        """Send a JSON body to the next server and return its answer, or the reason why there is none."""
        self._posts += 1
        server = self._servers[self._posts % len(self._servers)]
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{self._headers}\r\n"
        )
        connection: _Connection | None = None
        sent_at: float | None = None
        answer = None
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                try:
                    connection = await self._connection(server)
                    sent_at = asyncio.get_running_loop().time()
                    answer = await connection.send(head.encode() + body)
                finally:  # before the slot is free
                    self._release(server, connection, kept=bool(answer and answer.status))
        except TimeoutError:
            answer = Answer(0, problem=f"no answer within {self._timeout_s:g} s")
        except OSError as error:
            answer = Answer(0, problem=f"no connection: {error}")
        return replace(answer, sent_at=sent_at)

    def _release(self, server: Server, connection: _Connection | None, *, kept: bool) -> None:
        if connection is None:
            return
        if kept and connection.usable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._free[server].append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        for free in self._free.values():
            while free:
                free.pop().close()

    async def _connection(self, server: Server) -> _Connection:
        free = self._free[server]
        while free:
            kept = free.pop()
            if kept.usable and asyncio.get_running_loop().time() - kept.idle_since < IDLE_S:
                return kept
            kept.close()
        _, opened = await asyncio.get_running_loop().create_connection(
            _Connection,
            server.address.host,
            server.address.port,
            ssl=self._tls if server.tls else None,
        )
        return opened
