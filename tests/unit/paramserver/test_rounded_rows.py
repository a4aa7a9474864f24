"""Rows published rounded: serving is near the shard while it learns, and equal to the bit once it rests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Unavailable
from freshet.inference.rows import BucketView, FollowedTable, RowFollower, ServingTable
from freshet.log import EventLog
from freshet.paramserver import flusher as module
from freshet.paramserver.flusher import EXACT_AFTER_S
from freshet.rows.service import KeyGroup, Push
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.tables import Published
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_for
from freshet.testing.faults import Faulty
from freshet.types import F32, Fence, OffsetRange, TimeMs, TopicPartition, bucket_of
from tests.fixtures.shards import SPEC, TOPICS, loaded

PublishCodec = Literal["fp32", "bf16", "int8", "int4"]
DIM, KEYS = 16, 200
KIND, SCALARS = "hedge", True
CODECS: tuple[PublishCodec, ...] = ("bf16", "int8", "int4")
ERROR = {"bf16": 0.004, "int8": 0.12, "int4": 0.3}
"""Largest relative error of a row of random numbers: of its rounding, and of changes that are passed over."""


def spec_in(codec: PublishCodec) -> Spec:
    spec = parse_spec(SPEC.replace("dim = 2", f"dim = {DIM}").replace('kind = "dlrm"', f'kind = "{KIND}"'))
    return replace(spec, train=replace(spec.train, publish_codec=codec))


class World:
    """A shard, the table that serves its rows, and gradients between them."""

    def __init__(self, log: EventLog, folder: Path, codec: PublishCodec) -> None:
        self.log, self.spec, self.clock = log, spec_in(codec), SettableClock()
        self.store = SqliteRowStore(folder / "rows.sqlite")
        layout = layout_of(self.spec)
        self.group = layout.groups[0]
        assert bool(self.group.scalars) == SCALARS
        assert self.group.width == DIM + self.group.scalars
        self.table = ServingTable(layout, buckets=self.spec.buckets, partitions=1, seed=0)
        view = BucketView(self.spec.buckets)
        self.followed = FollowedTable(self.table, view, 0, 0, lambda: 1 << 63)
        self.rng, self.at, self.fence = np.random.default_rng(5), 0, 10
        self.shard = loaded(log, self.store, self.fence, self.clock, self.spec)
        keys = np.unique(self.rng.integers(1, 2**64, KEYS, np.uint64))
        self.keys = self.group_of(keys)

    def group_of(self, keys):
        keys = keys[np.argsort(bucket_of(keys, self.spec.buckets), kind="stable")]
        starts = np.searchsorted(bucket_of(keys, self.spec.buckets), np.arange(self.spec.buckets + 1)).astype(
            np.uint32
        )
        return KeyGroup(0, keys, np.zeros(len(keys), np.uint8), starts)

    def learn(self, keys: KeyGroup | None = None) -> None:
        """Push random gradients of some rows, or of all."""
        group = self.keys if keys is None else keys
        gradients = self.rng.normal(0, 1, (len(group.keys), self.group.width)).astype(np.float32)
        ranges = (OffsetRange(0, self.at, self.at + 1),)
        self.at += 1
        self.shard.push(Push(ranges, Fence(self.fence), TimeMs(1_000), [group], [gradients]))

    def restart(self) -> None:
        """Replace the shard by one that reads the row store."""
        self.fence += 1
        self.shard = loaded(self.log, self.store, self.fence, self.clock, self.spec)

    def rest(self) -> None:
        """Let nothing change for long enough, and publish until nothing is left."""
        self.shard.publish()
        self.clock.advance(EXACT_AFTER_S)
        while self.shard.publish():
            pass

    def follow(self) -> None:
        """Apply the new records as an inference server does."""
        reader = self.log.reader()
        reader.assign(
            {TopicPartition(TOPICS.rows, p): self.followed.next.get(p, 0) for p in range(ROWS_PARTITIONS)}
        )
        while polled := reader.poll(10_000, 0.0):
            for at, records in polled:
                self.followed.apply(at, records)
                self.followed.next[at.partition] = records.next_offset
        reader.close()
        assert not self.followed.corrupt

    def rows(self, table: Callable[..., object]) -> F32:
        out = np.full((len(self.keys.keys), self.group.width), 77, np.float32)
        table([self.keys], [out])
        return out

    def learned(self) -> F32:
        """(U, S) the rows of the shard."""
        return self.rows(lambda groups, out: self.shard.lookup(groups, out, create=False))

    def served(self) -> F32:
        """(U, S) the rows of the inference server, after all records."""
        self.follow()
        return self.rows(lambda groups, out: self.table.lookup(0, groups[0], out[0]))

    def error(self) -> float:
        """Largest relative error of a served row."""
        learned = self.learned()
        return float(
            (np.linalg.norm(self.served() - learned, axis=1) / np.linalg.norm(learned, axis=1)).max()
        )


@pytest.fixture
def world(log: EventLog, tmp_path: Path) -> Iterator[Callable[[PublishCodec], World]]:
    made: list[World] = []

    def make(codec: PublishCodec) -> World:
        made.append(World(log, tmp_path, codec))
        return made[0]

    yield make
    made[0].store.close()


@pytest.mark.parametrize("codec", CODECS)
def test_serving_equals_the_shard_once_it_rests(
    world: Callable[[PublishCodec], World], codec: PublishCodec
) -> None:
    w = world(codec)
    for _ in range(5):
        w.learn()
        w.shard.publish()
    assert 0 < w.error() < ERROR[codec]
    assert w.shard.store.inexact() == len(w.keys.keys)

    w.rest()

    np.testing.assert_array_equal(w.served(), w.learned())
    assert w.shard.store.inexact() == 0
    sent = w.shard.counts.published_rows
    w.rest()
    assert w.shard.counts.published_rows == sent, "a row is sent exactly once"


def test_without_exact_rows_serving_stays_rounded(
    world: Callable[[PublishCodec], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: what makes serving equal is `collect_inexact`."""
    w = world("int8")
    w.learn()
    monkeypatch.setattr(type(w.shard.store), "collect_inexact", lambda *_: Published((), TimeMs(0), 0))

    w.rest()

    assert 0 < w.error() < ERROR["int8"]


