"""Rows as pages of Redis hashes, natively: arguments that write runs, and the runs that pages add up to.

A bucket's rows are one hash, each field of which is a page: a run as one flush wrote it, or a part of one.
Field: PAGE, little-endian. Value: rows, removed keys and two CRC-32s (4 bytes each), then keys, removed keys
and records as in a run. Of several pages that know a key the one of the highest seq decides. K buckets, P
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.errors import Corrupt
from freshet.tables.runs import native_parts
from freshet.types import I64, RUN, U32, U64, Bool, RowRuns

__all__ = ["PAGE", "PAGE_BYTES", "PageWrites", "page_writes", "pages_of", "runs_of_pages", "which_may_hold"]

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
