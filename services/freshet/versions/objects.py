"""Version store on object storage: no locks, no renames; one conditional write decides.

```
s3://bucket/prefix?endpoint=https://minio.example:9000&region=eu-central-1
gs://bucket/prefix      az://container/prefix

<prefix>/0000000012/<sha256>.safetensors   the weights, named by their hash; written first
<prefix>/0000000012/manifest.json          created if it does not exist; from then on the version exists
<prefix>/aliases.json                      all aliases, and the numbers being deleted; replaced if unchanged
```
Objects are created or replaced whole, under a condition that the storage checks (If-None-Match, If-Match), so
that the second of two writers gets an error. A writer that dies leaves weights without a manifest, which no
reader sees. The next writer of that number, or the deletion of any version a day later, removes them.
`aliases.json` is one object so that pointing at a version and deleting it cannot both succeed; its serial
number makes all its states differ. A deleted number must not be used again (the trainer's numbers only
increase). Reads and listings must include every acknowledged write; S3, Google's and Azure's storages
guarantee that.

URLs have no credentials: these come from the variables of the storage's own tools (`AWS_ACCESS_KEY_ID` …,
`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY` …), from the machine's role, or from a file in
the form of `~/.aws/credentials` that `AWS_SHARED_CREDENTIALS_FILE` names.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import obstore
import orjson
from numpy.typing import NDArray
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.observability.skipped_state import skip
from freshet.versions import ALIASES, Aliases, Manifest, Version
from freshet.versions.weights import (
    MOST_DIGITS,
    check_alias,
    check_number,
    check_verdict,
    pack,
    read_manifest,
    unpack,
    write_manifest,
)

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore, S3Credential

RETRY: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
"""Attempts of a request that fails on the way, and the longest time for all of them."""
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
        """Return an object; None if it does not exist. Raises Unavailable if the bucket does not exist."""
        with self._translated(key, "read"):
            try:
                result = obstore.get(self._store, key)
            except FileNotFoundError:
                next(iter(obstore.list(self._store, key)), None)  # fails without a bucket
                return None
            state: UpdateVersion = {}
            if result.meta["e_tag"] is not None:
                state["e_tag"] = result.meta["e_tag"]
            if result.meta["version"] is not None:
                state["version"] = result.meta["version"]
            return Stored(bytes(result.bytes()), state)

    def exists(self, key: str) -> bool:
        """Return whether an object exists; False without a bucket, too, as the answer has no reason."""
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
        """Translate the library's errors. A missing object is interpreted within; what leaves is a missing
        bucket."""
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Conflict(self.where(key)) from error
        except (exceptions.BaseError, FileNotFoundError) as error:
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
    common: dict[str, Any] = {"prefix": prefix, "retry_config": RETRY}
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

_NO_BUCKET = "the bucket or container was not found: make it, or correct the URL"


def _hint(error: Exception) -> str:
    hint = _NO_BUCKET if "404 Not Found" in str(error) else _HINTS.get(type(error), "")
    return f"\n  {hint}" if hint else ""


_MANIFEST, _ALIASES = "manifest.json", "aliases.json"
_FOLDER = re.compile(r"(\d{10,18})/(.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_LEFT_BEHIND_FOR = timedelta(days=1)
"""Age beside the newest object from which weights without a manifest belong to a dead writer."""

_TRIES = 20
"""Attempts of a replacement that other writers precede; the few writers move an alias every few seconds."""


def open_url(url: str) -> ObjectVersionStore:
    """Open the store of `s3://bucket/prefix`, `gs://…` or `az://…`; see `freshet.versions.objects`."""
    return ObjectVersionStore(open_bucket(url))


@dataclass(frozen=True, slots=True)
class _Aliases:
    """Contents of `aliases.json`."""

    serial: int = 0
    aliases: Mapping[str, int] = field(default_factory=dict)
    deleting: Collection[int] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)  # alias -> why it cannot be read; not stored

    def dump(self) -> bytes:
        record = {"v": 1, "serial": self.serial, "aliases": self.aliases, "deleting": sorted(self.deleting)}
        return orjson.dumps(record, option=orjson.OPT_INDENT_2)


class ObjectVersionStore:
    """See `freshet.versions.VersionStore`. Any number of processes may use one prefix."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def put(self, manifest: Manifest, tensors: Mapping[str, NDArray[np.generic]]) -> Manifest:
        """Store a version durably, with `sha256` set; tensors may have any shape and dtype.

        Raises ValueError if the number exists.
        """
        check_number(manifest.number)
        self._bucket.demand_conditions()
        key = _key(manifest.number, _MANIFEST)
        weights, sha256 = pack(tensors)
        manifest = replace(manifest, sha256=sha256)
        exists = (
            f"{self._bucket.where(key)}: version {manifest.number} exists; versions are never overwritten"
        )
        if self._bucket.exists(key) or manifest.number in self._aliases()[0].deleting:
            raise ValueError(exists)
        self._bucket.write(_weights_key(manifest), weights)
        signed = _signed(write_manifest(manifest))
        try:
            self._bucket.create(key, signed)
        except Conflict:  # or the response was lost, and a retry found this writer's own
            stored = self._bucket.read(key)
            if stored is None or stored.data != signed:
                if stored is not None:
                    self._sweep(manifest.number, self._parsed(manifest.number, stored))
                raise ValueError(exists) from None
        self._sweep(manifest.number, manifest)
        return manifest

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the stored versions, increasing."""
        found = {n for n, name, _ in self._listed() if name == _MANIFEST}
        return sorted(found.difference(self._aliases()[0].deleting) if found else found)

    def manifest(self, number: int) -> Manifest:
        """Return a version's manifest. Raises KeyError if there is none, Corrupt if it does not parse."""
        return self._parsed(number, self._stored(number))

    def get(self, number: int, prefixes: Sequence[str] = ()) -> Version:
        """Return a version with all tensors, or those with names that start with one of `prefixes`.

        Raises:
            KeyError: there is no such version.
            Corrupt: the weights do not exist, or do not match their sha256.
        """
        manifest = self.manifest(number)
        key = _weights_key(manifest)
        weights = self._bucket.read(key)
        if weights is None:
            self._stored(number)  # raises KeyError if it was deleted between the two reads
            raise Corrupt(
                f"{self._bucket.where(key)}: expected an object, found none; delete version {number}"
            )
        return unpack(manifest, weights.data, prefixes, self._bucket.where(key))

    def judge(self, number: int, verdict: str, reason: str) -> Manifest:
        """Store the gate's verdict in the manifest, which is replaced atomically.

        Raises Unavailable if other writers always precede.
        """
        check_verdict(verdict)
        self._bucket.demand_conditions()
        for _ in range(_TRIES):
            stored = self._stored(number)
            manifest = replace(self._parsed(number, stored), verdict=verdict, reason=reason)
            with contextlib.suppress(Conflict):
                self._bucket.replace(_key(number, _MANIFEST), write_manifest(manifest), stored)
                return manifest
        raise self._too_busy(_key(number, _MANIFEST))

    def aliases(self) -> Aliases:
        """Return the version of each alias, without aliases that were never set or are damaged."""
        read = self._aliases()[0]
        return Aliases(read.aliases, read.damaged)

    def point(self, alias: str, number: int) -> None:
        """Move an alias, durably and atomically."""
        check_alias(alias)

        def pointed(now: _Aliases) -> _Aliases:
            if number in now.deleting or not self._bucket.exists(_key(number, _MANIFEST)):
                raise KeyError(f"no version {number} in {self._bucket.where('')}")
            return replace(now, aliases={**now.aliases, alias: number})

        self._change(pointed)

    def delete(self, number: int) -> None:
        """Delete a version, if it exists. Raises ValueError if an alias points at it."""

        def marked(now: _Aliases) -> _Aliases:
            for alias, target in now.aliases.items():
                if target == number:
                    raise ValueError(f"version {number} is {alias!r}; point that elsewhere first")
            return replace(now, deleting={*now.deleting, number})

        gone = self._change(marked).deleting  # includes unfinished deletions of dead processes
        listed = self._listed()
        doomed = [(name != _MANIFEST, entry.key) for n, name, entry in listed if n in gone]
        for _, key in sorted(doomed):  # manifests first: a version without its weights would be damaged
            self._bucket.delete(key)
        self._change(lambda now: replace(now, deleting=set(now.deleting).difference(gone)))
        self._sweep_dead(listed)

    def close(self) -> None:
        """Do nothing: the store keeps nothing open."""

    def _change(self, change: Callable[[_Aliases], _Aliases]) -> _Aliases:
        """Replace `aliases.json` by the result of `change`; retries if another writer came first."""
        self._bucket.demand_conditions()
        for _ in range(_TRIES):
            now, stored = self._aliases()
            new = replace(change(now), serial=now.serial + 1)
            with contextlib.suppress(Conflict):
                if stored is None:
                    self._bucket.create(_ALIASES, new.dump())
                else:
                    self._bucket.replace(_ALIASES, new.dump(), stored)
                return new
        raise self._too_busy(_ALIASES)

    def _aliases(self) -> tuple[_Aliases, Stored | None]:
        stored = self._bucket.read(_ALIASES)
        if stored is None:
            return _Aliases(), None
        return _read_aliases(stored.data, self._bucket.where(_ALIASES)), stored

    def _stored(self, number: int) -> Stored:
        stored = self._bucket.read(_key(number, _MANIFEST)) if number >= 0 else None
        if stored is None:
            raise KeyError(f"no version {number} in {self._bucket.where('')}")
        return stored

    def _parsed(self, number: int, stored: Stored) -> Manifest:
        where = self._bucket.where(_key(number, _MANIFEST))
        manifest = read_manifest(stored.data, where, number)
        if not _SHA256.fullmatch(manifest.sha256):
            raise Corrupt(f"{where}: sha256 = {manifest.sha256[:80]!r}, expected 64 hexadecimal digits")
        return manifest

    def _listed(self) -> list[tuple[int, str, Listed]]:
        """Return (version number, name, object) of every object of a version."""
        found = ((_FOLDER.fullmatch(listed.key), listed) for listed in self._bucket.list())
        named = [(int(match[1]), match, listed) for match, listed in found if match]
        return [(n, match[2], listed) for n, match, listed in named if match[1] == f"{n:010d}"]

    def _sweep(self, number: int, manifest: Manifest) -> None:
        """Remove other weights beside a version's own, of writers that came second or died."""
        keep = {_key(number, _MANIFEST), _weights_key(manifest)}
        for listed in self._bucket.list(_key(number, "").rstrip("/")):
            if listed.key not in keep:
                self._bucket.delete(listed.key)

    def _sweep_dead(self, listed: Sequence[tuple[int, str, Listed]]) -> None:
        """Remove old weights without a manifest."""
        exist = {n for n, name, _ in listed if name == _MANIFEST}
        newest = max((entry.written for _, _, entry in listed), default=None)
        for n, _, entry in listed:
            if n not in exist and newest is not None and newest - entry.written > _LEFT_BEHIND_FOR:
                self._bucket.delete(entry.key)

    def _too_busy(self, key: str) -> Unavailable:
        return Unavailable(
            f"{self._bucket.where(key)}: other writers changed it {_TRIES} times during its replacement\n"
            "  do two trainers write to one version store? Nothing was changed; try again"
        )


