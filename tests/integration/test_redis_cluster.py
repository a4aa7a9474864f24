"""The Redis row store on real servers that are killed, paused, filled up, moved about and badly set up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import structlog
from redis.crc import key_slot

from freshet.adapters import open_rowstore
from freshet.errors import ConfigError, Corrupt, DataLost, Unavailable
from freshet.rows.redis import pages
from freshet.rows.redis.scripts import COMMIT, SLACK_BYTES
from freshet.rows.store import FlushOutcome, OnServers, RowStore
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.rowstore import (
    Change,
    flush_of,
    identity,
    next_meta,
    outcomes_of,
    rows_of,
    starting,
)
from freshet.types import Bucket, Fence
from tests.fixtures.bucket_owner import ALL, Owner, Reader, every, large_flush, stamp_of
from tests.servers.redis_cluster import RedisCluster, RedisServer

HASTY = "?timeout=300ms&patience=4s"
Open = Callable[..., RowStore]


@pytest.fixture
def opened() -> Iterator[Callable[[str], RowStore]]:
    stores: list[RowStore] = []

    def open_it(url: str) -> RowStore:
        stores.append(open_rowstore(url))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


@pytest.fixture
def name() -> str:
    return f"m{uuid4().hex}"


@pytest.fixture
def cluster(redis_cluster: RedisCluster) -> Iterator[RedisCluster]:
    """Whole again, whatever a test has done to it."""
    yield redis_cluster
    redis_cluster.heal()


def rows_key(name: str, bucket: int = 0) -> str:
    return f"{{{name}:{bucket}}}:rows"


def merge_every_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge pages after every flush, however few they are."""
    at_once = COMMIT.replace(f"base / 2 + {SLACK_BYTES}", "0")
    assert at_once != COMMIT
    monkeypatch.setattr("freshet.rows.redis.pages.COMMIT", at_once)


# Failovers


@pytest.mark.parametrize("merged", [False, True], ids=["pages", "put_together"])
def test_a_master_killed_between_flushes_costs_no_row(
    cluster: RedisCluster, opened, name: str, merged: bool, monkeypatch: pytest.MonkeyPatch
):
    if merged:
        merge_every_flush(monkeypatch)
    cluster.fail_over_soon()
    url = f"redis://{cluster.addresses}/{name}{HASTY}"
    owner = Owner(opened(url), 5)
    owner.flush_rounds(3)
    master = cluster.master_of(rows_key(name))
    with Reader(opened(url), 0) as reader:
        every([master.kill, lambda: owner.flush_rounds(3)])
        cluster.wait_until_moved(rows_key(name), master)
        owner.flush_until_seen_by(reader)
    owner.check(opened(f"redis://{cluster.addresses}/{name}"))
    cluster.heal()  # the killed one follows now
    owner.flush_rounds(2)
    owner.check(opened(f"redis://{cluster.addresses}/{name}"))


@pytest.mark.parametrize("merged", [False, True], ids=["pages", "put_together"])
def test_a_resumed_master_neither_tears_nor_loses_rows(
    cluster: RedisCluster, opened, name: str, merged: bool, monkeypatch: pytest.MonkeyPatch
):
    if merged:
        merge_every_flush(monkeypatch)
    cluster.fail_over_soon()
    master = cluster.master_of(rows_key(name))
    others = [node.address for node in cluster.nodes if node is not master]
    url = f"redis://{','.join([*others, master.address])}/{name}{HASTY}"
    owner = Owner(opened(url), 5)
    owner.flush_rounds(3)
    with Reader(opened(url), 0) as reader:
        master.pause()
        owner.flush_rounds(3)  # the first of them is in the paused master's sockets too
        master.resume()
        owner.flush_rounds(5)
        owner.flush_until_seen_by(reader)
    cluster.heal()
    owner.check(opened(f"redis://{master.address}/{name}"))


