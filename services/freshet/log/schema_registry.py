"""A schema registry over REST, as Confluent's speaks it and those that are compatible with it.

Its ids are in the frames of external records.

    GET /schemas/ids/{id}                             the schema of a record's frame
    GET /subjects/{subject}/versions/{version}        a schema to which another one refers
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import orjson
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.avro.schema import Written, parse_written
from freshet.errors import ConfigError, Unavailable

_log = structlog.get_logger(__name__)

ANSWER_S = 5.0
"""Time-out of a request, from connect to its last byte; a registry holds kilobytes, in memory."""

_BURST_S = 20.0
"""Time that requests may take before the caller must go on with other work; idle time restores it. Otherwise
records with thousands of ids, or a slow registry, would delay the joiner's loop."""

_BACKOFF_S = 1.0
"""Time without requests after a burst; after a failed request it is the time that the request took."""

_SLOW_S = 0.5
"""Duration of a failed request below which the next one is sent at once."""

_MOST_BYTES = 4 << 20
"""Largest answer; the largest schemas are hundreds of kilobytes."""

_MOST_REFERENCES = 256
"""Most schemas to which one refers, directly or not."""

_MOST_UNKNOWN = 100_000
"""Most remembered unknown ids: more than the records that are decoded together can name (256 KiB)."""

_MOST_NAMED = 10_000
"""Most remembered versions of subjects, so that a schema with many references needs no request twice."""

_REPEAT_UNKNOWN_S = 10.0
"""Time after which an unknown id is requested again, as its schema may have been registered meanwhile; until
then records that name it cost no request. It grows if so many ids are unknown that requests for all take
longer."""

_SHAPE: Mapping[str, type] = {"schema": str, "schemaType": str, "references": list}
"""Fields of a schema in an answer; only the first is required."""

_NOT_FOUND = frozenset({"40401", "40402", "40403"})
"""Error codes of the API: subject, version, schema not found. A 404 without one comes from another server."""

_LARGEST_ID = (1 << 31) - 1
"""Largest id of the API; a larger one is in no frame of a registry."""

_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"


@dataclass(frozen=True, slots=True)
class Access:
    """Addresses of registries, and the credentials for them. Secrets are in files, which are read for each
    request, so that they may be changed."""

    urls: str  # of registries with the same contents, tried in turn: http(s)://host:port/path,…
    user: str = ""
    password_file: str = ""  # with `user`
    token_file: str = ""  # instead of both
    ca_file: str = ""  # PEM; without it the system's

    def __post_init__(self) -> None:
        for url in self.urls.split(","):
            if not _is_address(url):
                shown = "…@" + url.rpartition("@")[2] if "@" in url else url
                raise ConfigError(
                    "environment",
                    "FRESHET_REGISTRY_URL",
                    shown,
                    "http://HOST:PORT or https://HOST:PORT, several divided by commas",
                    "a user and a password go to FRESHET_REGISTRY_USER and FRESHET_REGISTRY_PASSWORD_FILE",
                )
        if bool(self.user) != bool(self.password_file) or (self.user and self.token_file):
            raise ConfigError(
                "environment",
                "FRESHET_REGISTRY_USER",
                self.user,
                "a user with a password file, or a token file, or none of them",
            )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and "@" not in parts.netloc
            and not parts.query
        )
    except ValueError:  # a port that is no number, or brackets that do not close
        return False


