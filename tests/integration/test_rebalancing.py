"""Shards as real processes, of which one has all the work, or no memory left: slices move, and every row's
sum stays exact. See test_shards for how a sum shows a push that was lost or doubled."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from uuid import uuid4

import numpy as np
import pytest

from freshet.coordination.assignment import slices_of
from freshet.errors import Unavailable
from freshet.process.ports import lease_ports
from freshet.rows.service import KeyGroup
from freshet.types import I64, bucket_of
from tests.integration.shard_run import (
    BUCKETS_OF_KEYS,
    GROUP,
    KEYS,
    SPEC,
    Pushing,
    Run,
    check_stored,
    wait_for,
)
from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster

SLICES = list(slices_of(SPEC.buckets).values())
HOT_SLICES = 6
HOT_KEYS_A_PUSH, KEYS_A_PUSH = 30, 40
QUICK = {"FRESHET_PARAMSERVER_REBALANCE_INTERVAL": "2s"}
LIMIT = 1 << 20
"""Bytes: five times what a shard takes without a row, and a third of what 20,000 rows do."""


class HotPushing(Pushing):
    """Most of a push is of a few keys."""

    def __init__(self, run: Run, hot: I64) -> None:
        super().__init__(run)
        self._hot, self._cold = hot, np.setdiff1d(np.arange(len(KEYS)), hot)

    def _choice(self) -> I64:
        hot = self._rng.choice(self._hot, min(HOT_KEYS_A_PUSH, len(self._hot)), replace=False)
        cold = self._rng.choice(self._cold, KEYS_A_PUSH - HOT_KEYS_A_PUSH, replace=False)
        return np.sort(np.concatenate([hot, cold]))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def owners_of(run: Run, slices: list[int]) -> list[int]:
    """Which of the shards has each of these."""
    owners = run.owners()
    return [int(owners.of_bucket[SLICES[i].start]) for i in slices]


def is_quiet(run: Run, port: int) -> bool:
    """Will no slice move any more."""
    told = json.loads(asked(port, "/status")[1])["load"]
    return run.is_as_planned() and told["unevenness"] == 0


def asked(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_slices_that_are_hot_are_shared_and_every_sum_is_exact(run: Run) -> None:
    share_hot_slices(run)


def test_hot_slices_are_shared_on_kafka_and_redis(
    kafka: Kafka, redis_cluster: RedisCluster, tmp_path: Path
) -> None:
    """Load reports, the plan and claims go through a broker, rows that move through Redis."""
    life = f"m{uuid4().hex}"
    run = Run(
        tmp_path,
        log_url=f"kafka://{kafka.bootstrap}/{life}?replication=1",
        rows_url=f"redis://{redis_cluster.addresses}/{life}",
    )
    try:
        share_hot_slices(run)
    finally:
        run.close()


def share_hot_slices(run: Run) -> None:
    """One shard has all of the hot slices; some of them move to the other under pushes, none of which is lost
    or doubled."""
    (port,) = lease_ports(1)
    run.start("a", settings=QUICK | {"FRESHET_PARAMSERVER_ADMIN_PORT": str(port)})
    run.start("b", settings=QUICK)
    run.wait_for_owners(2)
    at = owners_of(run, list(range(len(SLICES))))
    hot_slices = [i for i, shard in enumerate(at) if shard == 0][:HOT_SLICES]
    hot = np.flatnonzero([any(b in SLICES[i] for i in hot_slices) for b in BUCKETS_OF_KEYS.tolist()])
    pushing = HotPushing(run, hot)

    upto = 0
    while min(owners_of(run, hot_slices).count(shard) for shard in (0, 1)) < 2 and upto < 100_000:
        pushing.go_on(upto := upto + 50)
    shared = [owners_of(run, hot_slices).count(shard) for shard in (0, 1)]
    pushing.go_on(upto + 500)
    told = json.loads(asked(port, "/status")[1])["load"]
    assert told["plans"]["load"] >= 1
    assert told["rows_per_s"] > 0
    assert 'freshet_paramserver_plans_total{why="load"}' in asked(port, "/metrics")[1]
    wait_for(lambda: is_quiet(run, port), "load is of the past, and the last plan carried out")
    pushing.go_on(upto + 501)  # pushes at the moment of a move were repeated, or are now
    print(f"hot slices by shard: {shared}; the longest wait of a push was {pushing.longest_wait_s:.1f} s")
    assert min(shared) >= 2

    for process in run.shards.values():
        process.stop()
    check_stored(run, pushing)


def test_a_full_shard_trains_on_once_another_takes_slices(run: Run) -> None:
    (port,) = lease_ports(1)
    limited = {"FRESHET_PARAMSERVER_MEMORY_BYTES": str(LIMIT), "FRESHET_PARAMSERVER_ADMIN_PORT": str(port)}
    run.start("a", settings=QUICK | limited)
    run.wait_for_owners(1)
    pushing = Pushing(run)
    pushing.go_on(50)
    assert asked(port, "/health/ready")[0] == 200

    rows = run.client(deadline_s=0.5)
    refused = ""
    for seed in range(100):
        try:
            look_up(rows, seed)
        except Unavailable as error:
            refused = str(error)
            if "FRESHET_PARAMSERVER_MEMORY_BYTES" in refused:  # else it was only slow
                break
    assert "FRESHET_PARAMSERVER_MEMORY_BYTES" in refused
    code, body = asked(port, "/health/ready")
    assert code == 503
    assert "FRESHET_PARAMSERVER_MEMORY_BYTES" in body
    pushing.go_on(100)  # rows that are there already

    run.start("b", settings=QUICK)
    run.wait_for_owners(2, least=8)
    wait_for(lambda: asked(port, "/health/ready")[0] == 200, "the shard has room again")
    wait_for(lambda: is_quiet(run, port), "load is of the past, and the last plan carried out")
    pushing.go_on(150)
    look_up(run.rows, 1_000)
    run.shards["a"].stop()
    pushing.go_on(150)  # what "a" could not flush in time comes again, as from an embedder
    run.shards["b"].stop()
    check_stored(run, pushing)


def look_up(rows, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(1, 2**64, 1_000, dtype=np.uint64)
    keys = keys[np.argsort(bucket_of(keys, SPEC.buckets), kind="stable")]
    buckets = bucket_of(keys, SPEC.buckets)
    starts = np.searchsorted(buckets, np.arange(SPEC.buckets + 1)).astype(np.uint32)
    out = np.empty((len(keys), GROUP.width), np.float32)
    rows.lookup([KeyGroup(0, keys, np.zeros(len(keys), np.uint8), starts)], [out])
