"""Runs of packed rows, apart from any table: made, and merged natively."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from freshet import _native
from freshet.errors import Corrupt
from freshet.types import I64, RUN, U8, U32, U64, RowRuns, Run

__all__ = ["DamagedRuns", "check_runs", "merge_runs", "native_parts", "pick_runs", "runs_of", "widths_of"]


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
