"""Who writes the next world, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.trainer.membership import GRACE_S, Standing, World, may_write, read_world, seat_of, world_text
from freshet.types import Fence

LONG = 10 * GRACE_S


def seats(**fences: int) -> dict[int, Fence]:
    return {int(name[1:]): Fence(fence) for name, fence in fences.items()}


def world(fence: int, **members: int) -> World:
    return World(seats(**members), "127.0.0.1:1", 2, Fence(fence))


def writers(standing: Standing, former: int | None, waited_s: float) -> list[int]:
    fence = None if former is None else Fence(former)
    return [seat for seat in standing.seats if may_write(standing, seat, fence, waited_s)]


def test_the_first_rank_of_all_makes_a_world_of_its_own_at_once() -> None:
    assert writers(Standing(None, seats(s0=1)), None, 0.0) == [0]


def test_of_ranks_that_begin_together_the_lowest_seat_writes() -> None:
    assert writers(Standing(None, seats(s0=5, s1=3)), None, 0.0) == [0]


def test_who_joins_a_world_waits_until_all_have_left_it() -> None:
    old = world(10, s0=1, s1=2)

    assert writers(Standing(old, seats(s0=1, s1=2, s2=11)), None, LONG) == []
    assert writers(Standing(old, seats(s0=12, s1=2, s2=11)), None, LONG) == []
    assert writers(Standing(old, seats(s0=12, s1=13, s2=11)), None, 0.0) == [0]


def test_who_saw_its_world_break_goes_on_without_the_lost_after_a_grace() -> None:
    broken = Standing(
        world(10, s0=1, s1=2, s2=3), seats(s0=1, s1=12, s2=13)
    )  # rank 0 is gone, its claim is not

    assert writers(broken, 10, 0.5 * GRACE_S) == []
    assert writers(broken, 10, GRACE_S) == [1]
    assert writers(broken, 9, LONG) == []  # of an earlier world: they have not seen this one break


def test_a_lost_rank_whose_claim_still_lives_does_not_wait_until_it_claims_its_seat_anew() -> None:
    broken = Standing(world(10, s0=1, s1=2, s2=3), seats(s0=1, s1=12, s2=13))

    after = World(seats(s1=12, s2=13), "", 1, Fence(14), lost=broken.left_out())

    assert Standing(after, broken.seats).waiting() == {}
    assert Standing(after, broken.seats).left_out() == seats(s0=1, s1=12, s2=13)
    assert Standing(after, seats(s0=20, s1=12, s2=13)).waiting() == seats(s0=20)


def test_when_all_members_are_gone_those_who_wait_begin_without_them() -> None:
    assert writers(Standing(world(10, s0=1), seats(s1=20)), None, 0.0) == [1]


def test_ranks_are_in_the_order_of_seats_and_a_seat_that_was_claimed_anew_has_none() -> None:
    three = world(10, s5=3, s1=9, s2=1)

    assert [three.rank(seat, Fence(fence)) for seat, fence in ((1, 9), (2, 1), (5, 3))] == [0, 1, 2]
    assert three.rank(1, Fence(11)) is None
    assert three.rank(0, Fence(9)) is None


SEATS = st.dictionaries(st.integers(0, 99), st.integers(0, 2**53).map(Fence), max_size=9)


@given(SEATS, SEATS, st.integers(1, 64))
def test_a_world_reads_as_it_was_written(
    members: dict[int, Fence], lost: dict[int, Fence], lanes: int
) -> None:
    found = read_world(world_text(members, lost, "[::1]:80", lanes), Fence(7))

    assert found == World(members, "[::1]:80", lanes, Fence(7), lost)


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr))
def test_what_names_no_world_is_refused(text: str) -> None:
    with pytest.raises(Corrupt):
        read_world(text, Fence(1))


@pytest.mark.parametrize(
    "text",
    [
        '{"members": [[0, "1"]], "store": "a:1", "lanes": 1, "lost": []}',
        '{"members": [[0, 1]], "store": "a:1", "lanes": 0, "lost": []}',
        '{"members": [[0, 1]], "store": 1, "lanes": 1, "lost": []}',
        '{"members": [[0]], "store": "a:1", "lanes": 1, "lost": []}',
        '{"members": [[0, 1]], "store": "a:1", "lanes": 1, "lost": [[1, 2, 3]]}',
        '{"members": [[true, 1]], "store": "a:1", "lanes": 1, "lost": []}',
    ],
)
def test_a_world_with_a_wrong_member_store_or_lanes_is_refused(text: str) -> None:
    with pytest.raises(Corrupt, match="fence 1"):
        read_world(text, Fence(1))


def test_a_seat_is_told_by_its_name() -> None:
    assert [seat_of(what) for what in ("trainer:0", "trainer:17", "trainer:x", "world", "0")] == [
        0,
        17,
        None,
        None,
        None,
    ]
