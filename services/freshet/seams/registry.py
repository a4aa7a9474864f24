"""A schema registry over REST, as Confluent's speaks it and those that are compatible with it.

Its ids stand in the frames of records that others write.

    GET /schemas/ids/{id}                             what a record's frame names
    GET /subjects/{subject}/versions/{version}        what such a schema refers to
"""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import orjson
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import ConfigError, Unavailable
from freshet.spec.avro import Written, parse_written

__all__ = ["Access", "RestRegistry"]

_log = structlog.get_logger(__name__)

_ANSWER_S = 5.0
"""For an answer of one registry: it holds kilobytes, in memory."""

_MOST_BYTES = 4 << 20
"""Of an answer; the largest schemas are hundreds of kilobytes."""

_MOST_REFERENCES = 256
"""Schemas that one refers to, directly or not."""

_MOST_UNKNOWN = 10_000
"""Unknown ids that are kept in mind."""

_ASK_AGAIN_S = 10.0
"""An id that was unknown is asked for again: it may come with the record's writer's next schema. Until then
records that name it cost no request."""

_SHAPE: Mapping[str, type] = {"schema": str, "schemaType": str, "references": list}
"""Of a schema in an answer; only the first is always there."""

_NOT_FOUND = frozenset({"40401", "40402", "40403"})
"""Error codes of the API: subject, version, schema not found. A 404 without one is some other server's."""

_LARGEST_ID = (1 << 31) - 1
"""Of the API; a record that names another has no frame of a registry's."""

_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"


@dataclass(frozen=True, slots=True)
class Access:
    """Where registries are, and what they are shown. Secrets stand in files, read for each request, so that
    they may be changed."""

    urls: str  # of one or several that know the same, tried in turn: http(s)://host:port/path,…
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
    except ValueError:  # of a port that is no number, or brackets that do not close
        return False


class RestRegistry:
    """Schemas by id, each asked for once: an id never changes its meaning. Thread-safe."""

    def __init__(self, access: Access, clock: Clock = SYSTEM_CLOCK) -> None:
        """Nothing is asked yet. Raises ConfigError for a certificate file that cannot be read."""
        self._access, self._clock = access, clock
        self._urls = access.urls.split(",")
        self._first = 0  # the one that answered last
        self._lock = threading.Lock()
        self._schemas: dict[int, Written | ConfigError] = {}
        self._unknown: dict[int, float] = {}  # id: when it was asked for
        self._tls: ssl.SSLContext | None = None
        if any(url.startswith("https:") for url in self._urls):
            try:
                self._tls = ssl.create_default_context(cafile=access.ca_file or None)
            except OSError as error:
                raise ConfigError(
                    "environment",
                    "FRESHET_REGISTRY_CA_FILE",
                    access.ca_file,
                    "PEM of who signs certificates",
                    str(error),
                ) from None

    def get(self, schema_id: int) -> Written:
        """The schema of that id.

        Raises:
            KeyError: no registry has one of that id, or one that it refers to; asked for again after 10 s.
            ConfigError: it has one that is no Avro schema that we read.
            Unavailable: no registry answers, or none lets us in. Nothing is known of the id.
        """
        with self._lock:
            if schema_id not in self._schemas:
                self._schemas[schema_id] = self._asked(schema_id)
            found = self._schemas[schema_id]
        if isinstance(found, ConfigError):
            raise found
        return found

    def _asked(self, schema_id: int) -> Written | ConfigError:
        if schema_id > _LARGEST_ID:
            raise KeyError(f"ids of schemas end at {_LARGEST_ID}, found {schema_id}")
        now = self._clock.monotonic()
        if now - self._unknown.get(schema_id, float("-inf")) < _ASK_AGAIN_S:
            raise KeyError(schema_id)
        where = f"schema {schema_id} of the registry"
        try:
            answer = self._ask(f"/schemas/ids/{schema_id}")
            references: dict[tuple[str, int], str] = {}
            self._refer(answer, references, where)
            return parse_written(_text(answer, where), where, references=list(references.values()))
        except ConfigError as error:
            _log.warning("a schema of the registry cannot be used", schema_id=schema_id, reason=str(error))
            return error
        except KeyError:
            if len(self._unknown) >= _MOST_UNKNOWN:
                self._unknown.clear()
            self._unknown[schema_id] = now
            raise

    def _refer(self, answer: Mapping[str, Any], found: dict[tuple[str, int], str], where: str) -> None:
        """Add the schemas that one refers to, those first that others refer to."""
        for reference in answer.get("references") or ():
            try:
                subject, version = str(reference["subject"]), int(reference["version"])
            except (KeyError, TypeError, ValueError):
                raise ConfigError(where, "references", reference, "a subject and a version") from None
            if (subject, version) in found:
                continue
            if len(found) >= _MOST_REFERENCES:
                raise ConfigError(where, "references", len(found), f"at most {_MOST_REFERENCES} of them")
            named = self._ask(f"/subjects/{quote(subject, safe='')}/versions/{version}")
            found[subject, version] = ""  # its place is behind what it refers to itself
            self._refer(named, found, where)
            del found[subject, version]
            found[subject, version] = _text(named, where)

    def _ask(self, path: str) -> dict[str, Any]:
        """The answer as JSON, of the first registry that has such a thing: one may be behind the others.

        Raises:
            KeyError: none has, of those that answered.
            Unavailable: none answered.
        """
        problems, found_none = [], False
        for turn in range(len(self._urls)):
            at = (self._first + turn) % len(self._urls)
            try:
                answer = self._ask_at(self._urls[at], path)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problems.append(f"{self._urls[at]}{path}: {error or repr(error)}")
                continue
            if answer is not None:
                self._first = at
                return answer
            found_none = True
        if found_none:
            raise KeyError(f"the schema registry has no {path}")
        raise Unavailable(f"the schema registry did not tell: {'; '.join(problems)}")

    def _ask_at(self, url: str, path: str) -> dict[str, Any] | None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "checked by Access"
        connection = (
            http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_ANSWER_S, context=self._tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname, parts.port, timeout=_ANSWER_S)
        )
        try:
            connection.request("GET", parts.path.rstrip("/") + path, headers=self._headers())
            response = connection.getresponse()
            body = response.read(_MOST_BYTES + 1)
            if len(body) > _MOST_BYTES or response.length:
                raise http.client.HTTPException(
                    f"an answer above {_MOST_BYTES:,} bytes, or one that was cut off"
                )
        finally:
            connection.close()
        if response.status in (401, 403):
            raise OSError(
                f"{response.status} {response.reason}: FRESHET_REGISTRY_USER with its password, or"
                " FRESHET_REGISTRY_TOKEN_FILE, lets nobody in there"
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

    def _headers(self) -> dict[str, str]:
        access = self._access
        headers = {"Accept": _ACCEPT}
        if access.token_file:
            headers["Authorization"] = f"Bearer {_secret(access.token_file)}"
        elif access.user:
            pair = f"{access.user}:{_secret(access.password_file)}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        return headers


def _secret(path: str) -> str:
    text = Path(path).read_text().strip()
    if not (text.isprintable() and text.isascii()):  # else the client's complaint would show it
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
            "records of Protobuf and JSON Schema are not read: give the topic Avro",
        )
    text: str = answer["schema"]
    return text
