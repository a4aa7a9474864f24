"""Reference implementation of `freshet.evaluation.progressive`: sorts whole keys, adds all rows up at once.

The tests compare it with the package bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freshet.evaluation.descriptors import COARSE_BITS, PROBABILITY_FLOOR, bins_of
from freshet.evaluation.progressive import KEY, ScoredSamples, Table
from freshet.types import F64, I64, U64, Bool


def coarse(bins: I64) -> I64:
    """Return the middle of the coarse bin around each bin (B,), as segments have."""
    middles: I64 = (bins >> COARSE_BITS << COARSE_BITS) + (1 << (COARSE_BITS - 1))
    return middles


def table_of(samples: ScoredSamples, window: I64, number: Bool, values: Sequence[U64]) -> Table:
    """Group samples as `cells.table_of`."""
    sums, bins, counts = terms(samples, number)
    parts = []
    for field in range(1 + len(values)):
        keys = np.zeros(len(window), KEY)
        keys["window"], keys["label"], keys["field"] = window, samples.label, field
        if field:
            column = samples.segments[field - 1]
            keys["value"] = np.where(np.isin(column, values[field - 1]), column, np.uint64(0))
        parts.append(keys)
    fields, binned = len(parts), np.flatnonzero(counts.any(1))
    return grouped(
        np.concatenate(parts),
        np.tile(sums, (fields, 1)),
        np.concatenate([binned + field * len(window) for field in range(fields)]),
        np.concatenate([bins[binned], np.tile(coarse(bins[binned]), fields - 1)]),
        np.tile(counts[binned], (fields, 1)),
    )


def merge(tables: Sequence[Table]) -> Table:
    """Merge tables as `Table.merge`, one after the other."""
    total = Table.empty()
    for table in tables:
        total = grouped(
            np.concatenate([total.keys, table.keys]),
            np.concatenate([total.sums, table.sums]),
            np.concatenate([total.cell, table.cell + len(total.keys)]),
            np.concatenate([total.bin, table.bin]),
            np.concatenate([total.counts, table.counts]),
        )
    return total


def same_bits(a: Table, b: Table) -> bool:
    """Return whether two tables are equal to the bit."""
    return all(
        getattr(a, name).dtype == getattr(b, name).dtype
        and getattr(a, name).tobytes() == getattr(b, name).tobytes()
        for name in ("keys", "sums", "cell", "bin", "counts")
    )


def grouped(keys: NDArray[np.void], sums: F64, cell: I64, bins: I64, counts: F64) -> Table:
    """Create a table from cells and entries in any order."""
    kept, group = np.unique(keys, return_inverse=True)
    code, at = np.unique(group[cell] * (1 << 32) + bins, return_inverse=True)
    return Table(
        kept,
        sum_rows(sums, group, len(kept)),
        code >> 32,
        code & 0xFFFFFFFF,
        sum_rows(counts, at, len(code)),
    )


def sum_rows(rows: F64, group: I64, groups: int) -> F64:
    """Sum rows by group, in their order."""
    total = np.zeros((groups, rows.shape[1]))
    np.add.at(total, group, rows)
    return total


def terms(samples: ScoredSamples, number: Bool) -> tuple[F64, I64, F64]:
    """Return the summands, bins and histogram weights of samples."""
    p, y, w = (column.astype(np.float64) for column in (samples.prediction, samples.value, samples.weight))
    finite = np.isfinite(p) & np.isfinite(y)
    p, y, w = np.where(finite, p, 0.5), np.where(finite, y, 0.0), np.where(finite, w, 0.0)
    true_false = ~number[samples.label]
    q = np.clip(np.where(true_false, p, 0.5), PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    loss = np.where(true_false, -(y * np.log(q) + (1 - y) * np.log1p(-q)), 0.0)
    sums = np.stack(
        [finite * 1.0, w, w * p, w * y, w * loss, w * (p - y) ** 2, w * np.abs(p - y), ~finite * 1.0, w * w],
        1,
    )
    return sums, bins_of(q), np.stack([w * y, w * (1 - y)], 1) * true_false[:, None]
