"""Rows that are there before a model's services start, and that no traffic touches: what a restart loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from freshet.adapters import open_eventlog, open_rowstore
from freshet.clock import SYSTEM_CLOCK
from freshet.config.settings import load_settings
from freshet.config.spec import Spec
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.layout import layout_of
from freshet.config.spec.schemas import load_schemas
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.coordination.assignment import slices_of
from freshet.coordination.claims import Claims
from freshet.log.topics import ensure_topics
from freshet.paramserver.flusher import FlushBook
from freshet.paramserver.shard import Shard, ShardContext
from freshet.rows.service import KeyGroup
from freshet.rows.store import FlushOutcome
from freshet.tables import PushOutcome, Store
from freshet.types import U64, Bucket, OffsetRange, bucket_of

__all__ = ["seed_rows"]

TABLE = 0
"""Of the spec's, in its order."""

BUCKETS_AT_ONCE = 64
CLAIM_S = 30.0


def seed_rows(spec: Spec, folder: Path, count: int, seed: int, *, used_ms: int = 0) -> int:
    """Store rows of random keys as their owner, which then leaves; how many, as a key may come twice.

    `used_ms`: when they were last used; where tables have a ttl those of long ago go as soon as events come.
    """
    common = load_settings(run_folder=folder).common
    log, rows = open_eventlog(common.log_url), open_rowstore(common.rows_url)
    topics = ensure_topics(log, spec)
    hash_ = identity_hash(spec, load_schemas(spec))
    Shard(ShardContext(spec, hash_, log, rows)).buckets.create()
    claims = Claims(log, topics.control)
    held = claims.acquire_all(list(slices_of(spec.buckets)), "seed", SYSTEM_CLOCK.monotonic() + CLAIM_S)
    book = FlushBook(buckets=spec.buckets, partitions=spec.partitions)
    book.claimed(rows.claim([Bucket(b) for b in range(spec.buckets)], held.fence))
    made = _made(spec, np.random.default_rng(seed).integers(0, (1 << 64) - 1, count, np.uint64), used_ms)
    for first in range(0, spec.buckets, BUCKETS_AT_ONCE):
        collected = made.collect_whole(range(first, first + BUCKETS_AT_ONCE))
        flush = book.next_flush(collected, np.zeros(ROWS_PARTITIONS, np.int64), whole=True)
        assert (rows.flush(flush) == FlushOutcome.DONE).all()
    claims.close()
    rows.close()
    log.close()
    return made.memory().rows[spec.tables[TABLE].id]


def _made(spec: Spec, keys: U64, used_ms: int) -> Store:
    """A store with a row for each key, trained by nothing: rows that were only looked up are not stored."""
    layout, table = layout_of(spec), spec.tables[TABLE].id
    store, group = Store.of(spec, layout), next(g for g in layout.groups if table in g.tables)
    rising = np.unique(keys)
    starts = np.searchsorted(bucket_of(rising, spec.buckets), np.arange(spec.buckets + 1)).astype(np.uint32)
    rows = KeyGroup(group.index, rising, np.full(len(rising), table, np.uint8), starts)
    nothing = np.zeros((len(rising), group.width), np.float32)
    assert store.push([OffsetRange(0, 0, 1)], used_ms, [rows], [nothing]) is PushOutcome.APPLIED
    for bucket in range(spec.buckets):
        store.set_applied(bucket, dict.fromkeys(range(spec.partitions), 0), 0)
    return store
