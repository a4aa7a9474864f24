from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.paramserver.planning import next_plan

seats = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=6, unique=True)


@given(living=seats, current=st.lists(st.sampled_from([None, *"abcdefgxyz"]), min_size=1, max_size=64))
def test_every_slice_has_a_living_seat_and_none_has_two_more_than_another(living, current):
    planned = next_plan(current, living)

    assert len(planned) == len(current)
    counts = Counter({seat: planned.count(seat) for seat in living})
    assert sum(counts.values()) == len(current), "nobody else has one"
    assert max(counts.values()) - min(counts.values()) <= 1


@given(living=seats, current=st.lists(st.sampled_from([None, *"abcdefgxyz"]), min_size=1, max_size=64))
def test_a_plan_of_the_same_seats_changes_nothing(living, current):
    planned = next_plan(current, living)
    assert next_plan(planned, list(reversed(living))) == planned


def test_one_that_joins_is_given_its_share_and_no_other_slice_moves():
    before = next_plan([None] * 64, ["a", "b"])
    after = next_plan(before, ["a", "b", "c"])
    moved = [i for i in range(64) if before[i] != after[i]]
    assert (len(moved), {after[i] for i in moved}) == (21, {"c"})


def test_slices_of_one_that_leaves_go_to_the_others_and_no_other_slice_moves():
    before = next_plan([None] * 64, ["a", "b", "c"])
    after = next_plan(before, ["a", "c"])
    assert {before[i] for i in range(64) if before[i] != after[i]} == {"b"}


def test_a_plan_without_a_living_shard_is_an_error():
    with pytest.raises(ValueError, match="lives"):
        next_plan(["a"], [])
