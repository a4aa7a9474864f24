"""Published offsets are true under concurrent pushes, publishing and flushes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Fenced, Refused, Unavailable
from freshet.log import EventLog
from freshet.paramserver import flusher as module
from freshet.paramserver.shard import PublishedTo, Shard
from freshet.rows.deltas import decode_rows
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.testing.contracts.rowservice import PARTITIONS, Row, look_up, push_of
from freshet.testing.faults import Faulty
from freshet.types import TopicPartition
from tests.fixtures.shards import ROWS, TOPICS, loaded, push

ROUNDS = 8


@pytest.fixture
def shard(tmp_path: Path, log: EventLog, writer: Faulty) -> Iterator[Shard]:
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    yield loaded(log, rows, 10)
    rows.close()


class Reader:
    """The rows that a follower of `rows` has, record by record."""

    def __init__(self, log: EventLog, initial: dict[Row, list[float]]) -> None:
        self.records: list[list[dict[Row, float]]] = [[] for _ in range(ROWS_PARTITIONS)]
        self.initial = initial
        reader = log.reader()
        reader.assign({TopicPartition(TOPICS.rows, p): 0 for p in range(ROWS_PARTITIONS)})
        while polled := reader.poll(10_000, 0.0):
            for where, records in polled:
                for value in records.values:
                    delta = decode_rows(value)
                    rows = [(delta.table, key) for key in delta.keys.tolist()]
                    first = delta.values[:, 0].tolist()
                    self.records[where.partition].append(dict(zip(rows, first, strict=True)))
        reader.close()

    def pushes_in(self, published: PublishedTo) -> dict[Row, int]:
        """Return {row: number of pushes in its newest value below `rows_next`}."""
        newest: dict[Row, float] = {}
        for partition, stop in published.rows_next.items():
            for record in self.records[partition][:stop]:
                newest |= record
        return {row: round(self.initial[row][0] - value) for row, value in newest.items()}


def test_a_push_with_an_old_fence_is_refused_and_counted(shard: Shard) -> None:
    def pushed(at: int, fence: int) -> None:
        shard.push(push_of({0: (at, at + 1)}, {ROWS[0][0]: [1.0, 1.0]}, fence))

    pushed(0, 11)
    with pytest.raises(Fenced):
        pushed(1, 10)

    assert (shard.counts.pushes, shard.counts.fenced, shard.counts.refused) == (1, 1, 0)


def test_a_new_shard_has_published_everything(shard: Shard) -> None:
    assert shard.published == PublishedTo(
        dict.fromkeys(range(PARTITIONS), 0), dict.fromkeys(range(ROWS_PARTITIONS), 0)
    )


def test_a_round_publishes_the_offsets_applied_at_its_start(shard: Shard, log: EventLog) -> None:
    push(shard, 0, 0)
    shard.publish()
    ends = {p: log.bounds(TopicPartition(TOPICS.rows, p)).end for p in range(ROWS_PARTITIONS)}
    assert shard.published == PublishedTo({0: 1, 1: 0}, ends)


def test_a_push_during_a_round_belongs_to_the_next_round(shard: Shard, writer: Faulty) -> None:
    writer.script("append", nth=1, before=lambda: push(shard, 0, 1))
    push(shard, 0, 0)
    shard.publish()
    assert shard.published.applied[0] == 1
    shard.publish()
    assert shard.published.applied[0] == 2


def test_a_failed_round_publishes_no_offsets(shard: Shard, writer: Faulty) -> None:
    before = shard.published
    push(shard, 0, 0)
    writer.script("append", nth=1, error=Unavailable("the disk is away"))
    with pytest.raises(Unavailable):
        shard.publish()
    assert shard.published == before
    shard.publish()
    assert shard.published.applied[0] == 1


@pytest.mark.slow
def test_samples_below_the_published_offsets_are_in_the_records(
    shard: Shard, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUBLISH_ROWS", 20)  # a round has many pieces
    initial = {
        row: values for rows in ROWS.values() for row, values in look_up(shard, rows, create=True).items()
    }
    published: list[PublishedTo] = []
    errors: list[BaseException] = []
    enough = threading.Event()
    pushed = dict.fromkeys(range(PARTITIONS), 0)

    def started(work: Callable[[], object]) -> threading.Thread:
        def target() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        return thread

    def train(partition: int) -> None:
        while not enough.is_set():
            push(shard, partition, pushed[partition])
            pushed[partition] += 1

    def publish() -> None:
        for _ in range(ROUNDS):
            shard.publish()
            published.append(shard.published)

    def flush() -> None:
        while not enough.is_set():
            shard.flush()

    others = [started(partial(train, p)) for p in range(PARTITIONS)] + [started(flush)]
    publisher = started(publish)
    publisher.join(60)
    ended = not publisher.is_alive()
    enough.set()
    for thread in (publisher, *others):
        thread.join(60)
    assert ended, "a round must end although pushes go on"
    assert not errors
    shard.publish()
    published.append(shard.published)

    reader = Reader(log, initial)
    assert published[-1].applied == pushed
    for one in published:
        pushes = reader.pushes_in(one)
        for p, applied in one.applied.items():
            assert min(pushes.get(row, 0) for row in ROWS[p]) >= applied
    for earlier, later in pairwise(published):
        assert all(earlier.applied[p] <= later.applied[p] for p in range(PARTITIONS))


def test_a_shard_without_buckets_refuses_a_push(shard: Shard) -> None:
    push(shard, 0, 0)
    shard.buckets.revoke(shard.owned())
    assert shard.owned() == []

    with pytest.raises(Refused, match=r"push of 0:\[1, 2\) does not continue") as refused:
        push(shard, 0, 1)
    assert refused.value.applied == {}
