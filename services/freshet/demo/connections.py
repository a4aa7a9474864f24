"""Requests of the simulator: servers, a persistent connection with failover, and the queue of actions.

The connection uses the standard library's client, which costs a fifth of the CPU time of richer ones: the
simulator shares its processors with the system that it measures.
"""

from __future__ import annotations

import heapq
import http.client
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from freshet.clock import Clock
from freshet.config.settings import Settings
from freshet.errors import ConfigError, Unavailable
from freshet.http import tls
from freshet.http.addresses import Address, address_in, reachable_host
from freshet.http.token_files import token_headers


@dataclass(frozen=True, slots=True)
class Targets:
    """At least one server of each role; connections spread over them and change to the next on failure."""

    gateways: tuple[Address, ...]
    inferences: tuple[Address, ...]


def targets_by(settings: Settings, gateways: Sequence[str] = (), inferences: Sequence[str] = ()) -> Targets:
    """Parse URLs of servers; a role without URLs gets the address of this machine and the role's port.

    Raises ConfigError if a URL names no server.
    """
    host = reachable_host(settings.common.bind_address)
    return Targets(
        tuple(server_of("--gateway", url) for url in gateways) or (Address(host, settings.gateway.port),),
        tuple(server_of("--inference", url) for url in inferences)
        or (Address(host, settings.inference.port),),
    )


def server_of(option: str, url: str) -> Address:
    """Parse the URL of a server. Raises ConfigError, with the option, if it names none."""
    try:
        return address_in(url, tls.scheme())[1]
    except ValueError as error:
        raise ConfigError("simulate", option, url, str(error), "such as http://gateway-0:7000") from None


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


BATCH = 500
REFUSING = (400, 413, 415, 422)
"""Statuses that a retry would not change."""
LARGEST = 200_000
"""Actions queued while the gateway is unavailable, minutes at the highest rate. Further ones are dropped."""


class Outbox:
    """A queue with many writers, by `put`, and one sender."""

    def __init__(self, clock: Clock, largest: int = LARGEST) -> None:
        self._clock, self._largest = clock, largest
        self._lock = threading.Lock()
        self._ties = itertools.count()
        self._waiting: list[tuple[int, int, Mapping[str, Any]]] = []  # a heap by time
        self._batch: list[Mapping[str, Any]] = []  # sent and not acknowledged
        self.sent = 0  # acknowledged actions
        self.refused = 0  # actions that the gateway refused
        self.dropped = 0
        self.errors = 0  # failed attempts

    def put(self, action: Mapping[str, Any]) -> None:
        """Queue an action to be sent at its `ts`."""
        with self._lock:
            if len(self._waiting) >= self._largest:
                self.dropped += 1
                return
            heapq.heappush(self._waiting, (action["ts"], next(self._ties), action))

    def waiting(self) -> int:
        """Return the number of actions that are not acknowledged."""
        with self._lock:
            return len(self._waiting) + len(self._batch)

    def send_due(self, gateway: Connection) -> bool | None:
        """Send one batch of due actions.

        Returns True if the gateway acknowledged it, None if no action is due, False if the request failed;
        the next call then sends the same batch with the same event ids.
        """
        if not self._batch:
            self._batch = self._pop_due()
        if not self._batch:
            return None
        try:
            status, answer = gateway.post("/v1/actions", orjson.dumps(self._batch))
        except Unavailable:
            status, answer = 503, b""
        if status != 202 and status not in REFUSING:
            self.errors += 1
            return False
        refused = _count_refused(answer, len(self._batch))
        self.refused += refused
        self.sent += len(self._batch) - refused
        self._batch = []
        return True

    def _pop_due(self) -> list[Mapping[str, Any]]:
        now_ms = self._clock.now_ms()
        due: list[Mapping[str, Any]] = []
        with self._lock:
            while self._waiting and self._waiting[0][0] <= now_ms and len(due) < BATCH:
                due.append(heapq.heappop(self._waiting)[2])
        return due


def _count_refused(answer: bytes, sent: int) -> int:
    """Count the refused actions of a batch: all of them if the answer does not list single ones."""
    body = orjson.loads(answer)
    return len(body.get("refused", ())) if "acks" in body else sent
