"""Shard managers with real claims on shards that only record calls, for several test modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from freshet.clock import SYSTEM_CLOCK
from freshet.coordination.assignment import SHARD_LEASES, slices_of
from freshet.coordination.claims import Claims
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver.balancer import Bounds, LoadBalancer
from freshet.paramserver.shard import Shard
from freshet.paramserver.shard_manager import ShardManager
from freshet.testing.conditions import wait_until
from freshet.types import I64, Bucket, Fence, TopicPartition

BUCKETS = 64
SLICES = list(slices_of(BUCKETS))
WITHIN_S = 60.0


class Rows:
    """The part of a shard that its manager calls."""

    failed = None

    def __init__(self) -> None:
        self.stored_rows = np.full(BUCKETS, 10)
        self.loaded: list[int] = []
        self.fences: dict[Bucket, Fence] = {}  # of the last claim of each bucket
        self.former: dict[Bucket, Fence] = {}  # of the claim that it replaced
        self.given: list[int] = []
        self.given_at_once: list[int] = []
        self.dropped: list[int] = []
        self.on_drop: Callable[[Sequence[Bucket]], None] = lambda _: None
        self.still_loading: list[Bucket] = []
        self.buckets = self
        self.progress = SimpleNamespace(rows=0)
        self.store = SimpleNamespace(
            memory_bytes=1_000, tables=(), resident_bytes=int, memory=lambda: SimpleNamespace(rows={})
        )

    def loading(self) -> list[Bucket]:
        return self.still_loading

    def pop_conflicted(self) -> list[Bucket]:
        return []

    def count_stored(self) -> I64:
        return np.zeros(BUCKETS, np.int64)

    def claim(
        self, buckets: Sequence[Bucket], fence: Fence, *, former: Mapping[Bucket, Fence], whole: bool
    ) -> int:
        self.loaded += buckets
        self.former.update(former)
        self.fences.update(dict.fromkeys(buckets, fence))
        return 0

    def revoke(self, buckets: Sequence[Bucket]) -> None:
        self.given += buckets
        self.given_at_once.append(len(buckets))

    def drop(self, buckets: Sequence[Bucket]) -> None:
        self.dropped += buckets
        self.on_drop(buckets)

    def release(self, buckets: Sequence[Bucket]) -> None:
        pass


class Ahead:
    """The system's clock, some seconds ahead; claims use their own clock."""

    by_s = 0.0

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms()

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.by_s


class Managed:
    """A shard manager, stepped by the test."""

    def __init__(
        self,
        log: SqliteEventLog,
        name: str,
        rows: Rows | None = None,
        memory_bytes: int = 0,
        lease_s: float = WITHIN_S,  # longer than a busy machine lets a shard stand still
    ) -> None:
        self.clock = Ahead()
        self.rows, self.member = rows or Rows(), SHARD_LEASES + name
        shard = cast(Shard, self.rows)
        self.log, self.claims = log, Claims(log, "control", lease_s=lease_s)
        bounds = Bounds(memory_bytes=memory_bytes)
        self.balancer = LoadBalancer(shard, self.claims, bounds, buckets=BUCKETS, clock=self.clock)
        self.manager = ShardManager(
            shard,
            self.claims,
            self.balancer,
            name=name,
            address="127.0.0.1:1",
            life="1",
            buckets=BUCKETS,
            clock=self.clock,
        )

    def join(self) -> None:
        self.manager.join(SYSTEM_CLOCK.monotonic() + WITHIN_S)


def one_round(one: Managed) -> None:
    """Run a round; False if a claim was not read back in time, which the next round repeats."""

    def is_made() -> bool:
        try:
            one.manager.step()
        except Unavailable:
            return False
        return True

    wait_until("a round is made", is_made, within_s=WITHIN_S)


def step_until(shards: Sequence[Managed], holds: Any) -> None:
    def is_so() -> bool:
        for each in shards:
            one_round(each)
        return bool(holds())

    wait_until("slices are where they should be", is_so, within_s=WITHIN_S)


def steps(shards: Sequence[Managed], times: int) -> None:
    """Run rounds until the condition holds; each reads all records written before."""
    for _ in range(times):
        _wait_until_read(shards)
        for each in shards:
            one_round(each)
    _wait_until_read(shards)


def _wait_until_read(shards: Sequence[Managed]) -> None:
    upto = shards[0].log.bounds(TopicPartition("control", 0)).end
    wait_until("all is read", lambda: all(e.claims.read_upto >= upto for e in shards), within_s=WITHIN_S)
