"""Shards as real processes: one dies, is paused and comes back, leaves, or joins; every row's sum stays
exact.

A small embedder pushes ones at rows that start at zero (learning rate 1), so that a row is minus the number
of pushes that held it: one lost or doubled shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from freshet.adapters import open_rowstore
from freshet.errors import Refused, Unavailable
from freshet.process.ports import lease_ports
from freshet.rows.grpc.client import RemoteRows
from freshet.rows.service import KeyGroup, Push
from freshet.types import U64, Bucket, Fence, OffsetRange, TimeMs, bucket_of
from tests.integration.shard_run import (
    DEADLINE_S,
    GROUP,
    KEYS,
    SPEC,
    Pushing,
    Run,
    check_stored,
    push_again,
    push_of_ones,
    stored,
    wait_for,
)
from tests.servers.processes import Process, stop_between_transactions


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def killed(run: Run) -> None:
    run.shards["a"].kill()


def paused(run: Run) -> None:
    """Frozen for longer than its lease; when it comes back another shard has its slices."""
    stop_between_transactions(run.shards["a"].pid, run.folder)


def ended(run: Run) -> None:
    run.shards["a"].stop()


@pytest.mark.parametrize("what_happens", [killed, paused, ended])
def test_a_shard_that_goes_is_replaced_and_every_sum_is_exact(run: Run, what_happens) -> None:
    run.start("a")
    run.start("b")
    run.wait_for_owners(2)
    pushing = Pushing(run)
    pushing.go_on(50)

    what_happens(run)
    pushing.go_on(100)
    if what_happens is paused:
        run.shards["a"].resume()
        run.wait_for_owners(2)
        pushing.go_on(150)
    print(f"{what_happens.__name__}: the longest wait of a push was {pushing.longest_wait_s:.1f} s")

    for process in run.shards.values():
        process.stop()
    check_stored(run, pushing)


@pytest.mark.parametrize("cut", [Process.pause, Process.kill], ids=["silent", "refused"])
def test_pushes_wait_while_a_link_is_down_and_sums_stay_exact(
    run: Run, tmp_path: Path, cut: Callable[[Process], None]
) -> None:
    (port,) = lease_ports(1)
    addresses = [f"127.0.0.2:{port}", f"127.0.0.1:{port}"]  # the shard is known by the first one
    link = Process([sys.executable, "-m", "tests.servers.slow_link", *addresses], tmp_path / "link.log")
    joined: list[bool] = []

    def join() -> None:
        if link.alive:
            link.resume()
        else:
            link.start(lambda said: "ready" in said, within_s=DEADLINE_S)
        joined.append(True)

    join()
    try:
        run.start("a", port=port, advertised="127.0.0.2")
        run.start("b")
        run.wait_for_owners(2)
        pushing = Pushing(run)
        pushing.go_on(50)
        joined.clear()
        cut(link)
        pushing.go_on(100, held_up=join)
        assert joined, "no push was held up: the link carried none of them"
    finally:
        link.kill()
    print(f"the longest wait of a push was {pushing.longest_wait_s:.1f} s")
    for process in run.shards.values():
        process.stop()
    check_stored(run, pushing)


def test_eight_writers_at_the_same_rows_lose_and_double_nothing(run: Run) -> None:
    """Two of each partition push the same, as an embedder and one that was thought dead do."""
    pushes, writers_of_each = 100, 2
    run.start("a")
    run.start("b")
    run.wait_for_owners(2, least=SPEC.buckets // 2)  # no slice moves any more: no test here reads `applied`
    everything = np.arange(len(KEYS))

    def write(rows: RemoteRows, partition: int) -> int:
        return sum(push_again(rows, push_of_ones(everything, partition, at)) for at in range(pushes))

    with ThreadPoolExecutor(writers_of_each * SPEC.partitions) as threads:
        partitions = [*range(SPEC.partitions)] * writers_of_each
        applied = list(threads.map(write, [run.client() for _ in partitions], partitions))
    assert sum(applied) >= pushes * SPEC.partitions  # in full, or in one shard's part

    for process in run.shards.values():
        process.stop()
    np.testing.assert_array_equal(stored(run)[0], np.full(len(KEYS), -float(pushes * SPEC.partitions)))


def test_a_shard_joins_and_leaves_while_rows_are_pushed(run: Run) -> None:
    run.start("a")
    run.start("b")
    run.wait_for_owners(2)
    pushing = Pushing(run)
    pushing.go_on(50)
    run.start("c")
    for upto in range(60, 200, 10):
        pushing.go_on(upto)
    run.wait_for_owners(3)
    pushing.go_on(250)
    run.shards["c"].stop()
    pushing.go_on(300)
    run.wait_for_owners(2)
    print(f"joined and left: the longest wait of a push was {pushing.longest_wait_s:.1f} s")

    for process in run.shards.values():
        process.stop()
    check_stored(run, pushing)


def test_a_bounded_shard_evicts_the_least_recently_used_rows(run: Run) -> None:
    run.start("a", settings={"FRESHET_PARAMSERVER_EVICT_BYTES": "1000000"})  # a table may have 10,000 rows
    run.wait_for_owners(1, least=SPEC.buckets)
    chance = np.random.default_rng(5)
    pushed = [_by_bucket(chance.integers(1, 2**64, 2_500, dtype=np.uint64)) for _ in range(12)]

    def all_are_pushed() -> bool:
        try:
            for at in range(run.rows.applied()[0][0], len(pushed)):
                ones = np.ones((len(pushed[at].keys), GROUP.width), np.float32)
                time_ms = TimeMs(1_700_000_000_000 + 10_000 * at)
                run.rows.push(Push((OffsetRange(0, at, at + 1),), Fence(1), time_ms, [pushed[at]], [ones]))
            return run.rows.applied()[0] == [len(pushed)]
        except (Refused, Unavailable):  # slices came meanwhile: PROTOCOL 6
            return False

    wait_for(all_are_pushed, "all is pushed")

    wait_for(lambda: sum(_found(run, group) for group in pushed) <= 10_500, "rows are within the bound")

    assert _found(run, pushed[-1]) == len(pushed[-1].keys)
    assert _found(run, pushed[0]) == 0
    run.shards["a"].stop()
    store = open_rowstore(run.settings.common.rows_url)
    try:
        metas = store.metas([Bucket(b) for b in range(SPEC.buckets)])
        assert sum(meta.rows for meta in metas.values()) <= 10_500
    finally:
        store.close()


def _by_bucket(keys: U64) -> KeyGroup:
    keys = keys[np.argsort(bucket_of(keys, SPEC.buckets), kind="stable")]
    starts = np.searchsorted(bucket_of(keys, SPEC.buckets), np.arange(SPEC.buckets + 1)).astype(np.uint32)
    return KeyGroup(0, keys, np.zeros(len(keys), np.uint8), starts)


def _found(run: Run, group: KeyGroup) -> int:
    """How many of the keys have rows."""
    out = np.empty((len(group.keys), GROUP.width), np.float32)
    run.rows.lookup([group], [out], create=False)
    return int(out.any(axis=1).sum())
