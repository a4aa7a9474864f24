"""Bucket of an object storage: whole objects, created or replaced under a condition that the storage checks
(If-None-Match, If-Match), so that the second of two writers gets an error.

```
s3://bucket/prefix?endpoint=https://minio.example:9000&region=eu-central-1
gs://bucket/prefix      az://container/prefix
```
URLs have no credentials: these come from the variables of the storage's own tools (`AWS_ACCESS_KEY_ID` …,
`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY` …), from the machine's role, or from a file in
the form of `~/.aws/credentials` that `AWS_SHARED_CREDENTIALS_FILE` names.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from freshet.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore, S3Credential

__all__ = ["Bucket", "Conflict", "Listed", "Stored", "open_bucket"]

_RETRY: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
_CLIENT: dict[str, Any] = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
"""Time-outs of one request: an upload of 100 MB at 2 MB/s fits."""

_FILE_IS_GOOD_FOR = timedelta(minutes=5)
"""Time after which a credentials file is read again, so that rotated keys need no restart."""

_OPTIONS = {
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "virtual_hosted_style": "virtual_hosted_style_request",
    },
    "gs": {"endpoint": "base_url"},
    "az": {"endpoint": "endpoint", "account": "account_name"},
}

_PROBE = "conditions"


class Conflict(Exception):
    """The condition of a write did not hold: another writer was first. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, and its state as a condition of its replacement."""

    data: bytes
    state: UpdateVersion  # ETag, and the version if the storage numbers versions


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing, with the storage's time."""

    key: str
    written: datetime


class Bucket:
    """Objects below one prefix. Thread-safe. A method may block for about 20 s of retries before it raises
    Unavailable."""

    def __init__(self, store: ObjectStore, where: str) -> None:
        self._store, self._where = store, where
        self._keeps_conditions = False

    def where(self, key: str) -> str:
        """Return an object's URL, for messages."""
        return f"{self._where}/{key}" if key else self._where

    def read(self, key: str) -> Stored | None:
        """Return an object; None if it does not exist."""
        with self._translated(key, "read"):
            try:
                result = obstore.get(self._store, key)
            except FileNotFoundError:
                return None
            state: UpdateVersion = {}
            if result.meta["e_tag"] is not None:
                state["e_tag"] = result.meta["e_tag"]
            if result.meta["version"] is not None:
                state["version"] = result.meta["version"]
            return Stored(bytes(result.bytes()), state)

    def exists(self, key: str) -> bool:
        """Return whether an object exists."""
        with self._translated(key, "check"):
            try:
                obstore.head(self._store, key)
            except FileNotFoundError:
                return False
            return True

    def write(self, key: str, data: bytes) -> None:
        """Write an object, or replace it; a large one in parts, which become visible together."""
        with self._translated(key, "write"):
            obstore.put(self._store, key, data)

    def create(self, key: str, data: bytes) -> None:
        """Write a new object. Raises Conflict if it exists, or a response was lost."""
        with self._translated(key, "create"):
            obstore.put(self._store, key, data, mode="create")

    def replace(self, key: str, data: bytes, was: Stored) -> None:
        """Replace an object as it was read. Raises Conflict if it has changed, or as `create`."""
        with self._translated(key, "replace"):
            try:
                obstore.put(self._store, key, data, mode=was.state)
            except FileNotFoundError as error:
                raise Conflict(self.where(key)) from error

    def list(self, prefix: str = "") -> list[Listed]:
        """Return all objects below `prefix` (whole path segments), with their keys."""
        with self._translated(prefix, "list"):
            pages = obstore.list(self._store, prefix or None)
            return [Listed(meta["path"], meta["last_modified"]) for page in pages for meta in page]

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        with self._translated(key, "delete"), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def demand_conditions(self) -> None:
        """Check, once, that the storage enforces conditions. An older S3 server ignores the headers, so that
        two writers would both succeed.

        Raises:
            ConfigError: it ignores a condition.
            Unavailable: the storage cannot be reached, or loses a written object.
        """
        if self._keeps_conditions:
            return
        key = f"{_PROBE}/{uuid.uuid4().hex}"
        ignored = []
        try:
            self.create(key, b"1")
            first = self.read(key)
            if first is None:
                raise Unavailable(
                    f"{self.where(key)}: was written and is not there: is the storage consistent?"
                )
            if not self._conflicts(lambda: self.create(key, b"2")):
                ignored.append("If-None-Match: *")
            self.write(key, b"3")
            if not self._conflicts(lambda: self.replace(key, b"4", first)):
                ignored.append("If-Match")
        finally:
            self.delete(key)
        if ignored:
            raise ConfigError(
                "version store", "url", self._where,
                "an object storage that decides conditional writes (S3 does, recent MinIO and Ceph do)",
                f"this one ignores {' and '.join(ignored)}: two trainers could write over each other. "
                "Take a newer server, or file:/a/shared/folder",
            )  # fmt: skip
        self._keeps_conditions = True

    @staticmethod
    def _conflicts(write: Any) -> bool:
        try:
            write()
        except Conflict:
            return True
        return False

    @contextlib.contextmanager
    def _translated(self, key: str, doing: str) -> Iterator[None]:
        """Translate the library's errors. FileNotFoundError passes: callers interpret it."""
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Conflict(self.where(key)) from error
        except exceptions.BaseError as error:
            raise Unavailable(
                f"{self.where(key)}: cannot {doing}: {_first_line(error)}{_hint(error)}"
            ) from error


