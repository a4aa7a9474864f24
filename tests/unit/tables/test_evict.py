"""Eviction by age and size, and the memory it frees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.tables import Store, TableOptions
from freshet.types import OffsetRange
from tests.fixtures.tables import batch_of, counting_group, keys_of, look_up, push, store_of

EXAMPLES = Path(__file__).parents[3] / "examples"

DAY = 86_400_000
NOON = 1_700_000_000_000  # some event time, ms


def touched(store: Store, numbers: range, at: int, clock_ms: int, table: int = 0) -> None:
    keys = keys_of(*numbers)
    push(store, [(0, at, at + 1)], keys, np.ones((len(keys), 2), np.float32), clock_ms=clock_ms, table=table)


def clean(store: Store) -> None:
    store.collect_publish(1 << 40)
    store.collect_flush()


def present(store: Store, numbers: range, table: int = 0) -> list[int]:
    rows = look_up(store, keys_of(*numbers), table=table, create=False)
    return [n for n, row in zip(numbers, rows, strict=True) if row.any()]


def test_rows_are_evicted_after_their_ttl_of_event_time() -> None:
    store = store_of(counting_group((0, 1)), options={0: TableOptions(ttl_ms=DAY)})
    touched(store, range(1, 51), 0, NOON)
    touched(store, range(1, 51), 1, NOON, table=1)
    touched(store, range(26, 51), 2, NOON + DAY // 2)
    clean(store)

    assert store.evict(NOON + DAY - 1).evicted == 0
    done = store.evict(NOON + DAY)

    assert (done.evicted, done.finished) == (25, True)
    assert present(store, range(1, 51)) == list(range(26, 51))
    assert present(store, range(1, 51), table=1) == list(range(1, 51))
    assert store.memory().rows == {0: 25, 1: 50}
    assert store.counts().evicted == 25


@pytest.mark.parametrize(("defaults", "kept"), [(1, 0), (2, 50)])
def test_defaults_evict_no_row_for_years(defaults: int, kept: int) -> None:
    text = (EXAMPLES / "quickstart" / "freshet.toml").read_text()
    spec = parse_spec(f"defaults = {defaults}\n{text}", folder=str(EXAMPLES / "quickstart"))
    layout = layout_of(spec)
    store = Store.of(replace(spec, buckets=16), layout, changes=False)
    keys = batch_of(keys_of(*range(1, 51)))
    gradients = np.ones((50, layout.groups[0].width), np.float32)
    store.push([OffsetRange(0, 0, 1)], NOON, [keys], [gradients])

    store.make_room(NOON + 5 * 365 * DAY, 1_000)

    assert store.rows()[0] == kept


def test_unflushed_rows_are_evicted_after_their_flush() -> None:
    store = store_of(counting_group(), options={0: TableOptions(ttl_ms=DAY)})
    touched(store, range(1, 11), 0, NOON)
    store.collect_publish(100)

    assert store.evict(NOON + 2 * DAY).evicted == 0
    store.collect_flush()
    assert store.evict(NOON + 2 * DAY).evicted == 10

    flushed = store.collect_flush()
    gone = sorted(k for part in flushed for _, keys in part.removed for k in keys.tolist())
    assert gone == sorted(keys_of(*range(1, 11)).tolist())
    assert sum(part.stored for part in flushed) == 0
    assert sorted(store.collect_publish(100).tables[0].removed.tolist()) == gone


def test_training_lookups_touch_rows_and_serving_ones_do_not() -> None:
    store = store_of(counting_group(), options={0: TableOptions(ttl_ms=DAY)})
    touched(store, range(1, 4), 0, NOON)
    clean(store)
    touched(store, range(10, 60), 1, NOON + DAY - 1_000)
    clean(store)
    look_up(store, keys_of(1))
    look_up(store, keys_of(2), create=False)

    store.evict(NOON + DAY)

    assert present(store, range(1, 4)) == [1]


def test_the_least_recently_used_rows_are_evicted() -> None:
    store = store_of(counting_group((0, 1)), buckets=64, options={0: TableOptions(max_rows=100)})
    for age in range(10):
        touched(store, range(1 + 50 * age, 51 + 50 * age), age, NOON + age * 10_000)
    touched(store, range(1, 301), 10, NOON, table=1)
    clean(store)

    done = store.evict(NOON + 100_000)

    assert (done.evicted, done.finished) == (400, True)
    assert present(store, range(1, 501)) == list(range(401, 501))
    assert store.memory().rows == {0: 100, 1: 300}
    assert store.evict(NOON + 100_000).evicted == 0


def test_rows_of_equal_age_are_evicted_to_the_exact_size() -> None:
    store = store_of(counting_group(), options={0: TableOptions(max_rows=7)})
    touched(store, range(1, 101), 0, NOON)
    clean(store)

    assert store.evict(NOON).evicted == 93
    assert len(present(store, range(1, 101))) == 7


def test_rows_that_must_stay_are_not_counted_as_evictable() -> None:
    store = store_of(counting_group(), options={0: TableOptions(max_rows=20)})
    touched(store, range(1, 51), 0, NOON)
    clean(store)
    touched(store, range(1, 11), 1, NOON)

    store.evict(NOON + 5_000)

    assert store.memory().rows == {0: 20}
    assert set(range(1, 11)) <= set(present(store, range(1, 51)))


@pytest.mark.parametrize("budget", [1, 60, 1_000])
def test_a_round_can_run_in_pieces(budget: int) -> None:
    options = {0: TableOptions(ttl_ms=DAY, max_rows=150)}
    store = store_of(counting_group(), options=options)
    touched(store, range(1, 201), 0, NOON)
    touched(store, range(101, 401), 1, NOON + DAY)
    clean(store)
    rounds = 0
    evicted = 0
    while True:
        done = store.evict(NOON + DAY + 60_000, budget)
        rounds += 1
        evicted += done.evicted
        assert done.examined < budget + 400
        if done.finished:
            break

    assert evicted == 250
    assert store.memory().rows == {0: 150}
    assert rounds > 1 or budget == 1_000


def test_memory_of_evicted_rows_is_reused() -> None:
    store = store_of(counting_group(), partitions=1, options={0: TableOptions(ttl_ms=DAY)})
    sizes = []
    for turn in range(4):
        keys = keys_of(*range(1 + 100_000 * turn, 1 + 100_000 * (turn + 1)))
        push(
            store,
            [(0, turn, turn + 1)],
            keys,
            np.ones((len(keys), 2), np.float32),
            clock_ms=NOON + turn * 2 * DAY,
        )
        clean(store)
        full = store.memory().bytes
        assert store.evict(NOON + (turn + 1) * 2 * DAY).evicted == 100_000
        store.collect_flush()
        sizes.append((full, store.memory().bytes))

    assert all(empty < 100_000 for _, empty in sizes)
    assert max(full for full, _ in sizes) < 1.05 * sizes[0][0]


def test_a_serving_store_evicts_rows_without_lookups() -> None:
    store = store_of(counting_group(), serving=True, options={0: TableOptions(max_rows=50)})
    values = np.ones((100, 2), np.float32)
    store.import_values(0, keys_of(*range(1, 101)), values, clock_ms=NOON)
    store.import_values(0, keys_of(*range(101, 102)), values[:1], clock_ms=NOON + 60_000)
    look_up(store, keys_of(*range(1, 50)), create=False)

    store.evict(NOON + 60_000)

    assert present(store, range(1, 102)) == [*range(1, 50), 101]
