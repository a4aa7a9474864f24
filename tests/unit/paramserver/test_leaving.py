"""The log is held for what a shard leaves until others serve it, and no longer. Log, claims and rows are
real; its samples are so old that retention takes whatever nobody holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from freshet.clock import SYSTEM_CLOCK
from freshet.coordination.claims import Claims
from freshet.coordination.slices import slices_of
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver.balancer import Bounds, LoadBalancer
from freshet.paramserver.shard_manager import ShardManager
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.testing.contracts.eventlog import append_to
from freshet.testing.contracts.rowservice import push_of
from freshet.types import TopicPartition
from tests.system.waiting import wait_until
from tests.unit.paramserver.test_bucket_loader import shard_of
from tests.unit.paramserver.test_published import PARSED, TOPICS, log

__all__ = ["log"]

SAMPLES = TopicPartition(TOPICS.samples, 0)
SLICES = list(slices_of(PARSED.buckets))
RECORDS = 5
WITHIN_S = 20.0


class Member:
    """A shard with its keeper, stepped by hand."""

    def __init__(self, log: SqliteEventLog, rows: SqliteRowStore, name: str) -> None:
        self.shard = shard_of(log, rows, name)
        self.shard.create()
        self.claims = Claims(log, TOPICS.control)
        balancer = LoadBalancer(self.shard, self.claims, Bounds(), buckets=PARSED.buckets, clock=SYSTEM_CLOCK)
        self.manager = ShardManager(
            self.shard,
            self.claims,
            balancer,
            name=name,
            address="127.0.0.1:1",
            life="1",
            buckets=PARSED.buckets,
            clock=SYSTEM_CLOCK,
        )

    def sit(self) -> None:
        self.manager.join(SYSTEM_CLOCK.monotonic() + WITHIN_S)

    def step(self) -> None:
        """A round; a claim that was not read back in time, on a busy machine, is made in the next one."""
        with suppress(Unavailable):
            self.manager.step()
        while self.shard.loader.has_work:
            self.shard.load_next_part()

    def learn(self) -> None:
        """All there is, and write it."""
        self.shard.push(push_of({0: (0, RECORDS)}, {}))
        self.shard.flush()


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[SqliteRowStore]:
    made = SqliteRowStore(tmp_path / "rows.sqlite")
    yield made
    made.close()


@pytest.fixture
def members(log: SqliteEventLog, rows: SqliteRowStore) -> Iterator[list[Member]]:
    """One that serves every slice and has learned nothing, and one that has no seat yet."""
    for _ in range(RECORDS):
        log.writer().append([append_to(SAMPLES, [b"a block"], times=[1])])
    made = [Member(log, rows, name) for name in "ab"]
    made[0].sit()
    step_until(made[:1], lambda: len(made[0].manager.slices) == len(SLICES))
    made[0].shard.flush()
    yield made
    for each in made:
        each.claims.close()


def step_until(members: Sequence[Member], condition) -> None:
    def is_so() -> bool:
        for each in members:
            each.step()
        return bool(condition())

    wait_until("slices are where they should be", is_so, within_s=WITHIN_S)


def kept_from(log: SqliteEventLog) -> int:
    """Where the log of samples starts once retention has taken what it may."""
    while log.enforce_retention():
        pass
    return log.bounds(SAMPLES).start


def test_who_has_left_holds_the_log_no_longer_once_others_serve_what_it_had(
    members: list[Member], log: SqliteEventLog
) -> None:
    a, b = members
    b.sit()
    leaving = threading.Thread(target=lambda: a.manager.leave(SYSTEM_CLOCK.monotonic() + WITHIN_S))
    leaving.start()
    step_until([b], lambda: not leaving.is_alive())
    a.manager.drain()
    a.shard.stop()
    b.learn()
    assert len(b.manager.slices) == len(SLICES)
    assert kept_from(log) == RECORDS


def test_who_leaves_what_nobody_takes_keeps_the_log_held(members: list[Member], log: SqliteEventLog) -> None:
    """The other one has no room for them, or has not come to it."""
    a, b = members
    b.sit()
    a.manager.drain()
    a.shard.stop()
    assert kept_from(log) == 0


def test_a_shard_that_begins_again_keeps_its_hold_until_it_has_taken_slices(
    members: list[Member], log: SqliteEventLog, rows: SqliteRowStore
) -> None:
    """The row store may be away, or the lease of its earlier life not be over, for many flushes."""
    again = shard_of(log, rows, "a")
    again.flush()
    assert kept_from(log) == 0


def test_slices_that_were_lost_are_held_until_who_claimed_them_serves_them(
    members: list[Member], log: SqliteEventLog
) -> None:
    a, b = members
    lost = SLICES[0]
    fence = a.claims.owners()[lost].fence
    assert b.claims.replace(lost, "b@127.0.0.1:1/1", fence, SYSTEM_CLOCK.monotonic() + WITHIN_S)
    step_until([a], lambda: lost not in a.manager.slices)
    a.learn()
    assert kept_from(log) == 0
