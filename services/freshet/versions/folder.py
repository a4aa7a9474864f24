"""Version store in a folder: a folder for each version, renamed when complete, and a file for each alias.

```
<path>/0000000012/weights.safetensors  manifest.json
<path>/aliases/stable                  the number, in decimal
```
Everything is written under a new name, synced and renamed, and the folder is synced: a reader sees all of it
or nothing. A damaged entry, or one that this store did not write, does not affect the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt, Unavailable
from freshet.observability.skipped_state import skip
from freshet.sqlite import folder_of, sync_folder
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

_WEIGHTS, _MANIFEST = "weights.safetensors", "manifest.json"

_OURS = ("aliases", ".lock")
_UNREADABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EIO,
)
"""Errors that affect one entry and recur with each read: the entry is damaged. Other errors may pass."""


def open_url(url: str) -> FolderVersionStore:
    """Open the store of `file:/path`; creates a missing folder."""
    return FolderVersionStore(folder_of(url))


class FolderVersionStore:
    """See `freshet.versions.VersionStore`. Several processes may use one folder; changes take a file lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _disk(folder, "make"):
            (folder / "aliases").mkdir(parents=True, exist_ok=True)

    def put(self, manifest: Manifest, tensors: Mapping[str, NDArray[np.generic]]) -> Manifest:
        """Store a version durably, with `sha256` set; tensors may have any shape and dtype.

        Raises ValueError if the number exists.
        """
        check_number(manifest.number)
        final = self._path(manifest.number)
        weights, sha256 = pack(tensors)
        manifest = replace(manifest, sha256=sha256)
        with self._locked(), _disk(final, "write"):
            if final.exists():
                raise ValueError(f"{final}: version {manifest.number} exists; versions are never overwritten")
            self._sweep()
            temporary = self._folder / f".new-{uuid.uuid4().hex}"
            temporary.mkdir()
            _write(temporary / _WEIGHTS, weights)
            _write(temporary / _MANIFEST, write_manifest(manifest))
            sync_folder(temporary)
            temporary.rename(final)
            sync_folder(self._folder)
        return manifest

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the stored versions, increasing."""
        with _disk(self._folder, "list"):
            entries = os.listdir(self._folder)
        found, strays = [], []
        for entry in entries:
            number = _number(entry)
            if number is not None and os.path.exists(self._folder / entry / _MANIFEST):
                found.append(number)
            elif entry not in _OURS and not entry.startswith(".new-"):
                strays.append(entry)
        for entry in strays:
            path = self._folder / entry
            if _number(entry) is None or os.path.exists(path):  # otherwise it was deleted meanwhile
                reason = f"{path}: expected a version's folder with {_MANIFEST}; move it elsewhere"
                skip("version", str(path), reason)
        return sorted(found)

    def manifest(self, number: int) -> Manifest:
        """Return a version's manifest. Raises KeyError if there is none, Corrupt if it does not parse."""
        path = self._path(number) / _MANIFEST
        return read_manifest(self._read(number, path), str(path), number)

    def get(self, number: int, prefixes: Sequence[str] = ()) -> Version:
        """Return a version with all tensors, or those with names that start with one of `prefixes`."""
        manifest = self.manifest(number)
        path = self._path(number) / _WEIGHTS
        return unpack(manifest, self._read(number, path), prefixes, str(path))

    def judge(self, number: int, verdict: str, reason: str) -> Manifest:
        """Store the gate's verdict in the manifest, which is replaced atomically."""
        check_verdict(verdict)
        path = self._path(number) / _MANIFEST
        with self._locked(), _disk(path, "write"):
            manifest = replace(self.manifest(number), verdict=verdict, reason=reason)
            _replace(path, write_manifest(manifest))
        return manifest

    def aliases(self) -> Aliases:
        """Return the version of each alias, without aliases that were never set or are damaged."""
        found: dict[str, int] = {}
        damaged: dict[str, str] = {}
        self._check_folder()
        for alias in ALIASES:
            path = self._folder / "aliases" / alias
            try:
                found[alias] = _alias_target(path)
            except FileNotFoundError:
                continue
            except Corrupt as error:
                damaged[alias] = str(error)
                skip("alias", str(path), str(error))
        return Aliases(found, damaged)

    def point(self, alias: str, number: int) -> None:
        """Move an alias, durably and atomically. Raises KeyError if there is no such version."""
        check_alias(alias)
        with self._locked(), _disk(self._folder, "write"):
            if not self._path(number).exists():
                raise KeyError(f"no version {number} in {self._folder}")
            path = self._folder / "aliases" / alias
            if path.is_dir() and not path.is_symlink():  # a rename does not replace a folder
                path.rename(self._folder / f".new-{uuid.uuid4().hex}")
            _replace(path, str(number).encode())

    def delete(self, number: int) -> None:
        """Delete a version, if it exists. Raises ValueError if an alias points at it."""
        with self._locked(), _disk(self._folder, "write"):
            for alias, target in self.aliases().items():
                if target == number:
                    raise ValueError(f"version {number} is {alias!r}; point that elsewhere first")
            with contextlib.suppress(FileNotFoundError):
                self._path(number).rename(self._folder / f".new-{uuid.uuid4().hex}")
            self._sweep()
            sync_folder(self._folder)

    def close(self) -> None:
        """Do nothing: the store keeps nothing open."""

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010d}"

    def _read(self, number: int, path: Path) -> bytes:
        try:
            with _disk(path, "read"):
                return path.read_bytes()
        except FileNotFoundError:
            if path.parent.exists():
                raise Corrupt(f"{path}: expected a file, found none; delete version {number}") from None
            self._check_folder()
            raise KeyError(f"no version {number} in {self._folder}") from None
        except Unavailable as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _UNREADABLE:
                raise Corrupt(
                    f"{error}\n  repair the file or its permissions, or delete version {number}"
                ) from error
            raise

    def _check_folder(self) -> None:
        """Raise Unavailable if the store's folder is gone: then nothing is known to be absent."""
        if not os.path.exists(self._folder / "aliases"):
            raise Unavailable(
                f"{self._folder}: expected the folder of a version store, with `aliases` in it, found none\n"
                "  was it moved, or is its disk not mounted?"
            )

    def _sweep(self) -> None:
        """Remove incomplete folders of processes that were killed."""
        for left in self._folder.glob(".new-*"):
            shutil.rmtree(left, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _disk(self._folder, "lock"):
            handle = os.open(self._folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _number(entry: str) -> int | None:
    """Return the number of a version's folder; None for other names."""
    if not (entry.isascii() and entry.isdecimal() and len(entry) <= MOST_DIGITS):
        return None
    number = int(entry)
    return number if entry == f"{number:010d}" else None


def _alias_target(path: Path) -> int:
    """Return the number in an alias's file.

    Raises:
        FileNotFoundError: the alias was never set.
        Corrupt: the file has no number, or cannot be read.
        Unavailable: a later read may succeed.
    """
    try:
        with _disk(path, "read"), path.open("rb") as file:
            text = file.read(MOST_DIGITS + 1)
    except Unavailable as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _UNREADABLE:
            raise Corrupt(f"{error}\n  `freshet version promote NUMBER` sets stable again") from error
        raise
    if not text.isdigit() or len(text) > MOST_DIGITS:
        raise Corrupt(
            f"{path}: expected a version's number, found {text[:40]!r}\n"
            "  the trainer sets stable again with its next version, `freshet version promote NUMBER` at once"
        )
    return int(text)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        _write(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def _disk(path: Path, doing: str) -> Iterator[None]:
    """Raise Unavailable for errors of the system. A read's FileNotFoundError passes: callers interpret it."""
    try:
        yield
    except OSError as error:
        if doing == "read" and isinstance(error, FileNotFoundError):
            raise
        raise Unavailable(f"{path}: cannot {doing}: {error.strerror or error}") from error
