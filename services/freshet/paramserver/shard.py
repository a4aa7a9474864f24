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
from freshet.log.context import ModelContext
from freshet.observability.spans import end_push_answer, start_rows_answer
from freshet.observability.tracing import Context, end_span, running
from freshet.paramserver.buckets import NO_FORMER, OwnedBuckets
from freshet.paramserver.flusher import Flusher, PublishedTo, ShardCounts
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.rows.store import RowStore
from freshet.tables import NO_BOUND, KnownPushes, PushOutcome, RowsBound, RowsUnread, Store
from freshet.types import F32, I64, Bucket, Fence, OffsetRange

__all__ = ["PublishedTo", "Shard", "ShardCounts"]

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
