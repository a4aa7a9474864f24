"""Slices change owners a few at a time, and the next when the last are served. Claims are real, on a
log of SQLite; shards only note what is asked of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.coordination.claim_rules import state_record
from freshet.coordination.claims import Claims
from freshet.coordination.slices import slices_of
from freshet.errors import Corrupt, Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver.balancer import MOVED_ROWS, MOVED_SLICES, Balancing, Bounds
from freshet.paramserver.shard import Shard
from freshet.paramserver.shard_manager import DAMAGED_AGAIN_S, Keeper
from freshet.types import I64, Append, Bucket, BytesColumn, Fence, TopicPartition
from tests.system.waiting import wait_until

CONTROL = TopicPartition("control", 0)
BUCKETS = 64
SLICES = list(slices_of(BUCKETS))
WITHIN_S = 20.0


class Rows:
    """What a keeper asks of a shard."""

    failed = None

    def __init__(self) -> None:
        self.stored_rows = np.full(BUCKETS, 10)
        self.loaded: list[int] = []
        self.given: list[int] = []
        self.given_at_once: list[int] = []
        self.dropped: list[int] = []
        self.on_drop: Callable[[Sequence[Bucket]], None] = lambda _: None
        self.loading: list[Bucket] = []
        self.store = SimpleNamespace(
            memory_bytes=1_000, tables=(), resident_bytes=int, memory=lambda: SimpleNamespace(rows={})
        )
        self.loader = SimpleNamespace(loading=lambda: self.loading, progress=SimpleNamespace(rows=0))

    def doubtful(self) -> list[Bucket]:
        return []

    def count_stored(self) -> I64:
        return np.zeros(BUCKETS, np.int64)

    def take(self, buckets: Sequence[Bucket], fence: Fence, *, whole: bool) -> int:
        self.loaded += buckets
        return 0

    def give_up(self, buckets: Sequence[Bucket]) -> None:
        self.given += buckets
        self.given_at_once.append(len(buckets))

    def drop(self, buckets: Sequence[Bucket]) -> None:
        self.dropped += buckets
        self.on_drop(buckets)

    def leave(self, buckets: Sequence[Bucket]) -> None:
        pass


class One:
    """A shard's keeper, stepped by hand."""

    def __init__(
        self,
        log: SqliteEventLog,
        name: str,
        rows: Rows | None = None,
        memory_bytes: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.rows = rows or Rows()
        shard = cast(Shard, self.rows)
        self.claims = Claims(log, "control")
        bounds = Bounds(memory_bytes=memory_bytes)
        balancing = Balancing(shard, self.claims, bounds, buckets=BUCKETS, clock=SYSTEM_CLOCK)
        self.keeper = Keeper(
            shard,
            self.claims,
            balancing,
            name=name,
            address="127.0.0.1:1",
            life="1",
            buckets=BUCKETS,
            clock=clock,
        )

    def sit(self) -> None:
        self.keeper.take_seat(SYSTEM_CLOCK.monotonic() + WITHIN_S)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteEventLog]:
    made = SqliteEventLog(tmp_path)
    made.create_topic("control", partitions=1)
    yield made
    made.close()


@pytest.fixture
def shards(log: SqliteEventLog) -> Iterator[list[One]]:
    """Two that share all slices, and one that has just sat down."""
    made = [One(log, name) for name in "abc"]
    for each in made[:2]:
        each.sit()
    step_until(made[:2], lambda: [len(one.keeper.slices) for one in made] == [32, 32, 0])
    made[2].sit()
    for each in made:
        each.rows.given.clear()
        each.rows.given_at_once.clear()
    yield made
    for each in made:
        each.claims.close()


def one_round(one: One) -> None:
    """A round that is made: on a busy machine a claim may take too long to be read back, and is made in the
    next one."""

    def is_made() -> bool:
        try:
            one.keeper.step()
        except Unavailable:
            return False
        return True

    wait_until("a round is made", is_made, within_s=WITHIN_S)


def step_until(shards: Sequence[One], holds: Any) -> None:
    def is_so() -> bool:
        for each in shards:
            one_round(each)
        return bool(holds())

    wait_until("slices are where they should be", is_so, within_s=WITHIN_S)


def steps(shards: Sequence[One], times: int) -> None:
    """Rounds, in each of which all that was written is read."""
    for _ in range(times):
        _wait_until_read(shards)
        for each in shards:
            one_round(each)
    _wait_until_read(shards)


def _wait_until_read(shards: Sequence[One]) -> None:
    claims = shards[0].claims
    upto = claims._eventlog.bounds(claims._partition).end
    wait_until("all is read", lambda: all(e.claims._next >= upto for e in shards), within_s=WITHIN_S)


def test_nothing_more_is_given_until_what_was_given_is_served(shards: list[One]) -> None:
    a, b, c = shards
    step_until([a, b], lambda: a.rows.given_at_once or b.rows.given_at_once)
    steps([a, b], 5)
    assert [len(a.rows.given_at_once), len(b.rows.given_at_once)] == [1, 0], "nobody has taken them yet"

    step_until(shards, lambda: len(c.keeper.slices) == 21)
    assert len(c.rows.loaded) == 21
    assert len(a.rows.given) + len(b.rows.given) >= 21
    assert max(a.rows.given_at_once + b.rows.given_at_once) <= MOVED_SLICES


