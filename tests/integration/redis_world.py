"""An owner of buckets that keeps what it has learned in memory and flushes it as a shard does, and readers
who look for torn buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from freshet.errors import Unavailable
from freshet.rows.store import FlushOutcome, RowStore
from freshet.tables.runs import runs_of
from freshet.testing.contracts.rowstore import (
    BUCKETS,
    Change,
    flush_of,
    identity,
    next_meta,
    rows_of,
    run_of,
    starting,
)
from freshet.testing.waiting import wait_until
from freshet.types import Bucket, BucketMeta, Fence, Flush

__all__ = ["ALL", "Owner", "Reader", "every", "large_flush", "stamp_of"]

ALL = [Bucket(b) for b in range(BUCKETS)]
KEYS = range(40)


class Owner:
    """Owns all buckets. Each round it writes one number, the round's, into every row of every bucket: rows of
    two rounds in one bucket are a torn bucket."""

    def __init__(self, store: RowStore, fence: int) -> None:
        store.create(identity(), starting())
        self._store, self.metas = store, dict(store.claim(ALL, Fence(fence)))
        self.rounds, self.replaced = 0, 0
        self._unanswered: Flush | None = None

    def flush(self) -> None:
        """One round, or what the last one left unanswered. Raises Unavailable; then call it again."""
        if self._unanswered is None:
            self.rounds += 1
            news = {"rows": len(KEYS), "clock_ms": self.rounds}
            self.metas = {b: next_meta(m, **news) for b, m in self.metas.items()}
            self._unanswered = self._flush_of(self.metas, whole=False)
        outcomes = self._store.flush(self._unanswered)
        again = self._unanswered.buckets[outcomes == FlushOutcome.REPLACE]
        assert not (outcomes == FlushOutcome.FENCED).any()
        if len(again):
            self.replaced += len(again)
            lost = {Bucket(b): self.metas[Bucket(b)] for b in again.tolist()}
            self._unanswered = self._flush_of(lost, whole=True)
            assert set(self._store.flush(self._unanswered).tolist()) == {FlushOutcome.DONE}
        self._unanswered = None

    def flush_rounds(self, count: int, *, within_s: float = 60.0) -> None:
        """So many rounds that were answered, however many tries that takes."""
        done = [0]

        def one() -> bool:
            try:
                self.flush()
            except Unavailable:
                return False
            done[0] += 1
            return done[0] >= count

        wait_until(f"{count} flushes", one, within_s=within_s, poll_s=0.02)

    def flush_until_seen_by(self, reader: Reader) -> None:
        """Flush once more, and wait until a reader has seen it."""
        self.flush_rounds(1)
        wait_until("a reader sees the last round", lambda: reader.seen[-1:] == [self.rounds], within_s=30)

    def check(self, store: RowStore) -> None:
        """The store holds what this owner knows: every row of the last round, and its metas."""
        assert self._unanswered is None
        for bucket in ALL:
            assert rows_of(store, bucket) == {(0, key): self.rounds % 256 for key in KEYS}
        assert dict(store.metas(ALL)) == self.metas

    def _flush_of(self, metas: Mapping[Bucket, BucketMeta], *, whole: bool) -> Flush:
        rows = dict.fromkeys(KEYS, self.rounds % 256)
        return flush_of(*(Change(b, meta, {0: rows}) for b, meta in metas.items()), whole=whole)


class Reader:
    """Scans a bucket again and again, in a thread, and keeps the rounds that it saw."""

    def __init__(self, store: RowStore, bucket: int) -> None:
        self._store, self._bucket = store, bucket
        self._stop = threading.Event()
        self.seen: list[int] = []
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if error[0] is None and self.failed is not None:
            raise self.failed

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self.seen.append(stamp_of(self._store, self._bucket))
                except Unavailable:  # an error, and no absence
                    continue
        except BaseException as error:
            self.failed = error


def stamp_of(store: RowStore, bucket: int) -> int:
    """The round that all rows of a bucket are of; fails if they are of two, or some are missing."""
    rows = rows_of(store, bucket)
    assert len(rows) == len(KEYS), f"{len(rows)} of {len(KEYS)} rows: rows that were learned are gone"
    stamps = set(rows.values())
    assert len(stamps) == 1, f"a bucket holds rows of rounds {stamps}"
    return stamps.pop()


def large_flush(meta: BucketMeta, rows: int, fill: int, *, whole: bool) -> Flush:
    """Bucket 0 with so many rows."""
    run = run_of(0, 0, {}, ())
    keys = np.arange(rows, dtype=np.uint64)
    records = np.full((rows, run.records.shape[1]), fill, np.uint8)
    flush = flush_of(Change(0, meta, {}), whole=whole)
    return replace(flush, runs=runs_of([replace(run, keys=keys, records=records)], flush.runs.widths))


def every(tries: Sequence[Callable[[], object]]) -> None:
    """Each at the same time, in a thread of its own; the first failure is raised."""
    failed: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in tries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
