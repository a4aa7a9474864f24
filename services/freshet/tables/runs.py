"""Runs of packed rows, without a table: encoding, decoding and merging in the native core.

N keys, K buckets, P pages.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.errors import Corrupt
from freshet.types import I64, RUN, U8, U32, U64, Bool, RowRuns, Run

__all__ = ["check_runs", "merge_runs", "pick_runs", "runs_of", "widths_of"]

# --- Rows as pages of Redis hashes: arguments of writes, and the runs of read pages.
#
# A bucket's rows are one hash; each of its fields is a page: a run of one flush, or a part of one.
# Field: PAGE, little-endian. Value: rows, removed keys and two CRC-32s (4 bytes each), then keys,
# removed keys and records as in a run. If several pages contain a key, the one with the highest seq
# is valid.


PAGE = np.dtype([("seq", "<u8"), ("part", "<u4"), ("table", "<u4"), ("first", "<u8"), ("last", "<u8")])
"""Field of a page; `first` and `last` of its keys and removed keys."""

PAGE_BYTES = (56 << 10) - 4
"""Most bytes of a value. With Redis's header this just fits a size class of its allocator. A lookup of a key
reads at most this for each flush since pages were merged last."""


@dataclass(frozen=True, slots=True, eq=False)
class PageWrites:
    """Pages of K buckets, bucket after bucket."""

    arguments: memoryview  # field, value, field, value ... in Redis's protocol
    ends: list[int]  # (P,) end of each page in `arguments`
    firsts: list[int]  # (K + 1,) first page of each bucket; the last is P

    def bytes_of(self, i: int) -> int:
        """Return the bytes of the i-th bucket's pages."""
        return self._end(self.firsts[i + 1]) - self._end(self.firsts[i])

    def pages_of(self, i: int) -> int:
        """Return the number of the i-th bucket's pages."""
        return self.firsts[i + 1] - self.firsts[i]

    def of(self, i: int, most_bytes: int | None = None) -> list[tuple[int, memoryview]]:
        """Return (pages, arguments) of the i-th bucket in groups of at most `most_bytes`, or of one page."""
        low, stop, groups = self.firsts[i], self.firsts[i + 1], []
        while low < stop:
            high = low + 1
            while high < stop and (most_bytes is None or self._end(high + 1) - self._end(low) <= most_bytes):
                high += 1
            groups.append((high - low, self.arguments[self._end(low) : self._end(high)]))
            low = high
        return groups

    def _end(self, pages: int) -> int:
        return self.ends[pages - 1] if pages else 0


def page_writes(
    runs: RowRuns, buckets: I64, seqs: I64, *, whole: bool, page_bytes: int = PAGE_BYTES
) -> PageWrites:
    """Encode runs as pages.

    Args:
        runs: runs of these buckets only.
        buckets: (K,) int64, rising.
        seqs: (K,) int64, seq of each bucket's flush.
        whole: the runs hold all rows of their buckets.
        page_bytes: most bytes of a value.

    Raises:
        ValueError: the runs are out of place, or of other buckets.
    """
    arguments, ends, pages, why = _native.page_writes(
        *native_parts(runs), runs.widths, buckets, seqs, whole, page_bytes
    )
    if why:
        raise ValueError(why)
    return PageWrites(arguments.data, ends.tolist(), [0, *np.cumsum(pages).tolist()])


def runs_of_pages(
    buckets: Sequence[tuple[int, list[bytes]]], where: Sequence[str], widths: U32, *, most_bytes: int
) -> RowRuns:
    """Decode and merge the pages of buckets.

    Args:
        buckets: (bucket, [field, value, field, value ...]), in order of the buckets' numbers.
        where: name of each bucket, for errors.
        widths: (256,) uint32, bytes of a record by table id.
        most_bytes: runs longer than this are split.

    Raises:
        Corrupt: a page is malformed or fails its checksum.
    """
    directory, body, failed, why = _native.runs_of_pages(buckets, widths, most_bytes)
    if why:
        raise Corrupt(f"{where[failed]}: {why}; something else than freshet writes there")
    return RowRuns(directory.view(RUN), body, widths)


def pages_of(fields: Sequence[bytes], where: str) -> NDArray[np.void]:
    """Decode the fields of a bucket's hash into (P,) of PAGE. Raises Corrupt if a length is wrong."""
    if any(len(field) != PAGE.itemsize for field in fields):
        raise Corrupt(
            f"{where}: expected fields of {PAGE.itemsize} bytes; something else than freshet writes there"
        )
    return np.frombuffer(b"".join(fields), PAGE)


def which_may_hold(pages: NDArray[np.void], table: int, keys: U64) -> Bool:
    """Return (P,) bool, the pages that may contain one of these (N,) uint64 keys of a table."""
    ordered = np.sort(keys)
    begin = np.searchsorted(ordered, pages["first"], side="left")
    end = np.searchsorted(ordered, pages["last"], side="right")
    chosen: Bool = (pages["table"] == table) & (begin < end)
    return chosen