class RestRegistry:
    """Schemas by id, each requested once: an id never changes its meaning. Thread-safe."""

    def __init__(self, access: Access, clock: Clock = SYSTEM_CLOCK) -> None:
        """Send no request yet. Raises ConfigError for a certificate file that cannot be read."""
        self._access, self._clock = access, clock
        self._urls = access.urls.split(",")
        self._first = 0  # index of the registry that answered last
        self._lock = threading.Lock()
        self._schemas: dict[int, Written | ConfigError] = {}
        self._unknown: dict[int, float] = {}  # id: monotonic time of the last request
        self._named: dict[tuple[str, int], dict[str, Any]] = {}  # answers for a subject's version
        self._spent_s, self._last_s = (
            0.0,
            clock.monotonic(),
        )  # time of the burst's requests; end of the last one
        self._longest_s = 0.0  # longest request for an unknown id
        self._backoff_until_s, self._backoff_reason = float("-inf"), ""
        self._tls: ssl.SSLContext | None = None
        if any(url.startswith("https:") for url in self._urls):
            try:
                self._tls = ssl.create_default_context(cafile=access.ca_file or None)
            except OSError as error:
                raise ConfigError(
                    "environment",
                    "FRESHET_REGISTRY_CA_FILE",
                    access.ca_file,
                    "PEM of the authority that signs certificates",
                    str(error),
                ) from None

    def get(self, schema_id: int) -> Written:
        """Return the schema of an id.

        Raises:
            KeyError: no registry has the schema, or one to which it refers; requested again after 10 s.
            ConfigError: the schema is no Avro schema that freshet reads.
            Unavailable: no registry that answers and accepts the credentials has it, and another one does not
                answer; or requests have taken so long that the caller should do other work first. The id may
                exist; the next call may succeed at once.
        """
        with self._lock:
            if schema_id not in self._schemas:
                self._schemas[schema_id] = self._requested(schema_id)
            found = self._schemas[schema_id]
        if isinstance(found, ConfigError):
            raise found
        return found

    def _requested(self, schema_id: int) -> Written | ConfigError:
        if schema_id > _LARGEST_ID:
            raise KeyError(f"ids of schemas end at {_LARGEST_ID}, found {schema_id}")
        now = self._clock.monotonic()
        again_s = max(_REPEAT_UNKNOWN_S, 2 * self._longest_s * len(self._unknown))
        if now - self._unknown.get(schema_id, float("-inf")) < again_s:
            raise KeyError(schema_id)
        where = f"schema {schema_id} of the registry"
        try:
            answer = self._request(f"/schemas/ids/{schema_id}")
            references: dict[tuple[str, int], str] = {}
            self._refer(answer, references, where)
            return parse_written(_text(answer, where), where, references=list(references.values()))
        except ConfigError as error:
            _log.warning("a schema of the registry cannot be used", schema_id=schema_id, reason=str(error))
            return error
        except KeyError:
            if len(self._unknown) >= _MOST_UNKNOWN:
                self._unknown.clear()
                self._longest_s = 0.0
            self._unknown[schema_id] = self._clock.monotonic()
            self._longest_s = max(self._longest_s, self._unknown[schema_id] - now)
            raise

    def _refer(self, answer: Mapping[str, Any], found: dict[tuple[str, int], str], where: str) -> None:
        """Add the schemas to which an answer refers; each comes after those to which it refers itself."""
        for reference in answer.get("references") or ():
            try:
                subject, version = str(reference["subject"]), int(reference["version"])
            except (KeyError, TypeError, ValueError):
                raise ConfigError(where, "references", reference, "a subject and a version") from None
            if (subject, version) in found:
                continue
            if len(found) >= _MOST_REFERENCES:
                raise ConfigError(where, "references", len(found), f"at most {_MOST_REFERENCES} of them")
            named = self._request_named(subject, version)
            found[subject, version] = ""  # ends recursion; its own references come first
            self._refer(named, found, where)
            del found[subject, version]
            found[subject, version] = _text(named, where)

    def _request_named(self, subject: str, version: int) -> dict[str, Any]:
        """Return the answer for a subject's version, which never changes. Raises as `_request`."""
        named = self._named.get((subject, version))
        if named is None:
            named = self._request(f"/subjects/{quote(subject, safe='')}/versions/{version}")
            if len(self._named) >= _MOST_NAMED:
                self._named.clear()
            self._named[subject, version] = named
        return named

    def _request(self, path: str) -> dict[str, Any]:
        """As `_request_any`, within the time that requests may take."""
        began_s = self._clock.monotonic()
        self._spent_s = max(0.0, self._spent_s - (began_s - self._last_s))
        if began_s < self._backoff_until_s:
            raise Unavailable(self._backoff_reason)
        if self._spent_s > _BURST_S:
            self._back_off(
                _BACKOFF_S, f"requests to the schema registry took {_BURST_S:g} s: {path} is requested next"
            )
            self._spent_s = 0.0
            raise Unavailable(self._backoff_reason)
        try:
            return self._request_any(path)
        except Unavailable as error:
            took_s = self._clock.monotonic() - began_s
            if took_s >= _SLOW_S:
                self._back_off(took_s, str(error))
            raise
        finally:
            self._last_s = self._clock.monotonic()
            self._spent_s += self._last_s - began_s

    def _back_off(self, for_s: float, reason: str) -> None:
        self._backoff_until_s, self._backoff_reason = self._clock.monotonic() + for_s, reason

    def _request_any(self, path: str) -> dict[str, Any]:
        """Return the JSON answer of the first registry that has the object, as one may lag behind the others.

        Raises:
            KeyError: every registry answered that it has none.
            Unavailable: none has it, and one did not answer, which may have it.
        """
        problems = []
        for turn in range(len(self._urls)):
            at = (self._first + turn) % len(self._urls)
            try:
                answer = self._request_at(self._urls[at], path)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problems.append(f"{self._urls[at]}{path}: {error or repr(error)}")
                continue
            if answer is not None:
                self._first = at
                return answer
        if problems:
            raise Unavailable(f"the schema registry did not answer: {'; '.join(problems)}")
        raise KeyError(f"the schema registry has no {path}")

    def _request_at(self, url: str, path: str) -> dict[str, Any] | None:
        response, body = self._response(url, path)
        if response.status in (401, 403):
            raise OSError(
                f"{response.status} {response.reason}: FRESHET_REGISTRY_USER with its password, or"
                " FRESHET_REGISTRY_TOKEN_FILE, is not accepted there"
            )
        if 300 <= response.status < 400:
            to = (response.getheader("Location") or "nowhere").partition("?")[0][:200]
            raise OSError(
                f"{response.status} {response.reason} to {to}: redirects are not followed, as a password"
                " would go along; set FRESHET_REGISTRY_URL to the address that answers"
            )
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise OSError(
                f"{response.status} {response.reason}, and no JSON object: is this a schema registry?"
            )
        if response.status == 404 and str(answer.get("error_code")) in _NOT_FOUND:
            return None
        if response.status != 200:
            raise OSError(f"{response.status} {response.reason}: {str(answer.get('message', ''))[:200]}")
        for key, kind in _SHAPE.items():
            value = answer.get(key)
            if not isinstance(value, kind) and (value is not None or key == "schema"):
                raise OSError(f"{key} = {str(value)[:60]}, and no schema: is this a schema registry?")
        return answer

    def _response(self, url: str, path: str) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the head of an answer and its body.

        Raises OSError, HTTPException or ValueError if there is none within `ANSWER_S`.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None, "checked by Access"
        deadline = _Deadline(ANSWER_S)
        try:
            with deadline, self._connected(parts, deadline) as connection:
                connection.request("GET", parts.path.rstrip("/") + path, headers=self._headers())
                response = connection.getresponse()
                body = response.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if deadline.over or isinstance(error, TimeoutError):
                raise OSError(f"no whole answer within {ANSWER_S:g} s") from None
            raise
        if deadline.over:
            raise OSError(f"no whole answer within {ANSWER_S:g} s")
        if len(body) > _MOST_BYTES or response.length:
            raise http.client.HTTPException(
                f"an answer above {_MOST_BYTES:,} bytes, or one that was cut off: is this a schema registry?"
            )
        return response, body

    @contextlib.contextmanager
    def _connected(self, parts: SplitResult, deadline: _Deadline) -> Iterator[http.client.HTTPConnection]:
        host, tls = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        connection = (
            http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=self._tls)
            if tls
            else http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        )
        plain = socket.create_connection((host, port), timeout=ANSWER_S)
        with contextlib.closing(plain), contextlib.closing(connection):
            deadline.watch(plain.dup())  # TLS replaces the first socket
            connection.sock = (
                self._tls.wrap_socket(plain, server_hostname=host) if self._tls and tls else plain
            )
            yield connection

    def _headers(self) -> dict[str, str]:
        access = self._access
        headers = {"Accept": _ACCEPT}
        if access.token_file:
            headers["Authorization"] = f"Bearer {_secret(access.token_file)}"
        elif access.user:
            pair = f"{access.user}:{_secret(access.password_file)}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        return headers


class _Deadline:
    """Resets a connection at its end. A socket's time-out is for one piece of an answer, and would never pass
    between many small pieces."""

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def watch(self, connected: socket.socket) -> None:
        """Watch a socket of the connection, and close it at the end."""
        self._socket = connected
        if self.over:
            self._end()

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._socket is not None:
            self._socket.close()

    def _end(self) -> None:
        self.over = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)


def _secret(path: str) -> str:
    text = Path(path).read_text().strip()
    if not (text.isprintable() and text.isascii()):  # otherwise an error of the client would show it
        raise OSError(f"{path}: expected one line of printable ASCII, found something else")
    return text


def _text(answer: Mapping[str, Any], where: str) -> str:
    kind: str = answer.get("schemaType") or "AVRO"
    if kind != "AVRO":
        raise ConfigError(
            where,
            "schemaType",
            kind,
            "AVRO",
            "records of Protobuf and JSON Schema are not read: write Avro to the topic",
        )
    text: str = answer["schema"]
    return text
