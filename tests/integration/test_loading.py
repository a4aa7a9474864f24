"""A shard that replaces a killed one on a Redis Cluster answers with the right rows before it has loaded any
bucket, and every sum stays exact."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from uuid import uuid4

import numpy as np
import pytest

from freshet.adapters import open_rowstore
from freshet.log.topics import ModelContext
from freshet.paramserver.service import ParamServer, ShardAddress
from freshet.rows.service import KeyGroup
from freshet.rows.store import RowStore
from freshet.rpc.channel import MIB, Transport
from freshet.types import Bucket, RowRuns
from tests.fixtures.shards import write_by_old_owner
from tests.integration.shard_run import (
    BUCKETS_OF_KEYS,
    DEADLINE_S,
    GROUP,
    HASH,
    KEYS,
    SPEC,
    TOKEN,
    VECTOR,
    Pushing,
    Run,
    check_stored,
    wait_for,
)
from tests.servers.redis_cluster import RedisCluster

ALL = [Bucket(b) for b in range(SPEC.buckets)]


class HeldBack:
    """A row store with scans that wait until the test releases them."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self.asked, self.let_go = threading.Event(), threading.Event()

    def scan(self, buckets: Sequence[Bucket]) -> Iterator[RowRuns]:
        self.asked.set()
        assert self.let_go.wait(DEADLINE_S), "nobody let the scan go"
        yield from self._store.scan(buckets)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.fixture
def run(tmp_path: Path, redis_cluster: RedisCluster) -> Iterator[Run]:
    made = Run(tmp_path, rows_url=f"redis://{redis_cluster.addresses}/m{uuid4().hex}")
    yield made
    made.close()


@pytest.fixture
def store(run: Run) -> Iterator[RowStore]:
    made = open_rowstore(run.settings.common.rows_url)
    yield made
    made.close()


@contextmanager
def shard_in_this_process(run: Run, rows: HeldBack) -> Iterator[ParamServer]:
    """It takes the place of those that are gone; in the end it flushes and leaves."""
    place = ShardAddress("b", "127.0.0.1", 0)
    transport = Transport(token=TOKEN, max_message_bytes=MIB)
    server = ParamServer(ModelContext.open(SPEC, HASH, run.log), cast(RowStore, rows), place, transport)
    stop, failures = threading.Event(), list[BaseException]()

    def serve() -> None:
        try:
            server.run(stop, drain_s=60.0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        rows.let_go.set()
        stop.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not failures


def killed_after_a_flush(run: Run, store: RowStore) -> Pushing:
    """Shard `a` has flushed rows of some pushes, learned from more, and is killed."""
    run.start("a")
    run.wait_for_owners(1)
    pushing = Pushing(run)
    pushing.go_on(30)
    learned = np.count_nonzero(pushing.expected())
    wait_for(lambda: sum(meta.rows for meta in store.metas(ALL).values()) == learned, "rows are flushed")
    pushing.go_on(50)
    run.shards["a"].kill()
    return pushing


def looked_up(run: Run):
    """(keys,) the rows as shards answer."""
    out = np.empty((len(KEYS), GROUP.width), np.float32)
    starts = np.searchsorted(BUCKETS_OF_KEYS, np.arange(SPEC.buckets + 1)).astype(np.uint32)
    run.rows.lookup([KeyGroup(0, KEYS, np.zeros(len(KEYS), np.uint8), starts)], [out], create=False)
    assert (out[:, VECTOR] == out[:, -1]).all()
    return out[:, VECTOR]


def test_the_heir_of_a_killed_shard_answers_before_it_loads(run: Run, store: RowStore) -> None:
    pushing = killed_after_a_flush(run, store)
    before = store.metas(ALL)
    rows = HeldBack(store)
    with shard_in_this_process(run, rows) as heir:
        pushing.go_on(100)
        np.testing.assert_array_equal(looked_up(run), pushing.expected())
        assert rows.asked.is_set()
        assert heir.shard.buckets.progress.buckets == SPEC.buckets, "nothing is loaded"
        assert heir.status()["loading"]["buckets"] == SPEC.buckets
        assert heir.ready() is None
        assert {b: meta.seq for b, meta in store.metas(ALL).items()} == {
            b: meta.seq for b, meta in before.items()
        }, "nothing is flushed"

        rows.let_go.set()
        wait_for(lambda: heir.shard.buckets.progress.buckets == 0, "everything is loaded")
        np.testing.assert_array_equal(looked_up(run), pushing.expected())
        pushing.go_on(150)
    check_stored(run, pushing)


def test_buckets_written_while_they_load_are_claimed_anew(run: Run, store: RowStore) -> None:
    pushing = killed_after_a_flush(run, store)
    rows = HeldBack(store)
    with shard_in_this_process(run, rows) as heir:
        pushing.go_on(100)
        touched = Bucket(int(BUCKETS_OF_KEYS[0]))
        write_by_old_owner(store, touched)
        rows.let_go.set()
        wait_for(lambda: heir.manager.counts.doubted == 1, "a slice is doubted")
        wait_for(lambda: heir.shard.buckets.progress.buckets == 0, "everything is loaded")
        run.wait_for_owners(1)
        pushing.go_on(150)
        np.testing.assert_array_equal(looked_up(run), pushing.expected())
    check_stored(run, pushing)
