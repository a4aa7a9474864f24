"""What the SQLite adapters share: opening a file of a known format, transactions, and errors that say what
to do.

A file is made beside its place, complete, and linked into it, so that nobody ever opens a half-made one.
Everything runs in WAL mode with synchronous=FULL: a commit that returned is on disk.
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

__all__ = ["BlobCounting", "FileFormat", "connect", "folder_of", "open_file", "transaction", "translated"]

LOCK_WAIT_S = 10.0
"""How long a transaction waits for another process's; commits take milliseconds, so this is a stuck one."""

WAL_BYTES = 64 << 20
"""The write-ahead log is copied into the file at about this size: seldom enough that appends run at disk
speed."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One kind of SQLite file that freshet writes."""

    what: str  # for messages: "an event log"
    application_id: int  # in the file's header; tells our files from other people's
    version: int  # of the schema
    schema: str  # SQL that makes an empty file
    page_bytes: int


def folder_of(url: str) -> Path:
    """The path of `scheme:/path`, `scheme:relative` or `scheme:///path`."""
    scheme, _, rest = url.partition(":")
    path = rest[2:] if rest.startswith("//") else rest
    if not path or (rest.startswith("//") and not path.startswith("/")):
        raise ConfigError(
            "storage URL", "url", url, f"a path after {scheme}:", f"for example {scheme}:/var/lib/freshet"
        )
    return Path(path)


def open_file(path: Path, fmt: FileFormat) -> None:
    """Make sure that a file of this format lies at `path`, durably, whoever else is doing the same."""
    if path.exists():
        return
    with translated(path, "create"):
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with contextlib.closing(sqlite3.connect(made, isolation_level=None)) as connection:
                connection.execute(f"PRAGMA page_size={fmt.page_bytes}")
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                connection.executescript(fmt.schema)
                connection.execute(f"PRAGMA application_id={fmt.application_id}")
                connection.execute(f"PRAGMA user_version={fmt.version}")
            _put_in_place(made, path)
            _sync_folder(path.parent)
        finally:
            for left in (made, made.with_name(f"{made.name}-wal"), made.with_name(f"{made.name}-shm")):
                left.unlink(missing_ok=True)


def _put_in_place(made: Path, path: Path) -> None:
    """Give the file its name, unless another process was first: its file is as good."""
    try:
        os.link(made, path)
    except FileExistsError:
        pass
    except OSError:  # no hard links here (some mounted folders): then there is a moment to lose a race in
        if not path.exists():
            made.rename(path)


class BlobCounting(sqlite3.Connection):
    """Knows how many blobs it has opened: CPython keeps 88 bytes of each until the connection is closed.

    Whoever reads pieces of blobs for long connects anew from time to time.
    """

    blobs = 0

    def blobopen(self, table: str, column: str, row: int, /, **how: Any) -> sqlite3.Blob:
        """See `sqlite3.Connection.blobopen`."""
        self.blobs += 1
        return super().blobopen(table, column, row, **how)


def connect(path: Path, fmt: FileFormat) -> BlobCounting:
    """Connect to an existing file; use it from one thread at a time.

    Raises:
        Unavailable: it is not there or cannot be opened.
        Mismatch: it is something else than `fmt`.   Corrupt: it is no SQLite file.
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
            connection.execute("PRAGMA secure_delete=OFF")  # some builds fill what is deleted with zeros
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()  # older files have smaller ones
            connection.execute(f"PRAGMA wal_autocheckpoint={WAL_BYTES // page_bytes}")
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path, doing: str) -> Iterator[sqlite3.Connection]:
    """One write transaction: committed durably at the end, or rolled back whole.

    Raises:
        Unavailable: nothing was written; or, if the commit itself failed, it is not known whether it was.
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
    except FreshetError:
        _roll_back(connection)
        raise


@contextlib.contextmanager
def translated(path: Path, doing: str) -> Iterator[None]:
    """Turn SQLite's and the system's errors into ours, with the file and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(path, doing, error) from error
    except OSError as error:
        raise Unavailable(f"{path}: cannot {doing}: {error.strerror or error}") from error


_HINTS = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space, then it goes on by itself",
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


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
