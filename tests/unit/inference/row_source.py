"""A shard that writes rows, and an empty table that serves them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from freshet.config.spec.layout import Layout
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.inference.rows import ServingTable
from freshet.log import EventLog
from freshet.paramserver.flusher import FlushBook
from freshet.rows.deltas import RowDelta, encode_rows
from freshet.rows.store import RowStore, StoreIdentity
from freshet.types import (
    Append,
    Bucket,
    BucketMeta,
    BytesColumn,
    Fence,
    TimeMs,
    TopicPartition,
    bucket_of,
)
from tests.fixtures.tables import counting_group, keys_of, push, store_of

BUCKETS = 16
TOPIC = "shop.rows"
NO_KEYS = np.empty(0, np.uint64)
KEY_0 = encode_rows(
    RowDelta(0, Fence(5), TimeMs(1), np.zeros(1, np.uint64), np.ones((1, 2), np.float32), NO_KEYS)
)
"""A delta of a key that no row has, with a right checksum."""


class Shard:
    """What a shard does to the log and the row store, step by step."""

    def __init__(self, log: EventLog, store: RowStore) -> None:
        self.log, self.store = log, store
        self.table = store_of(counting_group(), buckets=BUCKETS)
        self.fence = Fence(5)
        self.offset = 0
        log.create_topic(TOPIC, partitions=ROWS_PARTITIONS)
        self.writer = log.writer()
        meta = BucketMeta(Fence(-1), 0, 0, {0: 0, 1: 0}, 0, TimeMs(0))
        identity = StoreIdentity("shop", "hash", BUCKETS, {"t": 0}, {0: self.table.record_bytes(0)}, "log")
        store.create(identity, {Bucket(b): meta for b in range(BUCKETS)})
        self.book = FlushBook(buckets=BUCKETS, partitions=2)
        self.book.claimed(store.claim([Bucket(b) for b in range(BUCKETS)], self.fence))

    def train(self, numbers: list[int], amount: float, *, clock_ms: int = 0) -> None:
        ranges = [(0, self.offset, self.offset + 1)]
        self.offset += 1
        push(self.table, ranges, keys_of(*numbers), np.full((len(numbers), 2), -amount), clock_ms=clock_ms)

    def publish(self, *, fence: int | None = None) -> None:
        published = self.table.collect_publish(1_000_000)
        for part in published.tables:
            self.send(
                RowDelta(
                    part.table,
                    Fence(self.fence if fence is None else fence),
                    published.clock_ms,
                    part.keys,
                    part.values,
                    part.removed,
                )
            )

    def send(self, delta: RowDelta) -> None:
        places = bucket_of(np.concatenate([delta.keys, delta.removed]), BUCKETS) * ROWS_PARTITIONS // BUCKETS
        at = places[: len(delta.keys)]
        gone = places[len(delta.keys) :]
        for p in np.unique(places).tolist():
            piece = replace(
                delta,
                keys=delta.keys[at == p],
                values=delta.values[at == p],
                removed=delta.removed[gone == p],
            )
            self.raw(p, encode_rows(piece))

    def raw(self, partition: int, record: bytes) -> None:
        self.writer.append([Append(TOPIC, partition, BytesColumn.of([record]))])

    def flush(self) -> None:
        ends = [self.log.bounds(TopicPartition(TOPIC, p)).end for p in range(ROWS_PARTITIONS)]
        flush = self.book.next_flush(self.table.collect_flush(), np.array(ends))
        self.book.done(flush, self.store.flush(flush))


def serving_table() -> ServingTable:
    return ServingTable(Layout((counting_group(),), ()), buckets=BUCKETS, partitions=2, seed=7)
