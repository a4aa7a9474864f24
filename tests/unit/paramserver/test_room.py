"""Shards with too little memory for all slices, until enough shards have joined.

Claims are real, on an SQLite log; rows are only counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from freshet.coordination.claim_rules import Load, SliceLoad
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver import balancer, shard_manager
from freshet.paramserver.placement import BalanceRules, Decision, Memory, PlanReason, next_plan, overfull
from freshet.types import I64, Bucket, Fence
from tests.unit.paramserver.managers import BUCKETS, SLICES, Managed, Rows, step_until, steps

ROWS, ROW_BYTES = 1_000, 100
SLICE_BYTES = ROWS * ROW_BYTES
LIMIT = 40 * SLICE_BYTES + 100


class Counted(Rows):
    """A shard that counts the memory of its rows; `load` loads those of some buckets."""

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

    def claim(
        self, buckets: Sequence[Bucket], fence: Fence, *, former: Mapping[Bucket, Fence], whole: bool
    ) -> int:
        self.here.update(buckets)
        self.still_loading = sorted({*self.still_loading, *buckets})
        self.stored_rows[buckets] = ROWS
        self.count_memory()
        return super().claim(buckets, fence, former=former, whole=whole)

    def load(self, buckets: int = BUCKETS) -> None:
        self.still_loading = self.still_loading[buckets:]
        self.count_memory()

    def revoke(self, buckets: Sequence[Bucket]) -> None:
        self.here.difference_update(buckets)
        self.count_memory()
        super().revoke(buckets)

    def count_memory(self) -> None:
        self.store.memory_bytes = (len(self.here) - len(self.still_loading)) * SLICE_BYTES
        self.progress.rows = len(self.still_loading) * ROWS
        self.most = max(self.most, len(self.here) * SLICE_BYTES)


class Shards:
    """Shards with these memory limits; none has joined yet."""

    def __init__(self, log_: SqliteEventLog, limits: Sequence[int]) -> None:
        self.rows = [Counted() for _ in limits]
        self.all = [
            Managed(log_, name, rows, limit)
            for name, rows, limit in zip("abc", self.rows, limits, strict=False)
        ]
        self.joined: list[Managed] = []

    def add_shard(self) -> Managed:
        one = self.all[len(self.joined)]
        one.join()
        self.joined.append(one)
        return one

    def add_full_shard(self) -> Managed:
        """Add the next shard, and wait until it has claimed and reported 40 slices."""
        number, one = len(self.joined), self.add_shard()
        reported_owner = one.balancer.rules.reported_owner

        def is_full() -> bool:
            self.rows[number].load()
            return sum(reported_owner(i) == one.member for i in range(len(SLICES))) == 40

        step_until(self.joined, is_full)
        return one

    def load_until_all_is_served(self, *each: int) -> None:
        """Load a bucket a round until all slices are served; `each`: slices of each shard, if given."""

        def is_so() -> bool:
            for rows in self.rows:
                rows.load(1)
            if each and [len(one.manager.slices) for one in self.joined] != list(each):
                return False
            return all(one.manager.ready is None for one in self.joined) and self.served == len(SLICES)

        step_until(self.joined, is_so)

    @property
    def served(self) -> int:
        return sum(len(one.manager.slices) for one in self.joined)


@pytest.fixture
def two(control_log: SqliteEventLog) -> Iterator[Shards]:
    made = Shards(control_log, [LIMIT, LIMIT])
    yield made
    for one in made.all:
        one.claims.close()


def test_the_first_shard_claims_no_more_than_its_memory_holds(two: Shards) -> None:
    first = two.add_full_shard()
    steps(two.joined, 5)

    assert len(first.manager.slices) == 40
    assert "24 slices do not fit" in (first.manager.ready or "")


def test_few_slices_are_claimed_before_row_bytes_are_measured(two: Shards) -> None:
    first = two.add_shard()
    step_until(two.joined, lambda: first.manager.slices)
    steps(two.joined, 5)

    assert len(first.manager.slices) == 8


def test_slices_without_rows_are_claimed_in_any_memory(two: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes per row cannot be measured."""
    rows = two.rows[0]
    monkeypatch.setattr(rows, "count_stored", lambda: np.zeros(BUCKETS, np.int64))
    monkeypatch.setattr(rows, "count_memory", lambda: None)
    rows.store.memory_bytes = LIMIT // 3
    rows.store.memory = lambda: SimpleNamespace(rows={0: 0})
    first = two.add_shard()

    step_until(two.joined, lambda: len(first.manager.slices) == len(SLICES))