class DamagedRuns(Corrupt):
    """One of several sources of runs is damaged."""

    def __init__(self, message: str, source: int) -> None:
        """Create from the message and the index of the damaged source."""
        super().__init__(message)
        self.source = source


def widths_of(record_bytes: Mapping[int, int]) -> U32:
    """Return (256,) uint32 bytes of a record by table id, from {table id: bytes of a record}."""
    widths = np.zeros(256, np.uint32)
    widths[list(record_bytes)] = list(record_bytes.values())
    return widths


def runs_of(runs: Iterable[Run], widths: U32) -> RowRuns:
    """Encode runs; keys may be unsorted. For tests and tools, as a table encodes its own.

    A key that is both changed and removed counts as changed.

    Args:
        runs: runs of any buckets and tables.
        widths: (256,) uint32, bytes of a record by table id.

    Raises:
        ValueError: a changed key is given twice, or records have another length than in `widths`.
    """
    entries, parts, at = [], [], 0
    for run in sorted(runs, key=lambda r: (r.bucket, r.table)):
        width = int(widths[run.table])
        if run.records.shape != (len(run.keys), width):
            raise ValueError(
                f"table {run.table}: expected records of shape ({len(run.keys)}, {width}), "
                f"found {run.records.shape}"
            )
        order = np.argsort(run.keys)
        keys, records = run.keys[order], np.ascontiguousarray(run.records[order]).tobytes()
        if (keys[1:] == keys[:-1]).any():
            raise ValueError(f"table {run.table} of bucket {run.bucket}: a key is given twice in one flush")
        removed = np.setdiff1d(run.removed, keys)
        known = keys.astype("<u8").tobytes() + removed.astype("<u8").tobytes()
        entries.append(
            (run.bucket, run.table, len(keys), len(removed), at, zlib.crc32(known), zlib.crc32(records))
        )
        parts += [known, records]
        at += len(known) + len(records)
    return RowRuns(np.array(entries, RUN), np.frombuffer(b"".join(parts), np.uint8), widths)


def check_runs(runs: RowRuns) -> None:
    """Raise ValueError if runs are unsorted, outside the body or of unknown tables; rows are not checked."""
    if fault := _native.runs_fault(*native_parts(runs), runs.widths):
        raise ValueError(fault)


def sound_runs(runs: RowRuns, check: Callable[[RowRuns], object]) -> tuple[RowRuns, list[str]]:
    """Return the runs without the rows that `check` refuses, and the reason for each of those.

    `check` raises Corrupt, as `Store.unpack_runs` does.
    """
    kept: list[Run] = []
    reasons: list[str] = []
    for run in runs:
        good = np.ones(len(run.keys), bool)
        waiting = [np.arange(len(good))] if len(good) else []
        while waiting:
            some = waiting.pop()
            part = Run(run.bucket, run.table, run.keys[some], run.keys[:0], run.records[some])
            try:
                check(runs_of([part], runs.widths))
            except (Corrupt, ValueError) as error:
                if len(some) == 1 or not runs.widths[run.table]:
                    good[some] = False
                    reasons += [str(error)] * len(some)
                else:
                    waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
        kept.append(Run(run.bucket, run.table, run.keys[good], run.removed, run.records[good]))
    return (runs_of(kept, runs.widths) if reasons else runs), reasons


def merge_runs(
    newest_first: Sequence[RowRuns],
    where: Sequence[str],
    widths: U32,
    *,
    keep_removed: bool,
    most_bytes: int,
) -> RowRuns:
    """Merge sources of runs; if several contain a key, the first one is valid.

    A directory may name fewer runs than lie in its body.

    Args:
        newest_first: the sources.
        where: name of each source, for errors.
        widths: (256,) uint32, bytes of a record by table id.
        keep_removed: keep removed keys, since older sources exist.
        most_bytes: runs longer than this are split.

    Raises:
        DamagedRuns: valid keys or records fail their checksum. Records that newer runs replace are not
            checked.
    """
    sources = [native_parts(runs) for runs in newest_first]
    directory, body, failed, why = _native.merge_runs(sources, widths, keep_removed, most_bytes)
    if why:
        raise DamagedRuns(f"{where[failed]}: {why}", failed)
    return RowRuns(directory.view(RUN), body, widths)


def pick_runs(runs: RowRuns, buckets: I64, tables: U8, keys: U64) -> RowRuns:
    """Return the rows of keys, without absent ones; for checked runs with each key in one run.

    Args:
        runs: the runs.
        buckets: (N,) int64, of each key.
        tables: (N,) uint8, table id of each key.
        keys: (N,) uint64; all three sorted by (bucket, table, key).
    """
    directory, body = _native.pick_runs(*native_parts(runs), runs.widths, buckets, tables, keys)
    return RowRuns(directory.view(RUN), body, runs.widths)


def native_parts(runs: RowRuns) -> tuple[U8, U8, int]:
    """Return (directory as bytes, body, start), the native core's arguments for runs."""
    return np.ascontiguousarray(runs.directory).view(np.uint8), runs.body, runs.start