def test_a_silent_cluster_is_unavailable_until_it_answers(cluster: RedisCluster, opened, name: str):
    """The slots cannot be read either, which ends no process: unwritten rows are in memory alone."""
    hasty = f"redis://{cluster.addresses}/{name}?timeout=200ms&patience=3s"
    owner, store = Owner(opened(f"redis://{cluster.addresses}/{name}"), 5), opened(hasty)
    owner.flush_rounds(2)
    store.metas([Bucket(0)])
    for node in cluster.nodes:
        node.pause()
    try:
        with pytest.raises(Unavailable, match="reading metas"):
            store.metas([Bucket(0)])
        with pytest.raises(Unavailable):
            opened(hasty)
    finally:
        for node in cluster.nodes:
            node.resume()
    cluster.heal()
    owner.flush_rounds(2)
    owner.check(opened(f"redis://{cluster.addresses}/{name}"))


def test_what_a_failover_lost_is_written_again(cluster: RedisCluster, opened, name: str):
    """Lost for certain: the replica that takes over was down while the last flushes were written."""
    cluster.fail_over_soon()
    url = f"redis://{cluster.addresses}/{name}{HASTY}"
    owner = Owner(opened(url), 5)
    owner.flush_rounds(2)
    master, replica = cluster.master_of(rows_key(name)), cluster.replica_of(rows_key(name))
    replica.kill()
    owner.flush_rounds(2)
    master.kill()
    replica.start()
    cluster.wait_until_moved(rows_key(name), master)
    owner.flush_rounds(2)
    assert owner.replaced > 0
    owner.check(opened(f"redis://{cluster.addresses}/{name}"))


def test_a_flush_that_no_replica_has_is_unavailable_if_one_must(cluster: RedisCluster, opened, name: str):
    owner = Owner(opened(f"redis://{cluster.addresses}/{name}?min_replicas=1&wait=5s&timeout=20s"), 5)
    owner.flush_rounds(1)
    replica = cluster.replica_of(rows_key(name))
    replica.pause()
    with pytest.raises(Unavailable, match="0 of 1 replicas"):
        owner.flush()
    replica.resume()
    owner.flush_rounds(1)
    owner.check(opened(f"redis://{cluster.addresses}/{name}"))


def test_a_slot_on_its_way_to_another_master_is_waited_for(cluster: RedisCluster, opened, name: str):
    url = f"redis://{cluster.addresses}/{name}{HASTY}"
    owner = Owner(opened(url), 5)
    owner.flush_rounds(1)
    slot, source = key_slot(rows_key(name).encode()), cluster.master_of(rows_key(name))
    masters = [node for node in cluster.nodes if node.ask("ROLE")[0] == "master"]
    target = next(node for node in masters if node is not source)
    ids = {node: node.ask("CLUSTER", "MYID") for node in masters}
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    with pytest.raises(Unavailable):
        owner.flush()
    keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100)
    source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    for node in (target, source, *masters):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    owner.flush_rounds(2)
    assert owner.replaced == 0
    owner.check(opened(f"redis://{cluster.addresses}/{name}"))
    assert cluster.master_of(rows_key(name)) is target


# Several at once


def test_a_zombie_owner_is_refused_whatever_it_flushes(cluster: RedisCluster, opened, name: str):
    url = f"redis://{cluster.addresses}/{name}"
    zombie = Owner(opened(url), 5)
    zombie.flush()
    owner = Owner(opened(url), 6)
    owner.rounds = zombie.rounds
    owner.flush()
    old = opened(url)
    for whole in (False, True):
        for rows in ({0: {1: 99}}, {}):
            late = flush_of(*(Change(b, next_meta(m), rows) for b, m in zombie.metas.items()), whole=whole)
            assert set(outcomes_of(old, late).values()) == {FlushOutcome.FENCED}
    owner.check(opened(f"redis://{cluster.addresses}/{name}"))


def test_two_clients_write_their_buckets_at_once(cluster: RedisCluster, opened, name: str):
    url = f"redis://{cluster.addresses}/{name}"
    store = opened(url)
    store.create(identity(), starting())
    store.claim(ALL, Fence(5))

    def write(buckets: list[Bucket]) -> None:
        mine = opened(url)
        for fill in range(1, 40):
            metas = mine.metas(buckets)
            flush = flush_of(*(Change(b, next_meta(m), {0: {1: fill, 2: fill}}) for b, m in metas.items()))
            assert set(mine.flush(flush).tolist()) == {FlushOutcome.DONE}

    every([lambda: write(ALL[:2]), lambda: write(ALL[2:])])
    assert [rows_of(store, b) for b in ALL] == [{(0, 1): 39, (0, 2): 39}] * len(ALL)


