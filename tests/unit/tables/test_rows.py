"""Rows by key: recovery, read-through, serving stores, admission, growth, exact keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.tables import PushOutcome, Store, TableOptions
from freshet.types import F32, U64, OffsetRange, PackedRows
from tests.fixtures.tables import (
    batch_of,
    counting_group,
    group,
    hedge_group,
    keys_of,
    look_up,
    push,
    rule,
    store_of,
)

OTHER_RULES = group(("linear", 2, rule("adam"), 0.0), ("vector", 5, rule("ftrl"), 0.01), precision="bf16")


def row_of(store: Store, key: U64, gradient: F32) -> PackedRows:
    push(store, [(0, 0, 1)], key, gradient)
    found, rows = store.export_rows(0, key)
    assert found.all()
    return rows


@pytest.mark.parametrize("rows_of", [hedge_group((0,)), counting_group(), OTHER_RULES])
def test_exported_rows_import_as_they_were(rows_of: object) -> None:
    store = store_of(rows_of)  # type: ignore[arg-type]
    width = store.layout.groups[0].width
    keys = keys_of(1, 2, 3)
    push(store, [(0, 0, 1)], keys, np.random.default_rng(0).normal(size=(3, width)).astype(np.float32))
    found, rows = store.export_rows(0, keys_of(1, 99, 2, 3))
    kept = PackedRows(0, rows.keys[found], rows.records[found])
    other = store_of(rows_of, seed=55)  # type: ignore[arg-type]

    other.import_rows(kept)

    assert found.tolist() == [True, False, True, True]
    assert not rows.records[1].any()
    assert rows.records.shape[1] == store.record_bytes(0)
    np.testing.assert_array_equal(
        other.export_rows(0, keys)[1].records, store.export_rows(0, keys)[1].records
    )
    assert other.pending_flush() == 0


def test_a_malformed_record_is_corrupt() -> None:
    store = store_of(hedge_group((0, 1)))
    good = row_of(store, keys_of(1), np.ones((1, 18), np.float32))
    other = store_of(hedge_group((0, 1)))

    def fault(change: int | slice, to: int | list[int], *, table: int = 0, records: int = 1) -> str:
        bytes_ = np.repeat(good.records, records, axis=0)
        bytes_[-1, change] = to
        keys = keys_of(*range(1, records + 1))
        with pytest.raises(Corrupt) as caught:
            other.import_rows(PackedRows(table, keys, bytes_))
        return str(caught.value)

    assert "names another table" in fault(0, 1)
    assert "names another table" in fault(9, 0, table=1)
    assert "flags" in fault(1, 2)
    infinite = [0, 0, 0x80, 0x7F]
    assert "row 4 of table 0" in fault(slice(-4, None), infinite, records=5)
    assert "not finite" in fault(slice(-4, None), infinite)
    assert "not finite" in fault(slice(8, 12), infinite)
    assert "negative sum" in fault(8 + 11, 0xBF)
    with pytest.raises(Corrupt, match="packed rows of 92 bytes, found 91"):
        other.import_rows(PackedRows(0, good.keys, np.ascontiguousarray(good.records[:, 1:])))
    with pytest.raises(Corrupt, match="key is 0"):
        other.import_rows(PackedRows(0, np.zeros(1, np.uint64), good.records))
    assert other.memory().rows == {0: 0, 1: 0}


@settings(deadline=None)
@given(st.binary(min_size=0, max_size=400), st.sampled_from([hedge_group((0,)), OTHER_RULES]))
def test_any_bytes_are_imported_whole_or_corrupt(data: bytes, rows_of: object) -> None:
    store = store_of(rows_of)  # type: ignore[arg-type]
    size = store.record_bytes(0)
    data = data[: len(data) // size * size]
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    keys = np.arange(1, len(records) + 1, dtype=np.uint64)
    try:
        store.import_rows(PackedRows(0, keys, records))
    except Corrupt:
        assert store.memory().rows == {0: 0}
        return
    assert np.isfinite(look_up(store, keys)).all()
    found, rows = store.export_rows(0, keys)
    assert found.all()
    np.testing.assert_array_equal(rows.records, records)


def test_a_serving_store_yields_zeros_for_absent_rows() -> None:
    store = store_of(hedge_group(), serving=True)
    values = np.arange(36, dtype=np.float32).reshape(2, 18)

    store.import_values(1, keys_of(1, 2), values, clock_ms=1_000)
    assert look_up(store, keys_of(1, 3, 2), table=1, create=False).tolist() == [
        values[0].tolist(),
        [0.0] * 18,
        values[1].tolist(),
    ]
    assert store.resident_bytes(1) < store_of(hedge_group()).resident_bytes(1)
    assert store.memory().row_bytes == {0: 0, 1: 2 * store.resident_bytes(1)}
    with pytest.raises(ValueError, match="create=False"):
        look_up(store, keys_of(1))
    with pytest.raises(ValueError, match="takes no gradients"):
        push(store, [(0, 0, 1)], keys_of(1), values[:1])


def test_values_replace_those_of_a_row_and_removed_rows_are_gone() -> None:
    store = store_of(counting_group(), serving=True)
    store.import_values(0, keys_of(1), np.full((1, 2), 5.0, np.float32))
    store.import_values(0, keys_of(1, 2), np.ones((2, 2), np.float32))

    assert look_up(store, keys_of(1, 2), create=False).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert store.remove(0, keys_of(1)) == 1
    assert look_up(store, keys_of(1, 2), create=False).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_lookups_report_which_keys_had_a_row() -> None:
    store = store_of(counting_group())
    push(store, [(0, 0, 1)], keys_of(2), np.ones((1, 2), np.float32))
    batch = batch_of(keys_of(1, 2, 3))
    out, found = np.empty((3, 2), np.float32), np.empty(3, np.uint8)

    store.lookup(0, batch, out, create=False, found=found)

    assert dict(zip(batch.keys.tolist(), found.tolist(), strict=True)) == dict(
        zip(keys_of(1, 2, 3).tolist(), [0, 1, 0], strict=True)
    )


def test_a_key_gets_a_row_after_its_admission() -> None:
    store = store_of(hedge_group((0, 1)), options={0: TableOptions(admission=3)})
    gradient = np.ones((1, 18), np.float32)
    first = look_up(store, keys_of(1))
    assert push(store, [(0, 0, 1)], keys_of(1), gradient) is PushOutcome.APPLIED
    assert (look_up(store, keys_of(1)) == first).all()
    assert store.memory().rows[0] == 0

    assert (look_up(store, keys_of(1)) == first).all()

    assert store.memory().rows[0] == 1
    assert store.counts().not_admitted == 1
    push(store, [(0, 1, 2)], keys_of(1), gradient)
    assert (look_up(store, keys_of(1)) != first).all()
    look_up(store, keys_of(1), table=1)
    assert store.memory().rows == {0: 1, 1: 1}


def test_admission_forgets_rare_keys_within_bounded_memory() -> None:
    store = store_of(counting_group(), buckets=1024, options={0: TableOptions(admission=2)})
    before = store.memory().bytes
    for start in range(1, 500_001, 50_000):
        look_up(store, keys_of(*range(start, start + 50_000)))

    rows = store.memory().rows[0]
    assert rows < 25_000
    assert store.memory().bytes - before < 4_000_000 + rows * 128


def test_keys_that_differ_in_one_bit_are_different_rows() -> None:
    store = store_of(counting_group())
    keys = np.array(
        [1 << b for b in range(64)] + [(1 << 63) | (1 << b) for b in range(63)] + [2**64 - 1], np.uint64
    )
    push(
        store,
        [(0, 0, 1)],
        keys,
        np.stack([np.arange(len(keys)), np.ones(len(keys))], axis=1).astype(np.float32),
    )

    assert look_up(store, keys, create=False)[:, 0].tolist() == [-float(i) for i in range(len(keys))]


def test_equal_keys_of_two_tables_are_two_rows() -> None:
    store = store_of(counting_group((0, 1)))
    push(store, [(0, 0, 1)], keys_of(1), np.ones((1, 2), np.float32), table=0)
    push(store, [(0, 1, 2)], keys_of(1), np.full((1, 2), 2.0, np.float32), table=1)

    assert look_up(store, keys_of(1), table=0).tolist() == [[-1.0, -1.0]]
    assert look_up(store, keys_of(1), table=1).tolist() == [[-2.0, -2.0]]


@pytest.mark.parametrize(
    "spread", [np.uint64(0x9E3779B97F4A7C15), np.uint64(1)], ids=["hashed", "counted up in one bucket"]
)
def test_a_table_grows_from_empty_to_a_million_rows(spread: np.uint64) -> None:
    total = 1_000_000 if spread != 1 else 200_000
    store = store_of(counting_group(), buckets=1024, partitions=1)
    for first in range(0, total, 100_000):
        numbers = np.arange(first + 1, first + 100_001, dtype=np.uint64)
        values = np.stack([numbers % 1024, numbers // 1024], axis=1).astype(np.float32)
        batch = batch_of(numbers * spread, buckets=1024)
        store.push(
            [OffsetRange(0, first, first + 100_000)], 0, [batch], [np.ascontiguousarray(values[batch.order])]
        )

    numbers = np.arange(1, total + 1, dtype=np.uint64)
    rows = look_up(store, numbers * spread, create=False)
    assert store.memory().rows == {0: total}
    assert (-rows == np.stack([numbers % 1024, numbers // 1024], axis=1)).all()
    absent = np.arange(total + 1, total + 1001, dtype=np.uint64) * spread
    assert not look_up(store, absent, create=False).any()
    assert store.memory().bytes < total * 64 + 12_000_000
