"""Shards of the contract tests' model on a real log, for several test modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.topics import topics_of
from freshet.log import EventLog, Writer
from freshet.paramserver.shard import Shard, ShardContext
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rows.store import FlushOutcome, RowStore
from freshet.tables.runs import runs_of, widths_of
from freshet.testing.contracts.rowservice import PARTITIONS, Row, push_of
from freshet.testing.contracts.rowstore import Change, flush_of, next_meta
from freshet.types import Append, Bucket, Fence
from tests.contract.test_rowservice import SPEC

PARSED = parse_spec(SPEC)
TOPICS = topics_of(PARSED)
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


def shard_of(log: EventLog, rows: SqliteRowStore, name: str, fence: Fence | None = None) -> Shard:
    return Shard(ShardContext(PARSED, "hash", log, rows), name=name, fence=fence)


def loaded(log: EventLog, rows: RowStore, fence: int, clock: Clock = SYSTEM_CLOCK) -> Shard:
    made = Shard(ShardContext(PARSED, "hash", log, rows, clock), fence=Fence(fence))
    made.load()
    return made


def push(shard: Shard, partition: int, at: int) -> None:
    shard.push(push_of({partition: (at, at + 1)}, {row: [1.0, 1.0] for row in ROWS[partition]}))


def interrupted(shard: Shard) -> Interrupting:
    shard.flusher._writer = writer = Interrupting(shard.flusher._writer)  # type: ignore[assignment]
    return writer


def write_by_old_owner(store: RowStore, bucket: int) -> None:
    """Advance a bucket's seq by one, as an old owner can if a failover loses a claim."""
    meta, identity = store.metas([Bucket(bucket)])[Bucket(bucket)], store.identity()
    assert identity is not None
    flush = flush_of(Change(bucket, next_meta(meta, rows=meta.rows), {}))
    flush = replace(flush, runs=runs_of([], widths_of(identity.record_bytes)))
    assert store.flush(flush).tolist() == [FlushOutcome.DONE]