@pytest.mark.parametrize("whole", [False, True])
def test_a_reader_never_sees_a_large_bucket_torn(
    cluster: RedisCluster, opened, name: str, whole: bool, monkeypatch: pytest.MonkeyPatch
):
    """Read by HSCANs, which see rows of before and after a flush, and are done again then."""
    monkeypatch.setattr(pages, "BYTES_AT_ONCE", 1000)
    url = f"redis://{cluster.addresses}/{name}"
    store, rows = opened(url), 20_000
    store.create(identity(), starting())
    meta = store.claim(ALL, Fence(5))[ALL[0]]

    def fills() -> set[tuple[int, int]]:
        runs = [run for piece in other.scan(ALL[:1]) for run in piece]
        return {(sum(len(run.keys) for run in runs), int(f)) for run in runs for f in np.unique(run.records)}

    def look(seen: list[set[tuple[int, int]]]) -> None:
        seen.append(fills())

    other = opened(url)
    for fill in range(1, 8):
        meta = next_meta(meta, rows=rows)
        flush = large_flush(meta, rows, fill, whole=whole)
        seen: list[set[tuple[int, int]]] = []
        every([partial(store.flush, flush), partial(look, seen)])
        allowed = [{(rows, fill)}, {(rows, fill - 1)} if fill > 1 else set()]
        assert seen[0] in allowed
        assert fills() == {(rows, fill)}


# Servers that are full, badly set up, or not ours


def test_a_full_server_is_unavailable_and_nothing_is_torn(tmp_path: Path, opened, name: str):
    with RedisServer(tmp_path / "full") as server:
        url = f"redis://{server.address}/{name}?patience=100ms"
        store = opened(url)
        owner = Owner(store, 5)
        owner.flush()
        before = dict(store.metas(ALL))
        server.ask("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(Unavailable, match=r"(?s)full: raise maxmemory"):
            owner.flush()
        for whole in (False, True):
            for removed in ({}, {0: [1, 2]}):
                rows = {} if removed else {0: {1: 99}}
                flush = flush_of(Change(0, next_meta(before[ALL[0]]), rows, removed), whole=whole)
                with pytest.raises(Unavailable, match="full"):
                    store.flush(flush)
        assert [stamp_of(store, b) for b in ALL] == [1] * len(ALL)
        assert dict(store.metas(ALL)) == before
        assert len(server.ask("KEYS", f"*{name}*")) == 2 * len(ALL) + 1, "something was left behind"
        server.ask("CONFIG", "SET", "maxmemory", "0")
        owner.flush()
        owner.check(store)


def test_a_server_that_may_evict_is_refused(tmp_path: Path, opened, name: str):
    told = r"(?s)maxmemory-policy.*allkeys-lru.*noeviction"
    with (
        RedisServer(tmp_path / "evicts", {"maxmemory-policy": "allkeys-lru"}) as server,
        pytest.raises(ConfigError, match=told),
    ):
        opened(f"redis://{server.address}/{name}")


def test_a_server_that_keeps_nothing_on_disk_is_warned_of(tmp_path: Path, opened, name: str):
    with (
        RedisServer(tmp_path / "forgets", {"appendonly": "no"}) as server,
        structlog.testing.capture_logs() as said,
    ):
        opened(f"redis://{server.address}/{name}")
    assert [line["log_level"] for line in said if "appendonly is off" in line["event"]] == ["warning"]


def test_a_server_that_came_back_empty_is_no_new_model(tmp_path: Path, opened, name: str):
    with RedisServer(tmp_path / "emptied") as server:
        url = f"redis://{server.address}/{name}"
        owner = Owner(opened(url), 5)
        owner.flush()
        server.ask("DEL", f"{{{name}}}:identity")
        with pytest.raises(DataLost, match="identity is gone"):
            Owner(opened(url), 6)
    with RedisServer(tmp_path / "partly") as server:
        url = f"redis://{server.address}/{name}"
        Owner(opened(url), 5).flush()
        server.ask("DEL", rows_key(name), f"{{{name}:0}}:meta")
        with pytest.raises(DataLost, match="bucket 0"):
            Owner(opened(url), 6)
        with pytest.raises(Unavailable, match="no meta"):
            opened(url).metas(ALL)


def test_a_key_of_another_program_is_corrupt(redis_server: RedisServer, opened, name: str):
    url = f"redis://{redis_server.address}/{name}"
    owner = Owner(opened(url), 5)
    owner.flush()
    redis_server.ask("HSET", rows_key(name), "a note", "to myself")
    with pytest.raises(Corrupt, match=r"bucket 0.*6 bytes, expected 32"):
        rows_of(opened(url), 0)
    redis_server.ask("DEL", rows_key(name))
    redis_server.ask("SET", rows_key(name), "text")
    with pytest.raises(Corrupt, match="WRONGTYPE"):
        owner.flush()
    assert opened(url).metas(ALL[:1])[ALL[0]].seq == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("a note", "to myself"),
        (b"\x00" * 32, b"\x00" * 40),
        (b"\xff" * 32, b""),
        (None, b"cut"),
        (None, b""),
        (None, b"\xff" * 500),
    ],
)
def test_a_damaged_page_is_left_out_and_the_others_are_read(
    redis_server: RedisServer, opened, name: str, field: Any, value: Any
):
    url = f"redis://{redis_server.address}/{name}"
    owner = Owner(opened(url), 5)
    owner.flush()
    whole = len(rows_of(opened(url), 0))
    if field is None:  # one of the bucket's own pages
        field = redis_server.ask("HKEYS", rows_key(name))[0]
    redis_server.ask("HSET", rows_key(name), field, value)
    with pytest.raises(Corrupt, match="bucket 0"):
        rows_of(opened(url), 0)

    sound = opened(url).scan_sound(ALL[0])

    assert len(sound.damage) == 1
    assert sound.runs.rows in (0, whole)
    assert len(rows_of(opened(url), 1)) == whole, "other buckets are not concerned"


