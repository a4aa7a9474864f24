"""Connecting to Redis servers: who we are to them, and whether they may be used.

What will not pass by itself is a ConfigError: a server that refuses our user or certificate, a server whose
own certificate is not to be trusted, one that may evict rows.
"""

from __future__ import annotations

import ssl
from typing import Any

import redis
import structlog
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, ResponseError
from redis.retry import Retry

from freshet.errors import ConfigError, FreshetError, Unavailable
from freshet.rows.redis.url import RedisUrl

__all__ = ["NOT_ALLOWED", "Opener", "said_by"]

_log = structlog.get_logger(__name__)

_LEAST_RELEASE = 7
"""Valkey says 7.2 where it is asked for Redis's version."""

NOT_ALLOWED = (NoPermissionError, AuthenticationError, AuthorizationError)


class Opener:
    """Opens clients of the servers behind one URL, and looks at each master before it is first used."""

    def __init__(self, url: RedisUrl) -> None:
        self._url, self._options = url, url.options
        self._checked: set[str] = set()
        self._warned = False

    def any_server(self) -> redis.Redis:
        """The first server of the URL that answers. Raises what redis-py does; see `as_ours`."""
        for last, (host, port) in enumerate(self._url.servers, 1 - len(self._url.servers)):
            client = redis.Redis(host, port, retry=Retry(NoBackoff(), 0), **self._connecting())
            try:
                client.ping()
            except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                client.close()
                if last == 0 or isinstance(error, NOT_ALLOWED) or _tls_of(error):
                    raise
            else:
                return client
        raise AssertionError("a URL names a server")

    def cluster(self) -> redis.RedisCluster:
        """The cluster that the URL's servers are part of."""
        nodes = [ClusterNode(*server) for server in self._url.servers]  # type: ignore[no-untyped-call]
        return redis.RedisCluster(startup_nodes=nodes, **self._connecting())

    def as_ours(self, error: Exception) -> FreshetError:
        """What callers are told when a store cannot be opened."""
        if isinstance(error, NOT_ALLOWED):
            return ConfigError(
                "Redis",
                "",
                f"{self._url} refuses user {self._options.user or 'default'!r}: {said_by(error)}",
                "a user with the rights that docs/redis.md lists",
                "options user= and password_file= of the URL",
            )
        fault = _tls_of(error)
        if isinstance(fault, ssl.SSLCertVerificationError):
            return ConfigError(
                "Redis",
                "",
                f"the certificate of {self._url} is not to be trusted: {fault.verify_message}",
                "one for this host, signed by an authority that we know",
                "option ca_file= of the URL names the authority's certificate",
            )
        if fault is not None:
            return ConfigError(
                "Redis",
                "",
                f"{self._url} speaks no TLS, or refuses our certificate: {fault.reason or fault}",
                "a TLS port, and a certificate that the server knows if it asks for one",
                "options cert_file= and key_file= of the URL; tls-ca-cert-file of the server",
            )
        return Unavailable(f"{self._url} cannot be reached: {error}")

    def check(self, name: str, client: redis.Redis) -> None:
        """Look at a master before it is first used.

        Raises ConfigError if it is too old, or may evict rows.
        """
        if name in self._checked:
            return
        info = client.info()
        release, policy = str(info["redis_version"]), str(info.get("maxmemory_policy", "not said"))
        if int(release.partition(".")[0]) < _LEAST_RELEASE:
            raise ConfigError("Redis", f"release of {name}", release, "7.0 or newer, or Valkey", "")
        if policy != "noeviction":
            raise ConfigError(
                "Redis",
                f"maxmemory-policy of {name}",
                policy,
                "noeviction: a server that evicts turns learned rows into new ones, and nobody is told",
                "CONFIG SET maxmemory-policy noeviction, and the same in its file; of replicas too",
            )
        self._checked.add(name)
        if not int(info.get("aof_enabled", 0)) and not self._warned:
            self._warned = True
            _log.warning(
                "appendonly is off: a master that restarts is empty, and so are its replicas then; every "
                "sample since the log's start would be trained on again, if the log still has it",
                address=name,
            )

    def _connecting(self) -> dict[str, Any]:
        """What every connection is opened with."""
        options = self._options
        tls = {
            "ssl": True,
            "ssl_ca_certs": options.ca_file or None,
            "ssl_certfile": options.cert_file or None,
            "ssl_keyfile": options.key_file or None,
        }
        return {
            "username": options.user or None,
            "password": self._url.password,
            "socket_timeout": options.timeout_ms / 1000,
            "socket_connect_timeout": options.timeout_ms / 1000,
            "protocol": 2,
            **(tls if self._url.tls else {}),
        }


def said_by(error: Exception) -> str:
    """An error of redis-py's in a line."""
    return f"{type(error).__name__}: {error}" if not isinstance(error, ResponseError) else str(error)


def _tls_of(error: BaseException | None) -> ssl.SSLError | None:
    """What TLS found wrong, if that is why redis-py failed."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
