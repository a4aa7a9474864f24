"""Shard map, as a client of several shards reads it from the claims."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.coordination.assignment import ShardMap, address_of, lease_of, owner_text, slices_of
from freshet.coordination.claims import Claims
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog

A, B = owner_text("a", "127.0.0.1:7020", "1"), owner_text("b", "host.name:7021", "2")


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[Claims]:
    log = SqliteEventLog(tmp_path)
    log.create_topic("control", partitions=1)
    made = Claims(log, "control")
    yield made
    made.close()
    log.close()


@pytest.mark.parametrize(("buckets", "slices"), [(1024, 64), (64, 64), (16, 16), (2, 2), (65536, 64)])
def test_slices_cover_all_buckets_once(buckets, slices):
    made = slices_of(buckets)
    assert len(made) == slices
    assert [b for part in made.values() for b in part] == list(range(buckets))


def test_owner_text_contains_address_and_membership_lease():
    assert (address_of(B), lease_of(B)) == ("host.name:7021", "shard:b")
    assert (address_of("trainer-17"), lease_of("trainer-17")) == (None, None)


def test_owners_follow_the_claims_and_every_change_has_a_number(claims):
    owners = ShardMap(claims, 4)
    names = list(slices_of(4))
    with pytest.raises(Unavailable, match="4 of 4 buckets have no owner"):
        owners().check_whole()

    soon = time.monotonic() + 30
    first = claims.acquire_all(names[:3], A, soon)
    claims.acquire_all(names[3:], B, soon)
    owners().check_whole()
    assert [owners().addresses[i] for i in owners().of_bucket] == ["127.0.0.1:7020"] * 3 + ["host.name:7021"]

    number = owners().number
    assert owners().number == number, "nothing has changed"
    first.release([names[0]])
    claims.acquire(names[0], B, soon)
    assert owners().number > number
    assert [owners().addresses[i] for i in owners().of_bucket].count("host.name:7021") == 2


def test_slices_of_an_embedded_shard_have_no_address(claims):
    claims.acquire_all(list(slices_of(4)), "trainer-17", time.monotonic() + 30)
    with pytest.raises(Unavailable, match="no owner"):
        ShardMap(claims, 4)().check_whole()