def test_slices_with_many_rows_go_one_by_one(shards: list[One]) -> None:
    a, b, c = shards
    for each in (a, b):
        each.rows.stored_rows[:] = MOVED_ROWS + 1
    step_until(shards, lambda: len(c.keeper.slices) == 21)
    assert set(a.rows.given_at_once + b.rows.given_at_once) == {1}


def test_the_next_go_when_the_last_are_loaded(shards: list[One]) -> None:
    a, b, c = shards
    c.rows.loading = [Bucket(i) for i in range(BUCKETS)]
    step_until(shards, lambda: len(c.keeper.slices) > 0)
    steps(shards, 5)
    assert len(a.rows.given_at_once) + len(b.rows.given_at_once) == 1
    c.rows.loading = []
    step_until(shards, lambda: len(c.keeper.slices) == 21)


def test_what_is_still_loading_is_not_given_away(shards: list[One]) -> None:
    a, b, c = shards
    a.rows.loading = [Bucket(i) for i in range(BUCKETS)]
    step_until(shards, lambda: (plan := c.claims.plan()) is not None and "shard:c" in plan.seats)
    steps(shards, 5)
    assert (a.rows.given, b.rows.given) == ([], []), "and others wait for their turn"
    a.rows.loading = []
    step_until(shards, lambda: len(c.keeper.slices) == 21)


def test_who_leaves_serves_until_others_have_taken_over(shards: list[One]) -> None:
    a, b, c = shards
    step_until(shards, lambda: len(c.keeper.slices) == 21)
    leaving = threading.Thread(target=lambda: c.keeper.leave(SYSTEM_CLOCK.monotonic() + WITHIN_S))
    leaving.start()
    step_until([a, b], lambda: not leaving.is_alive())
    assert list(c.keeper.slices) == []
    assert max(c.rows.given_at_once) <= MOVED_SLICES
    step_until([a, b], lambda: len(a.keeper.slices) + len(b.keeper.slices) == len(SLICES))


def test_who_leaves_alone_does_not_wait(log: SqliteEventLog) -> None:
    only = One(log, "a")
    only.sit()
    step_until([only], lambda: len(only.keeper.slices) == len(SLICES))
    only.keeper.leave(SYSTEM_CLOCK.monotonic() + WITHIN_S)
    assert len(only.keeper.slices) == len(SLICES), "they are for `drain`"
    only.keeper.drain()
    assert len(only.rows.given) == BUCKETS
    only.claims.close()


def test_who_finds_owners_and_no_plan_writes_one(log: SqliteEventLog) -> None:
    """Of a topic that was shortened by an earlier release."""
    before = One(log, "a")
    before.sit()
    step_until([before], lambda: len(before.keeper.slices) == len(SLICES))
    before.keeper.drain()
    claims = before.claims.snapshot()[0]
    before.claims.close()
    upto = log.bounds(CONTROL).end
    log.writer().append([Append("control", 0, BytesColumn.of([state_record(upto, claims.values(), None)]))])
    log.trim(CONTROL, upto)

    after = One(log, "a")
    after.sit()
    step_until([after], lambda: len(after.keeper.slices) == len(SLICES))
    after.claims.close()


def test_what_was_given_away_is_let_go_when_others_have_told_that_they_serve_it(shards: list[One]) -> None:
    """Until then the log is held for it."""
    giver = shards[0]
    tellers: list[str | None] = []

    def note(buckets: Sequence[Bucket]) -> None:
        slices = [what for what, of in slices_of(BUCKETS).items() if not set(of).isdisjoint(buckets)]
        tellers.extend(giver.keeper._balancing.told_by(what) for what in slices)

    giver.rows.on_drop = note
    given = giver.rows.given
    step_until(shards, lambda: given and set(given) <= set(giver.rows.dropped))
    assert tellers
    assert set(tellers) <= {"shard:b", "shard:c"}


class Ahead:
    """The system's clock, some seconds ahead: deadlines are of claims, which have their own."""

    by_s = 0.0

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms()

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.by_s


class WithDamage(Rows):
    """Rows of which some buckets cannot be read, until they are mended."""

    def __init__(self, damaged: set[int]) -> None:
        super().__init__()
        self.damaged = damaged

    def take(self, buckets: Sequence[Bucket], fence: Fence, *, whole: bool) -> int:
        if not self.damaged.isdisjoint(buckets):
            raise Corrupt(f"bucket {min(self.damaged)}: fails its CRC")
        return super().take(buckets, fence, whole=whole)


def test_a_slice_with_damaged_rows_holds_up_no_other(log: SqliteEventLog) -> None:
    rows, clock = WithDamage({0}), Ahead()
    one = One(log, "a", rows, clock=clock)
    one.sit()

    def others_are_served() -> bool:
        with contextlib.suppress(Unavailable):
            one.keeper.step()
        return len(one.keeper.slices) == 63 and bool(one.keeper.damaged)

    with contextlib.closing(one.claims):
        wait_until("all slices but one are served", others_are_served, within_s=WITHIN_S)
        assert list(one.keeper.damaged) == [SLICES[0]]
        assert "fails its CRC" in str(one.keeper.ready)

        rows.damaged = set()
        clock.by_s = DAMAGED_AGAIN_S + 1
        step_until([one], lambda: len(one.keeper.slices) == 64)
        assert not one.keeper.damaged
