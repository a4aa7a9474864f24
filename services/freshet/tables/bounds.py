"""Bounds of a store's rows: of each table, and of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

LEAST_ROWS = 10_000
"""Rows that a table may have under any memory bound."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Limits of a table's rows."""

    ttl_ms: int | None = None  # evict rows not touched for this long of event time, in whole seconds
    admission: int = 1  # training batches in which a key is seen before it gets a row; at most 255
    max_rows: int | None = None  # evict the least recently used rows beyond it


@dataclass(frozen=True, slots=True)
class RowsBound:
    """Memory that the rows of a store may take, and where rows go beyond it."""

    bytes: int = 0  # of rows with their indexes; 0: no bound
    ssd_folder: str = ""  # rows beyond it move to a file here; empty: the least recently used are evicted
    ssd_bytes: int = 0  # most of the file; 0: as much as the disk has


NO_BOUND = RowsBound()

PERHAPS_ON_DISK = 2
"""What a lookup in a serving store finds of a key whose row may be on disk: `Found` in store.hpp."""


@dataclass(frozen=True, slots=True)
class SsdRows:
    """Rows of a store on its local disk, and counts since its creation."""

    rows: int = 0  # on disk alone
    fetched: int = 0  # rows read back
    spilled: int = 0  # rows that left memory
    pages_read: int = 0
    pages_written: int = 0
    waits: int = 0  # calls that waited until rows had left memory
    bytes_in_use: int = 0
    bytes_on_disk: int = 0
    full: bool = False  # the disk, or `RowsBound.ssd_bytes`, is; rows stay in memory


@dataclass(frozen=True, slots=True)
class Evicted:
    """Progress of an eviction."""

    examined: int  # rows
    evicted: int  # rows
    finished: bool  # the round over all buckets is complete


def bounded(
    options: Mapping[int, TableOptions], sizes: Mapping[int, int], most_bytes: int
) -> dict[int, TableOptions]:
    """Bound every table, by `sizes`, the bytes of a row of each."""
    open_ = [table for table in sizes if options.get(table, TableOptions()).max_rows is None]
    reserved = sum((o.max_rows or 0) * sizes[table] for table, o in options.items() if table in sizes)
    share = max(most_bytes - reserved, most_bytes // 10) // max(1, len(open_))
    found = dict(options)
    for table in open_:
        rows = max(LEAST_ROWS, share // sizes[table])
        found[table] = replace(options.get(table, TableOptions()), max_rows=rows)
    return found
