"""Connections to Redis servers: the store's URL, authentication, and checks of a server before its use.

A fault that needs an operator is a ConfigError: a refused user or certificate, an untrusted certificate of
the server, a server that may evict rows.
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

# --- The URL of the row store: servers, the store's name, and options.
#
#     redis://10.0.0.1:6379,10.0.0.2:6379/news?user=freshet&password_file=/run/secrets/redis
#
# `rediss:` is TLS. URLs are logged, so secrets are in files.


_SECOND, _MINUTE = 1_000, 60_000
_PORT = 6379
_NAME = Text("letters, digits, . _ and -", r"[A-Za-z0-9._-]{1,200}")
_PATH = Text("the path of a file that can be read")
_WHERE = "row store URL"
_FORM = "redis://HOST:PORT,HOST:PORT/NAME?OPTION=VALUE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Options of a URL, in its query."""

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

    servers: tuple[tuple[str, int], ...]  # (host, port) of any nodes of the cluster
    name: str  # prefix of the store's keys
    tls: bool
    options: RedisOptions
    password: str | None = field(repr=False)

    def __str__(self) -> str:
        """Return the store's name in messages, without options."""
        first = ":".join(map(str, self.servers[0]))
        return f"{'rediss' if self.tls else 'redis'}://{first}/{self.name}"


def parse_url(url: str) -> RedisUrl:
    """Parse a URL and read its password file.

    Raises:
        ConfigError: the URL is malformed or has an unknown option, or a file cannot be read. The message
            shows no password.
    """
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
    Section(_WHERE, "", {"name": name}).read_value("name", _NAME)
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
    """Return the query's values, as integers where the option is one."""
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
"""Oldest major release of Redis; Valkey reports 7.2."""

NOT_ALLOWED = (NoPermissionError, AuthenticationError, AuthorizationError)


class Opener:
    """Opens clients of one URL's servers, and checks each master before its first use."""

    def __init__(self, url: RedisUrl) -> None:
        self._url, self._options = url, url.options
        self._checked: set[str] = set()
        self._warned = False

    def any_server(self) -> redis.Redis:
        """Connect to the first server of the URL that answers. Raises errors of redis-py; see `convert`."""
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
        """Connect to the cluster of the URL's servers."""
        nodes = [ClusterNode(*server) for server in self._url.servers]  # type: ignore[no-untyped-call]
        return redis.RedisCluster(startup_nodes=nodes, **self._connecting())

    def convert(self, error: Exception) -> FreshetError:
        """Return the error to raise for one of redis-py while a store is opened."""
        if isinstance(error, NOT_ALLOWED):
            return ConfigError(
                "Redis",
                "",
                f"{self._url} refuses user {self._options.user or 'default'!r}: {error_text(error)}",
                "a user with the rights that docs/redis.md lists",
                "options user= and password_file= of the URL",
            )
        fault = _tls_of(error)
        if isinstance(fault, ssl.SSLCertVerificationError):
            return ConfigError(
                "Redis",
                "",
                f"the certificate of {self._url} is not trusted: {fault.verify_message}",
                "one for this host, signed by a known authority",
                "option ca_file= of the URL names the authority's certificate",
            )
        if fault is not None:
            return ConfigError(
                "Redis",
                "",
                f"{self._url} speaks no TLS, or refuses the client's certificate: {fault.reason or fault}",
                "a TLS port, and a client certificate that the server trusts if it requires one",
                "options cert_file= and key_file= of the URL; tls-ca-cert-file of the server",
            )
        return Unavailable(f"{self._url} cannot be reached: {error}")

    def check(self, name: str, client: redis.Redis) -> None:
        """Check a master before its first use.

        Raises:
            ConfigError: the release is too old, or the server may evict rows.
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
                "noeviction: a server that evicts loses learned rows without notice",
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
        """Return the arguments of every connection."""
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


def error_text(error: Exception) -> str:
    """Return an error of redis-py in one line."""
    return f"{type(error).__name__}: {error}" if not isinstance(error, ResponseError) else str(error)


def _tls_of(error: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS error that caused an error of redis-py, or None."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
