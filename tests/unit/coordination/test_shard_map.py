"""Shard map, as a client of several shards reads it from the claims."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from freshet.coordination import assignment
from freshet.coordination.assignment import Owners, ShardMap, address_of, lease_of, owner_text, slices_of
from freshet.coordination.claim_rules import Claim
from freshet.coordination.claims import Claims
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.types import Fence

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

    soon = time.monotonic() + 60
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
    claims.acquire_all(list(slices_of(4)), "trainer-17", time.monotonic() + 60)
    with pytest.raises(Unavailable, match="no owner"):
        ShardMap(claims, 4)().check_whole()


def test_a_slow_read_of_claims_keeps_no_former_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = threading.Event()  # the second caller has its answer, or waits for the first

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                settled.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    class Changing:
        """Claims that another process replaces while the first caller reads them."""

        changes = 1
        owner, fence = A, 1

        def owners(self) -> dict[str, Claim]:
            read = {name: Claim(name, self.owner, Fence(self.fence)) for name in slices_of(2)}
            if self.changes == 1:
                self.changes, self.owner, self.fence = 2, B, 2
                second.start()
                assert settled.wait(60)
            return read

    def call_second() -> None:
        found.append(owners())
        settled.set()

    monkeypatch.setattr(assignment, "threading", SimpleNamespace(Lock=Lock), raising=False)
    owners, found = ShardMap(cast(Claims, Changing()), 2), list[Owners]()
    second = threading.Thread(target=call_second)
    found.append(owners())
    second.join(60)

    newest = max(found, key=lambda one: one.number)
    assert newest.addresses == ("host.name:7021",)
    assert owners() is newest
