from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.tables.plan import (
    PooledLists,
    add_list_gradients,
    lists_of_shard,
    sum_lists,
)
from freshet.types import F64, I64


@dataclass(frozen=True)
class Case:
    """Lists over random rows, of which each belongs to one of some shards."""

    lists: PooledLists
    rows: F64
    owner: I64
    shards: int

    @property
    def occurrences(self) -> F64:
        """(K, U) how often each list has each row: the monolithic operator is a product with it."""
        matrix: F64 = np.zeros((len(self.lists.counts), len(self.rows)))
        of_list = np.repeat(np.arange(len(self.lists.counts)), self.lists.counts)
        np.add.at(matrix, (of_list, self.lists.positions), 1.0)
        return matrix


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    unique, lists, shards = draw(st.integers(1, 40)), draw(st.integers(0, 12)), draw(st.integers(1, 6))
    counts = rng.integers(1, 30, lists).astype(np.uint32)
    positions = rng.integers(0, unique, int(counts.sum())).astype(np.int32)
    beside = np.flatnonzero(rng.random(unique) < 0.3).astype(np.int32)
    owner = rng.choice(rng.permutation(shards)[: rng.integers(1, shards + 1)], unique)  # others own nothing
    rows = rng.normal(0, 1, (unique, draw(st.integers(1, 5))))
    return Case(PooledLists(beside, positions, counts), rows, owner.astype(np.int64), shards)


@given(case=cases(), chunk=st.sampled_from([1, 7, 64, 1 << 19]))
def test_sums_of_all_shards_add_up_to_those_of_the_lists(case: Case, chunk: int) -> None:
    beside = len(case.lists.rows)
    found = np.zeros((len(case.lists), case.rows.shape[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freshet.tables.plan.CHUNK_FLOATS", chunk)
        for shard in range(case.shards):
            places = np.flatnonzero(case.owner == shard)
            part = lists_of_shard(case.lists, places, len(case.rows))
            held, own = part.lists, case.rows[places]
            assert (held.counts > 0).all()
            assert (len(part.row_places), len(part.sum_places)) == (len(held.rows), len(held.counts))
            found[part.row_places] = own[held.rows]
            found[part.sum_places] += sum_lists(own, held.positions, held.counts)
    np.testing.assert_allclose(found[:beside], case.rows[case.lists.rows], rtol=0, atol=0)
    np.testing.assert_allclose(found[beside:], case.occurrences @ case.rows, rtol=0, atol=1e-12)


@given(case=cases(), chunk=st.sampled_from([1, 7, 64, 1 << 19]))
def test_gradients_reach_rows_in_all_shards_once_per_occurrence(case: Case, chunk: int) -> None:
    gradients = np.random.default_rng(1).normal(0, 1, (len(case.lists), case.rows.shape[1]))
    beside = len(case.lists.rows)
    found = np.zeros(case.rows.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freshet.tables.plan.CHUNK_FLOATS", chunk)
        for shard in range(case.shards):
            places = np.flatnonzero(case.owner == shard)
            part = lists_of_shard(case.lists, places, len(case.rows))
            own = np.zeros((len(places), case.rows.shape[1]))
            own[part.lists.rows] = gradients[part.row_places]
            add_list_gradients(own, gradients[part.sum_places], part.lists.positions, part.lists.counts)
            found[places] = own
    expected = case.occurrences.T @ gradients[beside:]
    expected[case.lists.rows] += gradients[:beside]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@given(case=cases())
def test_a_shard_of_all_rows_has_the_lists_as_they_are(case: Case) -> None:
    whole = lists_of_shard(case.lists, None, len(case.rows))
    assert whole.lists is case.lists
    values = case.rows.astype(np.float32)
    looked_up = case.lists.looked_up(values)
    np.testing.assert_array_equal(looked_up[whole.row_places], values[case.lists.rows])
    np.testing.assert_allclose(looked_up[whole.sum_places], case.occurrences @ values, atol=1e-4)
    spread = case.lists.row_gradients(looked_up, len(values))
    expected = case.occurrences.T @ looked_up[whole.sum_places].astype(np.float64)
    expected[case.lists.rows] += looked_up[whole.row_places]
    np.testing.assert_allclose(spread, expected, rtol=1e-4, atol=1e-3)


def test_rows_are_sorted_by_more_than_sixteen_bits() -> None:
    rows = (1 << 16) + 2
    positions = np.array([rows - 1, 1, rows - 1, 0], np.int32)
    into: F64 = np.zeros((rows, 1))
    gradients: F64 = np.array([[1.0], [10.0]])
    add_list_gradients(into, gradients, positions, np.array([3, 1], np.uint32))
    assert {i: into[i, 0] for i in np.flatnonzero(into[:, 0]).tolist()} == {0: 10.0, 1: 1.0, rows - 1: 2.0}
