"""How rows of claimed buckets come into memory: before they are served, or while they are (PROTOCOL 10).

A bucket that is served while it is loaded answers for a key once its row was read, or the row store has said
that there is none. What was learned on top of rows read so stays in memory until the bucket was read whole
and its meta found unchanged: then nobody has written since the claim, no failover has taken anything back,
and every row that was read by key was right.
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

__all__ = ["Loader", "Progress", "damaged_of"]

log = structlog.get_logger("freshet.paramserver")

RETRIES = 3
"""A bucket claimed while its last owner still wrote is read again; a store that keeps changing is an
error."""

PARTS = 16
"""Of a model's buckets, loaded and checked a part at a time: what is loaded is flushed from then on. As many
as the SQLite row store has spans, each of which it reads as a whole."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is served already and still to be loaded."""

    buckets: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Buckets of one claim, as their metas were then; each object stands for one loading."""

    fence: Fence
    metas: Mapping[Bucket, BucketMeta]


class Loader:
    """Brings rows from the row store into a shard's table. Thread-safe; one thread at a time calls
    `load_some`."""

    def __init__(self, store: Store, rows: RowStore, *, buckets: int) -> None:
        """`buckets`: of the model."""
        self._store, self._rows, self._buckets = store, rows, buckets
        self._lock = threading.Lock()
        self._waiting: deque[_Part] = deque()
        self._part_of: dict[Bucket, _Part] = {}  # of buckets that are served and not loaded yet
        self._reading = threading.Lock()  # batches want the same keys: the second finds them read
        self.keys_read = 0  # one by one, since the start

    # --- before they are served

    def read_whole(
        self,
        claimed: Mapping[Bucket, BucketMeta],
        fence: Fence,
        stopping: Callable[[], bool] = lambda: False,
    ) -> dict[Bucket, BucketMeta]:
        """Import the rows of claimed buckets, each read again until its meta was the same before and after;
        returns the metas.

        Raises:
            Corrupt: buckets are damaged; names them. They are not skipped: what was learned would be lost.
            Fenced: another shard has claimed one of them meanwhile.
            Unavailable: the row store is away, or rows and meta did not agree, or `stopping` said so.
        """
        try:
            return self._read_whole(claimed, fence, stopping)
        except Corrupt as error:
            raise _refused(damaged_of(self._rows, list(claimed)), error) from error

    def _read_whole(
        self, claimed: Mapping[Bucket, BucketMeta], fence: Fence, stopping: Callable[[], bool]
    ) -> dict[Bucket, BucketMeta]:
        read: dict[Bucket, BucketMeta] = {}
        waiting = dict(claimed)
        for _ in range(RETRIES):
            found = np.zeros(self._buckets, np.int64)
            for runs in self._rows.scan(list(waiting)):
                if stopping():
                    raise Unavailable("asked to stop while rows are read from the row store")
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
            f"bucket {bucket}: its rows and meta did not agree in {RETRIES} readings ({found[bucket]} rows "
            f"read, {meta.rows} expected); the row store is damaged or still written to"
        )

    # --- while they are served

    def begin(self, claimed: Mapping[Bucket, BucketMeta], fence: Fence) -> None:
        """Serve these buckets from now on, which memory holds nothing of; `load_some` is to load them."""
        size = max(1, self._buckets // PARTS)
        ordered = sorted(claimed)
        for low in range(0, len(ordered), size):
            part = _Part(fence, {bucket: claimed[bucket] for bucket in ordered[low : low + size]})
            for bucket, meta in part.metas.items():
                self._store.begin_loading(bucket, meta.applied, meta.clock_ms, fence)
            with self._lock:  # last: what is loaded before a bucket is ready for it would be left out
                self._part_of.update(dict.fromkeys(part.metas, part))
                self._waiting.append(part)

    def read(self, groups: Sequence[KeyGroup]) -> None:
        """Read by key what a batch needs of buckets that are being loaded.

        Raises Unavailable; what was read until then is kept, so that trying again has less to read.
        """
        with self._reading:
            unread = self._store.unread(groups)
            for fence in np.unique(unread.fences).tolist():
                part = unread.of(unread.fences == fence)
                for runs in self._rows.read_many(part.buckets, part.tables, part.keys):
                    self._store.import_unread(runs, fence)
                self._store.settle(part, fence)
            self.keys_read += len(unread)

    def load_some(self, stopped: Callable[[], bool] = lambda: False) -> dict[Bucket, BucketMeta]:
        """Load the next part of what waits, in the order of the claims; returns those of its buckets whose
        rows were not what they were when they were claimed, or are damaged, with what is stored of them now.

        Whoever learned from such a bucket's rows must not keep it: the caller calls `forget`. Raises
        Unavailable, and begins this part again the next time.
        """
        with self._lock:
            part = self._waiting[0] if self._waiting else None
        if part is None:
            return {}
        found: I64 = np.zeros(self._buckets, np.int64)
        if wanted := self._of(part):
            try:
                for runs in self._rows.scan(wanted):
                    if stopped():
                        return {}
                    self._store.import_unread(runs, part.fence)
                    np.add.at(found, runs.directory["bucket"], runs.directory["rows"])
            except Corrupt as error:
                damaged = damaged_of(self._rows, wanted) or {wanted[0]: str(error)}
                for bucket, reason in damaged.items():
                    log.error("a bucket is damaged and is given up", reason=f"bucket {bucket}: {reason}")
                # The others are loaded the next time.
                return {bucket: part.metas[bucket] for bucket in damaged}
        after = self._rows.metas(wanted) if wanted else {}
        with self._lock:
            self._waiting.remove(part)
            doubtful: dict[Bucket, BucketMeta] = {}
            for bucket in wanted:
                if self._part_of.get(bucket) is not part:
                    continue  # dropped meanwhile
                if not _agree(part.metas[bucket], after[bucket], int(found[bucket])):
                    doubtful[bucket] = after[bucket]
                elif self._store.finish_loading(bucket, part.fence):
                    del self._part_of[bucket]
        return doubtful

    def forget(self, buckets: Sequence[Bucket]) -> None:
        """These are no longer held."""
        with self._lock:
            for bucket in buckets:
                self._part_of.pop(bucket, None)

    def loading(self) -> list[Bucket]:
        """Those that are served and not loaded yet."""
        with self._lock:
            return list(self._part_of)

    @property
    def waits(self) -> bool:
        """Whether there is something to load."""
        return bool(self._waiting)

    @property
    def progress(self) -> Progress:
        """How much is still to be loaded."""
        with self._lock:
            rows = sum(part.metas[bucket].rows for bucket, part in self._part_of.items())
            return Progress(len(self._part_of), rows)

    def _of(self, part: _Part) -> list[Bucket]:
        with self._lock:
            return [bucket for bucket in part.metas if self._part_of.get(bucket) is part]


def damaged_of(rows: RowStore, buckets: Sequence[Bucket]) -> dict[Bucket, str]:
    """{bucket that cannot be read: why}, each read alone. Raises Unavailable."""
    damaged: dict[Bucket, str] = {}
    for bucket in buckets:
        try:
            rows.metas([bucket])
            for _ in rows.scan([bucket]):
                pass
        except Corrupt as error:
            damaged[bucket] = str(error)
    return damaged


def _refused(damaged: Mapping[Bucket, str], error: Corrupt) -> Corrupt:
    """What is raised where an owner's rows are damaged."""
    bucket, reason = next(iter(damaged.items()), (None, str(error)))
    some = f"{len(damaged)} buckets of the row store are damaged, bucket {bucket} first: " if damaged else ""
    return Corrupt(
        f"{some}{reason}\n"
        "  nothing was skipped: training on other rows than were learned would not be noticed. Restore the "
        "row store\n"
        "  from a copy, or give up the damaged rows: `freshet rows check` names them, `freshet rows mend` "
        "does it\n"
        "  (ops/runbooks/FreshetRowsDamaged.md)"
    )


def _agree(before: BucketMeta, after: BucketMeta, found: int) -> bool:
    """Whether rows that were read between the two metas are all of one moment (PROTOCOL 10)."""
    return (after.fence, after.seq, after.rows) == (before.fence, before.seq, found)
