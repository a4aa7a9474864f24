"""Retention is held for the slices of a leaving shard until others serve them, and no longer.

Log, claims and rows are real; samples are so old that retention removes all that is not held.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from freshet.clock import SYSTEM_CLOCK
from freshet.coordination.assignment import slices_of
from freshet.coordination.claims import Claims
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver.balancer import Bounds, LoadBalancer
from freshet.paramserver.shard_manager import ShardManager
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.eventlog import append_to
from freshet.testing.contracts.rowservice import push_of
from freshet.types import TopicPartition
from tests.fixtures.shards import PARSED, TOPICS, shard_of

SAMPLES = TopicPartition(TOPICS.samples, 0)
SLICES = list(slices_of(PARSED.buckets))
RECORDS = 5
WITHIN_S = 60.0


class Member:
    """A shard with its manager, stepped by the test."""

    def __init__(self, log: SqliteEventLog, rows: SqliteRowStore, name: str) -> None:
        self.shard = shard_of(log, rows, name)
        self.shard.buckets.create()
        self.claims = Claims(log, TOPICS.control, lease_s=60.0)  # longer than a test waits
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

    def join(self) -> None:
        self.manager.join(SYSTEM_CLOCK.monotonic() + WITHIN_S)

    def step(self) -> None:
        """Run a round; a claim that was not read back in time is repeated in the next one."""
        with suppress(Unavailable):
            self.manager.step()
        while self.shard.buckets.has_work:
            self.shard.buckets.load_next_part()

    def learn(self) -> None:
        """Apply all samples and flush."""
        self.shard.push(push_of({0: (0, RECORDS)}, {}))
        self.shard.flush()


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[SqliteRowStore]:
    made = SqliteRowStore(tmp_path / "rows.sqlite")
    yield made
    made.close()


@pytest.fixture
def members(log: SqliteEventLog, rows: SqliteRowStore) -> Iterator[list[Member]]:
    """A shard that serves every slice untrained, and one that has not joined yet."""
    for _ in range(RECORDS):
        log.writer().append([append_to(SAMPLES, [b"a block"], times=[1])])
    made = [Member(log, rows, name) for name in "ab"]
    made[0].join()
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
    """Return the start of `samples` after retention has removed all that is not held."""
    while log.enforce_retention():
        pass
    return log.bounds(SAMPLES).start


def test_retention_is_released_once_others_serve_the_slices(
    members: list[Member], log: SqliteEventLog
) -> None:
    a, b = members
    b.join()
    leaving = threading.Thread(target=lambda: a.manager.leave(SYSTEM_CLOCK.monotonic() + WITHIN_S))
    leaving.start()
    step_until([b], lambda: not leaving.is_alive())
    a.manager.drain()
    a.shard.stop()
    b.learn()
    assert len(b.manager.slices) == len(SLICES)
    assert kept_from(log) == RECORDS


def test_retention_is_held_for_slices_without_a_new_owner(members: list[Member], log: SqliteEventLog) -> None:
    """The other shard lacks memory, or has not claimed them yet."""
    a, b = members
    b.join()
    a.manager.drain()
    a.shard.stop()
    assert kept_from(log) == 0


def test_a_restarted_shard_holds_retention_until_it_claims(
    members: list[Member], log: SqliteEventLog, rows: SqliteRowStore
) -> None:
    """The row store may be away, or the lease of the earlier process run, for many flushes."""
    again = shard_of(log, rows, "a")
    again.flush()
    assert kept_from(log) == 0


def test_retention_is_held_for_lost_slices_until_served(members: list[Member], log: SqliteEventLog) -> None:
    a, b = members
    lost = SLICES[0]
    fence = a.claims.owners()[lost].fence
    assert b.claims.replace(lost, "b@127.0.0.1:1/1", fence, SYSTEM_CLOCK.monotonic() + WITHIN_S)
    step_until([a], lambda: lost not in a.manager.slices)
    a.learn()
    assert kept_from(log) == 0