def test_fp32_sends_no_row_twice(world: Callable[[PublishCodec], World]) -> None:
    w = world("fp32")
    w.learn()
    w.rest()

    np.testing.assert_array_equal(w.served(), w.learned())
    assert w.shard.counts.published_rows == len(w.keys.keys)
    w.restart()
    w.rest()
    assert w.shard.counts.published_rows == 0


@pytest.mark.parametrize("flushed", [True, False])
def test_a_new_owner_sends_what_it_read_as_it_is(
    world: Callable[[PublishCodec], World], flushed: bool
) -> None:
    """It does not know what the former owner has published of the rows that it reads."""
    w = world("int8")
    w.learn()
    w.shard.flush()
    if not flushed:  # published, then lost with its owner: the log still has it, and replays it
        w.learn()
        w.shard.publish()
        w.at -= 1
    w.restart()
    assert w.shard.store.inexact() == len(w.keys.keys)
    if not flushed:
        w.rng = np.random.default_rng(6)
        w.learn()

    w.rest()

    np.testing.assert_array_equal(w.served(), w.learned())


def test_pauses_of_a_thin_stream_send_nothing_twice(world: Callable[[PublishCodec], World]) -> None:
    w = world("int8")
    for _ in range(4):
        w.learn()
        w.shard.publish()
        w.clock.advance(EXACT_AFTER_S - 1)
        assert w.shard.publish() == 0
    assert w.shard.counts.published_rows + w.shard.counts.passed_rows == 4 * len(w.keys.keys)


def test_a_failed_exact_batch_is_sent_again(writer: Faulty, world: Callable[[PublishCodec], World]) -> None:
    w = world("int8")
    w.learn()
    w.shard.publish()
    writer.script("append", nth=1, error=Unavailable("the disk is away"))
    w.clock.advance(EXACT_AFTER_S)
    with pytest.raises(Unavailable):
        w.shard.publish()

    w.rest()

    np.testing.assert_array_equal(w.served(), w.learned())


