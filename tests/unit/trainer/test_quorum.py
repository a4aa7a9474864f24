"""Which member writes the next quorum, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.trainer.membership import (
    GRACE_S,
    MembershipSnapshot,
    Quorum,
    decode_quorum,
    encode_quorum,
    may_write_quorum,
    member_of_claim,
)
from freshet.types import Fence

LONG = 10 * GRACE_S


def members(**fences: int) -> dict[int, Fence]:
    return {int(name[1:]): Fence(fence) for name, fence in fences.items()}


def quorum(fence: int, **fences: int) -> Quorum:
    return Quorum(members(**fences), "127.0.0.1:1", 2, Fence(fence))


def writers(snapshot: MembershipSnapshot, former: int | None, waited_s: float) -> list[int]:
    fence = None if former is None else Fence(former)
    return [i for i in snapshot.live if may_write_quorum(snapshot, i, fence, waited_s)]


def test_first_rank_writes_a_quorum_at_once() -> None:
    assert writers(MembershipSnapshot(None, members(s0=1)), None, 0.0) == [0]


def test_lowest_of_several_new_members_writes() -> None:
    assert writers(MembershipSnapshot(None, members(s0=5, s1=3)), None, 0.0) == [0]


def test_joining_rank_waits_until_all_have_left_the_quorum() -> None:
    old = quorum(10, s0=1, s1=2)

    assert writers(MembershipSnapshot(old, members(s0=1, s1=2, s2=11)), None, LONG) == []
    assert writers(MembershipSnapshot(old, members(s0=12, s1=2, s2=11)), None, LONG) == []
    assert writers(MembershipSnapshot(old, members(s0=12, s1=13, s2=11)), None, 0.0) == [0]


def test_former_members_exclude_the_lost_after_the_grace() -> None:
    broken = MembershipSnapshot(
        quorum(10, s0=1, s1=2, s2=3), members(s0=1, s1=12, s2=13)
    )  # rank 0 is dead, but its lease is live

    assert writers(broken, 10, 0.5 * GRACE_S) == []
    assert writers(broken, 10, GRACE_S) == [1]
    assert not may_write_quorum(broken, 1, Fence(10), 2 * GRACE_S, 3 * GRACE_S), "others meet less often"
    assert writers(broken, 9, LONG) == []  # members of an earlier quorum have not observed this failure


def test_excluded_member_waits_only_with_a_new_lease() -> None:
    broken = MembershipSnapshot(quorum(10, s0=1, s1=2, s2=3), members(s0=1, s1=12, s2=13))

    after = Quorum(members(s1=12, s2=13), "", 1, Fence(14), lost=broken.excluded())

    assert MembershipSnapshot(after, broken.live).waiting() == {}
    assert MembershipSnapshot(after, broken.live).excluded() == members(s0=1, s1=12, s2=13)
    assert MembershipSnapshot(after, members(s0=20, s1=12, s2=13)).waiting() == members(s0=20)


def test_waiting_members_replace_a_dead_quorum() -> None:
    assert writers(MembershipSnapshot(quorum(10, s0=1), members(s1=20)), None, 0.0) == [1]


def test_ranks_follow_the_order_of_members() -> None:
    three = quorum(10, s5=3, s1=9, s2=1)

    assert [three.rank(i, Fence(fence)) for i, fence in ((1, 9), (2, 1), (5, 3))] == [0, 1, 2]
    assert three.rank(1, Fence(11)) is None
    assert three.rank(0, Fence(9)) is None


MEMBERS = st.dictionaries(st.integers(0, 99), st.integers(0, 2**53).map(Fence), max_size=9)


@given(MEMBERS, MEMBERS, st.integers(1, 64))
def test_quorum_survives_encoding(members: dict[int, Fence], lost: dict[int, Fence], lanes: int) -> None:
    found = decode_quorum(encode_quorum(members, lost, "[::1]:80", lanes), Fence(7))

    assert found == Quorum(members, "[::1]:80", lanes, Fence(7), lost)


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr))
def test_text_that_is_no_quorum_is_refused(text: str) -> None:
    with pytest.raises(Corrupt):
        decode_quorum(text, Fence(1))


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
def test_quorum_with_wrong_member_store_or_lanes_is_refused(text: str) -> None:
    with pytest.raises(Corrupt, match="fence 1"):
        decode_quorum(text, Fence(1))


def test_member_of_claim_reads_the_name() -> None:
    assert [member_of_claim(what) for what in ("trainer:0", "trainer:17", "trainer:x", "world", "0")] == [
        0,
        17,
        None,
        None,
        None,
    ]
