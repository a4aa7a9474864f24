"""Partition assignment by a rule that each process applies by itself."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.clock import SYSTEM_CLOCK
from freshet.coordination.assignment import PartitionAssignment, assigned_partitions
from freshet.coordination.claims import Claims
from freshet.log.sqlite.event_log import SqliteEventLog


@given(st.lists(st.text(min_size=1), unique=True, min_size=1), st.integers(1, 64))
def test_partitions_are_assigned_evenly_to_one_owner_each(members: list[str], partitions: int) -> None:
    shares = [assigned_partitions(members, member, partitions) for member in members]

    assert sorted(p for share in shares for p in share) == list(range(partitions))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.lists(st.sampled_from("abcd"), unique=True), st.integers(1, 64))
def test_process_without_membership_lease_has_no_partition(members: list[str], partitions: int) -> None:
    assert assigned_partitions(members, "e", partitions) == set()


def test_oldest_member_keeps_its_first_partition() -> None:
    assert 0 in assigned_partitions(["a"], "a", 8) & assigned_partitions(
        ["a", "b"], "a", 8
    ) & assigned_partitions(["a", "b", "c"], "a", 8)


def test_partitions_are_revoked_before_others_claim_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshet.coordination.assignment.CLAIM_S", 20.0)
    log = SqliteEventLog(tmp_path)
    log.create_topic("control", partitions=1)
    claims = [Claims(log, "control", lease_s=60.0) for _ in range(2)]
    a, b = (
        PartitionAssignment(c, "joiner", "join", n, n, 4, SYSTEM_CLOCK)
        for c, n in zip(claims, "ab", strict=True)
    )
    a.join(20.0)
    a.update(lambda _: None)
    assert list(a.fences) == [0, 1, 2, 3]
    b.join(20.0)
    let_go: list[int] = []

    def end(partitions: Iterable[int]) -> None:
        let_go.extend(partitions)
        b.update(lambda _: None)
        assert list(b.fences) == []

    while not let_go:  # until a has read that b has joined
        a.update(end)
    while len(b.fences) < 2:
        b.update(lambda _: None)

    assert sorted(let_go) == list(b.fences) == [1, 3]
    assert list(a.fences) == [0, 2]
    for claim in claims:
        claim.close()
    log.close()
