"""A plan names each (table, key) once, in order of buckets, with its occurrences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.tables import Plan
from freshet.types import bucket_of

few_keys = st.integers(0, 5).map(lambda i: i * 0x2492492492492492)
any_keys = st.integers(0, 2**64 - 1)
features = st.lists(st.tuples(st.integers(0, 2), st.lists(few_keys | any_keys, max_size=40)), max_size=6)


@settings(deadline=None)
@given(st.lists(features, min_size=1, max_size=3), st.sampled_from([2, 16, 1024]))
def test_a_plan_equals_a_dictionary(batches: list[list[tuple[int, list[int]]]], buckets: int) -> None:
    tables = [table for table, _ in batches[0]]
    plan = Plan(tables=np.array(tables, np.uint8), buckets=buckets)
    for batch in batches:
        columns = [batch[f][1] if f < len(batch) else [] for f in range(len(tables))]
        occurrences = [(table, key) for table, column in zip(tables, columns, strict=True) for key in column]
        starts = np.cumsum([0, *(len(column) for column in columns)]).astype(np.uint32)
        keys = np.array([key for _, key in occurrences], np.uint64)

        unique = plan.build(keys, starts)

        rows = list(zip(plan.tables.tolist(), plan.keys.tolist(), strict=True))
        present = [pair for pair in occurrences if pair[1] != 0]
        assert len(rows) == unique == len(set(rows))
        assert set(rows) == set(present)
        positions = plan.positions.tolist()
        assert [None if at < 0 else rows[at] for at in positions] == [
            p if p[1] else None for p in occurrences
        ]
        counts = np.bincount(bucket_of(plan.keys, buckets), minlength=buckets)
        assert plan.bucket_starts.tolist() == [0, *np.cumsum(counts).tolist()]
        assert (np.diff(bucket_of(plan.keys, buckets)) >= 0).all()
        ends = plan.order_starts.tolist()
        uses = [plan.order[a:b].tolist() for a, b in pairwise(ends)]
        assert uses == [[i for i, at in enumerate(positions) if at == row] for row in range(unique)]


def test_rows_of_a_bucket_are_in_order_of_first_use() -> None:
    plan = Plan(tables=np.array([0], np.uint8), buckets=2)
    keys = np.array([9, 4, 9, 7, 4], np.uint64)

    plan.build(keys, np.array([0, 5], np.uint32))

    assert plan.keys.tolist() == [9, 4, 7]
    assert plan.order.tolist() == [0, 2, 1, 4, 3]


def test_views_of_an_earlier_batch_survive_growth() -> None:
    plan = Plan(tables=np.array([0], np.uint8), buckets=16)
    plan.build(np.array([3, 5], np.uint64), np.array([0, 2], np.uint32))
    earlier = plan.keys

    plan.build(np.arange(1, 100_001, dtype=np.uint64), np.array([0, 100_000], np.uint32))
    del plan

    assert len(earlier) == 2
    assert earlier.sum() >= 0


def test_memory_is_reused_from_batch_to_batch() -> None:
    plan = Plan(tables=np.array([0], np.uint8), buckets=16)
    addresses = set()
    for n in (500, 20, 499):
        plan.build(np.arange(1, n + 1, dtype=np.uint64), np.array([0, n], np.uint32))
        addresses.add(plan.keys.ctypes.data)

    assert len(addresses) == 1


def test_equal_keys_and_one_full_bucket_are_planned() -> None:
    plan = Plan(tables=np.array([0], np.uint8), buckets=1024)

    assert plan.build(np.full(200_000, 77, np.uint64), np.array([0, 200_000], np.uint32)) == 1
    assert plan.order.tolist() == list(range(200_000))
    assert plan.build(np.arange(1, 200_001, dtype=np.uint64), np.array([0, 200_000], np.uint32)) == 200_000


@pytest.mark.parametrize("buckets", [0, 1, 3, 1000, 131_072])
def test_other_bucket_counts_than_powers_of_two_are_refused(buckets: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Plan(tables=np.array([0], np.uint8), buckets=buckets)


@pytest.mark.parametrize("starts", [[0, 1], [0, 3], [1, 2], [0, 3, 2]])
def test_feature_starts_that_do_not_fit_are_refused(starts: list[int]) -> None:
    plan = Plan(tables=np.zeros(len(starts) - 1, np.uint8), buckets=16)

    with pytest.raises(ValueError, match="feature_starts must rise"):
        plan.build(np.array([1, 2], np.uint64), np.array(starts, np.uint32))