def _read_aliases(data: bytes, where: str) -> _Aliases:
    """Parse `aliases.json`. Entries in another form than `_Aliases.dump` writes are left out, counted and
    logged; the next change writes the object with a serial number that no former state can have had."""
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or record.get("v") != 1:
        record = {}
    serial, pointed, deleting = record.get("serial"), record.get("aliases"), record.get("deleting")
    if type(serial) is not int or not 0 <= serial < 2**53:
        serial = uuid.uuid4().int >> 80
    damaged: dict[str, str] = {}
    aliases: dict[str, int] = {}
    hint = "\n  the trainer sets stable again with its next version, `freshet version promote NUMBER` at once"
    if not isinstance(pointed, dict):
        reason = f"{where}: expected aliases of format 1, found {data[:60]!r}{hint}"
        damaged = dict.fromkeys(ALIASES, reason)
    else:
        for alias, number in pointed.items():
            if alias in ALIASES and type(number) is int and 0 <= number < 10**MOST_DIGITS:
                aliases[alias] = number
            elif alias in ALIASES:
                damaged[alias] = f"{where}: {alias} = {number!r:.40}, expected a version's number{hint}"
    marked = [n for n in deleting if type(n) is int and n >= 0] if isinstance(deleting, list) else []
    for reason in dict.fromkeys(damaged.values()):
        skip("alias", where, reason)
    return _Aliases(serial, aliases, frozenset(marked), damaged)


def _signed(manifest: bytes) -> bytes:
    """Add a key that readers ignore, so that the manifest differs from another writer's equal one."""
    record = orjson.loads(manifest)
    return orjson.dumps({**record, "put": uuid.uuid4().hex}, option=orjson.OPT_INDENT_2)


def _key(number: int, name: str) -> str:
    return f"{number:010d}/{name}"


def _weights_key(manifest: Manifest) -> str:
    return _key(manifest.number, f"{manifest.sha256}.safetensors")
