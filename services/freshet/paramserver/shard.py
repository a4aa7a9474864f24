"""A shard: lookups and pushes on the native store, and the ownership of its buckets.

Threads of the shard publish changed rows, flush them to the row store and load claimed buckets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import structlog

from freshet.errors import Fenced, FreshetError, Refused, Unavailable
from freshet.log.topics import ModelContext
from freshet.observability.metrics import Metric
from freshet.observability.spans import end_push_answer, start_rows_answer
from freshet.observability.tracing import Context, end_span, running
from freshet.paramserver.buckets import NO_FORMER, OwnedBuckets
from freshet.paramserver.flusher import Flusher, PublishedTo, ShardCounts
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.rows.store import RowStore
from freshet.tables import NO_BOUND, KnownPushes, PushOutcome, RowsBound, RowsUnread, Store
from freshet.types import F32, I64, Bucket, Fence, OffsetRange

__all__ = ["PublishedTo", "Shard", "ShardCounts", "store_metrics"]

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


class PushFences:
    """The highest fence of the pushes of each partition. Thread-safe.

    A lower fence comes from an embedder that another one has replaced (PROTOCOL 9).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._highest: dict[int, int] = {}

    def check(self, ranges: Sequence[OffsetRange], fence: Fence) -> None:
        """Record the fence of a push; raises Fenced if one of its partitions has seen a higher one."""
        with self._lock:
            for r in ranges:
                if fence < (seen := self._highest.get(r.partition, fence)):
                    raise Fenced(
                        f"a push of partition {r.partition} carries fence {fence}, its embedder has {seen}"
                    )
            self._highest.update({r.partition: int(fence) for r in ranges})


class Shard:
    """Buckets of a model: all of them under one claim, or some under claims of slices.

    Lookups and pushes follow `RowService`, and `NativeRows` for pushes that the native core applies.
    """

    def __init__(
        self,
        context: ModelContext,
        rows: RowStore,
        *,
        fence: Fence | None = None,
        held: Callable[[], bool] = lambda: True,
        name: str = "",
        bound: RowsBound = NO_BOUND,
    ) -> None:
        """Start without buckets.

        Args:
            context: the model, its log and clock.
            rows: the row store.
            fence: fence of the one claim of all buckets, for `load`. Without it buckets are claimed and
                released by `buckets`, each under its claim's fence.
            held: whether the claim of `fence` still stands; once it does not, nothing is written.
            name: distinguishes the shards of a model.
            bound: memory of rows, and what happens beyond it.
        """
        spec = context.spec
        self._spec, self._fence, self._held = spec, fence, held
        self._store = Store.of(spec, context.layout, owned=False, bound=bound)
        self.counts = ShardCounts()
        self.flusher = Flusher(context, rows, self._store, self.counts, name=name, alone=fence is not None)
        self.buckets = OwnedBuckets(context, rows, self._store, self.flusher)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failed: FreshetError | None = None
        self.on_failed: Callable[[], None] = lambda: None
        self._push_fences = PushFences()

    # --- life

    def load(self, stop: threading.Event | None = None, former: Mapping[Bucket, Fence] = NO_FORMER) -> int:
        """Create or check the row store, read every bucket under the one fence and serve; returns rows read.

        `stop` ends it; `former` is that of `OwnedBuckets.claim`.

        Raises:
            ValueError: the shard has no fence.
            Unavailable: `stop` was set, or as `OwnedBuckets.claim`, like all other errors.
        """
        if self._fence is None:
            raise ValueError("a shard without a fence claims its buckets by `buckets.claim`")
        self.buckets.create()
        stopping = stop.is_set if stop is not None else lambda: False
        every = [Bucket(b) for b in range(self._spec.buckets)]
        return self.buckets.claim(every, self._fence, former=former, whole=True, stopping=stopping)

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
        self.buckets.to_load.set()
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
        return self.flusher.published

    @property
    def unwritten_s(self) -> float:
        """Age of the flush that is not written yet; see `Flusher`."""
        return self.flusher.unwritten_s

    @property
    def store(self) -> Store:
        """The native store."""
        return self._store

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
        while True:
            try:
                self._store.lookup(group.group, group, rows, create=create, states=states, known=known)
                return
            except RowsUnread:
                self.buckets.read_by_key(groups)

    def push(self, push: Push) -> bool:
        """Apply a batch's gradients; see `RowService`."""
        with running(start_rows_answer("Push", push.span), end_push_answer):
            return self._apply(push)

    def _apply(self, push: Push) -> bool:
        while (outcome := self._push(push)) is PushOutcome.UNREAD:
            self.buckets.read_by_key(push.groups)
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
        applied = self.flusher.smallest_applied()  # empty where no bucket is owned
        text = ", ".join(f"{r.partition}:[{r.start}, {r.stop})" for r in ranges)
        return Refused(
            f"push of {text} does not continue what is applied, or has a bucket that is not owned here",
            applied,
        )

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

    def owned(self) -> Sequence[Bucket]:
        """The owned buckets, rising."""
        return self._store.owned()

    # --- publish and flush

    def publish(self) -> int:
        """Publish the rows changed so far; see `Flusher`."""
        return self.flusher.publish()

    def flush(self) -> None:
        """Write every loaded bucket's changed rows and its offsets; see `Flusher`."""
        self.flusher.flush()

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
            self._run_round(self.evict, _log_unwritten)
            stretched = (time.thread_time() - began) * (1 / FLUSH_SHARE - 1)
            wait = max(interval, min(stretched, LONGEST_FLUSH_WAIT_S))

    def _load_loop(self) -> None:
        load = partial(self.buckets.load_next_part, self._stop.is_set)
        while True:
            self.buckets.to_load.wait()
            self.buckets.to_load.clear()
            while self.buckets.has_work and not self._stop.is_set():
                if not self._run_round(load, _log_unloaded):
                    self._stop.wait(LOAD_RETRY_S)
            if self._stop.is_set():
                return
            if not self.buckets.loading():
                log.info("buckets are loaded", buckets=len(self._store.owned()))

    def evict(self) -> None:
        """Evict some rows beyond the tables' limits; the flush thread calls it between two flushes."""
        self._store.make_room(self.flusher.book.clock_ms, EVICT_ROWS)

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


