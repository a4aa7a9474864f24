"""After any failure during a flush, the row store ends with the rows of the table, and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Unavailable
from freshet.log import EventLog, Writer
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver.shard import Shard
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rows.store import FlushOutcome
from freshet.testing.clock import SettableClock
from freshet.testing.contracts.eventlog import append_to
from freshet.testing.contracts.rowservice import look_up
from freshet.testing.faults import Faulty
from freshet.types import U8, Append, Flush, TopicPartition
from tests.fixtures.shards import PARSED, ROWS, TOPICS, loaded, push, write_by_old_owner

ALL = [row for rows in ROWS.values() for row in rows]


class Unsure(SqliteRowStore):
    """A row store that loses answers, before or after a request has taken effect."""

    before: Callable[[Flush], None] = staticmethod(lambda _: None)
    after: Callable[[Flush], None] = staticmethod(lambda _: None)

    def flush(self, flush: Flush) -> U8:
        self.before(flush)
        outcomes = super().flush(flush)
        self.after(flush)
        return outcomes


def once(fails: Callable[[Flush], bool] = lambda _: True) -> Callable[[Flush], None]:
    """Fail once when set to."""
    left = [True]

    def fail(flush: Flush) -> None:
        if left and fails(flush):
            left.pop()
            raise Unavailable("the answer is lost")

    return fail


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Unsure]:
    made = Unsure(tmp_path / "rows.sqlite")
    yield made
    made.close()


def assert_alike(shard: Shard, log: EventLog, rows: SqliteRowStore) -> None:
    """Check that a restart has the rows and offsets of the shard."""
    again = loaded(log, rows, 11)
    assert again.applied() == shard.applied()
    assert look_up(again, ALL, create=False) == look_up(shard, ALL, create=False)


def test_the_age_of_an_unwritten_flush_is_reported(log: EventLog, rows: Unsure) -> None:
    clock = SettableClock()
    shard = loaded(log, rows, 10, clock)
    seen: list[float] = []

    def hang(_flush: Flush) -> None:
        clock.advance(12)
        seen.append(shard.unwritten_s)
        raise Unavailable("no answer")

    shard.flush()
    clock.advance(60)
    assert (shard.unwritten_s, shard.counts.flushes_failed) == (0, 0)

    rows.before = hang
    for _ in range(2):
        with pytest.raises(Unavailable):
            shard.flush()
        clock.advance(2)
    assert (seen, shard.unwritten_s, shard.counts.flushes_failed) == ([12, 26], 28, 2)

    rows.before = lambda _: None
    shard.flush()
    assert (shard.unwritten_s, shard.counts.flushes_failed, shard.counts.flushes) == (0, 2, 2)


class OnePartitionAway:
    """An unnamed writer to which one partition of `rows` does not answer; other partitions do."""

    def __init__(self, writer: Writer, partition: int) -> None:
        self._writer, self._away = writer, partition

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        taken = self._writer.append([one for one in appends if one.partition != self._away])
        if len(taken) < len(appends):
            raise Unavailable(f"no broker leads {TOPICS.rows}[{self._away}]")
        return taken


def test_one_unavailable_partition_counts_as_an_unwritten_flush(
    log: EventLog, rows: Unsure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends() -> list[int]:
        return [log.bounds(TopicPartition(TOPICS.rows, p)).end for p in range(ROWS_PARTITIONS)]

    clock, away = SettableClock(), OnePartitionAway(log.writer(), 3)
    monkeypatch.setattr(log, "writer", lambda: away)
    shard = loaded(log, rows, 10, clock)
    shard.flush()
    assert shard.unwritten_s == 0, "nothing is to be published"

    look_up(shard, ALL, create=True)
    before = ends()
    for at in range(3):
        push(shard, 0, at)
        with pytest.raises(Unavailable):
            shard.publish()
        with pytest.raises(Unavailable):
            shard.flush()
        clock.advance(30)

    stand_still = [p for p in range(ROWS_PARTITIONS) if ends()[p] == before[p]]
    assert stand_still == [3], "followers read of the others"
    assert (shard.unwritten_s, shard.counts.flushes_failed) == (90, 3)


def test_a_flush_that_failed_to_publish_is_written_by_the_next(
    log: EventLog, rows: Unsure, writer: Faulty
) -> None:
    shard = loaded(log, rows, 10)
    look_up(shard, ALL, create=True)
    push(shard, 0, 0)
    writer.script("append", nth=1, error=Unavailable("the disk is full"))
    with pytest.raises(Unavailable):
        shard.flush()
    push(shard, 1, 0)
    shard.flush()

    assert shard.store.pending_flush() == 0
    assert_alike(shard, log, rows)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_flush_with_a_lost_answer_is_repeated_unchanged(log: EventLog, rows: Unsure, when: str) -> None:
    shard = loaded(log, rows, 10)
    look_up(shard, ALL, create=True)
    push(shard, 0, 0)
    sent: list[Flush] = []
    fail = once()

    def lose(flush: Flush) -> None:
        sent.append(flush)
        fail(flush)

    setattr(rows, when, lose)
    with pytest.raises(Unavailable):
        shard.flush()
    push(shard, 0, 1)
    push(shard, 1, 0)
    shard.flush()

    assert sent[0] is sent[1]
    np.testing.assert_array_equal(sent[2].seqs, sent[0].seqs + 1)
    assert_alike(shard, log, rows)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_whole_flush_with_a_lost_answer_is_repeated_unchanged(
    log: EventLog, rows: Unsure, when: str
) -> None:
    shard = loaded(log, rows, 10)
    look_up(shard, ALL, create=True)
    push(shard, 0, 0)
    shard.flush()
    for bucket in [*range(PARSED.buckets)] * 5:  # by more than the two flushes that follow
        write_by_old_owner(rows, bucket)
    push(shard, 0, 1)
    setattr(rows, when, once(lambda flush: flush.whole))
    with pytest.raises(Unavailable):
        shard.flush()
    push(shard, 1, 0)
    shard.flush()

    assert shard.counts.replaced_buckets == PARSED.buckets
    assert_alike(shard, log, rows)


def test_distance_to_retention_shrinks_without_flushes(log: SqliteEventLog, rows: Unsure) -> None:
    """On a log without retention pins, as Kafka, retention removes samples that a restart must replay."""
    samples = TopicPartition(TOPICS.samples, 0)
    for _ in range(5):
        log.writer().append([append_to(samples, [b"a block"], times=[1])])
    shard = loaded(log, rows, 10)
    look_up(shard, ALL, create=True)
    for offset in range(3):
        push(shard, 0, offset)
    shard.flush()
    assert shard.counts.room_blocks["0"] == 3

    def away(_: Flush) -> None:
        raise Unavailable("the row store is away")

    rows.before = away
    log.hold(shard.flusher.pin, {samples: 5})
    while log.enforce_retention():
        pass
    with pytest.raises(Unavailable, match="away"):
        shard.flush()
    assert shard.counts.room_blocks["0"] == 3 - 5


def test_a_stop_writes_the_rest_after_the_unanswered_flush(log: EventLog, rows: Unsure) -> None:
    shard = loaded(log, rows, 10)
    look_up(shard, ALL, create=True)
    push(shard, 0, 0)
    rows.before = once()
    with pytest.raises(Unavailable):
        shard.flush()
    push(shard, 1, 0)
    shard.stop()

    assert_alike(shard, log, rows)


def test_a_second_failover_does_not_fake_a_whole_flush(log: EventLog, rows: Unsure) -> None:
    """Managed failover loses a flush; a second one restores it before the bucket is written whole."""
    shard = loaded(log, rows, 10)
    look_up(shard, ALL, create=True)
    push(shard, 0, 0)
    flushed = rows.flush

    def lost(flush: Flush) -> U8:
        rows.flush = flushed  # type: ignore[method-assign]
        flushed(flush)
        push(shard, 1, 0)
        return np.full(len(flush.buckets), FlushOutcome.REPLACE, np.uint8)

    rows.flush = lost  # type: ignore[method-assign]
    shard.flush()

    assert shard.counts.replaced_buckets > 0
    assert_alike(shard, log, rows)
