"""Segments of the SQLite row store: rows of many buckets packed into one blob with a directory. Pure
functions.

A run is the rows and removed keys of one table of one bucket. In a segment's body a run is u64 keys
(rising), u64 removed keys (rising), then the packed records, at the place that the directory names. Of
several runs of a table and bucket the newest one that knows a key decides. Letters: N rows, R removed keys,
W bytes of a record.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.types import U8, U64, Bool

__all__ = [
    "DIRECTORY",
    "Entry",
    "Run",
    "find",
    "make_run",
    "merge",
    "pack",
    "parse_directory",
    "read_keys",
    "read_run",
]

DIRECTORY = np.dtype(
    [
        ("bucket", "<u4"),
        ("table", "<u4"),
        ("rows", "<u4"),
        ("removed", "<u4"),
        ("at", "<u8"),  # where the run starts in the body
        ("keys_crc", "<u4"),  # CRC-32 of keys and removed keys
        ("records_crc", "<u4"),
    ]
)
"""An entry for each run, sorted by (bucket, table); the blob ends with a CRC-32 of all entries."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Rows and removed keys of one table of one bucket."""

    bucket: int
    table: int
    keys: U64  # (N,) rising
    removed: U64  # (R,) rising, disjoint from keys
    records: U8  # (N, W)

    @property
    def size(self) -> int:
        """Bytes of it in a body."""
        return 8 * (len(self.keys) + len(self.removed)) + self.records.size


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a run lies in a segment's body."""

    bucket: int
    table: int
    rows: int
    removed: int
    at: int
    keys_crc: int
    records_crc: int

    @property
    def keys_bytes(self) -> int:
        """Bytes of keys and removed keys."""
        return 8 * (self.rows + self.removed)


def make_run(bucket: int, table: int, keys: U64, removed: U64, records: U8) -> Run:
    """A run of keys in any order; a key given as changed and as removed is there.

    Raises ValueError if a changed key is given twice, as nobody could say which row counts.
    """
    if len(keys) > 1 and not bool(np.all(keys[1:] > keys[:-1])):
        order = np.argsort(keys)
        keys, records = keys[order], records[order]
        if bool(np.any(keys[1:] == keys[:-1])):
            raise ValueError(f"table {table} of bucket {bucket}: a key is given twice in one flush")
    if len(removed):
        removed = np.setdiff1d(removed, keys)
    return Run(bucket, table, keys, removed, records)


def merge(newest_first: Sequence[Run], *, keep_removed: bool) -> Run:
    """One run that says the same. Without `keep_removed` nothing older exists, so removed keys are
    forgotten."""
    first = newest_first[0]
    if len(newest_first) == 1 and (keep_removed or not len(first.removed)):
        return first
    known = np.concatenate([k for run in newest_first for k in (run.keys, run.removed)])
    alive = np.concatenate(
        [np.full(n, a) for run in newest_first for n, a in ((len(run.keys), True), (len(run.removed), False))]
    )
    keys, at = np.unique(known, return_index=True)  # the first of equals: the newest
    alive_at = alive[at]
    row_number = np.cumsum(alive) - 1  # of each known key, among the rows of all runs
    records = np.concatenate([run.records for run in newest_first])[row_number[at[alive_at]]]
    removed = keys[~alive_at] if keep_removed else np.empty(0, np.uint64)
    return Run(first.bucket, first.table, keys[alive_at], removed, records)


def pack(runs: Iterable[Run]) -> tuple[bytes, bytes]:
    """(directory, body) of runs, which are sorted by (bucket, table)."""
    parts: list[bytes | memoryview] = []
    entries, at = [], 0
    for run in sorted(runs, key=lambda r: (r.bucket, r.table)):
        keys = run.keys.astype("<u8").tobytes() + run.removed.astype("<u8").tobytes()
        records = np.ascontiguousarray(run.records).reshape(-1)
        sizes = (len(run.keys), len(run.removed), at, zlib.crc32(keys), zlib.crc32(records.data))
        entries.append((run.bucket, run.table, *sizes))
        parts += [keys, records.data]
        at += run.size
    directory = np.array(entries, DIRECTORY).tobytes()
    return directory + zlib.crc32(directory).to_bytes(4, "little"), b"".join(parts)


def parse_directory(data: bytes, where: str) -> NDArray[Any]:
    """The entries, a structured array of DIRECTORY. Raises Corrupt."""
    entries = data[:-4]
    if (
        len(data) < 4
        or len(entries) % DIRECTORY.itemsize
        or zlib.crc32(entries).to_bytes(4, "little") != data[-4:]
    ):
        raise Corrupt(f"{where}: the directory of a segment fails its CRC; restore the store from a backup")
    return np.frombuffer(entries, DIRECTORY)


def read_keys(entry: Entry, data: bytes, where: str) -> tuple[U64, U64]:
    """(keys, removed) of the run's first `keys_bytes` bytes. Raises Corrupt."""
    if len(data) != entry.keys_bytes or zlib.crc32(data) != entry.keys_crc:
        raise Corrupt(f"{where}: keys of table {entry.table}, bucket {entry.bucket} fail their CRC")
    keys = np.frombuffer(data, "<u8")
    return keys[: entry.rows], keys[entry.rows :]


def read_run(entry: Entry, data: bytes, record_bytes: Mapping[int, int], where: str) -> Run:
    """A whole run. Raises Corrupt."""
    keys, removed = read_keys(entry, data[: entry.keys_bytes], where)
    width = record_bytes[entry.table]
    packed = memoryview(data)[entry.keys_bytes :]
    if len(packed) != entry.rows * width or zlib.crc32(packed) != entry.records_crc:
        raise Corrupt(f"{where}: rows of table {entry.table}, bucket {entry.bucket} fail their CRC")
    records = np.frombuffer(packed, np.uint8).reshape(entry.rows, width)
    return Run(entry.bucket, entry.table, keys, removed, records)


def find(keys: U64, wanted: U64) -> tuple[Bool, NDArray[np.intp]]:
    """(is it there, where) for each wanted key in rising `keys`; where it is not, the place means nothing."""
    at = np.searchsorted(keys, wanted)
    if not len(keys):
        return np.zeros(len(wanted), np.bool_), at
    at = np.minimum(at, len(keys) - 1)
    return keys[at] == wanted, at