def test_all_slices_are_served_once_other_shards_join(two: Shards) -> None:
    first = two.add_shard()
    step_until(two.joined, lambda: first.manager.slices)
    two.add_shard()
    two.load_until_all_is_served()

    assert sorted(len(one.manager.slices) for one in two.joined) == [32, 32]
    assert max(rows.most for rows in two.rows) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, -1])
def test_a_joining_shard_claims_the_slices_that_are_revoked(
    control_log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """Any slices: before bytes per row are measured it claims only a few."""
    made = Shards(control_log, [70 * SLICE_BYTES, LIMIT])
    first = made.add_shard()
    made.load_until_all_is_served()
    assert len(first.manager.slices) == len(SLICES)
    full_balancer = first.balancer
    monkeypatch.setattr(full_balancer, "next_to_move", lambda away: [sorted(away)[which]] if away else [])

    made.add_shard()
    made.load_until_all_is_served(32, 32)

    for one in made.all:
        one.claims.close()


def test_loading_rows_do_not_count_for_loaded_slices(two: Shards) -> None:
    """Otherwise each slice would count as large as all together, and would fit no shard."""
    first, rows = two.add_shard(), two.rows[0]
    step_until(two.joined, lambda: first.manager.slices)
    number = rows.still_loading[0]
    rows.load(1)
    balance = first.balancer.rules
    step_until(two.joined, lambda: balance.reported_owner(number) == "shard:a")

    assert balance.sizes()[number] == pytest.approx(SLICE_BYTES, rel=0.01)


def test_an_unclaimed_slice_does_not_block_revocations(two: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan gives a full shard unclaimed slices and takes others from it, so it must revoke first."""
    monkeypatch.setattr(shard_manager, "UNCLAIMED_S", 0.2)
    first = two.add_full_shard()
    second = two.add_shard()
    planned = tuple("shard:a" if i < 34 else "shard:b" for i in range(len(SLICES)))
    monkeypatch.setattr(first.balancer.rules, "decide", lambda *_: Decision(planned, PlanReason.MEMBERS))
    two.load_until_all_is_served()

    assert len(second.manager.slices) == 30


@pytest.mark.parametrize(("shards", "room"), [(10, 7.5), (5, 14.4), (3, 22.5)])
def test_every_slice_is_placed_if_total_memory_suffices(shards: int, room: float) -> None:
    """Shards join one by one; equal slices fill them beyond the margin of plans."""
    names, plan = [f"shard:{i}" for i in range(shards)], ["shard:0"] * len(SLICES)
    memory = Memory(np.full(len(SLICES), 1.0), dict.fromkeys(names, room))
    for joined in range(1, shards + 1):
        plan = list(next_plan(plan, names[:joined], memory=memory))

    assert overfull(plan, memory) == []


def test_a_shard_without_a_report_gets_no_slice() -> None:
    balance = BalanceRules(4, bound=0.25, interval_s=60.0)
    parts = tuple(SliceLoad(i, 0, 10) for i in range(4))
    balance.record_reports({"a": Load("a", Fence(1), 100, 1_000, parts)}, 0.0)
    assert balance.decide(["a"] * 4, ["a", "b"], 0.0) is None

    balance.record_reports({"b": Load("b", Fence(2), 0, 1_000, ())}, 1.0)
    decided = balance.decide(["a"] * 4, ["a", "b"], 1.0)
    assert decided is not None
    assert decided.owners.count("b") == 2


def test_a_silent_store_does_not_hide_the_reason_of_a_claim(
    two: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balancer, "COUNT_RETRY_S", 0.0)
    waiting: list[int] = []

    def away() -> I64:
        waiting.append(1)
        raise Unavailable("the store is away")

    two.rows[0].count_stored = away  # type: ignore[method-assign]
    first = two.add_shard()
    steps(two.joined, 5)
    assert waiting
    assert list(first.manager.slices) == []

    first.clock.by_s = balancer.COUNT_TIMEOUT_S
    step_until(two.joined, lambda: len(first.manager.slices) == len(SLICES))
