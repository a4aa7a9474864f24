"""Connecting to Redis servers: who we are to them, and whether they may be used.

What will not pass by itself is a ConfigError: a server that refuses our user or certificate, a server whose
own certificate is not to be trusted, one that may evict rows.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

import redis
import structlog
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, ResponseError
from redis.retry import Retry

from freshet.config.options import Duration, Integer, Section, Text, key_of, option, options_of, read_object
from freshet.errors import ConfigError, FreshetError, Unavailable

__all__ = ["NOT_ALLOWED", "Opener", "RedisOptions", "RedisUrl", "parse_url", "said_by"]

# --- What a URL of the Redis row store says: servers, the store's name, and options.
#
#     redis://10.0.0.1:6379,10.0.0.2:6379/news?user=freshet&password_file=/run/secrets/redis
#
# `rediss:` is TLS. Secrets stand in files, never in a URL, which is logged.


_SECOND, _MINUTE = 1_000, 60_000
_PORT = 6379
_NAME = Text("letters, digits, . _ and -", r"[A-Za-z0-9._-]{1,200}")
_PATH = Text("the path of a file that can be read")
_WHERE = "row store URL"
_FORM = "redis://HOST:PORT,HOST:PORT/NAME?OPTION=VALUE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """The options of a URL, after its question mark."""

    user: str = option(
        "deployment", "the ACL user; without it, the default one", Text("a user's name"), default=""
    )
    password_file: str = option(
        "deployment", "a file that holds the password, and nothing else", _PATH, default=""
    )
    ca_file: str = option(
        "deployment",
        "certificates to trust (PEM), with rediss:; without it, the system's",
        _PATH,
        default="",
    )
    cert_file: str = option("deployment", "our certificate (PEM), if servers ask for one", _PATH, default="")
    key_file: str = option("deployment", "the key of `cert_file` (PEM)", _PATH, default="")
    timeout_ms: int = option(
        "deployment",
        "how long a server may take to connect, to take bytes and to answer; then another one is looked for",
        Duration(10, _MINUTE),
        key="timeout",
        default=2 * _SECOND,
    )
    patience_ms: int = option(
        "deployment",
        "how long a call tries on through failovers and moved slots; then it is unavailable",
        Duration(0, 10 * _MINUTE),
        key="patience",
        default=10 * _SECOND,
    )
    min_replicas: int = option(
        "deployment",
        "replicas that must have a flush before it counts as written; 0: the master alone",
        Integer(0, 16),
        default=0,
    )
    wait_ms: int = option(
        "deployment",
        "how long a flush waits for min_replicas; then it is unavailable, and sent again",
        Duration(1, _MINUTE),
        key="wait",
        default=_SECOND,
    )


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL, parsed."""

    servers: tuple[tuple[str, int], ...]  # (host, port), any of which tells about the others
    name: str  # of the store: begins all its keys
    tls: bool
    options: RedisOptions
    password: str | None = field(repr=False)

    def __str__(self) -> str:
        """How messages name the store."""
        first = ":".join(map(str, self.servers[0]))
        return f"{'rediss' if self.tls else 'redis'}://{first}/{self.name}"


def parse_url(url: str) -> RedisUrl:
    """Parse a URL and read its password's file. Raises ConfigError, which never shows a password."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    netloc, _, path = place.partition("/")
    if "@" in netloc:
        raise _wrong(
            "user or password before @",
            "servers alone",
            "use ?user=...&password_file=/a/file: URLs are logged",
        )
    servers = tuple(_server(text) for text in netloc.split(","))
    name = unquote(path)
    if not path:
        raise _wrong(f"{scheme}://{netloc}", _FORM, "NAME begins all keys of this store")
    Section(_WHERE, "", {"name": name}).take("name", _NAME)
    options = read_object(RedisOptions, Section(_WHERE, "", _values(query)))
    if (options.ca_file or options.cert_file or options.key_file) and scheme != "rediss":
        raise _wrong(f"{scheme}: with certificates", "rediss:", "that is the scheme for TLS")
    return RedisUrl(
        servers=servers,
        name=name,
        tls=scheme == "rediss",
        options=options,
        password=_password(options.password_file),
    )


def _server(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):  # no port, or an IPv6 address without one
        host, port = text, str(_PORT)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise _wrong(text, _FORM, "for example redis://10.0.0.1:6379,10.0.0.2:6379/news")
    return host.strip("[]"), int(port)


def _values(query: str) -> Mapping[str, Any]:
    """The query as TOML would give it: numbers where an option is one."""
    forms = {key_of(field): field.metadata["form"] for field in options_of(RedisOptions)}
    values: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key == "password":
            raise _wrong("a password", "a URL without secrets", "password_file=/a/file: URLs are logged")
        if key in values:
            raise _wrong(f"{key} twice", "each option once", "")
        is_number = isinstance(forms.get(key), Integer) and text.isascii() and text.isdigit()
        values[key] = int(text) if is_number else text
    return values


def _password(path: str) -> str | None:
    if not path:
        return None
    try:
        password = Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            _WHERE, "password_file", path, _PATH.expected, f"it cannot be read: {error}"
        ) from error
    if not password:
        raise ConfigError(_WHERE, "password_file", path, "a file that holds a password", "it is empty")
    return password


def _wrong(found: str, expected: str, hint: str) -> ConfigError:
    return ConfigError(_WHERE, "", found, expected, hint)


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
