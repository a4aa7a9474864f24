from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.embedder.batch_builder import GroupPlaces, pooled, pools_of
from freshet.testing.reference import ReferenceRowService
from freshet.types import F32, U32

DIM = 3


class PoolingRows(ReferenceRowService):
    def pooling_shards(self) -> int:
        return 1


def group(lists: Sequence[Sequence[Sequence[int]] | Sequence[int]], samples: int) -> GroupPlaces:
    """Return a group with these features: a row of each sample, or a list of rows; -1: null."""
    positions: list[int] = []
    starts, ends_of = [0], list[U32 | None]()
    for feature in lists:
        of: list[Any] = list(feature)
        assert len(of) == samples
        if isinstance(of[0], list):
            ends_of.append(np.cumsum([len(one) for one in of]).astype(np.uint32))
            positions += [p for one in of for p in one]
        else:
            ends_of.append(None)
            positions += of
        starts.append(len(positions))
    return GroupPlaces(np.array(positions, np.int32), np.array(starts, np.uint32), ends_of)


def vectors(places: GroupPlaces, rows: F32, pools: Sequence[str | None]) -> F32:
    """Return (B, F, S) what the model sees of each feature, in float64."""
    seen = []
    for f, ends in enumerate(places.list_ends):
        own = places.positions[places.feature_starts[f] : places.feature_starts[f + 1]]
        parts = own[:, None] if ends is None else np.split(own, ends[:-1])
        column = []
        for part in parts:
            held = rows[part[part >= 0]].astype(np.float64)
            scale = len(held) if pools[f] == "mean" and len(held) else 1
            column.append(held.sum(0) / scale)
        seen.append(column)
    return np.array(seen).swapaxes(0, 1)


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupPlaces, int, list[str | None]]:
    samples, unique = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    row = st.integers(-1, unique - 1)
    single = st.lists(row, min_size=samples, max_size=samples)
    several = st.lists(st.lists(row, max_size=30), min_size=samples, max_size=samples)
    kinds = draw(st.lists(st.sampled_from([None, "sum", "mean"]), min_size=1, max_size=4))
    features: list[Any] = [draw(several) if kind else draw(single) for kind in kinds]
    return group(features, samples), unique, kinds


@given(drawn=groups(), shards=st.integers(1, 3))
def test_the_model_sees_the_same_vectors(
    drawn: tuple[GroupPlaces, int, list[str | None]], shards: int
) -> None:
    places, unique, pools = drawn
    found = pooled(places, unique, pools, shards)
    if found is None:
        return
    rows = np.random.default_rng(1).normal(0, 1, (unique, DIM)).astype(np.float32)
    values = found.lists.looked_up(rows)
    values[len(found.lists.rows) :] *= found.factors
    np.testing.assert_allclose(vectors(found.places, values, pools), vectors(places, rows, pools), atol=1e-5)
    used = found.places.positions[found.places.positions >= 0]
    assert set(used.tolist()) == set(range(len(found.lists))), "no row or list travels for nothing"


WIDE = [list(range(20)), list(range(5, 25))]


@pytest.mark.parametrize(("shards", "sums"), [(1, 2), (6, 2), (7, 0)])
def test_lists_are_pooled_where_sums_are_half_of_their_rows(shards: int, sums: int) -> None:
    """25 unique rows, and up to a sum from each shard for each of two lists."""
    found = pooled(group([WIDE], 2), 25, ["mean"], shards)
    assert (0 if found is None else len(found.lists.counts)) == sums


def test_each_list_feature_is_chosen_by_itself() -> None:
    places = group([[3, -1], WIDE, [[1, 1, 1, 1], [1, 1, 1, 1]]], 2)
    found = pooled(places, 25, [None, "sum", "mean"], 1)
    assert found is not None
    assert found.lists.rows.tolist() == [1, 3]
    assert found.places.positions.tolist() == [1, -1, 2, 3, *[0] * 8]
    assert found.factors.tolist() == [[1.0], [1.0]]


def test_nulls_do_not_count_and_empty_lists_have_no_sum() -> None:
    found = pooled(group([[[0, -1, 1, 2], [], [-1, -1]]], 3), 3, ["mean"], 1)
    assert found is not None
    assert found.factors.tolist() == [[np.float32(1) / np.float32(3)]]
    assert [ends.tolist() for ends in found.places.list_ends if ends is not None] == [[1, 1, 1]]


CHOICES: Mapping[str, tuple[type[ReferenceRowService], str, bool, bool]] = {
    "a network whose rows stand still": (PoolingRows, "dlrm", False, True),
    "copies of rows are stepped": (PoolingRows, "dlrm", True, False),
    "a native model": (PoolingRows, "hedge", False, False),
    "a class of the user": (PoolingRows, "towers:Net", False, False),
    "rows of this process": (ReferenceRowService, "dlrm", False, False),
}


@pytest.mark.parametrize("case", CHOICES)
def test_lists_are_pooled_only_where_that_is_exact(case: str) -> None:
    kind, model, states, expected = CHOICES[case]
    assert (pools_of(kind([2], {0: 0}), model, states=states) is not None) == expected
