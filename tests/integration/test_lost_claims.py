"""Serving has every change although a Redis lost the claim of an owner, and the owner before wrote on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from freshet.adapters import open_rowstore
from freshet.config.spec.layout import layout_of
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.inference.rows import RowFollower, ServingTable
from freshet.log import EventLog
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ensure_topics
from freshet.paramserver.shard import Shard
from freshet.rows.store import RowStore
from freshet.testing.conditions import wait_for
from freshet.testing.contracts.rowservice import Row, keys_of, look_up, push_of
from freshet.types import Bucket, Fence, TopicPartition
from tests.fixtures.shards import PARSED, TOPICS, shard_of
from tests.servers.redis_cluster import RedisServer

EVERY_BUCKET = [Bucket(b) for b in range(PARSED.buckets)]
OLD, NEW = (
    [(0, (key * 0x9E3779B97F4A7C15) % (1 << 64)) for key in keys] for keys in (range(1, 60), range(60, 120))
)
"""Rows in every bucket."""
A, B, C = Fence(10), Fence(11), Fence(12)


class Model:
    """One Redis with a log; `samples` are pushes of one to each float of some rows."""

    def __init__(self, server: RedisServer, log: EventLog, store: RowStore, name: str) -> None:
        self.server, self.log, self.store, self.name = server, log, store, name
        first = shard_of(log, store, "a")
        first.buckets.create()
        first.buckets.claim(EVERY_BUCKET, A, whole=True)
        self.initial = look_up(first, OLD + NEW, create=True)
        self.samples = [OLD]
        self.learn(first)
        first.flush()
        self.first = first

    def owner(self, fence: Fence, former: Fence, *, whole: bool = True) -> Shard:
        """Return a shard that has claimed every bucket from the claim with the fence `former`."""
        made = shard_of(self.log, self.store, f"fence-{fence}")
        made.buckets.claim(EVERY_BUCKET, fence, former=dict.fromkeys(EVERY_BUCKET, former), whole=whole)
        while made.buckets.has_work:
            made.buckets.load_next_part()
        return made

    def learn(self, shard: Shard) -> None:
        """Push the samples that the shard has not applied."""
        for at in range(shard.applied()[0][0], len(self.samples)):
            assert shard.push(push_of({0: (at, at + 1)}, {row: [1.0, 1.0] for row in self.samples[at]}))

    def lose_claims(self) -> None:
        """Take the last claim back, as a failover to a replica that did not have it yet."""
        for bucket in EVERY_BUCKET:
            self.server.ask("HSET", f"{{{self.name}:{bucket}}}:meta", "fence", A)

    def pushes(self, rows: dict[Row, list[float]]) -> dict[Row, int]:
        """Return {row: number of samples in it}."""
        return {row: round(self.initial[row][0] - values[0]) for row, values in rows.items() if any(values)}

    def learned(self) -> dict[Row, int]:
        """Return {row: number of samples that touched it}."""
        touched = [row for sample in self.samples for row in sample]
        return {row: touched.count(row) for row in touched}


@pytest.fixture
def model(redis_server: RedisServer, tmp_path: Path) -> Iterator[Model]:
    log, name = SqliteEventLog(tmp_path / "log"), f"m{uuid4().hex}"
    ensure_topics(log, PARSED)
    store = open_rowstore(f"redis://{redis_server.address}/{name}")
    yield Model(redis_server, log, store, name)
    store.close()
    log.close()


class Server:
    """The rows of an inference server, which reads the row store once and then follows the log."""

    def __init__(self, model: Model) -> None:
        self._model, self._stop = model, threading.Event()
        table = partial(ServingTable, layout_of(PARSED), buckets=PARSED.buckets, partitions=2, seed=0)
        self._follower = RowFollower(
            model.log, model.store, TOPICS.rows, table, spec_hash="hash", wait_s=0.01
        )
        self._thread = threading.Thread(target=self._follower.run, args=(self._stop,))

    def __enter__(self) -> Server:
        self._thread.start()
        wait_for(self._has_read)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _has_read(self) -> bool:
        places = {p: TopicPartition(TOPICS.rows, p) for p in range(ROWS_PARTITIONS)}
        ends = {p: self._model.log.bounds(at).end for p, at in places.items()}
        return self._follower.state.sink is not None and self._follower.state.next == ends

    def pushes(self) -> dict[Row, int]:
        """Return {row: number of samples in it}, after all records."""
        wait_for(self._has_read)
        group, rows = keys_of(OLD + NEW)
        out = np.zeros((len(rows), 2), np.float32)
        table = self._follower.state.sink
        assert isinstance(table, ServingTable)
        table.lookup(0, group, out)
        return self._model.pushes(dict(zip(rows, out.tolist(), strict=True)))


@pytest.fixture
def serve(model: Model) -> Iterator[Callable[[], Server]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Server(model))


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "while_loading"])
def test_the_next_owner_publishes_what_the_lost_claim_hid(
    model: Model, serve: Callable[[], Server], whole: bool
) -> None:
    """The server has seen the lost claim's fence, so it drops what the first owner publishes after it."""
    server = serve()
    second = model.owner(B, A)
    model.samples.append(OLD)
    model.learn(second)
    second.publish()
    model.lose_claims()
    model.samples.append(OLD + NEW)
    model.learn(model.first)
    model.first.flush()
    assert server.pushes() == dict.fromkeys(OLD, 2)

    third = model.owner(C, B, whole=whole)
    third.publish()

    assert model.pushes(look_up(third, OLD + NEW, create=False)) == model.learned()
    assert server.pushes() == model.learned()


def test_a_server_takes_what_follows_a_claim_that_is_lost(model: Model, serve: Callable[[], Server]) -> None:
    """It starts while the claim is stored. The claimant then claims again, under the same fence."""
    model.store.claim(EVERY_BUCKET, B)
    server = serve()
    model.lose_claims()
    model.samples.append(NEW)
    model.learn(model.first)
    model.first.flush()
    model.owner(B, A).publish()

    assert server.pushes() == model.learned()


def test_a_bucket_that_is_written_whole_is_published_whole(model: Model, serve: Callable[[], Server]) -> None:
    """A server that reads the store before follows `rows` from behind what this owner has published."""
    second = model.owner(B, A)
    model.samples += [OLD, NEW]
    model.learn(second)
    second.publish()
    model.lose_claims()
    model.samples.pop()
    model.learn(model.first)
    for _ in range(2):  # the second one's meta names the offsets behind what the first has published
        model.first.flush()
    server = serve()
    assert server.pushes() == dict.fromkeys(OLD, 2)
    model.samples.append(NEW)

    second.flush()

    assert second.counts.replaced_buckets == len(EVERY_BUCKET)
    assert server.pushes() == model.learned()


def test_a_claim_that_nothing_came_between_publishes_nothing(model: Model) -> None:
    second = model.owner(B, A)
    second.flush()
    third = model.owner(C, B)
    third.publish()

    assert (second.counts.published_rows, third.counts.published_rows) == (0, 0)


def test_a_store_of_an_earlier_release_publishes_nothing(model: Model) -> None:
    """Its metas have no fence of the last flush: the claim goes on as in that release."""
    for bucket in EVERY_BUCKET:
        assert model.server.ask("HDEL", f"{{{model.name}:{bucket}}}:meta", "writer") == 1
    second = model.owner(B, A)
    second.publish()

    assert model.pushes(look_up(second, OLD, create=False)) == model.learned()
    assert second.counts.published_rows == 0
    second.flush()
    assert {meta.writer for meta in model.store.metas(EVERY_BUCKET).values()} == {B}
