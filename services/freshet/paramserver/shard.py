"""A shard: lookups and pushes on the native store, and the ownership of its buckets.

Threads of the shard publish changed rows, flush them to the row store and load claimed buckets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import structlog

from freshet.config.spec.layout import layout_of
from freshet.errors import Corrupt, DataLost, Fenced, FreshetError, Refused, Unavailable
from freshet.observability.spans import end_push_answer, start_rows_answer
from freshet.observability.tracing import Context, end_span, running
from freshet.paramserver.bucket_loader import Loader
from freshet.paramserver.core import PushFences
from freshet.paramserver.flusher import Flusher, PublishedTo, ShardContext, ShardCounts
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.rows.store import StoreIdentity
from freshet.tables import KnownPushes, PushOutcome, RowsUnread, Store
from freshet.types import F32, I64, Bucket, BucketMeta, Fence, OffsetRange, TimeMs, TopicPartition

__all__ = ["PublishedTo", "Shard", "ShardContext", "ShardCounts"]

log = structlog.get_logger("freshet.paramserver")

PUBLISH_SHARE = 0.1
"""Largest share of a core for publishing: under full load 1.6 M rows change per second, too many to publish
each change."""

FLUSH_SHARE = 0.1
"""Largest share of a core for flushing: under full load each flush holds most rows in use, and flushes back
to back would cost as much as a lane."""

LONGEST_FLUSH_WAIT_S = 20.0
"""Longest wait for a flush, at any cost: a crash repeats the training since the last one."""

EVICT_ROWS = 20_000
"""Rows checked for eviction between two flushes."""

LOAD_RETRY_S = 0.5
"""Wait after a failed load of buckets."""


class Shard:
    """Buckets of a model: all of them under one claim, or some under claims of slices.

    Lookups and pushes follow `RowService`, and `NativeRows` for pushes that the native core applies.
    """

    def __init__(
        self,
        context: ShardContext,
        *,
        fence: Fence | None = None,
        held: Callable[[], bool] = lambda: True,
        name: str = "",
        most_bytes: int = 0,
    ) -> None:
        """Start without buckets.

        Args:
            context: model and stores.
            fence: fence of the one claim of all buckets, for `load`. Without it buckets are added by
                `claim_buckets` and removed by `revoke`, `release` and `drop`, each under its claim's fence.
            held: whether the claim of `fence` still stands; once it does not, nothing is written.
            name: distinguishes the shards of a model.
            most_bytes: memory of rows beyond which the least recently used are evicted (`Store.of`). 0: no
                bound.
        """
        spec, layout = context.spec, layout_of(context.spec)
        self._spec, self._spec_hash, self._topics = spec, context.spec_hash, context.topics
        self._log, self._rows, self._held = context.log, context.rows, held
        self._fence = fence
        self._store = Store.of(spec, layout, held=False, most_bytes=most_bytes)
        self._loader = Loader(self._store, context.rows, buckets=spec.buckets)
        self._to_load = threading.Event()
        self._conflicts_lock, self._conflicted = threading.Lock(), set[Bucket]()
        self.counts = ShardCounts()
        alone = fence is not None
        self._flusher = Flusher(context, self._store, self.counts, name=name, alone=alone, drop=self.drop)
        self._book, self._flushing = self._flusher.book, self._flusher.lock
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failed: FreshetError | None = None
        self.on_failed: Callable[[], None] = lambda: None
        self._push_fences = PushFences()

    # --- ownership

    def load(self, stop: threading.Event | None = None) -> int:
        """Create or check the row store, read every bucket under the one fence and serve; returns rows read.

        Raises as `claim_buckets`; also Unavailable once `stop` is set.
        """
        if self._fence is None:
            raise ValueError("a shard without a fence claims its buckets by `claim_buckets`")
        self.create()
        buckets = [Bucket(b) for b in range(self._spec.buckets)]
        stopping = stop.is_set if stop is not None else lambda: False
        return self.claim_buckets(buckets, self._fence, whole=True, stopping=stopping)

    def create(self) -> None:
        """Create the row store, or check that it is this model's (PROTOCOL 5). Raises Mismatch if not."""
        buckets = [Bucket(b) for b in range(self._spec.buckets)]
        meta = BucketMeta(Fence(0), 0, 0, self._starts(), 0, TimeMs(0))
        self._rows.create(self._identity(), dict.fromkeys(buckets, meta))

    def claim_buckets(
        self,
        buckets: Sequence[Bucket],
        fence: Fence,
        *,
        whole: bool = False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> int:
        """Claim buckets in the row store and serve them (PROTOCOL 10).

        Args:
            buckets: the buckets to claim.
            fence: fence of the claim that includes them.
            whole: read all rows before this returns. Otherwise the load thread reads them, and lookups and
                pushes read rows by key until then.
            stopping: aborts a `whole` read once it returns True.

        Returns:
            The number of rows stored of these buckets.

        Raises:
            DataLost: the log lacks samples that must be replayed (PROTOCOL 12).
            Fenced: another shard has a higher fence.
            Unavailable: the row store is away or still written to, or `stopping`; no bucket is served.
        """
        with self._flushing:
            self._forget(buckets)
            try:
                metas = self._rows.claim(buckets, fence)
                self._flusher.hold_retention(metas)  # by this shard from the claim on
                if whole:
                    metas = self._loader.read_whole(metas, fence, stopping)
                self._check_replay_is_possible(metas)
                with self._flusher.owning(metas):
                    if whole:
                        for bucket, meta in metas.items():
                            self._store.set_applied(bucket, meta.applied, meta.clock_ms)
                    else:
                        self._loader.begin(metas, fence)
            except FreshetError:  # no bucket is owned yet
                self._forget(buckets)
                raise
        self._to_load.set()
        stored = sum(meta.rows for meta in metas.values())
        log.info("buckets claimed", buckets=len(buckets), rows=stored, fence=int(fence), loaded=whole)
        return stored

    def load_next_part(self) -> None:
        """Load the next part of the claimed buckets; the load thread calls this until all are loaded.

        Buckets that changed since the claim are dropped with the rows learned on top, and returned by
        `pop_conflicted`. Raises Unavailable; the next call retries.
        """
        changed = self._loader.load_next_part(self._stop.is_set)
        if not changed:
            return
        with self._flushing:  # no bucket is claimed between the check and the release
            changed = {b: changed[b] for b in sorted(changed.keys() & set(self._loader.loading()))}
            self._book.found_stored(changed)
            self.release(list(changed))
        with self._conflicts_lock:
            self._conflicted.update(changed)
        log.warning(
            "buckets were written to, or a failover took writes back, while they were loaded; dropped",
            buckets=len(changed),
        )

    def pop_conflicted(self) -> set[Bucket]:
        """Return the buckets dropped by `load_next_part` since the last call.

        Their claims must be renewed: clients see the owner change, and replay their pushes (PROTOCOL 7).
        """
        with self._conflicts_lock:
            conflicted, self._conflicted = self._conflicted, set()
            return conflicted

    @property
    def loader(self) -> Loader:
        """The loader of buckets that are served and not loaded yet."""
        return self._loader

    def revoke(self, buckets: Sequence[Bucket]) -> None:
        """Flush, then stop serving these buckets, so that their claim can be released.

        Pushes between the two, and rows of buckets that are still loading, are lost from memory; clients see
        the owner change, and replay from the flushed offsets (PROTOCOL 7).

        Raises:
            Unavailable: the flush failed; the buckets are still served.
        """
        with self._flushing:
            self.flush()
            self.release(buckets)

    def drop(self, buckets: Sequence[Bucket]) -> None:
        """Stop serving buckets that another shard owns; nothing of them is written any more."""
        self._forget(buckets)
        with self._flushing:
            self._book.lost(buckets)

    def release(self, buckets: Sequence[Bucket]) -> None:
        """Stop serving buckets that no other shard owns yet.

        Retention of the log is held for them until this shard claims them again, or drops them because
        another one serves them (PROTOCOL 12).
        """
        self._forget(buckets)
        with self._flushing:
            self._book.left(buckets)

    def _forget(self, buckets: Sequence[Bucket]) -> None:
        self._loader.forget(buckets)
        for bucket in buckets:
            self._store.drop_bucket(bucket)

    def start(self) -> None:
        """Start the threads that publish, flush and load."""
        loops = (self._publish_loop, "publish"), (self._flush_loop, "flush"), (self._load_loop, "load")
        for target, name in loops:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, *, flush: bool = True) -> None:
        """Stop the threads; with `flush` also publish and flush the rest, if the claim still stands.

        Blocks up to the row store's time-out. Raises Unavailable if the flush fails.
        """
        self._stop.set()
        self._to_load.set()
        for thread in self._threads:
            thread.join()
        if flush and self._failed is None and self._held():
            self.flush()

    @property
    def failed(self) -> FreshetError | None:
        """The error that stopped the shard, or None; the process must end on an error."""
        return self._failed

    @property
    def published(self) -> PublishedTo:
        """Progress of publishing; empty before `load`. Readable from any thread."""
        return self._flusher.published

    @property
    def unwritten_s(self) -> float:
        """Age of the flush that is not written yet; see `Flusher`."""
        return self._flusher.unwritten_s

    @property
    def store(self) -> Store:
        """The native store."""
        return self._store

    @property
    def stored_rows(self) -> I64:
        """(B,) int64 rows of each bucket in the row store as of its last flush; valid for owned buckets."""
        return self._book.rows

    def count_stored(self) -> I64:
        """Return (B,) int64 rows of each bucket in the row store, of all owners. Raises Unavailable."""
        metas = self._rows.metas([Bucket(b) for b in range(len(self._book.rows))])
        return np.array([metas[Bucket(b)].rows for b in range(len(metas))], np.int64)

    # --- RowService

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        """Write each key's slots into `out`, (U, S) float32 for each group; see `RowService`."""
        with running(start_rows_answer("Lookup")):
            self._lookup_groups(groups, out, create, states)

    def _lookup_groups(
        self, groups: Sequence[KeyGroup], out: Sequence[F32], create: bool, states: RowStates | None
    ) -> None:
        if states is None:
            for group, rows in zip(groups, out, strict=True):
                self._lookup_group(groups, group, rows, create)
            return
        read = []
        for group, rows, floats in zip(groups, out, states.floats, strict=True):
            read.append(np.empty((self._spec.buckets, self._spec.partitions), np.int64))
            self._lookup_group(groups, group, rows, create, floats, read[-1])
        states.known = KnownPushes.of(groups, read)

    def _lookup_group(
        self,
        groups: Sequence[KeyGroup],
        group: KeyGroup,
        rows: F32,
        create: bool,
        states: F32 | None = None,
        known: I64 | None = None,
    ) -> None:
        """Look one group up. Unread rows are first read from the row store, for all groups together."""
        k = group
        while True:
            try:
                self._store.lookup(
                    k.group,
                    k.keys,
                    k.tables,
                    k.bucket_starts,
                    rows,
                    create=create,
                    states=states,
                    known=known,
                )
                return
            except RowsUnread:
                self._read_by_key(groups)

    def _read_by_key(self, groups: Sequence[KeyGroup]) -> None:
        """Read rows of loading buckets.

        Raises Unavailable; also for a damaged page, whose bucket the load thread drops, so that clients wait
        for its next owner.
        """
        try:
            self._loader.read_by_key(groups)
        except Corrupt as error:
            raise Unavailable(f"rows cannot be read: {error}") from error

    def push(self, push: Push) -> bool:
        """Apply a batch's gradients; see `RowService`."""
        with running(start_rows_answer("Push", push.span), end_push_answer):
            return self._apply(push)

    def _apply(self, push: Push) -> bool:
        while (outcome := self._push(push)) is PushOutcome.UNREAD:
            self._read_by_key(push.groups)
        if outcome is PushOutcome.REFUSED:
            raise self.refused(push.ranges)
        self.pushed(1, int(outcome is PushOutcome.SKIPPED))
        return outcome is PushOutcome.APPLIED

    # --- NativeRows

    def pushed(self, pushes: int, skipped: int) -> None:
        """Count pushes; see `NativeRows`."""
        self.counts.pushes += pushes
        self.counts.skipped += skipped

    def refused(self, ranges: Sequence[OffsetRange]) -> Refused:
        """Count a refused push and return its error; see `NativeRows`."""
        self.counts.refused += 1
        applied = self._flusher.smallest_applied()  # empty where no bucket is owned
        text = ", ".join(f"{r.partition}:[{r.start}, {r.stop})" for r in ranges)
        return Refused(f"push of {text} does not continue what is applied", applied)

    def admit(self, ranges: Sequence[OffsetRange], fence: Fence) -> None:
        """Check the fence of a push before it is applied; see `NativeRows`.

        Raises:
            Unavailable: the shard has stopped.
            Fenced: the shard's claim is lost, or a higher fence has pushed to one of the partitions.
        """
        if self._failed is not None:
            raise Unavailable(f"the shard has stopped: {self._failed}")
        try:
            if not self._held():
                raise Fenced("the shard's claim on its buckets is lost; another process may own them")
            self._push_fences.check(ranges, fence)
        except Fenced:
            self.counts.fenced += 1
            raise

    def answered(self, method: str, asked: Context, began_ns: int, end_ns: int) -> None:
        """Record a span; see `NativeRows`."""
        if (span := start_rows_answer(method, asked, began_ns)) is not None:
            (end_push_answer if method == "Push" else end_span)(span, end_ns=end_ns)

    def _push(self, push: Push) -> PushOutcome:
        self.admit(push.ranges, push.fence)
        return self._store.push(push.ranges, push.clock_ms, push.groups, push.gradients, owned=push.owned)

    def applied(self) -> Mapping[int, Sequence[int]]:
        """{partition: distinct offsets that buckets have applied up to}."""
        return self._store.applied()

    def held(self) -> Sequence[Bucket]:
        """The owned buckets, rising."""
        return self._store.held()

    # --- publish and flush

    def publish(self) -> int:
        """Publish the rows changed so far; see `Flusher`."""
        return self._flusher.publish()

    def flush(self) -> None:
        """Write every loaded bucket's changed rows and its offsets; see `Flusher`."""
        self._flusher.flush()

    def _publish_loop(self) -> None:
        interval = self._spec.train.publish_interval_ms / 1000
        wait = interval
        while not self._stop.wait(wait):
            began = time.thread_time()
            self._run_round(self.publish, _log_unpublished)
            # Measured in CPU time of this thread: an append that waits 100 ms for the disk must not delay
            # the next round by 900 ms.
            wait = max(interval, (time.thread_time() - began) * (1 / PUBLISH_SHARE - 1))

    def _flush_loop(self) -> None:
        interval = self._spec.train.flush_interval_ms / 1000
        wait = interval
        while not self._stop.wait(wait):
            began = time.thread_time()
            self._run_round(self.flush, _log_unwritten)
            self._run_round(self._evict, _log_unwritten)
            stretched = (time.thread_time() - began) * (1 / FLUSH_SHARE - 1)
            wait = max(interval, min(stretched, LONGEST_FLUSH_WAIT_S))

    def _load_loop(self) -> None:
        while True:
            self._to_load.wait()
            self._to_load.clear()
            while self._loader.has_work and not self._stop.is_set():
                if not self._run_round(self.load_next_part, _log_unloaded):
                    self._stop.wait(LOAD_RETRY_S)
            if self._stop.is_set():
                return
            if not self._loader.loading():
                log.info("buckets are loaded", buckets=len(self._store.held()))

    def _evict(self) -> None:
        self._store.make_room(self._book.clock_ms, EVICT_ROWS)

    def _run_round(self, work: Callable[[], object], log_failure: Callable[[Unavailable], None]) -> bool:
        """Run one round of a thread; True if it succeeded.

        Unavailable is logged, and the thread tries again. Any other error stops the shard.
        """
        if self._failed is not None or not self._held():
            return False
        try:
            work()
            return True
        except Unavailable as error:
            log_failure(error)
        except Exception as error:  # a dead thread would leave rows unwritten without a notice
            log.error("the shard stops", reason=str(error), exc_info=not isinstance(error, FreshetError))
            self._failed = error if isinstance(error, FreshetError) else FreshetError(repr(error))
            self.on_failed()
        return False

    # --- the row store

    def _identity(self) -> StoreIdentity:
        spec = self._spec
        return StoreIdentity(
            model=spec.name,
            spec_hash=self._spec_hash,
            buckets=spec.buckets,
            tables={t.name: t.id for t in spec.tables},
            record_bytes={t.id: self._store.record_bytes(t.id) for t in spec.tables},
            samples_log_id=str(self._log.topics()[self._topics.samples].log_id),
        )

    def _starts(self) -> dict[int, int]:
        """{partition: first offset in the log of samples}."""
        partitions = range(self._spec.partitions)
        return {p: self._log.bounds(TopicPartition(self._topics.samples, p)).start for p in partitions}

    def _check_replay_is_possible(self, metas: Mapping[Bucket, BucketMeta]) -> None:
        for p, start in self._starts().items():
            offset = min((meta.applied.get(p, 0) for meta in metas.values()), default=start)
            if offset < start:
                raise DataLost(
                    f"{self._topics.samples}[{p}]: rows have learned up to {offset}, "
                    f"but the log starts at {start}\n"
                    "  samples between the two are gone; restore the log, or start the model anew"
                )


def _log_unpublished(error: Unavailable) -> None:
    log.warning("rows were not published, tried again", reason=str(error))


def _log_unwritten(error: Unavailable) -> None:
    log.warning("rows were not written, tried again", reason=str(error))


def _log_unloaded(error: Unavailable) -> None:
    log.warning("rows were not loaded, tried again", reason=str(error))