def _log_unpublished(error: Unavailable) -> None:
    log.warning("rows were not published, tried again", reason=str(error))


def _log_unwritten(error: Unavailable) -> None:
    log.warning("rows were not written, tried again", reason=str(error))


def _log_unloaded(error: Unavailable) -> None:
    log.warning("rows were not loaded, tried again", reason=str(error))


def store_metrics(of: str) -> tuple[Metric, ...]:
    """Metrics of a shard's table and flushes, named `freshet_<of>_…`."""
    return (
        Metric(f"freshet_{of}_rows", "gauge", "rows", "Rows resident, by table.", ("table",)),
        Metric(
            f"freshet_{of}_published_rows",
            "counter",
            "rows",
            "Changed rows published to serving.",
            at="shard.published_rows",
        ),
        Metric(
            f"freshet_{of}_flushed_rows",
            "counter",
            "rows",
            "Changed rows written to the row store.",
            at="shard.flushed_rows",
        ),
        Metric(
            f"freshet_{of}_flushes",
            "counter",
            "flushes",
            "Rounds of flushing all buckets.",
            at="shard.flushes",
        ),
        Metric(
            f"freshet_{of}_flushes_failed",
            "counter",
            "flushes",
            "Failed attempts at a flush.",
            at="shard.flushes_failed",
        ),
        Metric(
            f"freshet_{of}_unwritten_seconds",
            "gauge",
            "seconds",
            "Age of the flush that is not yet written, over all attempts; 0 between flushes.",
            at="unwritten_s",
        ),
        Metric(
            f"freshet_{of}_room_blocks",
            "gauge",
            "blocks",
            "Blocks between the start of samples and the smallest offset in the row store; below 0 is a "
            "loss.",
            ("partition",),
            at="shard.room_blocks",
        ),
        Metric(f"freshet_{of}_created_rows", "counter", "rows", "Rows created.", at="store.created"),
        Metric(
            f"freshet_{of}_dropped_rows",
            "counter",
            "rows",
            "Rows dropped from memory, evicted or removed.",
            at="store.evicted",
        ),
        Metric(
            f"freshet_{of}_not_finite_gradients",
            "counter",
            "gradients",
            "Row gradients that were not applied because they, or their squared length, were not finite; "
            "those samples did not change these rows.",
            at="store.not_finite",
        ),
        Metric(
            f"freshet_{of}_not_admitted_gradients",
            "counter",
            "gradients",
            "Row gradients that were dropped because their key had not been seen often enough (`admission` "
            "of the table).",
            at="store.not_admitted",
        ),
        Metric(
            f"freshet_{of}_replaced_buckets",
            "counter",
            "buckets",
            "Buckets that were written whole because the row store had lost or mixed writes.",
            at="shard.replaced_buckets",
        ),
        Metric(
            f"freshet_{of}_published_bytes",
            "counter",
            "bytes",
            "Bytes of records of changed rows for serving, with their keys.",
            at="shard.published_bytes",
        ),
        Metric(
            f"freshet_{of}_passed_rows",
            "counter",
            "rows",
            "Changed rows that were not published because serving holds them nearly (int8, int4).",
            at="shard.passed_rows",
        ),
        Metric(
            f"freshet_{of}_inexact_rows",
            "gauge",
            "rows",
            "Rows that serving may hold rounded, until nothing has changed for 10 s; 0 in fp32.",
            at="inexact_rows",
        ),
        Metric(
            f"freshet_{of}_ssd_rows",
            "gauge",
            "rows",
            "Rows on the local disk alone (SSD_FOLDER).",
            at="ssd.rows",
        ),
        Metric(
            f"freshet_{of}_ssd_bytes",
            "gauge",
            "bytes",
            "Bytes of the file of rows on the local disk that are in use.",
            at="ssd.bytes_in_use",
        ),
        Metric(
            f"freshet_{of}_ssd_fetched_rows",
            "counter",
            "rows",
            "Rows that were read back from the local disk.",
            at="ssd.fetched",
        ),
        Metric(
            f"freshet_{of}_ssd_spilled_rows",
            "counter",
            "rows",
            "Rows that left memory and are on the local disk.",
            at="ssd.spilled",
        ),
        Metric(
            f"freshet_{of}_ssd_waits",
            "counter",
            "calls",
            "Lookups and pushes that waited until rows had left memory for the local disk.",
            at="ssd.waits",
        ),
        Metric(
            f"freshet_{of}_ssd_full",
            "gauge",
            "1",
            "1 while the disk, or SSD_BYTES, is full: rows stay in memory beyond its bound.",
            at="ssd.full",
        ),
    )
