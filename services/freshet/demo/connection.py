"""One persistent HTTP connection of the simulator, with failover between servers.

It uses the standard library's client, which costs a fifth of the processor time of richer ones: the simulator
shares its processors with the system that it measures.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from typing import Protocol

from freshet.errors import Unavailable
from freshet.http import tls
from freshet.http.addresses import Address
from freshet.http.token_files import token_headers

__all__ = ["Connection", "HttpConnection"]

FAILING = (502, 503, 504)
"""Statuses after which another server may succeed."""

UNAUTHORIZED = 401

HEADERS = {"Content-Type": "application/json"}


class Connection(Protocol):
    """A connection for JSON requests, used by one thread."""

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return status and body of the answer.

        Raises Unavailable if there is none. The server may have handled the request nevertheless, so it must
        be idempotent.
        """

    def close(self) -> None:
        """Close the connection. Idempotent."""


class HttpConnection:
    """A `Connection` to one of several servers; it changes to the next when that one fails."""

    def __init__(
        self, servers: Sequence[Address], first: int = 0, *, timeout_s: float = 5.0, token_file: str = ""
    ) -> None:
        """Connect to the server with index `first` modulo their number.

        Requests carry the token of `token_file`, which is read again after a 401. Raises ConfigError if the
        file holds no token.
        """
        self._token_file, self._headers = token_file, {**HEADERS, **token_headers(token_file)}
        self._servers, self._at, self._timeout_s = tuple(servers), first, timeout_s
        self._connection = self._connect()

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """See `Connection`. Raises Unavailable if there is no answer."""
        try:
            self._connection.request("POST", path, body, self._headers)
            answer = self._connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            where = f"{self._server}{path}"
            self._connect_next()
            raise Unavailable(f"{where}: {error!r}") from error
        if status == UNAUTHORIZED and self._token_file:
            self._headers = {**HEADERS, **token_headers(self._token_file)}
        if status in FAILING and len(self._servers) > 1:
            self._connect_next()
        return status, content

    def close(self) -> None:
        """See `Connection`."""
        self._connection.close()

    @property
    def _server(self) -> Address:
        return self._servers[self._at % len(self._servers)]

    def _connect(self) -> http.client.HTTPConnection:
        return tls.connection(self._server.host, self._server.port, self._timeout_s)

    def _connect_next(self) -> None:
        self._connection.close()
        self._at += 1
        self._connection = self._connect()
