"""Published offsets are true under concurrent pushes, publishing and flushes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.topics import ROWS_PARTITIONS, topics_of
from freshet.errors import Fenced, Refused, Unavailable
from freshet.log import EventLog, Writer
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver import flusher as module
from freshet.paramserver.shard import PublishedTo, Shard
from freshet.rows.deltas import decode_rows
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rows.store import RowStore
from freshet.testing.contracts.rowservice import PARTITIONS, Row, look_up, push_of
from freshet.types import Append, Fence, TopicPartition
from tests.contract.test_rowservice import SPEC

PARSED = parse_spec(SPEC)
TOPICS = topics_of(PARSED)
ROUNDS = 8
ROWS: dict[int, list[Row]] = {
    p: [
        (table, (key * 0x9E3779B97F4A7C15) % (1 << 64))
        for table in (0, 1)
        for key in range(1 + p, 60, PARTITIONS)
    ]
    for p in range(PARTITIONS)
}
"""Rows that each partition of samples changes, in every bucket; a push subtracts one from each float."""


class Interrupting:
    """A log's writer with a callback before each append."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.before: Callable[[], None] = lambda: None

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        self.before()
        return self._writer.append(appends)

    def __getattr__(self, name: str) -> object:
        return getattr(self._writer, name)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    made = SqliteEventLog(tmp_path / "log")
    for plan in TOPICS.plans:
        made.create_topic(
            plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
        )
    yield made
    made.close()


def loaded(log: EventLog, rows: RowStore, fence: int, clock: Clock = SYSTEM_CLOCK) -> Shard:
    made = Shard(
        spec=PARSED,
        layout=layout_of(PARSED),
        spec_hash="hash",
        topics=TOPICS,
        log=log,
        rows=rows,
        fence=Fence(fence),
        clock=clock,
        held=lambda: True,
    )
    made.load()
    return made


@pytest.fixture
def shard(tmp_path: Path, log: EventLog) -> Iterator[Shard]:
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    yield loaded(log, rows, 10)
    rows.close()


def push(shard: Shard, partition: int, at: int) -> None:
    shard.push(push_of({partition: (at, at + 1)}, {row: [1.0, 1.0] for row in ROWS[partition]}))


def interrupted(shard: Shard) -> Interrupting:
    shard._flusher._writer = writer = Interrupting(shard._flusher._writer)  # type: ignore[assignment]
    return writer


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


def test_a_push_during_a_round_belongs_to_the_next_round(shard: Shard) -> None:
    writer = interrupted(shard)

    def once() -> None:
        writer.before = lambda: None
        push(shard, 0, 1)

    writer.before = once
    push(shard, 0, 0)
    shard.publish()
    assert shard.published.applied[0] == 1
    shard.publish()
    assert shard.published.applied[0] == 2


def test_a_failed_round_publishes_no_offsets(shard: Shard) -> None:
    def fail() -> None:
        raise Unavailable("the disk is away")

    before, writer = shard.published, interrupted(shard)
    push(shard, 0, 0)
    writer.before = fail
    with pytest.raises(Unavailable):
        shard.publish()
    assert shard.published == before
    writer.before = lambda: None
    shard.publish()
    assert shard.published.applied[0] == 1


def test_samples_below_the_published_offsets_are_in_the_records(
    shard: Shard, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUBLISH_ROWS", 20)  # a round has many pieces
    initial = {
        row: values for rows in ROWS.values() for row, values in look_up(shard, rows, create=True).items()
    }
    told: list[PublishedTo] = []
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
            told.append(shard.published)

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
    told.append(shard.published)

    reader = Reader(log, initial)
    assert told[-1].applied == pushed
    for published in told:
        pushes = reader.pushes_in(published)
        for p, applied in published.applied.items():
            assert min(pushes.get(row, 0) for row in ROWS[p]) >= applied
    for earlier, later in pairwise(told):
        assert all(earlier.applied[p] <= later.applied[p] for p in range(PARTITIONS))


def test_a_shard_without_buckets_refuses_a_push(shard: Shard) -> None:
    push(shard, 0, 0)
    shard.revoke(shard.held())
    assert shard.held() == []

    with pytest.raises(Refused, match=r"push of 0:\[1, 2\) does not continue") as refused:
        push(shard, 0, 1)
    assert refused.value.applied == {}
