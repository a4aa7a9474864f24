"""Changes collected by a flush and a publish, and their failures."""

from __future__ import annotations

import numpy as np

from freshet.tables import Flushed, Published, Store, TableOptions
from freshet.types import BucketRange, bucket_of
from tests.fixtures.tables import counting_group, hedge_group, keys_of, look_up, push, store_of

ONES = np.ones((100, 2), np.float32)


def flushed_keys(flushed: Flushed) -> dict[int, list[int]]:
    keys: dict[int, list[int]] = {}
    for bucket in flushed:
        for part in bucket.rows:
            keys.setdefault(part.table, []).extend(part.keys.tolist())
    return {table: sorted(k) for table, k in keys.items()}


def removed_keys(flushed: Flushed) -> list[int]:
    return sorted(k for bucket in flushed for _, keys in bucket.removed for k in keys.tolist())


def published_keys(published: Published) -> list[int]:
    return sorted(k for part in published.tables for k in part.keys.tolist())


def changed(
    store: Store, *numbers: int, at: int = 0, clock_ms: int = 0, table: int = 0, group_index: int = 0
) -> None:
    keys = keys_of(*numbers)
    push(
        store,
        [(0, at, at + 1)],
        keys,
        ONES[: len(keys)],
        clock_ms=clock_ms,
        table=table,
        group_index=group_index,
    )


def test_a_flush_holds_each_changed_row_once_with_offsets() -> None:
    store = store_of(counting_group((0,)), counting_group((3, 5), index=1))
    changed(store, 1, 2, clock_ms=5_000)
    changed(store, 2, 3, at=1)
    changed(store, 9, at=2, table=5, group_index=1)
    look_up(store, keys_of(4))

    flushed = store.collect_flush()

    assert flushed_keys(flushed) == {0: sorted(keys_of(1, 2, 3).tolist()), 5: keys_of(9).tolist()}
    for part in flushed:
        assert part.applied == {0: 3, 1: 0}
        assert part.clock_ms == 5_000
        assert part.stored == sum(len(rows.keys) for rows in part.rows)
        assert all((bucket_of(rows.keys, 16) == part.bucket).all() for rows in part.rows)
    assert [part.bucket for part in flushed] == list(range(16))
    assert flushed_keys(store.collect_flush()) == {}


def test_packed_rows_restore_a_bucket_in_another_store() -> None:
    store = store_of(hedge_group(), seed=1)
    keys = keys_of(*range(1, 60))
    push(store, [(0, 0, 1)], keys, np.random.default_rng(0).normal(size=(59, 18)).astype(np.float32))
    flushed = store.collect_flush()
    other = store_of(hedge_group(), seed=99)
    for part in flushed:
        for rows in part.rows:
            other.import_rows(rows)
        other.set_applied(part.bucket, part.applied, part.clock_ms)

    np.testing.assert_array_equal(look_up(other, keys), look_up(store, keys))
    gradient = np.ones((59, 18), np.float32)
    for each in (store, other):
        push(each, [(0, 1, 2)], keys, gradient)
    np.testing.assert_array_equal(look_up(other, keys), look_up(store, keys))
    assert [p.stored for p in other.collect_flush()] == [p.stored for p in flushed]


def test_a_collected_flush_is_a_copy() -> None:
    store = store_of(counting_group())
    changed(store, 1, 2, 3)
    kept = store.collect_flush()
    directory, body = kept.runs.directory.copy(), kept.runs.body.copy()

    changed(store, 2, 3, 4, at=1)
    store.remove(0, keys_of(3))
    later = store.collect_flush()
    for bucket in range(16):
        store.drop_bucket(bucket)

    np.testing.assert_array_equal(kept.runs.directory, directory)
    np.testing.assert_array_equal(kept.runs.body, body)
    assert flushed_keys(kept) == {0: sorted(keys_of(1, 2, 3).tolist())}
    assert flushed_keys(later) == {0: sorted(keys_of(2, 4).tolist())}
    assert removed_keys(later) == keys_of(3).tolist()


def test_a_whole_flush_leaves_other_buckets_changed() -> None:
    store = store_of(counting_group())
    changed(store, *range(1, 51))
    chosen = [3, 9]

    whole, rest = store.collect_whole(chosen), store.collect_flush()

    assert [part.bucket for part in whole if part.rows] == chosen
    assert not {part.bucket for part in rest if part.rows} & set(chosen)
    assert len(whole) + len(rest) == 50
    assert store.pending_flush() == 0


