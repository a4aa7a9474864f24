"""A cache of rows beside a full copy: deltas, flushes, reads and rows that leave, in random order."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from freshet.config.spec.layout import Layout
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.inference.row_cache import EPOCH_S, MissingKeys, RowCache
from freshet.inference.row_reads import read_into
from freshet.inference.rows import BucketView, FollowedTable
from freshet.log import EventLog
from freshet.log.sqlite.event_log import open_url as open_log
from freshet.rows.deltas import RowDelta, decode_rows
from freshet.rows.sqlite.row_store import open_url as open_store
from freshet.rows.store import RowStore
from freshet.testing.clock import SettableClock
from freshet.types import I64, U8, U64, Bucket, BucketMeta, Flush, RowRuns, TopicPartition
from tests.fixtures.tables import batch_of, counting_group, keys_of
from tests.unit.inference.row_source import BUCKETS, TOPIC, Shard

NUMBERS = range(1, 25)
STEPS = 120
EVERY_BUCKET = [Bucket(b) for b in range(BUCKETS)]


class FallingBack:
    """A row store that at times is as it was some flushes ago, as after a failover."""

    def __init__(self, newest: RowStore, older: RowStore) -> None:
        self.newest, self.older, self.missed = newest, older, list[Flush]()
        self.reads_from = newest
        self.happens: Callable[[], None] = lambda: None  # called during reads

    def create(self, identity: Any, starting: Any) -> None:
        for store in (self.newest, self.older):
            store.create(identity, starting)

    def claim(self, buckets: Sequence[Bucket], fence: Any) -> Mapping[Bucket, BucketMeta]:
        self.older.claim(buckets, fence)
        return self.newest.claim(buckets, fence)

    def flush(self, flush: Flush) -> U8:
        self.missed.append(flush)
        return self.newest.flush(flush)

    def fall_back(self, rng: random.Random) -> None:
        """Read from the other store, which gets some of the flushes that it misses."""
        for _ in range(rng.randrange(len(self.missed) + 1)):
            self.older.flush(self.missed.pop(0))
        self.reads_from = self.older if self.reads_from is self.newest else self.newest

    def metas(self, buckets: Sequence[Bucket]) -> Mapping[Bucket, BucketMeta]:
        self.happens()
        return self.reads_from.metas(buckets)

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Iterator[RowRuns]:
        self.happens()
        return self.reads_from.read_many(buckets, tables, keys)


class Scene:
    """A shard, what it has published, and a cache that follows it."""

    def __init__(self, folder: Path, log: EventLog, seed: int, cache: type[RowCache] = RowCache) -> None:
        self.rng, self.clock = random.Random(seed), SettableClock()
        self.store = FallingBack(*(open_store(f"sqlite:{folder}/rows-{i}-{seed}") for i in range(2)))
        self.shard = Shard(log, cast(RowStore, self.store))
        self.cache = cache(
            Layout((counting_group(),), ()),
            buckets=BUCKETS,
            partitions=2,
            seed=7,
            memory_bytes=0,
            clock=self.clock,
        )
        self.table = FollowedTable(self.cache, BucketView(BUCKETS), 0, 0, lambda: 1 << 60)
        self.log, self.reader = log, log.reader()
        for bucket in EVERY_BUCKET:
            self.table.follow_from(bucket, 0)
        self.reader.assign({TopicPartition(TOPIC, p): 0 for p in range(ROWS_PARTITIONS)})
        self.amount = 0
        self.history: dict[int, list[float | None]] = defaultdict(lambda: [None])  # as followed

    def act(self) -> None:
        """Do one of all that may happen."""
        self.rng.choice(
            [self.train, self.train, self.forget, self.flush, self.follow, self.follow, self.leave]
        )()

    def train(self) -> None:
        self.amount += 1
        self.shard.train(self.rng.sample(NUMBERS, 4), float(self.amount))
        self.shard.publish()

    def forget(self) -> None:
        self.shard.table.remove(0, keys_of(*self.rng.sample(NUMBERS, 2)))
        self.shard.publish()

    def flush(self) -> None:
        self.shard.publish()
        self.shard.flush()

    def follow(self) -> None:
        for partition, records in self.reader.poll(self.rng.randrange(1, 20), 0.0):
            for record in records.values:
                add(self.history, decode_rows(record))
            self.table.apply(partition, records)
            self.table.next[partition.partition] = records.next_offset
        self.clock.advance(EPOCH_S)
        self.cache.followed(self.table.next)

    def leave(self) -> None:
        if self.rng.random() < 0.1:
            self.store.fall_back(self.rng)
        self.cache.stored(self.store.reads_from.metas(EVERY_BUCKET))
        self.cache.evict()

    def read(self) -> None:
        """Read what is missing of some keys, while other things happen."""
        batch = batch_of(keys_of(*self.rng.sample(NUMBERS, 6)), buckets=BUCKETS)
        missing = MissingKeys.concat([self.cache.missing(0, batch)])
        if len(missing):
            self.store.happens = self.happen
            read_into(self.cache, cast(RowStore, self.store), missing, BUCKETS)
            self.store.happens = lambda: None

    def happen(self) -> None:
        for _ in range(self.rng.randrange(4)):
            self.act()

    def check(self) -> None:
        """No row, and no row that is known to be absent, is older than the deltas that were followed."""
        batch = batch_of(keys_of(*NUMBERS), buckets=BUCKETS)
        rows, found = np.empty((len(batch.keys), 2), np.float32), np.empty(len(batch.keys), np.uint8)
        self.cache.lookup(0, batch, rows, found=found)
        missing, newer = set(self.cache.missing(0, batch).keys.tolist()), self.ahead()
        for key, row, is_here in zip(batch.keys.tolist(), rows[:, 0].tolist(), found.tolist(), strict=True):
            if key not in missing:
                value = row if is_here else None
                assert value == self.history[key][-1] or value in newer[key], f"key {key} has {value}"

    def ahead(self) -> Mapping[int, list[float | None]]:
        """Return values by key that the store may have, though their deltas were not followed yet."""
        out: dict[int, list[float | None]] = defaultdict(list)
        reader = self.log.reader()
        reader.assign({TopicPartition(TOPIC, p): self.table.next.get(p, 0) for p in range(ROWS_PARTITIONS)})
        while polled := reader.poll(10_000, 0.0):
            for delta in (decode_rows(record) for _, records in polled for record in records.values):
                add(out, delta)
        reader.close()
        return out

    def end(self) -> None:
        """In the end all rows are as they were published last."""
        self.store.fall_back(self.rng)
        self.flush()
        while self.store.missed:
            self.store.older.flush(self.store.missed.pop(0))
        while any(
            self.table.next[p] < self.log.bounds(TopicPartition(TOPIC, p)).end for p in self.table.next
        ):
            self.follow()
        self.follow()
        self.leave()
        batch = batch_of(keys_of(*NUMBERS), buckets=BUCKETS)
        missing = MissingKeys.concat([self.cache.missing(0, batch)])
        if len(missing):
            read_into(self.cache, cast(RowStore, self.store), missing, BUCKETS)
        assert len(self.cache.missing(0, batch)) == 0
        rows = np.empty((len(batch.keys), 2), np.float32)
        self.cache.lookup(0, batch, rows)
        wanted = [self.history[key][-1] or 0.0 for key in batch.keys.tolist()]
        assert rows[:, 0].tolist() == wanted


def add(values: dict[int, list[float | None]], delta: RowDelta) -> None:
    """Add a delta's values to those of its keys; None: it removes the row."""
    for key, row in zip(delta.keys.tolist(), delta.values.tolist(), strict=True):
        values[key].append(row[0])
    for key in delta.removed.tolist():
        values[key].append(None)


