"""Runs of packed rows, apart from any table: made, and merged natively."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.errors import Corrupt
from freshet.types import I64, RUN, U8, U32, U64, Bool, RowRuns, Run

__all__ = [
    "PAGE",
    "PAGE_BYTES",
    "DamagedRuns",
    "PageWrites",
    "check_runs",
    "merge_runs",
    "native_parts",
    "page_writes",
    "pages_of",
    "pick_runs",
    "runs_of",
    "runs_of_pages",
    "which_may_hold",
    "widths_of",
]

# --- Rows as pages of Redis hashes, natively: arguments that write runs, and the runs that pages add up
# to.
#
# A bucket's rows are one hash, each field of which is a page: a run as one flush wrote it, or a part
# of one. Field: PAGE, little-endian. Value: rows, removed keys and two CRC-32s (4 bytes each), then
# keys, removed keys and records as in a run. Of several pages that know a key the one of the highest
# seq decides. K buckets, P pages.


PAGE = np.dtype([("seq", "<u8"), ("part", "<u4"), ("table", "<u4"), ("first", "<u8"), ("last", "<u8")])
"""A page's name: `first` and `last` of its keys and removed keys."""

PAGE_BYTES = (56 << 10) - 4
"""At most, of a value. With Redis's head of it this just fits one of its allocator's sizes, and looking a key
up reads no more than that of each flush since pages were last put together."""


@dataclass(frozen=True, slots=True, eq=False)
class PageWrites:
    """Pages of K buckets, bucket after bucket."""

    arguments: memoryview  # field, value, field, value ... in Redis's protocol
    ends: list[int]  # (P,) of each page in `arguments`
    firsts: list[int]  # (K + 1,) of each bucket's pages; the last is P

    def bytes_of(self, i: int) -> int:
        """What the i-th bucket's pages take."""
        return self._end(self.firsts[i + 1]) - self._end(self.firsts[i])

    def pages_of(self, i: int) -> int:
        """How many pages the i-th bucket has."""
        return self.firsts[i + 1] - self.firsts[i]

    def of(self, i: int, most_bytes: int | None = None) -> list[tuple[int, memoryview]]:
        """(pages, arguments) of the i-th bucket, in groups of about so many bytes; one page at least."""
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
    """Pages of the runs of these (K,) rising buckets, each with its bucket's seq.

    `whole`: they hold all rows of their buckets. Raises ValueError if the runs' places are wrong, or they are
    of other buckets.
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
    """Rows of (bucket, [field, value, field, value ...]), in order of the buckets' numbers.

    Runs longer than `most_bytes` are cut. Raises Corrupt, naming the bucket by `where`, for what is no page,
    or one that fails its checksum.
    """
    directory, body, failed, why = _native.runs_of_pages(buckets, widths, most_bytes)
    if why:
        raise Corrupt(f"{where[failed]}: {why}; something else than freshet writes there")
    return RowRuns(directory.view(RUN), body, widths)


def pages_of(fields: Sequence[bytes], where: str) -> NDArray[np.void]:
    """(P,) of PAGE: what the fields of a bucket's hash say. Raises Corrupt."""
    if any(len(field) != PAGE.itemsize for field in fields):
        raise Corrupt(
            f"{where}: expected fields of {PAGE.itemsize} bytes; something else than freshet writes there"
        )
    return np.frombuffer(b"".join(fields), PAGE)


def which_may_hold(pages: NDArray[np.void], table: int, keys: U64) -> Bool:
    """(P,) the pages that may know one of these keys."""
    ordered = np.sort(keys)
    begin = np.searchsorted(ordered, pages["first"], side="left")
    end = np.searchsorted(ordered, pages["last"], side="right")
    chosen: Bool = (pages["table"] == table) & (begin < end)
    return chosen


class DamagedRuns(Corrupt):
    """One of several sources of runs is damaged."""

    def __init__(self, message: str, source: int) -> None:
        """Take what is wrong, and the place of the source among those that were given."""
        super().__init__(message)
        self.source = source


def widths_of(record_bytes: Mapping[int, int]) -> U32:
    """(256,) bytes of a record by table id, of {table id: bytes of a record}."""
    widths = np.zeros(256, np.uint32)
    widths[list(record_bytes)] = list(record_bytes.values())
    return widths


def runs_of(runs: Iterable[Run], widths: U32) -> RowRuns:
    """Runs put together, their keys in any order; for tests and tools: a table makes its own.

    A key given as changed and as removed is there. Raises ValueError if a changed key is given twice, as
    nobody could say which row counts, or records are of another length than `widths` says.
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
    """Raise ValueError if places are wrong: tables unknown, not in order, not within the body.

    The rows themselves are not looked at.
    """
    if fault := _native.runs_fault(*native_parts(runs), runs.widths):
        raise ValueError(fault)


def merge_runs(
    newest_first: Sequence[RowRuns],
    where: Sequence[str],
    widths: U32,
    *,
    keep_removed: bool,
    most_bytes: int,
) -> RowRuns:
    """One set of runs that says what all of them say together: of those that know a key the first decides.

    Without `keep_removed` nothing older exists, and removed keys are forgotten. Runs longer than `most_bytes`
    are cut. A directory may name fewer runs than lie in its body.

    Raises DamagedRuns, naming the source by `where`, if keys or records that count fail their checksum;
    records of a run that newer ones replace wholly are not looked at.
    """
    sources = [native_parts(runs) for runs in newest_first]
    directory, body, failed, why = _native.merge_runs(sources, widths, keep_removed, most_bytes)
    if why:
        raise DamagedRuns(f"{where[failed]}: {why}", failed)
    return RowRuns(directory.view(RUN), body, widths)


def pick_runs(runs: RowRuns, buckets: I64, tables: U8, keys: U64) -> RowRuns:
    """The rows of these keys (N,), sorted by (bucket, table, key); those that are not there are left out.

    For runs that have been checked, no key of which is in two.
    """
    directory, body = _native.pick_runs(*native_parts(runs), runs.widths, buckets, tables, keys)
    return RowRuns(directory.view(RUN), body, runs.widths)


def native_parts(runs: RowRuns) -> tuple[U8, U8, int]:
    """(directory as bytes, body, start), as the native core takes runs."""
    return np.ascontiguousarray(runs.directory).view(np.uint8), runs.body, runs.start
