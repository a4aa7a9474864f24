"""Loading of claimed buckets from the row store: before they are served, or while they are (PROTOCOL 10).

A bucket that is served while it loads answers for a key once its row was read by key, or the row store has
answered that there is none. Rows learned on top stay in memory until the whole bucket was read and its meta
found unchanged. An unchanged meta proves that no write since the claim and no failover invalidated a row that
was read by key.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from freshet.errors import Corrupt, Fenced, Unavailable
from freshet.rows.service import KeyGroup
from freshet.rows.store import RowStore
from freshet.tables import Store
from freshet.types import I64, Bucket, BucketMeta, Fence

__all__ = ["Loader", "Progress", "damaged_buckets"]

log = structlog.get_logger("freshet.paramserver")

RETRIES = 3
"""Reads of a bucket that its last owner still wrote to; a bucket that changes more often is an error."""

PARTS = 16
"""Parts of a model's buckets that are loaded and checked one after the other; a part is flushed once loaded.
As many as the SQLite row store has spans, each of which it reads whole."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Buckets that are served and still loading, and their stored rows."""

    buckets: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Buckets of one claim, with their metas at the claim; compared by identity."""

    fence: Fence
    metas: Mapping[Bucket, BucketMeta]


class Loader:
    """Loads rows from the row store into a shard's table. Thread-safe; `load_next_part` needs one thread."""

    def __init__(self, store: Store, rows: RowStore, *, buckets: int) -> None:
        """Start without buckets; `buckets` is their number in the model."""
        self._store, self._rows, self._buckets = store, rows, buckets
        self._lock = threading.Lock()
        self._waiting: deque[_Part] = deque()
        self._part_of: dict[Bucket, _Part] = {}  # of buckets that are served and still loading
        self._reading = threading.Lock()  # batches want the same keys: the second finds them read
        self.keys_read = 0  # by key, since the start

    # --- before buckets are served

    def read_whole(
        self,
        claimed: Mapping[Bucket, BucketMeta],
        fence: Fence,
        stopping: Callable[[], bool] = lambda: False,
    ) -> dict[Bucket, BucketMeta]:
        """Import the rows of claimed buckets and return their metas.

        A bucket is read again until its meta is the same before and after the read.

        Raises:
            Corrupt: buckets are damaged; the message names them. None is skipped, since that would lose
                trained rows.
            Fenced: another shard claimed one of them during the read.
            Unavailable: the row store is away, rows and meta do not agree, or `stopping` returned True.
        """
        try:
            return self._read_whole(claimed, fence, stopping)
        except Corrupt as error:
            raise _damaged_error(damaged_buckets(self._rows, list(claimed)), error) from error

    def _read_whole(
        self, claimed: Mapping[Bucket, BucketMeta], fence: Fence, stopping: Callable[[], bool]
    ) -> dict[Bucket, BucketMeta]:
        read: dict[Bucket, BucketMeta] = {}
        waiting = dict(claimed)
        for _ in range(RETRIES):
            found = np.zeros(self._buckets, np.int64)
            for runs in self._rows.scan(list(waiting)):
                if stopping():
                    raise Unavailable("the process stops while rows are read from the row store")
                self._store.import_runs(runs)
                np.add.at(found, runs.directory["bucket"], runs.directory["rows"])
            for bucket, after in self._rows.metas(list(waiting)).items():
                if after.fence > fence:
                    raise Fenced(f"bucket {bucket} was claimed by a higher fence while it was read")
                if _agree(waiting[bucket], after, int(found[bucket])):
                    read[bucket] = waiting.pop(bucket)
                else:
                    self._store.drop_bucket(bucket)
                    waiting[bucket] = after
            if not waiting:
                return read
        bucket, meta = next(iter(waiting.items()))
        raise Unavailable(
            f"bucket {bucket}: its rows and meta did not agree in {RETRIES} reads ({found[bucket]} rows "
            f"read, {meta.rows} expected); the row store is damaged or still written to"
        )

    # --- while buckets are served

    def begin(self, claimed: Mapping[Bucket, BucketMeta], fence: Fence) -> None:
        """Serve these buckets, of which memory holds no row yet; `load_next_part` loads them."""
        size = max(1, self._buckets // PARTS)
        ordered = sorted(claimed)
        for low in range(0, len(ordered), size):
            part = _Part(fence, {bucket: claimed[bucket] for bucket in ordered[low : low + size]})
            for bucket, meta in part.metas.items():
                self._store.begin_loading(bucket, meta.applied, meta.clock_ms, fence)
            with self._lock:  # last: a bucket that is loaded before `begin_loading` would lose rows
                self._part_of.update(dict.fromkeys(part.metas, part))
                self._waiting.append(part)

    def read_by_key(self, groups: Sequence[KeyGroup]) -> None:
        """Read the rows that a batch needs from buckets that are still loading.

        Raises:
            Unavailable: the row store is away; rows read until then are kept for the next try.
        """
        with self._reading:
            unread = self._store.unread(groups)
            for fence in np.unique(unread.fences).tolist():
                part = unread.of(unread.fences == fence)
                for runs in self._rows.read_many(part.buckets, part.tables, part.keys):
                    self._store.import_unread(runs, fence)
                self._store.settle(part, fence)
            self.keys_read += len(unread)

    def load_next_part(self, stopped: Callable[[], bool] = lambda: False) -> dict[Bucket, BucketMeta]:
        """Load the next waiting part, in the order of the claims.

        Returns:
            {bucket: its meta now} of the buckets that changed since the claim or are damaged. Rows learned on
            top of them are invalid; the caller must drop them and call `forget`.

        Raises:
            Unavailable: the row store is away; the next call loads this part again.
        """
        with self._lock:
            part = self._waiting[0] if self._waiting else None
        if part is None:
            return {}
        found: I64 = np.zeros(self._buckets, np.int64)
        if wanted := self._still_loading(part):
            try:
                for runs in self._rows.scan(wanted):
                    if stopped():
                        return {}
                    self._store.import_unread(runs, part.fence)
                    np.add.at(found, runs.directory["bucket"], runs.directory["rows"])
            except Corrupt as error:
                damaged = damaged_buckets(self._rows, wanted) or {wanted[0]: str(error)}
                for bucket, reason in damaged.items():
                    log.error("a bucket is damaged and dropped", reason=f"bucket {bucket}: {reason}")
                # The next call loads the part's other buckets.
                return {bucket: part.metas[bucket] for bucket in damaged}
        after = self._rows.metas(wanted) if wanted else {}
        with self._lock:
            self._waiting.remove(part)
            changed: dict[Bucket, BucketMeta] = {}
            for bucket in wanted:
                if self._part_of.get(bucket) is not part:
                    continue  # dropped in the meantime
                if not _agree(part.metas[bucket], after[bucket], int(found[bucket])):
                    changed[bucket] = after[bucket]
                elif self._store.finish_loading(bucket, part.fence):
                    del self._part_of[bucket]
        return changed

    def forget(self, buckets: Sequence[Bucket]) -> None:
        """Stop loading buckets that the shard no longer owns."""
        with self._lock:
            for bucket in buckets:
                self._part_of.pop(bucket, None)

    def loading(self) -> list[Bucket]:
        """The buckets that are served and still loading."""
        with self._lock:
            return list(self._part_of)

    @property
    def has_work(self) -> bool:
        """Whether a part waits to be loaded."""
        return bool(self._waiting)

    @property
    def progress(self) -> Progress:
        """Buckets and rows still to be loaded."""
        with self._lock:
            rows = sum(part.metas[bucket].rows for bucket, part in self._part_of.items())
            return Progress(len(self._part_of), rows)

    def _still_loading(self, part: _Part) -> list[Bucket]:
        with self._lock:
            return [bucket for bucket in part.metas if self._part_of.get(bucket) is part]


def damaged_buckets(rows: RowStore, buckets: Sequence[Bucket]) -> dict[Bucket, str]:
    """Return {damaged bucket: reason}; each bucket is read by itself. Raises Unavailable."""
    damaged: dict[Bucket, str] = {}
    for bucket in buckets:
        try:
            rows.metas([bucket])
            for _ in rows.scan([bucket]):
                pass
        except Corrupt as error:
            damaged[bucket] = str(error)
    return damaged


def _damaged_error(damaged: Mapping[Bucket, str], error: Corrupt) -> Corrupt:
    bucket, reason = next(iter(damaged.items()), (None, str(error)))
    some = f"{len(damaged)} buckets of the row store are damaged, bucket {bucket} first: " if damaged else ""
    return Corrupt(
        f"{some}{reason}\n"
        "  no row was skipped, because training on other rows than were learned would go unnoticed. Restore\n"
        "  the row store from a copy, or give the damaged rows up: `freshet rows check` names them,\n"
        "  `freshet rows mend` removes them (ops/runbooks/FreshetRowsDamaged.md)"
    )


def _agree(before: BucketMeta, after: BucketMeta, found: int) -> bool:
    """Whether the rows read between the two metas are of one state (PROTOCOL 10)."""
    return (after.fence, after.seq, after.rows) == (before.fence, before.seq, found)
