"""Rows as fields of Redis hashes, natively: commands that write runs, and the runs that hashes hold.

A bucket's rows are one hash. Field: table id (1 byte) and key (8 bytes, little-endian); value: packed record.
K buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.errors import Corrupt
from freshet.tables.runs import native_parts
from freshet.types import I64, RUN, U8, U32, U64, RowRuns

__all__ = ["FIELD_BYTES", "HashWrites", "fields_of", "hash_writes", "runs_of_hashes"]

FIELD_BYTES = 9


@dataclass(frozen=True, slots=True, eq=False)
class HashWrites:
    """What K buckets' runs say in Redis's protocol, bucket after bucket."""

    sets: memoryview  # HSET commands
    set_ends: list[int]  # (K,) of each bucket's in `sets`
    set_commands: list[int]  # (K,) how many they are
    removed: memoryview  # removed fields, as arguments of a command
    removed_ends: list[int]  # (K,)
    removed_fields: list[int]  # (K,)

    def sets_of(self, i: int) -> memoryview:
        """The i-th bucket's commands."""
        return self.sets[self.set_ends[i - 1] if i else 0 : self.set_ends[i]]

    def removed_of(self, i: int) -> memoryview:
        """The i-th bucket's removed fields."""
        return self.removed[self.removed_ends[i - 1] if i else 0 : self.removed_ends[i]]


def hash_writes(runs: RowRuns, buckets: I64, keys: Sequence[bytes], *, rows_per_command: int) -> HashWrites:
    """Commands that write the runs of these (K,) rising buckets into hashes of these keys.

    Raises ValueError if the runs' places are wrong, or they are of other buckets.
    """
    ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
    joined = np.frombuffer(b"".join(keys), np.uint8)
    sets, set_ends, commands, removed, removed_ends, fields, why = _native.hash_writes(
        *native_parts(runs), runs.widths, buckets, joined, ends, rows_per_command
    )
    if why:
        raise ValueError(why)
    return HashWrites(
        sets.data,
        set_ends.tolist(),
        commands.tolist(),
        removed.data,
        removed_ends.tolist(),
        fields.tolist(),
    )


def runs_of_hashes(
    hashes: Sequence[tuple[int, list[bytes]]], where: Sequence[str], widths: U32, *, most_bytes: int
) -> RowRuns:
    """Rows of (bucket, [field, value, field, value ...]), in the order of the hashes.

    A field that comes twice counts once. Runs longer than `most_bytes` are cut. Raises Corrupt, naming the
    hash by `where`, for a field or value that is none of a row.
    """
    directory, body, failed, why = _native.runs_of_hashes(hashes, widths, most_bytes)
    if why:
        raise Corrupt(f"{where[failed]}: {why}; something else than freshet writes there")
    return RowRuns(directory.view(RUN), body, widths)


def fields_of(table: int, keys: U64) -> U8:
    """(N, FIELD_BYTES) fields of rows by key."""
    fields = np.empty((len(keys), FIELD_BYTES), np.uint8)
    fields[:, 0] = table
    fields[:, 1:] = keys.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
    return fields
