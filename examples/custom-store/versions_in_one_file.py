"""Dense versions in one SQLite file, a third party's adapter: `versionfile:/path/versions.db`.

A version is a row: its manifest as JSON, its tensors as safetensors. A reader sees a whole version or none,
as SQLite commits rows as a whole; several processes may use the file.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt, Unavailable
from freshet.sqlite import folder_of
from freshet.versions import Aliases, Manifest, Version
from freshet.versions.weights import (
    check_alias,
    check_verdict,
    pack,
    read_manifest,
    unpack,
    write_manifest,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY, manifest BLOB NOT NULL, weights BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS aliases (alias TEXT PRIMARY KEY, number INTEGER NOT NULL REFERENCES versions);
"""


def open_url(url: str) -> OneFile:
    """What the entry point names: takes the whole URL, returns the store."""
    return OneFile(str(folder_of(url)))


class OneFile:
    """See `freshet.versions.VersionStore`, which says what each method promises."""

    def __init__(self, path: str) -> None:
        self._path, self._lock = path, threading.RLock()
        with self._disk():
            self._file = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA synchronous = FULL")  # a commit that returned is on disk
            self._file.execute("PRAGMA foreign_keys = ON")
            self._file.executescript(SCHEMA)

    def put(self, manifest: Manifest, tensors: Mapping[str, NDArray[np.generic]]) -> Manifest:
        """Store a version durably; `sha256` is filled in."""
        weights, sha256 = pack(tensors)
        manifest = replace(manifest, sha256=sha256)
        row = (manifest.number, write_manifest(manifest), weights)
        with self._changing() as file:
            if file.execute("SELECT 1 FROM versions WHERE number = ?", row[:1]).fetchone():
                raise ValueError(f"{self._path}: version {manifest.number} exists")
            file.execute("INSERT INTO versions VALUES (?, ?, ?)", row)
        return manifest

    def numbers(self) -> Sequence[int]:
        """Numbers of the stored versions, rising."""
        return [number for (number,) in self._rows("SELECT number FROM versions ORDER BY number")]

    def manifest(self, number: int) -> Manifest:
        """One manifest."""
        return self._read(number, "SELECT manifest FROM versions WHERE number = ?")[0]

    def get(self, number: int, prefixes: Sequence[str] = ()) -> Version:
        """A version with all tensors, or those whose names start with one of `prefixes`."""
        manifest, weights = self._read(number, "SELECT manifest, weights FROM versions WHERE number = ?")
        return unpack(manifest, weights, prefixes, f"{self._path}, version {number}")

    def judge(self, number: int, verdict: str, reason: str) -> Manifest:
        """Record the gate's verdict in the manifest."""
        check_verdict(verdict)
        with self._changing() as file:
            manifest = replace(self.manifest(number), verdict=verdict, reason=reason)
            file.execute(
                "UPDATE versions SET manifest = ? WHERE number = ?", (write_manifest(manifest), number)
            )
        return manifest

    def aliases(self) -> Aliases:
        """Where each alias points."""
        return Aliases(dict(self._rows("SELECT alias, number FROM aliases")))

    def point(self, alias: str, number: int) -> None:
        """Move an alias."""
        check_alias(alias)
        with self._changing() as file:
            self.manifest(number)
            file.execute("INSERT OR REPLACE INTO aliases VALUES (?, ?)", (alias, number))

    def delete(self, number: int) -> None:
        """Delete a version that no alias points at."""
        with self._changing() as file:
            pointing = [alias for alias, at in self.aliases().items() if at == number]
            if pointing:
                raise ValueError(f"version {number} is {', '.join(pointing)}: move that first")
            file.execute("DELETE FROM versions WHERE number = ?", (number,))

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._file.close()

    def _read(self, number: int, query: str) -> tuple[Manifest, bytes]:
        found = self._rows(query, (number,))
        if not found:
            raise KeyError(f"{self._path}: there is no version {number}")
        manifest, *weights = found[0]
        return read_manifest(manifest, f"{self._path}, version {number}"), weights[0] if weights else b""

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock, self._disk():
            return self._file.execute(query, tuple(values)).fetchall()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all that is done in the block, or nothing."""
        with self._lock, self._disk():
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield self._file
                self._file.execute("COMMIT")
            except BaseException:
                self._file.execute("ROLLBACK")
                raise

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Translate SQLite's errors: damage is Corrupt, a full disk or a lock Unavailable."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise Unavailable(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise Corrupt(f"{self._path}: {error}") from error
