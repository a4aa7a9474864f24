"""A push is applied, skipped or refused as a whole (PROTOCOL 2 to 4)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from freshet.errors import Unavailable
from freshet.tables import PushOutcome
from freshet.types import OffsetRange, bucket_of
from tests.fixtures.tables import batch_of, counting_group, hedge_group, keys_of, look_up, push, store_of

ONE = np.ones((1, 2), np.float32)


def test_after_recovery_buckets_apply_only_missing_pushes() -> None:
    store = store_of(counting_group())
    ahead, behind = keys_of(1), keys_of(2)
    store.set_applied(int(bucket_of(ahead, 16)[0]), {0: 20}, clock_ms=0)
    both = np.concatenate([ahead, behind])

    assert store.applied() == {0: [0, 20], 1: [0]}
    assert push(store, [(0, 0, 20)], both, np.ones((2, 2), np.float32)) is PushOutcome.APPLIED
    assert look_up(store, both).tolist() == [[0.0, 0.0], [-1.0, -1.0]]
    assert store.applied() == {0: [20], 1: [0]}


def test_a_push_without_rows_advances_every_bucket() -> None:
    store = store_of(counting_group(), partitions=3)

    assert store.push([OffsetRange(2, 0, 5), OffsetRange(0, 0, 9)], 50, [], []) is PushOutcome.APPLIED
    assert store.applied() == {0: [9], 1: [0], 2: [5]}
    assert store.native.clock_of(3) == 50


def test_rows_of_an_unowned_bucket_refuse_push_and_lookup() -> None:
    store = store_of(counting_group())
    gone = int(bucket_of(keys_of(7), 16)[0])
    store.drop_bucket(gone)

    assert push(store, [(0, 0, 10)], keys_of(7), ONE) is PushOutcome.REFUSED
    assert store.push([OffsetRange(0, 0, 10)], 0, [], []) is PushOutcome.APPLIED
    with pytest.raises(Unavailable, match=f"bucket {gone} "):
        look_up(store, keys_of(7))
    assert gone not in store.owned()


def test_an_unknown_partition_or_two_ranges_of_one_are_errors() -> None:
    store = store_of(counting_group())

    with pytest.raises(ValueError, match="partition below 2, found 2"):
        push(store, [(2, 0, 1)], keys_of(7), ONE)
    with pytest.raises(ValueError, match="at most one range"):
        push(store, [(1, 0, 1), (1, 1, 2)], keys_of(7), ONE)
    with pytest.raises(ValueError, match="at least one range"):
        push(store, [], keys_of(7), ONE)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_non_finite_gradients_advance_offsets_and_are_counted(bad: float) -> None:
    store = store_of(hedge_group())
    before = look_up(store, keys_of(7, 8))
    gradients = np.ones((2, 18), np.float32)
    gradients[0, 9] = bad

    assert push(store, [(0, 0, 10)], keys_of(7, 8), gradients) is PushOutcome.APPLIED
    after = look_up(store, keys_of(7, 8))
    assert (after[0] == before[0]).all()
    assert (after[1] != before[1]).all()
    assert store.counts().not_finite == 1
    assert store.pending_flush() == 1


def test_misplaced_keys_are_an_error_without_effect() -> None:
    store = store_of(counting_group())
    good = batch_of(keys_of(1, 2, 3))
    starts = good.bucket_starts.copy()
    starts[1:-1] = 0
    out = np.zeros((3, 2), np.float32)

    with pytest.raises(ValueError, match="sorted by bucket"):
        store.lookup(0, replace(good, bucket_starts=starts), out)
    with pytest.raises(ValueError, match="sorted by bucket"):
        store.lookup(0, replace(good, tables=good.tables + np.uint8(1)), out)
    starts[:] = 9
    with pytest.raises(ValueError, match="must rise"):
        store.lookup(0, replace(good, bucket_starts=starts), out)
    with pytest.raises(ValueError, match="out must be"):
        store.lookup(0, good, out[:2])
    assert store.memory().rows == {0: 0}
