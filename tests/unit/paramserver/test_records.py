"""Records of changed rows: bounded in size, and together each row once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.rows.deltas import DELTA_BYTES, decode_rows, records_of
from freshet.tables import Published, PublishedTable
from freshet.types import U64, TimeMs, bucket_of
from freshet.wires.row_wire import RowWire
from tests.fixtures.effort import examples

BUCKETS = 64
AROUND_BYTES = 64
LONGEST = 2 * DELTA_BYTES + AROUND_BYTES


def keys_from(first: int, n: int) -> U64:
    """Return n keys sorted by bucket."""
    keys = np.arange(first, first + n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return keys[np.argsort(bucket_of(keys, BUCKETS), kind="stable")]


@settings(deadline=None, max_examples=examples(40))
@given(
    rows=st.integers(0, 3_000),
    width=st.sampled_from([1, 16, 512, 4_096]),
    removed=st.sampled_from([0, 7, 600_000]),
    owners=st.integers(1, 2),
)
def test_records_are_bounded_and_hold_every_row_once(rows, width, removed, owners):
    rows = min(rows, (8 << 20) // (4 * width))  # of memory
    keys, gone = keys_from(1, rows), keys_from(1 << 40, removed)
    values = np.repeat((keys % np.uint64(1000)).astype(np.float32)[:, None], width, axis=1)
    fences = np.arange(BUCKETS) % owners + 10
    batch = Published((PublishedTable(3, keys, values, gone),), TimeMs(5), 0)

    found, dropped = [], []
    for append in records_of(batch, "rows", fences, RowWire()):
        for data in append.values:
            assert len(data) <= LONGEST
            delta = decode_rows(bytes(data))
            assert len(delta.keys) or len(delta.removed), "a record says something"
            found.append(delta.keys)
            dropped.append(delta.removed)
            of = bucket_of(np.concatenate([delta.keys, delta.removed]), BUCKETS)
            assert set(fences[of]) == {delta.fence}
            assert set(of * ROWS_PARTITIONS // BUCKETS) == {append.partition}
            assert (delta.values[:, 0] == (delta.keys % np.uint64(1000)).astype(np.float32)).all()
    assert np.array_equal(np.sort(np.concatenate([*found, keys[:0]])), np.sort(keys))
    assert np.array_equal(np.sort(np.concatenate([*dropped, keys[:0]])), np.sort(gone))


def test_a_row_beyond_the_record_size_has_its_own_record():
    keys = keys_from(1, 3)
    values = np.ones((3, DELTA_BYTES // 4), np.float32)
    batch = Published((PublishedTable(0, keys, values, keys[:0]),), TimeMs(5), 0)
    records = records_of(batch, "rows", np.zeros(BUCKETS, np.int64), RowWire())
    sizes = [len(data) for append in records for data in append.values]
    assert len(sizes) == 3