def test_exact_rows_are_sent_in_batches(
    world: Callable[[PublishCodec], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUBLISH_ROWS", 30)
    w = world("int4")
    w.learn()
    w.shard.publish()
    w.clock.advance(EXACT_AFTER_S)
    assert w.shard.publish() == 30

    w.rest()

    np.testing.assert_array_equal(w.served(), w.learned())


def test_bytes_and_errors_of_published_rows_are_counted(world: Callable[[PublishCodec], World]) -> None:
    w = world("int8")
    w.learn()
    w.shard.publish()
    counts, n = w.shard.flusher.wire.counts()[0, "int8"], len(w.keys.keys)

    assert counts.rows == n
    assert counts.bytes_raw == 4 * w.group.width * n
    assert counts.bytes_wire == (2 * w.group.scalars + 2 + DIM) * n
    assert counts.relative_error is not None
    assert 0 < counts.relative_error < 0.02
    assert counts.encode_s > 0
    with_keys = counts.bytes_wire + 8 * n
    assert with_keys < w.shard.counts.published_bytes <= with_keys + 40 * ROWS_PARTITIONS


def has_read(follower: RowFollower, ends: dict[int, int]) -> bool:
    return follower.state.sink is not None and follower.state.next == ends


def test_servers_that_start_at_any_time_equal_the_shard(world: Callable[[PublishCodec], World]) -> None:
    """One follows from before the first record; others read a store that is behind what was published."""
    w, stop = world("int8"), threading.Event()
    followers, threads = [], []
    for _ in range(3):
        table = partial(ServingTable, layout_of(w.spec), buckets=w.spec.buckets, partitions=1, seed=0)
        follower = RowFollower(w.log, w.store, TOPICS.rows, table, spec_hash="hash", wait_s=0.01)
        followers.append(follower)
        threads.append(threading.Thread(target=follower.run, args=(stop,)))
        threads[-1].start()
        w.learn()
        w.shard.flush()
        w.learn()
        w.shard.publish()

    w.rest()

    ends = {p: w.log.bounds(TopicPartition(TOPICS.rows, p)).end for p in range(ROWS_PARTITIONS)}
    try:
        for follower in followers:
            wait_for(partial(has_read, follower, ends))
            sink = follower.state.sink
            assert isinstance(sink, ServingTable)
            served = np.empty((len(w.keys.keys), w.group.width), np.float32)
            sink.lookup(0, w.keys, served)
            np.testing.assert_array_equal(served, w.learned())
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def nudged(w: World, share: float) -> None:
    """Change all rows by a share of their lengths."""
    rows = w.learned()
    gradients = (-share * rows).astype(np.float32)
    ranges = (OffsetRange(0, w.at, w.at + 1),)
    w.at += 1
    w.shard.push(Push(ranges, Fence(w.fence), TimeMs(1_000), [w.keys], [gradients]))


@pytest.fixture
def plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a push changes by its gradients alone: no experts, no counts."""
    monkeypatch.setattr(f"{__name__}.KIND", "dlrm")
    monkeypatch.setattr(f"{__name__}.SCALARS", False)


@pytest.mark.usefixtures("plain_steps")
def test_small_changes_are_passed_over_until_they_add_up(world: Callable[[PublishCodec], World]) -> None:
    w = world("int8")
    w.learn()
    w.shard.publish()
    sent, n, rounds = w.shard.counts.published_rows, len(w.keys.keys), 0
    while w.shard.counts.published_rows == sent:
        nudged(w, 0.01)
        w.shard.publish()
        rounds += 1
        assert w.error() < 0.06, "what serving holds is never further away"
    assert 3 <= rounds <= 6
    assert w.shard.counts.passed_rows >= (rounds - 1) * n

    w.rest()

    np.testing.assert_array_equal(w.served(), w.learned())


@pytest.mark.usefixtures("plain_steps")
def test_a_change_after_a_failed_append_is_not_passed_over(
    writer: Faulty, world: Callable[[PublishCodec], World]
) -> None:
    """Serving does not hold what was not appended."""
    w = world("int8")
    w.learn()
    writer.script("append", nth=1, error=Unavailable("the disk is away"))
    with pytest.raises(Unavailable):
        w.shard.publish()
    w.shard.publish()

    assert w.shard.counts.published_rows == len(w.keys.keys)
    assert w.error() < 0.02


@pytest.mark.usefixtures("plain_steps")
def test_a_row_that_is_removed_and_learned_anew_is_sent(world: Callable[[PublishCodec], World]) -> None:
    w = world("int8")
    w.learn()
    w.shard.publish()
    keys = w.keys.keys
    rows = w.learned()
    assert w.shard.store.remove(0, keys[::2]) == len(keys[::2])
    w.shard.lookup([w.keys], [np.empty_like(rows)])
    nudged(w, 0.001)
    w.shard.publish()

    served = w.served()

    learned = w.learned()
    near = np.linalg.norm(served - learned, axis=1) / np.linalg.norm(learned, axis=1)
    assert near.max() < 0.02
    w.rest()
    np.testing.assert_array_equal(w.served(), learned)
