"""Files of the SQLite adapters: creation, connections, transactions and errors.

A file is created complete under a temporary name and then linked to its path, so that no process opens an
incomplete one. Connections use WAL mode with synchronous=FULL: a commit that returned is on disk.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freshet.errors import ConfigError, Corrupt, FreshetError, Mismatch, Unavailable

LOCK_WAIT_S = 10.0
"""Longest wait for another process's transaction; commits take milliseconds, so a longer one is stuck."""

WAL_BYTES = 64 << 20
"""Approximate size at which the write-ahead log is copied into the file; copies are rare enough for appends
at disk speed."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One kind of SQLite file."""

    what: str  # for messages: "an event log"
    application_id: int  # in the file's header; distinguishes files of freshet from others
    version: int  # of the schema
    schema: str  # SQL that creates the tables
    page_bytes: int


def folder_of(url: str) -> Path:
    """Return the path of `scheme:/path`, `scheme:relative` or `scheme:///path`.

    Raises ConfigError if the URL has no path.
    """
    scheme, _, rest = url.partition(":")
    path = rest[2:] if rest.startswith("//") else rest
    if not path or (rest.startswith("//") and not path.startswith("/")):
        raise ConfigError(
            "storage URL", "url", url, f"a path after {scheme}:", f"for example {scheme}:/var/lib/freshet"
        )
    return Path(path)


def open_file(path: Path, fmt: FileFormat) -> None:
    """Create a file of this format at `path`, durably, unless it exists; safe against concurrent creation.

    Raises:
        Unavailable: the file cannot be created.
    """
    if path.exists():
        return
    with translated(path, "create"):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
                connection.execute(f"PRAGMA page_size={fmt.page_bytes}")
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                connection.executescript(fmt.schema)
                connection.execute(f"PRAGMA application_id={fmt.application_id}")
                connection.execute(f"PRAGMA user_version={fmt.version}")
            _put_in_place(new, path)
            sync_folder(path.parent)
        finally:
            for left in (new, new.with_name(f"{new.name}-wal"), new.with_name(f"{new.name}-shm")):
                left.unlink(missing_ok=True)


def _put_in_place(new: Path, path: Path) -> None:
    """Link the file to its path, unless another process has created an equal one first."""
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    except OSError:  # the file system lacks hard links; a concurrent creation may then be overwritten
        if not path.exists():
            new.rename(path)


class BlobCounting(sqlite3.Connection):
    """A connection that counts the blobs it has opened.

    CPython keeps 88 bytes of each until the connection is closed, so long-lived readers of blobs reconnect
    now and then.
    """

    blobs = 0

    def blobopen(self, table: str, column: str, row: int, /, **how: Any) -> sqlite3.Blob:
        """See `sqlite3.Connection.blobopen`."""
        self.blobs += 1
        return super().blobopen(table, column, row, **how)


def connect(path: Path, fmt: FileFormat) -> BlobCounting:
    """Connect to an existing file; one thread at a time may use the connection.

    Raises:
        Unavailable: the file is absent or cannot be opened.
        Mismatch: the file is not of the format `fmt`.
        Corrupt: the file is not an SQLite file.
    """
    with translated(path, "open"):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=LOCK_WAIT_S,
            isolation_level=None,
            check_same_thread=False,
            factory=BlobCounting,
        )
        try:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if not path.stat().st_size:
                raise Corrupt(
                    f"{path}: expected {fmt.what}, found an empty file\n"
                    "  restore the file from a backup, or set it aside and start anew"
                )
            if application_id != fmt.application_id:
                raise Mismatch(f"{path}: expected {fmt.what} of freshet, found another program's SQLite file")
            if version != fmt.version:
                raise Mismatch(f"{path}: expected {fmt.what} of format {fmt.version}, found format {version}")
            connection.execute("PRAGMA journal_mode=WAL")  # a copy made by VACUUM INTO has lost it
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA secure_delete=OFF")  # some builds overwrite deleted data by default
            (page_bytes,) = connection.execute(
                "PRAGMA page_size"
            ).fetchone()  # older files have smaller pages
            connection.execute(f"PRAGMA wal_autocheckpoint={WAL_BYTES // page_bytes}")
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path, doing: str) -> Iterator[sqlite3.Connection]:
    """Run a write transaction: committed durably at the end of the block, or rolled back.

    Raises:
        Unavailable: nothing was written; or the commit itself failed, and its outcome is unknown.
    """
    with translated(path, f"{doing}; nothing was written"):
        connection.execute("BEGIN IMMEDIATE")
    try:
        with translated(path, f"{doing}; nothing was written"):
            yield connection
    except BaseException:
        _roll_back(connection)
        raise
    try:
        with translated(path, f"{doing}; it is not known whether it was written"):
            connection.execute("COMMIT")
    except BaseException:  # an open transaction would refuse all later ones of this connection
        _roll_back(connection)
        raise


@contextlib.contextmanager
def translated(path: Path, doing: str) -> Iterator[None]:
    """Convert errors of SQLite and the system.

    Raises Unavailable or Corrupt, with the file and a hint.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(path, doing, error) from error
    except OSError as error:
        raise Unavailable(f"{path}: cannot {doing}: {error.strerror or error}") from error


_HINTS = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space; it continues by itself",
    sqlite3.SQLITE_BUSY: f"another process held its lock for {LOCK_WAIT_S:.0f} s: is one stopped or stuck?",
    sqlite3.SQLITE_LOCKED: "another connection holds its lock",
    sqlite3.SQLITE_READONLY: "it is read-only: check owner and mode of file and folder, and the mount",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: does it exist, and may this user read and write it?",
    sqlite3.SQLITE_PERM: "access is denied: check the owner and mode of the file",
    sqlite3.SQLITE_IOERR: "the disk reports an error (or is full): see the system's log",
}
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _explain(path: Path, doing: str, error: sqlite3.Error) -> FreshetError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _CORRUPT:
        return Corrupt(
            f"{path}: expected an intact SQLite file, found damage ({error})\n"
            "  restore the file from a backup, or set it aside and start anew; nothing was skipped"
        )
    hint = _HINTS.get(code, "")
    return Unavailable(f"{path}: cannot {doing} ({error})" + (f"\n  {hint}" if hint else ""))


def _roll_back(connection: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
