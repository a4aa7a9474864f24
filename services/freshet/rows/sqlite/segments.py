"""Segments of the SQLite row store: runs of many buckets in one blob, with their directory in another.

A segment's body is `RowRuns.body`; its directory is that of the runs, followed by a CRC-32. If several runs
of a table and bucket contain a key, the newest one is valid. N keys, R runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.tables.runs import merge_runs
from freshet.types import RUN, U64, Bool, RowRuns

__all__ = [
    "Directory",
    "Entry",
    "find",
    "gapped",
    "parse_directory",
    "parts_of",
    "read_keys",
    "write_directory",
]

Directory = NDArray[np.void]
"""(R,) of RUN."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a directory: one run in a segment's body."""

    bucket: int
    table: int
    rows: int
    removed: int
    at: int
    keys_crc: int
    records_crc: int

    @property
    def keys_bytes(self) -> int:
        """Bytes of the keys and removed keys."""
        return 8 * (self.rows + self.removed)


def write_directory(runs: RowRuns) -> bytes:
    """Encode the directory of a segment whose body is that of `runs`."""
    entries = runs.directory.copy()
    entries["at"] -= runs.start
    data = entries.tobytes()
    return data + zlib.crc32(data).to_bytes(4, "little")


def parse_directory(data: bytes, where: str) -> Directory:
    """Decode a directory; users must check its offsets. Raises Corrupt if it fails its CRC."""
    entries = data[:-4]
    if len(data) < 4 or len(entries) % RUN.itemsize or zlib.crc32(entries).to_bytes(4, "little") != data[-4:]:
        raise Corrupt(f"{where}: the directory of a segment fails its CRC; restore the store from a backup")
    return np.frombuffer(entries, RUN)


def read_keys(entry: Entry, data: bytes | memoryview, where: str) -> tuple[U64, U64]:
    """Decode (keys, removed keys), uint64, from a run's first `keys_bytes` bytes. Raises Corrupt."""
    if len(data) != entry.keys_bytes or zlib.crc32(data) != entry.keys_crc:
        raise Corrupt(f"{where}: keys of table {entry.table}, bucket {entry.bucket} fail their CRC")
    keys = np.frombuffer(data, "<u8")
    return keys[: entry.rows], keys[entry.rows :]


def gapped(runs: RowRuns, chosen: Bool) -> RowRuns:
    """Return the runs chosen by (R,) bool without copying the body; with gaps, so only for `merge_runs`."""
    directory = runs.directory[chosen]
    skipped = int(directory["at"][0]) - runs.start if len(directory) else 0
    return RowRuns(directory, runs.body[skipped:], runs.widths)


def parts_of(runs: RowRuns, most_bytes: int) -> Iterator[RowRuns]:
    """Yield slices of about `most_bytes`, at least one run each; longer runs are split first."""
    sizes = runs.sizes()
    if len(sizes) and sizes.max() > most_bytes:
        runs = merge_runs([runs], ["a flush"], runs.widths, keep_removed=True, most_bytes=most_bytes)
        sizes = runs.sizes()
    ends = np.cumsum(sizes)
    low, done = 0, 0
    while low < len(sizes):
        high = max(low + 1, int(np.searchsorted(ends, done + most_bytes, side="right")))
        yield runs.slice(low, high)
        low, done = high, int(ends[high - 1])


def find(keys: U64, wanted: U64) -> tuple[Bool, NDArray[np.intp]]:
    """Search (N,) uint64 keys in rising `keys`.

    Returns:
        (found (N,) bool, index (N,) intp; undefined where not found).
    """
    at = np.searchsorted(keys, wanted)
    if not len(keys):
        return np.zeros(len(wanted), np.bool_), at
    at = np.minimum(at, len(keys) - 1)
    return keys[at] == wanted, at
