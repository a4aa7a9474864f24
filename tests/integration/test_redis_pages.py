"""Pages of rows in a Redis: merged once they exceed half of the bytes that a bucket began with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import uuid4

import numpy as np
import pytest
import structlog

from freshet.adapters import open_rowstore
from freshet.errors import Unavailable
from freshet.rows.redis import pages as redis_pages
from freshet.rows.redis.pages import Labelled, Reads
from freshet.rows.store import FlushOutcome, RowStore
from freshet.testing.contracts.rowstore import (
    Change,
    flush_of,
    identity,
    next_meta,
    outcomes_of,
    rows_of,
    starting,
)
from freshet.types import Bucket, BucketMeta, Fence
from tests.fixtures.bucket_owner import ALL, large_flush
from tests.servers.redis_cluster import RedisServer

ROWS = 2_000
"""Rows of each flush: some 32 KB; three flushes exceed the bytes that stay unmerged."""
Open = Callable[[], RowStore]


@pytest.fixture
def name() -> str:
    return f"m{uuid4().hex}"


@pytest.fixture
def opened(redis_server: RedisServer, name: str) -> Iterator[Open]:
    stores: list[RowStore] = []

    def open_it() -> RowStore:
        stores.append(open_rowstore(f"redis://{redis_server.address}/{name}"))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def claimed(store: RowStore, fence: int) -> BucketMeta:
    store.create(identity(), starting())
    return store.claim(ALL, Fence(fence))[ALL[0]]


def flushed(store: RowStore, meta: BucketMeta, fill: int) -> BucketMeta:
    """All rows of bucket 0 written once more."""
    meta = next_meta(meta, rows=ROWS)
    assert set(outcomes_of(store, large_flush(meta, ROWS, fill, whole=False)).values()) == {FlushOutcome.DONE}
    return meta


def pages(server: RedisServer, name: str) -> int:
    return int(server.ask("HLEN", f"{{{name}:0}}:rows"))


@pytest.mark.parametrize("at_once", [1_000, 32 << 20], ids=["page_by_page", "at_once"])
def test_rewritten_rows_take_a_bounded_number_of_pages(
    redis_server: RedisServer, opened: Open, name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_pages, "BYTES_AT_ONCE", at_once)
    store = opened()
    meta = claimed(store, 5)
    most = 0
    for fill in range(1, 30):
        meta = flushed(store, meta, fill)
        most = max(most, pages(redis_server, name))
        if fill % 7 == 0:
            assert rows_of(opened(), 0) == {(0, key): fill for key in range(ROWS)}
    assert 2 <= most <= 6, "three flushes may follow the last merge"
    there, records = opened().read(Bucket(0), 0, np.array([0, ROWS - 1, ROWS], np.uint64))
    assert there.tolist() == [True, True, False]
    assert records[:2].tolist() == [[29] * 8] * 2
    assert dict(store.metas(ALL[:1])) == {ALL[0]: meta}
    assert redis_server.ask("KEYS", f"*{name}*aside*") == [], "a stage was left behind"


def test_removed_rows_stay_removed_when_pages_are_merged(
    redis_server: RedisServer, opened: Open, name: str
) -> None:
    store = opened()
    meta = flushed(store, claimed(store, 5), 1)
    meta = next_meta(meta, rows=ROWS - 2)
    store.flush(flush_of(Change(0, meta, {}, {0: [7, 8]})))
    for fill in range(2, 9):  # other rows than those two, until all are merged
        meta = next_meta(meta, rows=ROWS - 2)
        rows = {key: fill for key in range(ROWS) if key not in (7, 8)}
        store.flush(flush_of(Change(0, meta, {0: rows})))
    assert pages(redis_server, name) < 7
    assert rows_of(opened(), 0) == {(0, key): 8 for key in range(ROWS) if key not in (7, 8)}


def test_an_owner_replaced_while_it_merges_changes_nothing(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(), opened()
    meta = claimed(store, 5)
    read = Reads.labelled
    taken: list[BucketMeta] = []

    def read_and_lose(reads: Reads, buckets: list[int]) -> list[Labelled]:
        found = read(reads, buckets)
        if not taken:
            theirs = other.claim(ALL, Fence(9))[ALL[0]]
            taken.append(next_meta(theirs, rows=ROWS))
            other.flush(large_flush(taken[0], ROWS, 99, whole=False))
        return found

    monkeypatch.setattr(Reads, "labelled", read_and_lose)
    fill = 0
    while not taken:
        fill += 1
        assert fill < 10, "pages were never merged"
        meta = flushed(store, meta, fill)
    assert rows_of(opened(), 0) == {(0, key): 99 for key in range(ROWS)}
    assert store.metas(ALL[:1])[ALL[0]] == taken[0]
    late = large_flush(next_meta(meta, rows=ROWS), ROWS, 1, whole=False)
    assert outcomes_of(store, late) == {0: FlushOutcome.FENCED}


def test_a_flush_is_written_if_merging_fails(
    redis_server: RedisServer, opened: Open, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    meta = claimed(store, 5)

    def fail(*_: object) -> list[Labelled]:
        raise Unavailable("the master is gone")

    with monkeypatch.context() as patched, structlog.testing.capture_logs() as said:
        patched.setattr(Reads, "labelled", fail)
        for fill in range(1, 6):
            meta = flushed(store, meta, fill)
    assert any("not merged" in line["event"] for line in said)
    assert rows_of(opened(), 0) == {(0, key): 5 for key in range(ROWS)}
    flushed(store, meta, 6)  # tries again
    assert pages(redis_server, name) == 1
    assert rows_of(opened(), 0) == {(0, key): 6 for key in range(ROWS)}
