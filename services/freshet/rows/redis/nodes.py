"""Requests to a Redis Cluster, or to one Redis: encoded commands in one pipeline per master, in parallel.

redis-py manages connections and knows the master of each slot. Commands are encoded for many rows at once,
which avoids its packing of single arguments. All requests are idempotent: failed ones are sent again, to the
slot's current master, until the time-out.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis
import structlog
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)

from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.rows.redis.connection import NOT_ALLOWED, Opener, RedisUrl, error_text
from freshet.rows.redis.scripts import command

_log = structlog.get_logger(__name__)

Replies = list[Any]
"""Replies of one request's commands: integers, bytes, None and lists of these; no errors."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
"""Backoff between two tries, while a master is replaced."""

_THREADS = 32
"""Most masters in parallel, over all callers."""

_PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    OSError,
    AskError,  # MOVED too
    TryAgainError,
    ClusterDownError,
    SlotNotCoveredError,
    RedisClusterException,
    MasterDownError,
    ReadOnlyError,
)
"""Errors after which another master serves the slot, now or soon."""

_FAILED = (RedisError, RedisClusterException, OSError)
"""All errors of requests; RedisClusterException is no RedisError in redis-py."""


@dataclass(frozen=True, slots=True)
class Request:
    """Commands for one slot; they may be sent several times."""

    slot: int
    data: Sequence[bytes | memoryview]  # in Redis's protocol
    replies: int  # number of commands