def test_a_whole_bucket_holds_all_rows_ever_changed() -> None:
    store = store_of(counting_group())
    changed(store, *range(1, 51))
    store.collect_flush()
    changed(store, *range(40, 61), at=1)
    look_up(store, keys_of(*range(100, 200)))

    whole = store.collect_whole(BucketRange(0, 16))

    assert flushed_keys(whole) == {0: sorted(keys_of(*range(1, 61)).tolist())}
    assert sum(part.stored for part in whole) == 60
    assert len(store.collect_flush()) == 0


def test_publishing_is_bounded_and_resumes() -> None:
    store = store_of(counting_group(), partitions=1)
    changed(store, *range(1, 101), clock_ms=777)
    seen: list[int] = []
    sizes = []
    while store.pending_publish():
        part = store.collect_publish(30)
        sizes.append(len(part))
        seen += published_keys(part)
        for table in part.tables:
            assert (np.diff(bucket_of(table.keys, 16)) >= 0).all()
            assert table.values.tolist() == [[-1.0, -1.0]] * len(table.keys)
        assert part.clock_ms == 777
        assert part.pending == store.pending_publish()

    assert sizes == [30, 30, 30, 10]
    assert sorted(seen) == sorted(keys_of(*range(1, 101)).tolist())


def test_a_publish_that_wraps_around_is_sorted_by_bucket() -> None:
    store = store_of(counting_group(), partitions=1)
    changed(store, *range(1, 101))
    store.collect_publish(70)
    changed(store, *range(1, 101), at=1)

    rest = store.collect_publish(1_000)

    assert len(rest) == 100
    assert (np.diff(bucket_of(rest.tables[0].keys, 16)) >= 0).all()


def test_a_failed_publish_is_published_again() -> None:
    store = store_of(counting_group())
    changed(store, 1, 2)
    failed = store.collect_publish(10)

    store.put_back_published(failed.tables)

    assert store.pending_publish() == 2
    assert published_keys(store.collect_publish(10)) == published_keys(failed)


def test_a_row_changed_before_a_flush_is_listed_for_both() -> None:
    store = store_of(counting_group())
    changed(store, 1)
    store.collect_publish(10)
    changed(store, 1, at=1)

    assert published_keys(store.collect_publish(10)) == keys_of(1).tolist()
    assert flushed_keys(store.collect_flush()) == {0: keys_of(1).tolist()}


def test_removed_rows_are_reported_once_to_each_consumer() -> None:
    store = store_of(counting_group())
    changed(store, 1, 2, 3, 4)
    store.collect_flush()
    store.collect_publish(10)
    assert store.remove(0, keys_of(1, 2, 3, 99)) == 3
    changed(store, 1, at=1)
    look_up(store, keys_of(2))

    published = store.collect_publish(10)
    flushed = store.collect_flush()

    assert published_keys(published) == keys_of(1).tolist()
    assert sorted(published.tables[0].removed.tolist()) == sorted(keys_of(2, 3).tolist())
    assert flushed_keys(flushed) == {0: keys_of(1).tolist()}
    assert removed_keys(flushed) == sorted(keys_of(2, 3).tolist())
    assert sum(part.stored for part in flushed) == 2
    assert removed_keys(store.collect_flush()) == []


def test_rows_only_looked_up_are_evicted_unreported() -> None:
    store = store_of(counting_group())
    look_up(store, keys_of(1, 2))

    store.remove(0, keys_of(1))

    assert removed_keys(store.collect_flush()) == []
    assert sum(part.stored for part in store.collect_flush()) == 0


def test_removal_keeps_the_change_lists_of_moved_rows() -> None:
    store = store_of(counting_group(), buckets=2, partitions=1)
    push(store, [(0, 0, 1)], keys_of(*range(1, 301)), np.ones((300, 2), np.float32))

    store.remove(0, keys_of(*range(1, 200)))

    assert flushed_keys(store.collect_flush()) == {0: sorted(keys_of(*range(200, 301)).tolist())}
    assert published_keys(store.collect_publish(1_000)) == sorted(keys_of(*range(200, 301)).tolist())
    assert store.memory().rows == {0: 101}


def test_a_dropped_bucket_leaves_no_rows_or_changes() -> None:
    store = store_of(counting_group(), options={0: TableOptions(max_rows=10)})
    changed(store, *range(1, 51))
    for bucket in range(16):
        store.drop_bucket(bucket)

    assert store.memory().rows == {0: 0}
    assert store.pending_flush() == store.pending_publish() == 0
    assert store.owned() == []
    assert len(store.collect_publish(10)) == 0
