"""A shard: lookups and pushes on the native store, and the life of its buckets around it.

What changed goes to serving (`publish`) and to the row store (`flush`), by threads of the shard's own. A
flush copies rows and offsets together, publishes what it copied, and only then writes it (PROTOCOL 11 and
17).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import structlog

from freshet.clock import Clock
from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import Topics
from freshet.errors import Corrupt, DataLost, Fenced, FreshetError, Refused, Unavailable
from freshet.log import EventLog
from freshet.observability.spans import end_push_answer, start_rows_answer
from freshet.observability.tracing import Context, end_span, running
from freshet.paramserver.bucket_loader import Loader
from freshet.paramserver.core import PushFences
from freshet.paramserver.flusher import Flusher, PublishedTo, ShardCounts
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.rows.store import RowStore, StoreIdentity
from freshet.tables import KnownPushes, PushOutcome, RowsUnread, Store
from freshet.types import F32, I64, Bucket, BucketMeta, Fence, OffsetRange, TimeMs, TopicPartition

__all__ = ["PublishedTo", "Shard", "ShardCounts"]

log = structlog.get_logger("freshet.paramserver")

PUBLISH_SHARE = 0.1
"""Of a core, spent on publishing at most: at full speed 1.6 M rows change a second, too many to publish each
at once."""

FLUSH_SHARE = 0.1
"""Of a core, spent on flushing at most: at full speed each flush holds most of the rows in use,
and back to back they took as much as a lane."""

LONGEST_FLUSH_WAIT_S = 20.0
"""However much a flush costs: what was not flushed is trained on again after a crash."""

EVICT_ROWS = 20_000
"""Rows looked at for eviction between two flushes."""

LOAD_AGAIN_S = 0.5
"""Before a row store that was away is asked again for buckets that are being loaded."""


class Shard:
    """Buckets of a model: all of them under one claim, or those that it took. `RowService` to the embedder;
    see there for lookups and pushes."""

    def __init__(
        self,
        *,
        spec: Spec,
        layout: Layout,
        spec_hash: str,
        topics: Topics,
        log: EventLog,
        rows: RowStore,
        fence: Fence | None = None,
        clock: Clock,
        held: Callable[[], bool] = lambda: True,
        name: str = "",
        most_bytes: int = 0,
    ) -> None:
        """Own no bucket yet.

        Args:
            fence: of the claim of every bucket, for `load`; without it buckets come and go by `take`,
                `give_up` and `drop`, each under its claim's fence.
            held: whether the claim behind `fence` still stands; without it nothing is written any more.
            name: tells the shards of a model apart.
            most_bytes: what rows may take; the least recently used go beyond it (`Store.of`). 0: no bound.
        """
        self._spec, self._layout, self._spec_hash, self._topics = spec, layout, spec_hash, topics
        self._log, self._rows, self._clock, self._held = log, rows, clock, held
        self._fence = fence
        self._store = Store.of(spec, layout, held=False, most_bytes=most_bytes)
        self._loader = Loader(self._store, rows, buckets=spec.buckets)
        self._to_load = threading.Event()
        self._telling, self._doubtful = threading.Lock(), set[Bucket]()
        self.counts = ShardCounts()
        self._flusher = Flusher(
            spec,
            topics,
            log,
            rows,
            self._store,
            self.counts,
            clock,
            name=name,
            alone=fence is not None,
            drop=self.drop,
        )
        self._book, self._flushing = self._flusher.book, self._flusher.lock
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failed: FreshetError | None = None
        self.on_failed: Callable[[], None] = lambda: None
        self._push_fences = PushFences()

    # --- life

    def load(self, stop: threading.Event | None = None) -> int:
        """Create or check the row store, read every bucket under the one fence, and serve; returns rows read.
        Raises as `take`; Unavailable, too, once `stop` is set."""
        if self._fence is None:
            raise ValueError("a shard among others takes its buckets by `take`")
        self.create()
        buckets = [Bucket(b) for b in range(self._spec.buckets)]
        stopping = stop.is_set if stop is not None else lambda: False
        return self.take(buckets, self._fence, whole=True, stopping=stopping)

    def create(self) -> None:
        """Create the row store, or check that it is this model's (PROTOCOL 5). Raises Mismatch."""
        buckets = [Bucket(b) for b in range(self._spec.buckets)]
        meta = BucketMeta(Fence(0), 0, 0, self._starts(), 0, TimeMs(0))
        self._rows.create(self._identity(), dict.fromkeys(buckets, meta))

    def take(
        self,
        buckets: Sequence[Bucket],
        fence: Fence,
        *,
        whole: bool = False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> int:
        """Claim buckets in the row store and serve them from now on (PROTOCOL 10); returns their rows.

        Their rows are read by key as they are asked for, and all of them by a thread of the shard's;
        `whole`: all of them before this returns, unless it is told that this process is `stopping`.

        Raises:
            DataLost: the log no longer holds what must be replayed (PROTOCOL 12).
            Fenced: another shard has a higher fence.
            Unavailable: the row store is away, or still written to, or `stopping`; nothing is served.
        """
        with self._flushing:
            self._forget(buckets)
            try:
                metas = self._rows.claim(buckets, fence)
                self._flusher.hold_retention(metas)  # from now on this shard's to hold
                if whole:
                    metas = self._loader.read_whole(metas, fence, stopping)
                self._check_replay_is_possible(metas)
                with self._flusher.taking(metas):
                    if whole:
                        for bucket, meta in metas.items():
                            self._store.set_applied(bucket, meta.applied, meta.clock_ms)
                    else:
                        self._loader.begin(metas, fence)
            except FreshetError:  # nothing is owned yet
                self._forget(buckets)
                raise
        self._to_load.set()
        stored = sum(meta.rows for meta in metas.values())
        log.info("buckets claimed", buckets=len(buckets), rows=stored, fence=int(fence), loaded=whole)
        return stored

    def load_some(self) -> None:
        """Load some of the buckets that are served already; the shard's thread does this until all are.

        Those whose rows turn out not to be what they were at the claim are dropped, with what they have
        learned, and told by `doubtful`. Raises Unavailable (the next call goes on), Corrupt.
        """
        doubtful = self._loader.load_some(self._stop.is_set)
        if not doubtful:
            return
        with self._flushing:  # nobody takes them meanwhile
            doubtful = {b: doubtful[b] for b in sorted(doubtful.keys() & set(self._loader.loading()))}
            self._book.found_stored(doubtful)
            self.leave(list(doubtful))
        with self._telling:
            self._doubtful.update(doubtful)
        log.warning(
            "buckets were written to, or a failover took writes back, while they were loaded; dropped",
            buckets=len(doubtful),
        )

    def doubtful(self) -> set[Bucket]:
        """Buckets that `load_some` has dropped, told once: they are to be claimed anew, so that whoever has
        pushed replays (PROTOCOL 7)."""
        with self._telling:
            told, self._doubtful = self._doubtful, set()
            return told

    @property
    def loader(self) -> Loader:
        """What is served already and still being loaded."""
        return self._loader

    def give_up(self, buckets: Sequence[Bucket]) -> None:
        """Flush, then serve these no longer: their claim can be released. Raises Unavailable, and serves on.

        What is pushed between the two is lost with the memory, and replayed from what was flushed: who pushed
        learns that owners changed (PROTOCOL 7). So is what buckets learned that were still being loaded.
        """
        with self._flushing:
            self.flush()
            self.leave(buckets)

    def drop(self, buckets: Sequence[Bucket]) -> None:
        """Serve these no longer, and write nothing of them: somebody else owns them."""
        self._forget(buckets)
        with self._flushing:
            self._book.lost(buckets)

    def leave(self, buckets: Sequence[Bucket]) -> None:
        """As `drop`, before anybody else owns them: retention of the log is held for them until they are
        taken again or, once others serve them, dropped (PROTOCOL 12)."""
        self._forget(buckets)
        with self._flushing:
            self._book.left(buckets)

    def _forget(self, buckets: Sequence[Bucket]) -> None:
        self._loader.forget(buckets)
        for bucket in buckets:
            self._store.drop_bucket(bucket)

    def start(self) -> None:
        """Publish, flush and load from now on, in threads."""
        loops = (self._publish_loop, "publish"), (self._flush_loop, "flush"), (self._load_loop, "load")
        for target, name in loops:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, *, flush: bool = True) -> None:
        """Stop the threads, then publish and flush what is left, if the claim still stands and nobody has
        tried in vain just now. Raises Unavailable. Takes as long as the row store has patience."""
        self._stop.set()
        self._to_load.set()
        for thread in self._threads:
            thread.join()
        if flush and self._failed is None and self._held():
            self.flush()

    @property
    def failed(self) -> FreshetError | None:
        """Why the shard stopped writing, if it did; its process should end."""
        return self._failed

    @property
    def published(self) -> PublishedTo:
        """How far rows are published; from any thread. Empty before `load`."""
        return self._flusher.published

    @property
    def unwritten_s(self) -> float:
        """For how long there has been a flush that is not written; see `Flusher`."""
        return self._flusher.unwritten_s

    @property
    def store(self) -> Store:
        """The native store, for tests and metrics."""
        return self._store

    @property
    def stored_rows(self) -> I64:
        """(buckets,) rows of each bucket in the row store, as of its last flush; of no account where the
        bucket is not held."""
        return self._book.rows

    def count_stored(self) -> I64:
        """(buckets,) rows of each bucket in the row store, whoever owns it. Raises Unavailable."""
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
        """Write each key's slots into `out`; see the protocol."""
        with running(start_rows_answer("Lookup")):
            self._look_all_up(groups, out, create, states)

    def _look_all_up(
        self, groups: Sequence[KeyGroup], out: Sequence[F32], create: bool, states: RowStates | None
    ) -> None:
        if states is None:
            for group, rows in zip(groups, out, strict=True):
                self._look_up(groups, group, rows, create)
            return
        read = []
        for group, rows, floats in zip(groups, out, states.floats, strict=True):
            read.append(np.empty((self._spec.buckets, self._spec.partitions), np.int64))
            self._look_up(groups, group, rows, create, floats, read[-1])
        states.known = KnownPushes.of(groups, read)

    def _look_up(
        self,
        groups: Sequence[KeyGroup],
        group: KeyGroup,
        rows: F32,
        create: bool,
        states: F32 | None = None,
        known: I64 | None = None,
    ) -> None:
        """One group's rows; if some must be read from the row store first, so are those of all groups."""
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
                self._read(groups)

    def _read(self, groups: Sequence[KeyGroup]) -> None:
        """Read by key. Raises Unavailable, also where a page is damaged: the bucket is given up as it is
        loaded, and whoever asks waits until it has an owner."""
        try:
            self._loader.read(groups)
        except Corrupt as error:
            raise Unavailable(f"rows cannot be read: {error}") from error

    def push(self, push: Push) -> bool:
        """Apply a batch's gradients; see the protocol."""
        with running(start_rows_answer("Push", push.span), end_push_answer):
            return self._apply(push)

    def _apply(self, push: Push) -> bool:
        while (outcome := self._push(push)) is PushOutcome.UNREAD:
            self._read(push.groups)
        if outcome is PushOutcome.REFUSED:
            raise self.refused(push.ranges)
        self.pushed(1, int(outcome is PushOutcome.SKIPPED))
        return outcome is PushOutcome.APPLIED

    # --- NativeRows

    def pushed(self, pushes: int, skipped: int) -> None:
        """Count pushes; see the protocol."""
        self.counts.pushes += pushes
        self.counts.skipped += skipped

    def refused(self, ranges: Sequence[OffsetRange]) -> Refused:
        """Count a refused push; see the protocol."""
        self.counts.refused += 1
        applied = self._flusher.smallest_applied()  # of no partition where no bucket is held
        text = ", ".join(f"{r.partition}:[{r.start}, {r.stop})" for r in ranges)
        return Refused(f"push of {text} does not continue what is applied", applied)

    def admit(self, ranges: Sequence[OffsetRange], fence: Fence) -> None:
        """Let pushes of these ranges in; see the protocol."""
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
        """Tell a trace; see the protocol."""
        if (span := start_rows_answer(method, asked, began_ns)) is not None:
            (end_push_answer if method == "Push" else end_span)(span, end_ns=end_ns)

    def _push(self, push: Push) -> PushOutcome:
        self.admit(push.ranges, push.fence)
        return self._store.push(push.ranges, push.clock_ms, push.groups, push.gradients, owned=push.owned)

    def applied(self) -> Mapping[int, Sequence[int]]:
        """{partition: distinct offsets that buckets have applied up to}."""
        return self._store.applied()

    def held(self) -> Sequence[Bucket]:
        """The buckets that are owned here and served, rising."""
        return self._store.held()

    # --- publish and flush

    def publish(self) -> int:
        """Publish the rows that have changed so far; see `Flusher`."""
        return self._flusher.publish()

    def flush(self) -> None:
        """Write every loaded bucket's changed rows and its offsets; see `Flusher`."""
        self._flusher.flush()

    def _publish_loop(self) -> None:
        interval = self._spec.train.publish_interval_ms / 1000
        wait = interval
        while not self._stop.wait(wait):
            began = time.thread_time()
            self._guarded(self.publish, _not_published)
            # Stretches when much changes: at most a tenth of a core goes into publishing. Counted in its own
            # time: an append that waits 100 ms for the disk would otherwise hold the next one back for 900.
            wait = max(interval, (time.thread_time() - began) * (1 / PUBLISH_SHARE - 1))

    def _flush_loop(self) -> None:
        interval = self._spec.train.flush_interval_ms / 1000
        wait = interval
        while not self._stop.wait(wait):
            began = time.thread_time()
            self._guarded(self.flush, _not_written)
            self._guarded(self._evict, _not_written)
            stretched = (time.thread_time() - began) * (1 / FLUSH_SHARE - 1)
            wait = max(interval, min(stretched, LONGEST_FLUSH_WAIT_S))

    def _load_loop(self) -> None:
        while True:
            self._to_load.wait()
            self._to_load.clear()
            while self._loader.waits and not self._stop.is_set():
                if not self._guarded(self.load_some, _not_loaded):
                    self._stop.wait(LOAD_AGAIN_S)
            if self._stop.is_set():
                return
            if not self._loader.loading():
                log.info("buckets are loaded", buckets=len(self._store.held()))

    def _evict(self) -> None:
        self._store.make_room(self._book.clock_ms, EVICT_ROWS)

    def _guarded(self, work: Callable[[], object], tell: Callable[[Unavailable], None]) -> bool:
        """Run one round, and say whether it was done; what is unavailable is told and tried again, what is
        lost stops the shard."""
        if self._failed is not None or not self._held():
            return False
        try:
            work()
            return True
        except Unavailable as error:
            tell(error)
        except Exception as error:  # a thread that died in silence would leave rows unwritten for ever
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
        """{partition: where the log of samples starts}."""
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


def _not_published(error: Unavailable) -> None:
    log.warning("rows were not published, tried again", reason=str(error))


def _not_written(error: Unavailable) -> None:
    log.warning("rows were not written, tried again", reason=str(error))


def _not_loaded(error: Unavailable) -> None:
    log.warning("rows were not loaded, tried again", reason=str(error))