class Nodes:
    """The masters behind a URL. Thread-safe."""

    def __init__(self, url: RedisUrl) -> None:
        """Connect, and check every master.

        Raises:
            Unavailable: no server answers, or slots have no master.
            ConfigError: a server must not be used, or refuses the connection: see `Opener`.
        """
        self._url, self._options = url, url.options
        self._opener = Opener(url)
        self._threads = ThreadPoolExecutor(_THREADS, "redis")
        self._single: redis.Redis | None = None
        self._cluster: redis.RedisCluster | None = None
        try:
            first = self._opener.any_server()
            if int(first.info("cluster")["cluster_enabled"]):
                first.close()
                self._cluster = self._opener.cluster()
                for node in self._cluster.get_primaries():  # type: ignore[no-untyped-call]
                    self._opener.check(node.name, self._cluster.get_redis_connection(node))
            else:
                self._single = first
                self._opener.check(":".join(map(str, url.servers[0])), first)
        except _FAILED as error:
            self.close()
            raise self._opener.convert(error) from error
        except BaseException:
            self.close()
            raise

    def ask(self, requests: Sequence[Request], doing: str, *, to_replicas: bool = False) -> list[Replies]:
        """Send each request to the master of its slot, one pipeline per master; returns the replies of each.

        With `to_replicas`, `min_replicas` replicas of each master must have received the writes.

        Raises:
            Unavailable: the outcome of some requests is unknown; repeating all is safe.
            Corrupt: a key has another type than freshet writes.
        """
        replies: list[Replies] = [[] for _ in requests]
        deadline = time.monotonic() + self._options.patience_ms / 1000
        pause, waiting = _FIRST_PAUSE_S, list(range(len(requests)))
        while waiting:
            failed: dict[int, Exception] = {}
            for i, answer in self._try({i: requests[i] for i in waiting}, to_replicas):
                if isinstance(answer, Exception):
                    failed[i] = answer
                else:
                    replies[i] = answer
            permanent = next((error for error in failed.values() if not isinstance(error, _PASSING)), None)
            if permanent is not None:
                raise self._convert(permanent, doing) from permanent
            waiting = sorted(failed)
            if waiting:
                error = failed[waiting[0]]
                if time.monotonic() + pause > deadline:
                    raise self._convert(error, doing) from error
                _log.debug(
                    "a request to redis is repeated",
                    doing=doing,
                    requests=len(waiting),
                    reason=error_text(error),
                )
                threading.Event().wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                self._refresh_slots()
        return replies

    def infos(self) -> Mapping[str, Mapping[str, Any]]:
        """Return {address: INFO} of every master. Raises Unavailable if one does not answer."""
        try:
            if self._cluster is None:
                assert self._single is not None
                return {":".join(map(str, self._url.servers[0])): self._single.info()}
            primaries = self._cluster.get_primaries()  # type: ignore[no-untyped-call]
            return {node.name: self._cluster.get_redis_connection(node).info() for node in primaries}
        except _FAILED as error:
            self._refresh_slots()
            raise self._convert(error, "reading INFO of servers") from error

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._threads.shutdown(wait=True)
        for client in (self._single, self._cluster):
            if client is not None:
                client.close()

    def _try(
        self, requests: Mapping[int, Request], to_replicas: bool
    ) -> Iterable[tuple[int, Replies | Exception]]:
        """Try each request once; returns its replies or error."""
        masters: dict[str, tuple[redis.Redis, dict[int, Request]]] = {}
        answers: list[tuple[int, Replies | Exception]] = []
        for i, request in requests.items():
            try:
                name, client = self._master_of(request.slot)
            except _PASSING as error:
                answers.append((i, error))
            else:
                masters.setdefault(name, (client, {}))[1][i] = request
        parts = [(name, client, own, to_replicas) for name, (client, own) in masters.items()]
        others = [self._threads.submit(self._send_pipeline, *part) for part in parts[1:]]
        for part in parts[:1]:
            answers += self._send_pipeline(*part)
        for other in others:
            answers += other.result()
        return answers

    def _send_pipeline(
        self, name: str, client: redis.Redis, requests: Mapping[int, Request], to_replicas: bool
    ) -> list[tuple[int, Replies | Exception]]:
        """Send a pipeline to a master and read its answers."""
        data = [part for request in requests.values() for part in request.data]
        want = self._options.min_replicas if to_replicas else 0
        if want:
            data.append(command(b"WAIT", b"%d" % want, b"%d" % self._options.wait_ms))
        answers: list[tuple[int, Replies | Exception]] = []
        try:
            self._opener.check(name, client)
            with _connection_of(client) as connection:
                connection.send_packed_command([b"".join(data)])
                for i, request in requests.items():
                    answers.append((i, _read(connection, request.replies)))
                got = int(connection.read_response()) if want else 0
        except (*_FAILED, ConfigError) as error:
            return [(i, error) for i in requests]
        if got < want:
            few = _TooFewReplicas(
                f"{name}: {got} of {want} replicas had it within {self._options.wait_ms} ms"
            )
            return [(i, few) for i in requests]
        return answers

    def _master_of(self, slot: int) -> tuple[str, redis.Redis]:
        if self._single is not None:
            return str(self._url), self._single
        assert self._cluster is not None
        node = self._cluster.nodes_manager.get_node_from_slot(slot)
        return node.name, self._cluster.get_redis_connection(node)

    def _refresh_slots(self) -> None:
        """Read the masters of the slots from the cluster; after a failure the next try reads them again."""
        if self._cluster is not None:
            try:
                self._cluster.nodes_manager.initialize()
            except _FAILED as error:
                _log.debug("the cluster's slots are not known", reason=error_text(error))

    def _convert(self, error: Exception, doing: str) -> Exception:
        """Return the error to raise for one of redis-py."""
        said = f"{self._url}: {doing} failed: {error_text(error)}"
        if isinstance(error, ConfigError):
            return error
        if isinstance(error, NOT_ALLOWED):
            return Unavailable(f"{said}\n  the user lacks a right; docs/redis.md lists the rights it needs")
        if isinstance(error, OutOfMemoryError):
            return Unavailable(
                f"{said}\n  Redis is full: raise maxmemory, or add masters; no bucket was written in part"
            )
        if isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE"):
            return Corrupt(f"{said}\n  a key of the store was written by something else than freshet")
        return Unavailable(f"{said}\n  the outcome is unknown; repeating is safe")


class _TooFewReplicas(RedisError):
    """A write reached fewer replicas than required."""


@contextlib.contextmanager
def _connection_of(client: redis.Redis) -> Iterator[Any]:
    """Borrow a connection of the client's pool; after an error it is closed, as replies may be unread."""
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()  # type: ignore[no-untyped-call]
        raise
    finally:
        pool.release(connection)


def _read(connection: Any, count: int) -> Replies | Exception:
    """Read the next replies; returns the first error among them, if any, after all are read."""
    replies: Replies = []
    errors: list[Exception] = []
    for _ in range(count):
        try:
            reply = connection.read_response()
        except ResponseError as error:
            errors.append(error)
            continue
        if isinstance(reply, list):  # of an EXEC, its replies include errors of its commands
            errors += [part for part in reply if isinstance(part, Exception)]
        replies.append(reply)
    return errors[0] if errors else replies
