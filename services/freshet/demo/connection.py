"""Where requests go: one HTTP connection, kept open. The standard library's client: the simulator shares two
cores with the system that it tests, and this one costs a fifth of a comfortable one.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from typing import Protocol

from freshet.errors import Unavailable
from freshet.http import tls
from freshet.http.addresses import Address
from freshet.http.token_file import token_headers

__all__ = ["Door", "HttpDoor"]

FAILING = (502, 503, 504)
"""Answers of a server that cannot, while another may."""

UNAUTHORIZED = 401

HEADERS = {"Content-Type": "application/json"}


class Door(Protocol):
    """A server that takes JSON. Used by one thread."""

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises Unavailable if there is none: whether the server has taken the request is not known then, so it
        must be one that may be sent again.
        """

    def close(self) -> None:
        """Close the connection. Idempotent."""


class HttpDoor:
    """See `Door`. Of several servers it keeps to one, and goes to the next when that fails."""

    def __init__(
        self, servers: Sequence[Address], first: int = 0, *, timeout_s: float = 5.0, token_file: str = ""
    ) -> None:
        """`first`: which of them to begin with; it may be beyond the last, as doors are counted. The token of
        the file is sent, and read again when it is refused. Raises ConfigError: it holds none."""
        self._token_file, self._headers = token_file, {**HEADERS, **token_headers(token_file)}
        self._servers, self._at, self._timeout_s = tuple(servers), first, timeout_s
        self._connection = self._connected()

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """See `Door`."""
        try:
            self._connection.request("POST", path, body, self._headers)
            answer = self._connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            where = f"{self._server}{path}"
            self._turn()
            raise Unavailable(f"{where}: {error!r}") from error
        if status == UNAUTHORIZED and self._token_file:
            self._headers = {**HEADERS, **token_headers(self._token_file)}
        if status in FAILING and len(self._servers) > 1:
            self._turn()
        return status, content

    def close(self) -> None:
        """See `Door`."""
        self._connection.close()

    @property
    def _server(self) -> Address:
        return self._servers[self._at % len(self._servers)]

    def _connected(self) -> http.client.HTTPConnection:
        return tls.connection(self._server.host, self._server.port, self._timeout_s)

    def _turn(self) -> None:
        """To the next server, with a new connection; the only one is connected to anew."""
        self._connection.close()
        self._at += 1
        self._connection = self._connected()
