"""Shards that have not memory for everything: who comes first takes what it has room for, and all is served
once there are enough of them. Claims are real, on a log of SQLite; rows are only counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from freshet.coordination.claim_rules import Load, SliceLoad
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver import balancer, shard_manager
from freshet.paramserver.balance_rules import BalanceRules, Decision, PlanReason
from freshet.paramserver.placement import Memory, next_plan, overfull
from freshet.types import I64, Bucket, Fence
from tests.unit.paramserver.test_handing_over import BUCKETS, SLICES, One, Rows, log, step_until, steps

ROWS, ROW_BYTES = 1_000, 100
SLICE_BYTES = ROWS * ROW_BYTES
LIMIT = 40 * SLICE_BYTES + 100

__all__ = ["log"]


class Counted(Rows):
    """A shard whose rows take memory as they come; `load` brings all of them of some buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.here: set[Bucket] = set()
        self.stored_rows = np.zeros(BUCKETS, np.int64)
        self.store = SimpleNamespace(
            memory_bytes=0,
            tables=(0,),
            resident_bytes=lambda _: ROW_BYTES,
            memory=lambda: SimpleNamespace(rows={0: self.store.memory_bytes // ROW_BYTES}),
        )
        self.most = 0

    def count_stored(self) -> I64:
        return np.full(BUCKETS, ROWS)

    def claim_buckets(self, buckets: Sequence[Bucket], fence: Fence, *, whole: bool) -> int:
        self.here.update(buckets)
        self.loading = sorted({*self.loading, *buckets})
        self.stored_rows[buckets] = ROWS
        self._count()
        return super().claim_buckets(buckets, fence, whole=whole)

    def load(self, buckets: int = BUCKETS) -> None:
        self.loading = self.loading[buckets:]
        self._count()

    def revoke(self, buckets: Sequence[Bucket]) -> None:
        self.here.difference_update(buckets)
        self._count()
        super().revoke(buckets)

    def _count(self) -> None:
        self.store.memory_bytes = (len(self.here) - len(self.loading)) * SLICE_BYTES
        self.loader.progress.rows = len(self.loading) * ROWS
        self.most = max(self.most, len(self.here) * SLICE_BYTES)


class Shards:
    """Of these limits, none of which is there yet."""

    def __init__(self, log_: SqliteEventLog, limits: Sequence[int]) -> None:
        self.rows = [Counted() for _ in limits]
        self.all = [
            One(log_, name, rows, limit) for name, rows, limit in zip("abc", self.rows, limits, strict=False)
        ]
        self.there: list[One] = []

    def comes(self) -> One:
        one = self.all[len(self.there)]
        one.sit()
        self.there.append(one)
        return one

    def comes_and_fills(self) -> One:
        """The next one takes 40 slices, and has told of them."""
        number, one = len(self.there), self.comes()
        reported_owner = one.manager._balancer._rules.reported_owner

        def is_full() -> bool:
            self.rows[number].load()
            return sum(reported_owner(i) == one.manager._member for i in range(len(SLICES))) == 40

        step_until(self.there, is_full)
        return one

    def load_until_all_is_served(self, *each: int) -> None:
        """A bucket a round, as where there are many rows; so many slices by each, where that is said."""

        def is_so() -> bool:
            for rows in self.rows:
                rows.load(1)
            if each and [len(one.manager.slices) for one in self.there] != list(each):
                return False
            return all(one.manager.ready is None for one in self.there) and self.served == len(SLICES)

        step_until(self.there, is_so)

    @property
    def served(self) -> int:
        return sum(len(one.manager.slices) for one in self.there)


@pytest.fixture
def two(log: SqliteEventLog) -> Iterator[Shards]:
    made = Shards(log, [LIMIT, LIMIT])
    yield made
    for one in made.all:
        one.claims.close()


def test_who_comes_first_takes_no_more_than_it_has_memory_for(two: Shards) -> None:
    first = two.comes_and_fills()
    steps(two.there, 5)

    assert len(first.manager.slices) == 40
    assert "24 slices do not fit" in (first.manager.ready or "")


def test_it_takes_a_few_before_it_knows_what_rows_take(two: Shards) -> None:
    first = two.comes()
    step_until(two.there, lambda: first.manager.slices)
    steps(two.there, 5)

    assert len(first.manager.slices) == 8


def test_slices_without_rows_are_taken_however_much_of_the_memory_is_no_rows(
    two: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to learn of what rows take."""
    rows = two.rows[0]
    monkeypatch.setattr(rows, "count_stored", lambda: np.zeros(BUCKETS, np.int64))
    monkeypatch.setattr(rows, "_count", lambda: None)
    rows.store.memory_bytes = LIMIT // 3
    rows.store.memory = lambda: SimpleNamespace(rows={0: 0})
    first = two.comes()

    step_until(two.there, lambda: len(first.manager.slices) == len(SLICES))


def test_all_is_served_when_the_others_have_come(two: Shards) -> None:
    first = two.comes()
    step_until(two.there, lambda: first.manager.slices)
    two.comes()
    two.load_until_all_is_served()

    assert sorted(len(one.manager.slices) for one in two.there) == [32, 32]
    assert max(rows.most for rows in two.rows) <= LIMIT


@pytest.mark.parametrize("which", [0, -1])
def test_who_comes_to_a_shard_that_serves_all_takes_what_that_gives_away(
    log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """Whichever slice that is: before it knows what rows take it has room for a few of its own only."""
    made = Shards(log, [70 * SLICE_BYTES, LIMIT])
    first = made.comes()
    made.load_until_all_is_served()
    assert len(first.manager.slices) == len(SLICES)
    giving = first.manager._balancer
    monkeypatch.setattr(giving, "next_to_move", lambda away: [sorted(away)[which]] if away else [])

    made.comes()
    made.load_until_all_is_served(32, 32)

    for one in made.all:
        one.claims.close()


def test_what_is_loading_does_not_count_for_what_is_loaded(two: Shards) -> None:
    """Else slices seemed as large as all of them together, and nobody had room for any."""
    first, rows = two.comes(), two.rows[0]
    step_until(two.there, lambda: first.manager.slices)
    number = rows.loading[0]
    rows.load(1)
    balance = first.manager._balancer._rules
    step_until(two.there, lambda: balance.reported_owner(number) == "shard:a")

    assert balance.sizes()[number] == pytest.approx(SLICE_BYTES, rel=0.01)


def test_a_slice_that_nobody_takes_keeps_no_room_from_being_made(
    two: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan gives a full shard slices of nobody, and takes others from it: it has to give first."""
    monkeypatch.setattr(shard_manager, "UNCLAIMED_S", 0.2)
    first = two.comes_and_fills()
    second = two.comes()
    planned = tuple("shard:a" if i < 34 else "shard:b" for i in range(len(SLICES)))
    monkeypatch.setattr(
        first.manager._balancer._rules, "decide", lambda *_: Decision(planned, PlanReason.MEMBERS)
    )
    two.load_until_all_is_served()

    assert len(second.manager.slices) == 30


@pytest.mark.parametrize(("shards", "room"), [(10, 7.5), (5, 14.4), (3, 22.5)])
def test_no_slice_is_left_where_all_shards_together_have_room(shards: int, room: float) -> None:
    """They come one by one, with equal slices that fill them beyond what plans leave free."""
    seats, plan = [f"shard:{i}" for i in range(shards)], ["shard:0"] * len(SLICES)
    memory = Memory(np.full(len(SLICES), 1.0), dict.fromkeys(seats, room))
    for there in range(1, shards + 1):
        plan = list(next_plan(plan, seats[:there], memory=memory))

    assert overfull(plan, memory) == []


def test_a_shard_that_has_told_nothing_gets_nothing_yet() -> None:
    balance = BalanceRules(4, bound=0.25, interval_s=60.0)
    parts = tuple(SliceLoad(i, 0, 10) for i in range(4))
    balance.record_reports({"a": Load("a", Fence(1), 100, 1_000, parts)}, 0.0)
    assert balance.decide(["a"] * 4, ["a", "b"], 0.0) is None

    balance.record_reports({"b": Load("b", Fence(2), 0, 1_000, ())}, 1.0)
    decided = balance.decide(["a"] * 4, ["a", "b"], 1.0)
    assert decided is not None
    assert decided.owners.count("b") == 2


def test_a_store_that_does_not_answer_for_long_keeps_no_claim_from_saying_why(
    two: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balancer, "COUNT_RETRY_S", 0.0)
    asked: list[int] = []

    def away() -> I64:
        asked.append(1)
        raise Unavailable("the store is away")

    two.rows[0].count_stored = away  # type: ignore[method-assign]
    first = two.comes()
    steps(two.there, 5)
    assert asked
    assert list(first.manager.slices) == []

    first.manager._balancer._count_until_s = 0.0
    step_until(two.there, lambda: len(first.manager.slices) == len(SLICES))