def test_masters_say_how_many_follow_them_and_how_full_they_are(cluster: RedisCluster, opened, name: str):
    store = opened(f"redis://{cluster.addresses}/{name}")
    assert isinstance(store, OnServers)
    addresses = set(cluster.addresses.split(","))
    for server in store.servers():
        assert (server.name in addresses, server.replicas, server.limit_bytes) == (True, 1, 0)
        assert server.used_bytes > 0

    for node in cluster.nodes:
        node.ask("CONFIG", "SET", "maxmemory", 1 << 30)
    assert {server.limit_bytes for server in store.servers()} == {1 << 30}
    for node in cluster.nodes:
        node.make_room()
    next(node for node in cluster.nodes if "role:slave" in node.ask("INFO", "replication")).kill()
    wait_until(
        "a master without a replica",
        lambda: sorted(server.replicas for server in store.servers()) == [0, 1, 1],
        within_s=60,
    )


def test_the_documented_rights_suffice_and_fewer_are_named(tmp_path: Path, opened):
    lines = [
        text
        for text in Path("docs/redis.md").read_text().splitlines()
        if text.startswith(("ACL SETUSER freshet", "ACL SETUSER reader"))
    ]
    with RedisServer(tmp_path / "acl") as server:
        url = f"redis://{server.address}/news"
        for line in lines:
            server.ask(*line.replace("<password>", "s3cret").split())
        server.ask("ACL", "SETUSER", "nobody", "on", ">s3cret", "+ping")
        secret = tmp_path / "password"
        secret.write_text("s3cret\n")
        freshet = f"{url}?user=freshet&password_file={secret}"
        reader = f"{url}?user=reader&password_file={secret}"
        owner = Owner(opened(freshet), 5)
        owner.flush()
        owner.check(opened(freshet))
        owner.check(opened(reader))
        with pytest.raises(Unavailable, match="the user lacks a right"):
            Owner(opened(reader), 6)
        for store in ("newsletter", "news-b"):  # of other models
            with pytest.raises(Unavailable, match="the user lacks a right"):
                opened(freshet.replace("/news?", f"/{store}?")).identity()
        for user in ("nobody", "unknown"):
            with pytest.raises(ConfigError, match=f"refuses user '{user}'"):
                opened(f"{url}?user={user}&password_file={secret}")


def test_servers_that_are_not_there_are_unavailable(opened, name: str):
    with pytest.raises(Unavailable, match="cannot be reached"):
        opened(f"redis://127.0.0.1:1,127.0.0.1:2/{name}?timeout=100ms")
