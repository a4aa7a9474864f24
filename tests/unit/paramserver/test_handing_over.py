"""Slices change owners a few at a time, the next ones when the last are served.

Claims are real, on an SQLite log; shards only record calls.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from freshet.clock import SYSTEM_CLOCK
from freshet.coordination.assignment import slices_of
from freshet.coordination.claim_rules import state_record
from freshet.coordination.claims import LEASE_S
from freshet.errors import Corrupt, Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver.balancer import MOVED_ROWS, MOVED_SLICES
from freshet.paramserver.shard_manager import DAMAGED_RETRY_S
from freshet.testing.conditions import wait_until
from freshet.types import Append, Bucket, BytesColumn, Fence, TopicPartition
from tests.unit.paramserver.managers import (
    BUCKETS,
    SLICES,
    WITHIN_S,
    Managed,
    Rows,
    step_until,
    steps,
)

CONTROL = TopicPartition("control", 0)


@pytest.fixture
def shards(control_log: SqliteEventLog) -> Iterator[list[Managed]]:
    """Two shards that own all slices, and one that has just joined."""
    made = [Managed(control_log, name) for name in "abc"]
    for each in made[:2]:
        each.join()
    step_until(made[:2], lambda: [len(one.manager.slices) for one in made] == [32, 32, 0])
    made[2].join()
    for each in made:
        each.rows.given.clear()
        each.rows.given_at_once.clear()
    yield made
    for each in made:
        each.claims.close()


def test_no_slice_is_revoked_until_the_last_ones_are_served(shards: list[Managed]) -> None:
    a, b, c = shards
    step_until([a, b], lambda: a.rows.given_at_once or b.rows.given_at_once)
    steps([a, b], 5)
    assert [len(a.rows.given_at_once), len(b.rows.given_at_once)] == [1, 0], "nobody has taken them yet"

    step_until(shards, lambda: len(c.manager.slices) == 21)
    assert len(c.rows.loaded) == 21
    assert len(a.rows.given) + len(b.rows.given) >= 21
    assert max(a.rows.given_at_once + b.rows.given_at_once) <= MOVED_SLICES


@pytest.mark.slow
def test_slices_with_many_rows_are_revoked_one_by_one(shards: list[Managed]) -> None:
    a, b, c = shards
    for each in (a, b):
        each.rows.stored_rows[:] = MOVED_ROWS + 1
    step_until(shards, lambda: len(c.manager.slices) == 21)
    assert set(a.rows.given_at_once + b.rows.given_at_once) == {1}


def test_the_next_slices_are_revoked_once_the_last_are_loaded(shards: list[Managed]) -> None:
    a, b, c = shards
    c.rows.still_loading = [Bucket(i) for i in range(BUCKETS)]
    step_until(shards, lambda: len(c.manager.slices) > 0)
    steps(shards, 5)
    assert len(a.rows.given_at_once) + len(b.rows.given_at_once) == 1
    c.rows.still_loading = []
    step_until(shards, lambda: len(c.manager.slices) == 21)


def test_a_shard_knows_the_claims_that_it_replaces(shards: list[Managed]) -> None:
    a, b, c = shards
    buckets = map(Bucket, range(BUCKETS))
    fences = {bucket: max(one.rows.fences.get(bucket, Fence(-1)) for one in (a, b)) for bucket in buckets}

    step_until(shards, lambda: len(c.manager.slices) == 21)

    assert c.rows.former == {bucket: fences[bucket] for bucket in c.rows.fences}


def test_a_claim_that_failed_is_not_the_one_before(shards: list[Managed]) -> None:
    """Its fence reached no reader, so nothing has to be published again."""
    a, b, c = shards
    buckets = map(Bucket, range(BUCKETS))
    fences = {bucket: max(one.rows.fences.get(bucket, Fence(-1)) for one in (a, b)) for bucket in buckets}
    failures = [Corrupt("damaged"), Unavailable("away"), Unavailable("away")]
    claim = c.rows.claim

    def fail(*arguments: Any, **options: Any) -> int:
        if failures:
            raise failures.pop()
        return claim(*arguments, **options)

    c.rows.claim = fail  # type: ignore[method-assign]
    step_until(shards, lambda: len(c.manager.slices) == 21)

    assert not failures
    assert c.rows.former == {bucket: fences[bucket] for bucket in c.rows.fences}


def test_a_loading_slice_is_not_revoked(shards: list[Managed]) -> None:
    a, b, c = shards
    a.rows.still_loading = [Bucket(i) for i in range(BUCKETS)]
    step_until(shards, lambda: (plan := c.claims.plan()) is not None and "shard:c" in plan.owners)
    steps(shards, 5)
    assert (a.rows.given, b.rows.given) == ([], []), "and others wait for their turn"
    a.rows.still_loading = []
    step_until(shards, lambda: len(c.manager.slices) == 21)


def test_a_leaving_shard_serves_until_others_have_loaded(shards: list[Managed]) -> None:
    a, b, c = shards
    step_until(shards, lambda: len(c.manager.slices) == 21)
    leaving = threading.Thread(target=lambda: c.manager.leave(SYSTEM_CLOCK.monotonic() + WITHIN_S))
    leaving.start()
    step_until([a, b], lambda: not leaving.is_alive())
    assert list(c.manager.slices) == []
    assert max(c.rows.given_at_once) <= MOVED_SLICES
    step_until([a, b], lambda: len(a.manager.slices) + len(b.manager.slices) == len(SLICES))


def test_the_only_shard_leaves_without_a_wait(control_log: SqliteEventLog) -> None:
    only = Managed(control_log, "a")
    only.join()
    step_until([only], lambda: len(only.manager.slices) == len(SLICES))
    only.manager.leave(SYSTEM_CLOCK.monotonic() + WITHIN_S)
    assert len(only.manager.slices) == len(SLICES), "they are for `drain`"
    only.manager.drain()
    assert len(only.rows.given) == BUCKETS
    only.claims.close()


@pytest.mark.slow
def test_a_leader_without_a_plan_publishes_the_current_owners(control_log: SqliteEventLog) -> None:
    """A `control` topic trimmed by an earlier release has claims without a plan."""
    before = Managed(control_log, "a")
    before.join()
    step_until([before], lambda: len(before.manager.slices) == len(SLICES))
    before.manager.drain()
    claims = before.claims.snapshot()[0]
    before.claims.close()
    upto = control_log.bounds(CONTROL).end
    control_log.writer().append(
        [Append("control", 0, BytesColumn.of([state_record(upto, claims.values(), None)]))]
    )
    control_log.trim(CONTROL, upto)

    after = Managed(control_log, "a", lease_s=LEASE_S)  # the claims of the one before end
    after.join()
    step_until([after], lambda: len(after.manager.slices) == len(SLICES))
    after.claims.close()


def test_retention_is_released_once_others_report_the_slices(shards: list[Managed]) -> None:
    """Until then retention is held for them."""
    former = shards[0]
    reporters: list[str | None] = []

    def note(buckets: Sequence[Bucket]) -> None:
        slices = [what for what, of in slices_of(BUCKETS).items() if not set(of).isdisjoint(buckets)]
        reporters.extend(former.balancer.reported_owner(what) for what in slices)

    former.rows.on_drop = note
    given = former.rows.given
    step_until(shards, lambda: given and set(given) <= set(former.rows.dropped))
    assert reporters
    assert set(reporters) <= {"shard:b", "shard:c"}


class WithDamage(Rows):
    """Rows with damaged buckets, until they are repaired."""

    def __init__(self, damaged: set[int]) -> None:
        super().__init__()
        self.damaged = damaged

    def claim(
        self, buckets: Sequence[Bucket], fence: Fence, *, former: Mapping[Bucket, Fence], whole: bool
    ) -> int:
        if not self.damaged.isdisjoint(buckets):
            raise Corrupt(f"bucket {min(self.damaged)}: fails its CRC")
        return super().claim(buckets, fence, former=former, whole=whole)


def test_a_slice_with_damaged_rows_delays_no_other(control_log: SqliteEventLog) -> None:
    rows = WithDamage({0})
    one = Managed(control_log, "a", rows)
    one.join()

    def others_are_served() -> bool:
        with contextlib.suppress(Unavailable):
            one.manager.step()
        return len(one.manager.slices) == 63 and bool(one.manager.damaged)

    with contextlib.closing(one.claims):
        wait_until("all slices but one are served", others_are_served, within_s=WITHIN_S)
        assert list(one.manager.damaged) == [SLICES[0]]
        assert "fails its CRC" in str(one.manager.ready)

        rows.damaged = set()
        one.clock.by_s = DAMAGED_RETRY_S + 1
        step_until([one], lambda: len(one.manager.slices) == 64)
        assert not one.manager.damaged
