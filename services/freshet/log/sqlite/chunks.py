"""Chunks of the SQLite log: each row holds one chunk of many records. Pure functions over bytes.

A chunk's body, little-endian:

| at | type | field |
|---|---|---|
| 0 | u8 | magic 0xB0 |
| 1 | u8 | version 1 |
| 2 | u16 | flags: 1 has keys, 2 has times |
| 4 | u32 | n records, >= 1 |
| 8 | u32 | bytes of keys |
| 12 | u32 | CRC-32 of bytes 0 to 12, the times, the ends and the keys |
| 16 | u32 | CRC-32 of the values |
| 20 | u32 | 0 |
| 24 | i64[n] | record times, if flag 2; otherwise all are the chunk's `min_ms` |
| | u32[n] | ends of the values |
| | u32[n] | ends of the keys, if flag 1; otherwise all are empty |
| | bytes | keys, then values |
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.errors import Corrupt, TooLarge
from freshet.types import I64, BytesColumn

__all__ = ["CHUNK_BYTES", "MAX_RECORD_BYTES", "Chunk", "Contents", "pack", "split", "unpack"]

CHUNK_BYTES = 1 << 20
"""Size above which an append is split; bounds the read of a single record."""

MAX_RECORD_BYTES = 64 << 20
"""Largest record: far above any block of samples, far below SQLite's limit of a row."""

SELF_CHECKED_BYTES = 4096
"""Average record size above which values are not checked: such records are blocks and deltas with a CRC of
their own, and a second CRC-32 at 2.4 GB/s would halve the reading speed."""

_HEAD = struct.Struct("<BBHIIIII")
_MAGIC, _VERSION, _HAS_KEYS, _HAS_TIMES = 0xB0, 1, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """Records of one partition without their offsets."""

    values: BytesColumn  # (N,)
    keys: BytesColumn  # (N,)
    times_ms: I64  # (N,)

    def __len__(self) -> int:
        return len(self.times_ms)

    def slice(self, start: int, stop: int) -> Contents:
        """Return records [start, stop), which share memory."""
        return Contents(
            self.values.slice(start, stop), self.keys.slice(start, stop), self.times_ms[start:stop]
        )

    @classmethod
    def concat(cls, parts: list[Contents]) -> Contents:
        """Concatenate; a single part is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            BytesColumn.concat([p.values for p in parts]),
            BytesColumn.concat([p.keys for p in parts]),
            np.concatenate([p.times_ms for p in parts]),
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A packed chunk with the columns stored beside it."""

    count: int
    min_ms: int
    max_ms: int
    body: bytes


def split(contents: Contents) -> Iterator[Contents]:
    """Split into pieces of at most CHUNK_BYTES of keys and values; a larger record gets a piece of its own.

    Raises TooLarge for a record above MAX_RECORD_BYTES.
    """
    if len(contents.values.data) + len(contents.keys.data) <= CHUNK_BYTES:
        if len(contents):
            yield contents
        return
    sizes = contents.values.ends + contents.keys.ends  # running bytes after each record
    if len(contents) and int(np.diff(sizes, prepend=0).max()) > MAX_RECORD_BYTES:
        largest = int(np.diff(sizes, prepend=0).max())
        raise TooLarge(f"a record of {largest:,} bytes; the log accepts at most {MAX_RECORD_BYTES:,}")
    start, before = 0, 0
    while start < len(contents):
        stop = max(int(np.searchsorted(sizes, before + CHUNK_BYTES, side="right")), start + 1)
        yield contents.slice(start, stop)
        start, before = stop, int(sizes[stop - 1])


def pack(contents: Contents) -> Chunk:
    """Pack one piece of `split`."""
    times, keys, values = contents.times_ms, contents.keys, contents.values
    low, high = int(times.min()), int(times.max())
    flags = (_HAS_KEYS if len(keys.data) else 0) | (_HAS_TIMES if low != high else 0)
    index = [values.ends.astype("<u4").tobytes()]
    if flags & _HAS_TIMES:
        index.insert(0, times.astype("<i8").tobytes())
    if flags & _HAS_KEYS:
        index += [keys.ends.astype("<u4").tobytes(), keys.data.tobytes()]
    payload = np.ascontiguousarray(values.data)
    head = _HEAD.pack(_MAGIC, _VERSION, flags, len(times), len(keys.data), 0, 0, 0)
    crc = zlib.crc32(head[:12])
    for part in index:
        crc = zlib.crc32(part, crc)
    values_crc = _native.crc32(payload, 0)
    head = _HEAD.pack(_MAGIC, _VERSION, flags, len(times), len(keys.data), crc, values_crc, 0)
    return Chunk(len(times), low, high, b"".join([head, *index, payload.data]))


def unpack(body: bytes, min_ms: int, where: str) -> Contents:
    """Read a chunk; its arrays are views of `body`. `where` names it in errors.

    Raises Corrupt for bytes that `pack` did not write.
    """
    if len(body) < _HEAD.size:
        raise Corrupt(f"{where}: expected a chunk of at least {_HEAD.size} bytes, found {len(body)}")
    magic, version, flags, n, key_bytes, crc, values_crc, zero = _HEAD.unpack_from(body)
    if (magic, version) != (_MAGIC, _VERSION) or flags > 3 or zero:
        raise Corrupt(
            f"{where}: expected a chunk of version {_VERSION},"
            f" found magic {magic:#x}, version {version}, flags {flags}"
        )
    times_at = _HEAD.size
    ends_at = times_at + (8 * n if flags & _HAS_TIMES else 0)
    key_ends_at = ends_at + 4 * n
    keys_at = key_ends_at + (4 * n if flags & _HAS_KEYS else 0)
    values_at = keys_at + key_bytes
    view = memoryview(body)
    if n == 0 or values_at > len(body) or zlib.crc32(view[times_at:values_at], zlib.crc32(view[:12])) != crc:
        raise Corrupt(f"{where}: the chunk's index fails its CRC; the disk has changed it")
    values = BytesColumn(
        np.frombuffer(body, np.uint8, offset=values_at),
        np.frombuffer(body, "<u4", n, ends_at).astype(np.int64),
    )
    if flags & _HAS_KEYS:
        key_ends = np.frombuffer(body, "<u4", n, key_ends_at).astype(np.int64)
        keys = BytesColumn(np.frombuffer(body, np.uint8, key_bytes, keys_at), key_ends)
    else:
        keys = BytesColumn(np.empty(0, np.uint8), np.zeros(n, np.int64))
    _check_ends(values, where)
    _check_ends(keys, where)
    _check_values(values, values_crc, where)
    if flags & _HAS_TIMES:
        times = np.frombuffer(body, "<i8", n, times_at).astype(np.int64, copy=False)
    else:
        times = np.full(n, min_ms, np.int64)
    return Contents(values, keys, times)


def _check_ends(column: BytesColumn, where: str) -> None:
    """Check the ends, which readers of the column trust: a changed file cannot cause a read out of bounds."""
    if int(column.ends[-1]) != len(column.data) or bool(np.any(column.ends[1:] < column.ends[:-1])):
        raise Corrupt(f"{where}: expected rising ends up to {len(column.data)} bytes; the chunk was damaged")


def _check_values(values: BytesColumn, crc: int, where: str) -> None:
    size = len(values.data)
    if size <= SELF_CHECKED_BYTES * len(values) and _native.crc32(values.data, 0) != crc:
        raise Corrupt(f"{where}: the chunk's values fail their CRC; the disk has changed them")
