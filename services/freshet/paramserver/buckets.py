"""Buckets of a shard: claimed in the row store, loaded from it, and released (PROTOCOL 10 and 12).

`claim` reads all rows before it returns, or starts to serve the buckets and has a thread load them part by
part. A bucket that is served while it loads answers for a key once its row was read by key, or the row store
has answered that there is none. Rows learned on top stay in memory until the whole bucket was read and its
meta found unchanged. An unchanged meta proves that no write since the claim and no failover invalidated a row
that was read by key.

Ownership ends by `revoke`, which flushes first, by `release`, or by `drop` if another shard owns the bucket.
B buckets of the model.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import structlog

from freshet.errors import Corrupt, DataLost, Fenced, FreshetError, Unavailable
from freshet.log.topics import ModelContext
from freshet.paramserver.flusher import PART_OF_BOUND, Flusher
from freshet.rows.service import KeyGroup
from freshet.rows.store import LostMetas, RowStore, StoreIdentity
from freshet.tables import Store
from freshet.tables.store import INDEX_BYTES
from freshet.types import I64, Bucket, BucketMeta, Fence, RowRuns, Run, TimeMs, TopicPartition

log = structlog.get_logger("freshet.paramserver")

NO_FORMER: Mapping[Bucket, Fence] = {}

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
    hidden: Set[Bucket]  # see `_hidden`


class OwnedBuckets:
    """Ownership of a shard's buckets. Thread-safe; `load_next_part` needs one thread."""

    def __init__(self, context: ModelContext, rows: RowStore, store: Store, flusher: Flusher) -> None:
        """Start without buckets."""
        self._context, self._store, self._flusher = context, store, flusher
        flusher.on_fenced = self._forget
        self._rows, self._buckets = rows, context.spec.buckets
        self._lock = threading.Lock()  # guards the three below
        self._waiting: deque[_Part] = deque()
        self._part_of: dict[Bucket, _Part] = {}  # of buckets that are served and still loading
        self._conflicted: set[Bucket] = set()
        self._reading = threading.Lock()  # batches want the same keys: the second finds them read
        self.keys_read = 0  # by key, since the start
        self.to_load = threading.Event()  # set by a claim of buckets that are loaded later

    def create(self) -> None:
        """Create the row store, or check that it is this model's (PROTOCOL 5). Raises Mismatch if not."""
        context, spec = self._context, self._context.spec
        meta = BucketMeta(Fence(0), 0, 0, self._starts(), 0, TimeMs(0))
        identity = StoreIdentity(
            model=spec.name,
            spec_hash=context.spec_hash,
            buckets=spec.buckets,
            tables={t.name: t.id for t in spec.tables},
            record_bytes={t.id: self._store.record_bytes(t.id) for t in spec.tables},
            samples_log_id=str(context.log.topics()[context.topics.samples].log_id),
        )
        self._rows.create(identity, dict.fromkeys(map(Bucket, range(spec.buckets)), meta))

    # --- ownership

    def claim(
        self,
        buckets: Sequence[Bucket],
        fence: Fence,
        *,
        former: Mapping[Bucket, Fence] = NO_FORMER,
        whole: bool = False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> int:
        """Claim buckets in the row store and serve them.

        Args:
            buckets: the buckets to claim.
            fence: fence of the claim that includes them.
            former: fence of the claim that this one replaces, of buckets that had one. All rows of a bucket
                that another owner wrote last are published (PROTOCOL 17).
            whole: read all rows before this returns. Otherwise `load_next_part` reads them, and lookups and
                pushes read rows by key until then.
            stopping: aborts a `whole` read once it returns True.

        Returns:
            The number of rows stored of these buckets.

        Raises:
            Corrupt: buckets to read whole are damaged; the message names them. None is skipped, since that
                would lose trained rows.
            DataLost: the log lacks samples that must be replayed (PROTOCOL 12).
            Fenced: another shard has a higher fence.
            Unavailable: the row store is away or still written to, or `stopping`; no bucket is served.
        """
        with self._flusher.lock:
            self._forget(buckets)
            try:
                metas = self._rows.claim(buckets, fence)
                self._flusher.hold_retention(metas)  # by this shard from the claim on
                keys: list[Run] = []
                if whole:
                    metas, keys = self._read_whole(metas, fence, former, stopping)
                self._check_replay_is_possible(metas)
                with self._flusher.owning(metas):
                    if whole:
                        for bucket, meta in metas.items():
                            self._store.set_applied(bucket, meta.applied, meta.clock_ms)
                    else:
                        self._begin_loading(metas, fence, former)
            except FreshetError:  # no bucket is owned yet
                self._forget(buckets)
                raise
            self._publish_hidden(keys)  # not before: deltas carry the fence as owned
        self.to_load.set()
        stored = sum(meta.rows for meta in metas.values())
        log.info("buckets claimed", buckets=len(buckets), rows=stored, fence=int(fence), loaded=whole)
        return stored

    def revoke(self, buckets: Sequence[Bucket]) -> None:
        """Flush, then stop serving these buckets, so that their claim can be released.

        Pushes between the two, and rows of buckets that are still loading, are lost from memory; clients see
        the owner change, and replay from the flushed offsets (PROTOCOL 7).

        Raises:
            Unavailable: the flush failed; the buckets are still served.
        """
        with self._flusher.lock:
            self._flusher.flush()
            self.release(buckets)

    def release(self, buckets: Sequence[Bucket]) -> None:
        """Stop serving buckets that no other shard owns yet.

        Retention of the log is held for them until this shard claims them again, or drops them because
        another one serves them (PROTOCOL 12).
        """
        self._forget(buckets)
        with self._flusher.lock:
            self._flusher.book.left(buckets)

    def drop(self, buckets: Sequence[Bucket]) -> None:
        """Stop serving buckets that another shard owns; nothing of them is written any more."""
        self._forget(buckets)
        with self._flusher.lock:
            self._flusher.book.lost(buckets)

    def pop_conflicted(self) -> set[Bucket]:
        """Return the buckets dropped by `load_next_part` since the last call.

        Their claims must be renewed: clients see the owner change, and replay their pushes (PROTOCOL 7).
        """
        with self._lock:
            conflicted, self._conflicted = self._conflicted, set()
            return conflicted

    def _publish_hidden(self, keys: Sequence[Run]) -> None:
        """Have the rows of these keys published. They stay in memory until then, so where rows need not fit
        in memory, it publishes them in parts; while the log is away they wait."""
        rows, most = 0, self._rows_of_a_part
        for run in keys:
            self._store.put_back_published([run])
            rows += len(run.keys)
            if rows > most:
                rows = 0
                with suppress(FreshetError):  # the buckets are served; the publish thread meets it again
                    self._flusher.publish()

    def _forget(self, buckets: Sequence[Bucket]) -> None:
        with self._lock:
            for bucket in buckets:
                self._part_of.pop(bucket, None)
        for bucket in buckets:
            self._store.drop_bucket(bucket)

    # --- loading

    def read_by_key(self, groups: Sequence[KeyGroup]) -> None:
        """Read the rows that a batch needs from buckets that are still loading.

        Raises:
            Unavailable: the row store is away; rows read until then are kept for the next try. Also for a
                damaged page: the load thread drops its bucket, so clients wait for the next owner.
        """
        try:
            with self._reading:
                unread = self._store.unread(groups)
                for fence in np.unique(unread.fences).tolist():
                    part = unread.of(unread.fences == fence)
                    for runs in self._rows.read_many(part.buckets, part.tables, part.keys):
                        self._store.import_unread(runs, fence)
                    self._store.settle(part, fence)
                self.keys_read += len(unread)
        except Corrupt as error:
            raise Unavailable(f"rows cannot be read: {error}") from error

    def load_next_part(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Load the next waiting part, in the order of the claims.

        Buckets that changed since the claim or are damaged are dropped with the rows learned on top, and
        returned by `pop_conflicted`.

        Raises:
            Unavailable: the row store is away, or a damage was gone when its bucket was read again; the next
                call loads this part again.
        """
        with self._lock:
            part = self._waiting[0] if self._waiting else None
            wanted = [b for b in part.metas if self._part_of.get(b) is part] if part is not None else []
        if part is None:
            return
        try:
            found = self._import(wanted, partial(self._import_unread, part), stopped)
        except _Stopped:
            return
        except Corrupt as error:
            damaged = damaged_buckets(self._rows, self._store, wanted)
            if not damaged:
                raise Unavailable(f"rows could not be read, but each bucket alone could: {error}") from error
            for bucket, reason in damaged.items():
                log.error("a bucket is damaged and dropped", reason=f"bucket {bucket}: {reason}")
            # The next call loads the part's other buckets.
            self._release_conflicted({bucket: part.metas[bucket] for bucket in damaged})
            return
        try:
            after = self._rows.metas(wanted) if wanted else {}
        except LostMetas as error:  # a new claim of these buckets says what was lost
            log.error("the row store lost buckets that load; they are dropped", reason=str(error))
            self._release_conflicted({bucket: part.metas[bucket] for bucket in error.buckets})
            return
        changed: dict[Bucket, BucketMeta] = {}
        with self._lock:
            self._waiting.remove(part)
            for bucket in wanted:
                if self._part_of.get(bucket) is not part:
                    continue  # dropped in the meantime
                if not _agree(part.metas[bucket], after[bucket], int(found[bucket])):
                    changed[bucket] = after[bucket]
                elif self._store.finish_loading(bucket, part.fence):
                    del self._part_of[bucket]
        if changed:
            self._release_conflicted(changed)

    def _import_unread(self, part: _Part, runs: RowRuns) -> None:
        self._store.import_unread(runs, part.fence)
        self._store.put_back_published(_runs_of(runs, part.hidden))

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

    @property
    def stored_rows(self) -> I64:
        """(B,) int64 rows of each bucket in the row store as of its last flush; valid for owned buckets."""
        return self._flusher.book.rows

    def count_stored(self) -> I64:
        """Return (B,) int64 rows of each bucket in the row store, of all owners. Raises Unavailable."""
        buckets = list(map(Bucket, range(self._buckets)))
        metas = self._rows.metas(buckets)
        return np.array([metas[bucket].rows for bucket in buckets], np.int64)

    def _read_whole(
        self,
        claimed: Mapping[Bucket, BucketMeta],
        fence: Fence,
        former: Mapping[Bucket, Fence],
        stopping: Callable[[], bool],
    ) -> tuple[dict[Bucket, BucketMeta], list[Run]]:
        """Import the rows of claimed buckets; return their metas, and the keys of `_hidden` buckets.

        A bucket is claimed and read again until its meta is the same before and after the read.
        """
        read: dict[Bucket, BucketMeta] = {}
        keys: list[Run] = []
        waiting = dict(claimed)

        def imported(runs: RowRuns) -> None:
            self._store.import_runs(runs)
            keys.extend(replace(run, records=run.records[:0].copy()) for run in _runs_of(runs, hidden))

        for _ in range(RETRIES):
            hidden = _hidden(waiting, former)
            try:
                found = self._import(list(waiting), imported, stopping)
                metas = self._rows.metas(list(waiting))
            except Corrupt as error:
                raise _damaged_error(
                    damaged_buckets(self._rows, self._store, list(claimed)), error
                ) from error
            for bucket, after in metas.items():
                if after.fence > fence:
                    raise Fenced(f"bucket {bucket} was claimed by a higher fence while it was read")
                if _agree(waiting[bucket], after, int(found[bucket])):
                    read[bucket] = waiting.pop(bucket)
                else:
                    self._store.drop_bucket(bucket)
            if not waiting:
                return read, keys
            # A failover may have lost the fence: then the former owner's would be taken for this one's.
            waiting = dict(self._rows.claim(list(waiting), fence))
            self._flusher.hold_retention({**read, **waiting})
        bucket, meta = next(iter(waiting.items()))
        raise Unavailable(
            f"bucket {bucket}: its rows and meta did not agree in {RETRIES} reads ({found[bucket]} rows "
            f"read, {meta.rows} expected); the row store is damaged or still written to"
        )

    def _begin_loading(
        self, claimed: Mapping[Bucket, BucketMeta], fence: Fence, former: Mapping[Bucket, Fence]
    ) -> None:
        """Serve these buckets, of which memory holds no row yet, and have them loaded."""
        for buckets in self._parts_to_load(claimed):
            metas = {bucket: claimed[bucket] for bucket in buckets}
            part = _Part(fence, metas, _hidden(metas, former))
            for bucket, meta in part.metas.items():
                self._store.begin_loading(bucket, meta.applied, meta.clock_ms, fence)
            with self._lock:  # last: a bucket that is loaded before `begin_loading` would lose rows
                self._part_of.update(dict.fromkeys(part.metas, part))
                self._waiting.append(part)

    def _parts_to_load(self, claimed: Mapping[Bucket, BucketMeta]) -> Sequence[Sequence[Bucket]]:
        """Return the buckets in parts. Rows stay in memory while their bucket loads."""
        size, most = max(1, self._buckets // PARTS), self._rows_of_a_part
        parts: list[list[Bucket]] = []
        rows = 0
        for bucket in sorted(claimed):
            rows += claimed[bucket].rows
            if not parts or len(parts[-1]) == size or rows > most:
                parts.append([])
                rows = claimed[bucket].rows
            parts[-1].append(bucket)
        return parts

    @property
    def _rows_of_a_part(self) -> float:
        """Rows that take a small share of the memory, where rows need not fit in it."""
        if (bound := self._store.memory_bound) is None:
            return math.inf
        row_bytes = max(self._store.resident_bytes(t) + INDEX_BYTES for t in self._store.tables)
        return bound * PART_OF_BOUND / row_bytes

    def _import(
        self, buckets: Sequence[Bucket], imported: Callable[[RowRuns], None], stopped: Callable[[], bool]
    ) -> I64:
        """Import the stored rows of buckets by `imported`; returns the (B,) int64 rows read of each."""
        found: I64 = np.zeros(self._buckets, np.int64)
        for runs in self._rows.scan(buckets) if buckets else ():
            if stopped():
                raise _Stopped("the process stops while rows are read from the row store")
            imported(runs)
            np.add.at(found, runs.directory["bucket"], runs.directory["rows"])
        return found

    def _release_conflicted(self, changed: Mapping[Bucket, BucketMeta]) -> None:
        """Release buckets that still load, with stored metas that are not those of the claim."""
        with self._flusher.lock:  # no bucket is claimed between the check and the release
            changed = {b: changed[b] for b in sorted(changed.keys() & set(self.loading()))}
            self._flusher.book.found_stored(changed)
            self.release(list(changed))
        with self._lock:
            self._conflicted.update(changed)
        log.warning(
            "buckets were written to, or a failover took writes back, while they were loaded; dropped",
            buckets=len(changed),
        )

    # --- the log

    def _starts(self) -> dict[int, int]:
        """{partition: first offset in the log of samples}."""
        samples, log_ = self._context.topics.samples, self._context.log
        partitions = range(self._context.spec.partitions)
        return {p: log_.bounds(TopicPartition(samples, p)).start for p in partitions}

    def _check_replay_is_possible(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        for p, start in self._starts().items():
            offset = min((meta.applied.get(p, 0) for meta in metas.values()), default=start)
            if offset < start:
                raise DataLost(
                    f"{self._context.topics.samples}[{p}]: rows have learned up to {offset}, "
                    f"but the log starts at {start}\n"
                    "  samples between the two are gone; restore the log, or start the model anew"
                )


class _Stopped(Unavailable):
    """The process stops while buckets are read."""


def damaged_buckets(rows: RowStore, store: Store, buckets: Sequence[Bucket]) -> dict[Bucket, str]:
    """Return {damaged bucket: reason}; each bucket is read by itself.

    Its records are checked as `store` checks what it imports. Raises Unavailable.
    """
    damaged: dict[Bucket, str] = {}
    for bucket in buckets:
        try:
            rows.metas([bucket])
            for runs in rows.scan([bucket]):
                store.unpack_runs(runs)
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


def _hidden(metas: Mapping[Bucket, BucketMeta], former: Mapping[Bucket, Fence]) -> set[Bucket]:
    """Return the buckets that another owner wrote last than that of the claim before.

    A failover may have lost that claim, after readers had seen its fence: they then dropped rows of the
    writer, which are published again. A claim whose owner ended before its first flush looks the same.
    """
    return {
        b
        for b, meta in metas.items()
        if meta.writer is not None and meta.writer != former.get(b, meta.writer)
    }


def _runs_of(runs: RowRuns, buckets: Set[Bucket]) -> Iterator[Run]:
    return (run for run in runs if run.bucket in buckets) if buckets else iter(())


def _agree(before: BucketMeta, after: BucketMeta, found: int) -> bool:
    """Whether the rows read between the two metas are of one state (PROTOCOL 10)."""
    return (after.fence, after.seq, after.rows) == (before.fence, before.seq, found)