def open_bucket(url: str) -> Bucket:
    """Return the bucket of a URL, without a request to the storage.

    Raises:
        ConfigError: the URL is not valid, or contains a secret, which the message does not repeat.
    """
    parts = urlsplit(url)
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    if parts.username or parts.password:
        raise _refused(shown, "a URL without user and password", "credentials come from the environment")
    allowed = _OPTIONS.get(parts.scheme)
    if allowed is None or not parts.netloc or parts.fragment:
        raise _refused(shown, "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix", "")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in allowed:
            raise _refused(
                f"{shown}?{name}=…", f"options {', '.join(allowed)}", "a URL must not contain secrets"
            )
    config = {allowed[name]: value for name, value in options.items()}
    prefix = parts.path.strip("/") or None
    try:
        return Bucket(_store(parts.scheme, parts.netloc, prefix, config), shown.rstrip("/"))
    except (exceptions.BaseError, ValueError) as error:
        raise _refused(shown, "options of the storage's client", _first_line(error)) from error


def _store(scheme: str, bucket: str, prefix: str | None, config: dict[str, Any]) -> ObjectStore:
    common: dict[str, Any] = {"prefix": prefix, "retry_config": _RETRY}
    client = dict(_CLIENT, allow_http=any(str(v).startswith("http://") for v in config.values()))
    if scheme == "gs":
        return GCSStore(bucket, config=config, client_options=client, **common)  # type: ignore[arg-type]
    if scheme == "az":
        return AzureStore(bucket, config=config, client_options=client, **common)  # type: ignore[arg-type]
    path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE")
    if path and "AWS_ACCESS_KEY_ID" not in os.environ:
        common["credential_provider"] = _FromFile(Path(path), os.environ.get("AWS_PROFILE", "default"))
    config.setdefault(
        "region", os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
    )
    return S3Store(bucket, config={**config, "conditional_put": "etag"}, client_options=client, **common)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _FromFile:
    """Keys from a file in the form of `~/.aws/credentials`, read again after every few minutes."""

    path: Path
    profile: str

    def __call__(self) -> S3Credential:
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(self.path.read_text(encoding="utf-8"))
            section = parser[self.profile]
            return {
                "access_key_id": section["aws_access_key_id"],
                "secret_access_key": section["aws_secret_access_key"],
                "token": section.get("aws_session_token"),
                "expires_at": datetime.now(UTC) + _FILE_IS_GOOD_FOR,
            }
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path}: cannot be read ({type(error).__name__})") from None
        except (configparser.Error, KeyError):  # their messages may repeat a line of the file
            raise ValueError(
                f"{self.path}: expected [{self.profile}] with aws_access_key_id and aws_secret_access_key"
            ) from None


def _refused(found: str, expected: str, hint: str) -> ConfigError:
    return ConfigError("version store", "url", found, expected, hint)


def _first_line(error: Exception) -> str:
    """Return the first line of the library's message, which continues with nested causes."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


_HINTS: Mapping[type[Exception], str] = {
    exceptions.PermissionDeniedError: "the credentials lack permissions: grant read, write, list and delete",
    exceptions.UnauthenticatedError: "the credentials are not accepted: check whether they are current",
}


def _hint(error: Exception) -> str:
    hint = _HINTS.get(type(error), "")
    return f"\n  {hint}" if hint else ""