def run(folder: Path, seed: int, cache: type[RowCache] = RowCache) -> None:
    log = open_log(f"sqlite:{folder}/log-{seed}")
    scene = Scene(folder, log, seed, cache)
    for _ in range(STEPS):
        scene.act()
        scene.read()
        scene.check()
    scene.end()
    scene.reader.close()
    log.close()


@pytest.mark.parametrize("seed", range(6))
def test_cache_serves_what_a_full_copy_would(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed)


class ForgetsWhatWasStored(RowCache):
    """Inserts rows of a store that has lost what was seen in it."""

    def insert(self, keys: MissingKeys, runs: Sequence[RowRuns], stored: I64) -> None:
        super().insert(keys, runs, np.full(len(stored), 1 << 60, np.int64))


class LetsDeltasLeave(RowCache):
    """Removes rows whose last delta the row store may lack."""

    def stored(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        super().stored(metas)
        self._clean[:] = self._epoch


class ForgetsRemovals(RowCache):
    """Does not remember which rows were removed, though the row store may still have them."""

    def remove(self, table: int, keys: U64) -> None:
        super().remove(table, keys)
        self._absent.clear()


class OverwritesDeltas(RowCache):
    """Inserts what was read over rows of deltas that came meanwhile."""

    def insert(self, keys: MissingKeys, runs: Sequence[RowRuns], stored: I64) -> None:
        self._rows.remove(0, keys.keys)
        super().insert(keys, runs, stored)


def is_caught(folder: Path, seed: int, broken: type[RowCache]) -> bool:
    try:
        run(folder, seed, broken)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("broken", [ForgetsWhatWasStored, LetsDeltasLeave, ForgetsRemovals, OverwritesDeltas])
def test_broken_rule_of_the_cache_is_caught(tmp_path: Path, broken: type[RowCache]) -> None:
    assert any(is_caught(tmp_path, seed, broken) for seed in range(30))


def test_row_that_is_evicted_during_its_read_is_not_absent(tmp_path: Path) -> None:
    log = open_log(f"sqlite:{tmp_path}/log")
    scene = Scene(tmp_path, log, 0)
    scene.shard.train(list(NUMBERS), 1.0)
    scene.flush()
    stop = threading.Event()

    def evict() -> None:
        while not stop.wait(0.0005):
            scene.cache.evict()

    thread = threading.Thread(target=evict)
    thread.start()
    batch = batch_of(keys_of(*NUMBERS), buckets=BUCKETS)
    everything = MissingKeys.concat([MissingKeys(batch.tables, batch.keys)])
    rows, found = np.empty((len(batch.keys), 2), np.float32), np.empty(len(batch.keys), np.uint8)
    for _ in range(50):
        read_into(scene.cache, cast(RowStore, scene.store), everything, BUCKETS)
        with scene.cache.lock:
            missing = scene.cache.missing(0, batch)
            scene.cache.lookup(0, batch, rows, found=found)
        assert len(missing) == (found == 0).sum()
    stop.set()
    thread.join()
    scene.reader.close()
    log.close()


def test_keys_without_a_row_are_forgotten_while_no_delta_comes(tmp_path: Path) -> None:
    log = open_log(f"sqlite:{tmp_path}/log")
    scene = Scene(tmp_path, log, 0)
    scene.cache.memory_bytes = 100_000
    before = scene.cache.bytes_in_use
    for first in range(1, 2_000, 100):
        keys = keys_of(*range(first, first + 100))
        unknown = MissingKeys.concat([MissingKeys(np.zeros(len(keys), np.uint8), keys)])
        read_into(scene.cache, cast(RowStore, scene.store), unknown, BUCKETS)
        scene.cache.evict()
    assert before < scene.cache.bytes_in_use < before + 0.11 * scene.cache.memory_bytes
    scene.reader.close()
    log.close()


def test_flushes_that_are_late_by_many_epochs_let_rows_leave(tmp_path: Path) -> None:
    log = open_log(f"sqlite:{tmp_path}/log")
    scene = Scene(tmp_path, log, 0)
    metas = []
    for number in range(1, 401):  # each row learns once
        scene.shard.train([number], 1.0)
        scene.flush()
        metas.append(scene.store.newest.metas(EVERY_BUCKET))
        scene.follow()
        scene.follow()
        scene.cache.stored(metas[max(0, len(metas) - 100)])
        scene.cache.evict()
    old = batch_of(keys_of(*range(1, 101)), buckets=BUCKETS)
    new = batch_of(keys_of(*range(303, 401)), buckets=BUCKETS)  # the row store is known to lack these
    assert len(scene.cache.missing(0, old)) > 0
    assert len(scene.cache.missing(0, new)) == 0
    scene.reader.close()
    log.close()
