"""Where requests go: one HTTP connection, kept open. The standard library's client: the simulator shares two
cores with the system that it tests, and this one costs a fifth of a comfortable one.
"""

from __future__ import annotations

import http.client
from typing import Protocol

from freshet.errors import Unavailable

__all__ = ["Door", "HttpDoor"]

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
    """See `Door`."""

    def __init__(self, host: str, port: int, *, timeout_s: float = 5.0) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """See `Door`."""
        try:
            self._connection.request("POST", path, body, HEADERS)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request opens a new one
            where = f"{self._connection.host}:{self._connection.port}{path}"
            raise Unavailable(f"{where}: {error!r}") from error

    def close(self) -> None:
        """See `Door`."""
        self._connection.close()
