"""A shard: lookups and pushes on the native store, and the life of its buckets around it.

What changed goes to serving (`publish`) and to the row store (`flush`), by threads of the shard's own. A
flush copies rows and offsets together, publishes what it copied, and only then writes it (PROTOCOL 11 and
17).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import structlog

from freshet.clock import Clock
from freshet.errors import DataLost, Fenced, FreshetError, Refused, Unavailable
from freshet.paramserver.core import FlushBook, PushFences
from freshet.paramserver.loading import Loader
from freshet.paramserver.publishing import records_of
from freshet.seams.eventlog import EventLog
from freshet.seams.rowservice import KeyGroup, Push
from freshet.seams.rowstore import RowStore, StoreIdentity
from freshet.spec.layout import Layout
from freshet.spec.model import Spec
from freshet.spec.topics import ROWS_PARTITIONS, Topics
from freshet.tables import Flushed, PushOutcome, RowsUnread, Store
from freshet.types import F32, I64, Bucket, BucketMeta, Fence, Flush, TimeMs, TopicPartition

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

PUBLISH_ROWS = 50_000
"""Rows copied out of the store at once; bounds the memory of a publish and the time that others wait for
it."""

EVICT_ROWS = 20_000
"""Rows looked at for eviction between two flushes."""

LOAD_AGAIN_S = 0.5
"""Before a row store that was away is asked again for buckets that are being loaded."""


@dataclass(slots=True)
class ShardCounts:
    """What the shard has done since it started."""

    pushes: int = 0
    skipped: int = 0
    refused: int = 0
    published_rows: int = 0
    flushed_rows: int = 0
    flushes: int = 0
    replaced_buckets: int = 0
    room_blocks: dict[str, int] = field(default_factory=dict)
    """{partition of samples: blocks between the log's start and what a restart replays} as of the last flush
    (PROTOCOL 12)"""


@dataclass(frozen=True, slots=True)
class PublishedTo:
    """What serving can know: rows have learned from every sample below `applied` in the records below
    `rows_next`."""

    applied: Mapping[int, int]  # {partition of samples: next offset}
    rows_next: Mapping[int, int]  # {partition of rows: next offset}


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
    ) -> None:
        """Own no bucket yet.

        Args:
            fence: of the claim of every bucket, for `load`; without it buckets come and go by `take`,
                `give_up` and `drop`, each under its claim's fence.
            held: whether the claim behind `fence` still stands; without it nothing is written any more.
            name: tells the shards of a model apart.
        """
        self._spec, self._layout, self._spec_hash, self._topics = spec, layout, spec_hash, topics
        self._log, self._rows, self._clock, self._held = log, rows, clock, held
        self._fence, self._name = fence, name
        self._store = Store.of(spec, layout, held=False)
        self._loader = Loader(self._store, rows, buckets=spec.buckets)
        self._to_load = threading.Event()
        self._telling, self._doubtful = threading.Lock(), set[Bucket]()
        self._book = FlushBook(buckets=spec.buckets, partitions=spec.partitions)
        self._writer = log.writer()
        self._publishing = threading.Lock()
        self._flushing = threading.RLock()  # flushes, and changes of what is owned; before `_publishing`
        self._rows_next = [0] * ROWS_PARTITIONS
        self._published = PublishedTo({}, {})
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._unanswered: Flush | None = None  # sent, or about to be; of the thread that flushes
        self._failed: FreshetError | None = None
        self.on_failed: Callable[[], None] = lambda: None
        self._push_fences = PushFences()
        self._pushed: dict[int, int] = {}  # {partition: where the last push ended that all buckets have}
        self.counts = ShardCounts()

    # --- life

    def load(self) -> int:
        """Create or check the row store, read every bucket under the one fence, and serve; returns rows read.
        Raises as `take`."""
        if self._fence is None:
            raise ValueError("a shard among others takes its buckets by `take`")
        self.create()
        return self.take([Bucket(b) for b in range(self._spec.buckets)], self._fence, whole=True)

    def create(self) -> None:
        """Create the row store, or check that it is this model's (PROTOCOL 5). Raises Mismatch."""
        buckets = [Bucket(b) for b in range(self._spec.buckets)]
        meta = BucketMeta(Fence(0), 0, 0, self._starts(), 0, TimeMs(0))
        self._rows.create(self._identity(), dict.fromkeys(buckets, meta))

    def take(self, buckets: Sequence[Bucket], fence: Fence, *, whole: bool = False) -> int:
        """Claim buckets in the row store and serve them from now on (PROTOCOL 10); returns their rows.

        Their rows are read by key as they are asked for, and all of them by a thread of the shard's;
        `whole`: all of them before this returns.

        Raises:
            DataLost: the log no longer holds what must be replayed (PROTOCOL 12).
            Fenced: another shard has a higher fence.
            Unavailable: the row store is away, or still written to; nothing is served.
        """
        with self._flushing:
            self._forget(buckets)
            try:
                metas = self._rows.claim(buckets, fence)
                if whole:
                    metas = self._loader.read_whole(metas, fence)
                self._check_replay_is_possible(metas)
                rows = {p: TopicPartition(self._topics.rows, p) for p in range(ROWS_PARTITIONS)}
                ends = {p: self._log.bounds(at).end for p, at in rows.items()}
            except FreshetError:  # nothing is owned yet
                self._forget(buckets)
                raise
            with self._publishing:
                self._book.claimed(metas)
                for p, end in ends.items():
                    self._rows_next[p] = max(self._rows_next[p], end)
                if whole:
                    for bucket, meta in metas.items():
                        self._store.set_applied(bucket, meta.applied, meta.clock_ms)
                else:
                    self._loader.begin(metas, fence)
                # A flush publishes before it writes, so what is stored is published.
                applied = self._smallest_applied()
                self._published = self._published_to(applied)
                self._pushed = applied
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
            doubtful = sorted(set(doubtful) & set(self._loader.loading()))
            self.drop(doubtful)
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
            self.drop(buckets)

    def drop(self, buckets: Sequence[Bucket]) -> None:
        """Serve these no longer, and write nothing of them: somebody else owns them."""
        self._forget(buckets)
        with self._flushing:
            self._book.lost(buckets)

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

    def stop(self) -> None:
        """Stop the threads, then publish and flush what is left, if the claim still stands."""
        self._stop.set()
        self._to_load.set()
        for thread in self._threads:
            thread.join()
        if self._failed is None and self._held():
            self.flush()

    @property
    def failed(self) -> FreshetError | None:
        """Why the shard stopped writing, if it did; its process should end."""
        return self._failed

    @property
    def published(self) -> PublishedTo:
        """How far rows are published; from any thread. Empty before `load`."""
        return self._published

    @property
    def store(self) -> Store:
        """The native store, for tests and metrics."""
        return self._store

    @property
    def stored_rows(self) -> I64:
        """(buckets,) rows of each bucket in the row store, as of its last flush; of no account where the
        bucket is not held."""
        return self._book.rows

    # --- RowService

    def lookup(self, groups: Sequence[KeyGroup], out: Sequence[F32], *, create: bool = True) -> None:
        """Write each key's slots into `out`; see the protocol."""
        for group, rows in zip(groups, out, strict=True):
            while not self._look_up(group, rows, create=create):
                self._loader.read(groups)

    def _look_up(self, group: KeyGroup, rows: F32, *, create: bool, states: F32 | None = None) -> bool:
        """False if rows must be read first."""
        try:
            self._store.lookup(
                group.group,
                group.keys,
                group.tables,
                group.bucket_starts,
                rows,
                create=create,
                states=states,
            )
        except RowsUnread:
            return False
        return True

    def lookup_with_states(
        self, groups: Sequence[KeyGroup], out: Sequence[F32], states: Sequence[F32]
    ) -> Mapping[int, int]:
        """As `lookup`, with the rows' optimiser state; see the protocol."""
        pushed = dict(self._pushed)
        for group, rows, state in zip(groups, out, states, strict=True):
            while not self._look_up(group, rows, create=True, states=state):
                self._loader.read(groups)
        return pushed

    def push(self, push: Push) -> bool:
        """Apply a batch's gradients; see the protocol."""
        while (outcome := self._push(push)) is PushOutcome.UNREAD:
            self._loader.read(push.groups)
        if outcome is PushOutcome.REFUSED:
            self.counts.refused += 1
            applied = self._smallest_applied()  # of no partition where no bucket is held: they are given away
            ranges = ", ".join(f"{r.partition}:[{r.start}, {r.stop})" for r in push.ranges)
            raise Refused(f"push of {ranges} does not continue what is applied", applied)
        for r in push.ranges:
            self._pushed[r.partition] = r.stop
        self.counts.pushes += 1
        self.counts.skipped += outcome is PushOutcome.SKIPPED
        return outcome is PushOutcome.APPLIED

    def _push(self, push: Push) -> PushOutcome:
        if self._failed is not None:
            raise Unavailable(f"the shard has stopped: {self._failed}")
        if not self._held():
            raise Fenced("the shard's claim on its buckets is lost; another process may own them")
        self._push_fences.check(push.ranges, push.fence)
        return self._store.push(push.ranges, push.clock_ms, push.groups, push.gradients, owned=push.owned)

    def applied(self) -> Mapping[int, Sequence[int]]:
        """{partition: distinct offsets that buckets have applied up to}."""
        return self._store.applied()

    def held(self) -> Sequence[Bucket]:
        """The buckets that are owned here and served, rising."""
        return self._store.held()

    # --- publish and flush

    def publish(self) -> int:
        """Publish the rows that have changed so far; returns how many. Durable when it returns."""
        with self._publishing:
            return self._publish_all()

    def flush(self) -> None:
        """Write every loaded bucket's changed rows and its offsets, dirty or not (PROTOCOL 12).

        After a failure the next call first sends what was not answered, unchanged: whether it was written
        nobody knows, and a store that has it takes its repetition for done (PROTOCOL 11).
        """
        with self._flushing:
            if self._unanswered is not None:
                self.publish()
                self._write(self._unanswered)
            self._write(self._copied(self._store.collect_flush, whole=False))
            self.counts.flushes += 1
            self._hold_retention()

    def _copied(self, collect: Callable[[], Flushed], *, whole: bool) -> Flush:
        """Copy what is to be written, and publish it. It is kept until the row store has answered."""
        with self._publishing:
            # Whatever a later delta holds must be at or past these offsets: readers follow from them.
            offsets = np.array(self._rows_next, np.int64)
            self._unanswered = self._book.next_flush(collect(), offsets, whole=whole)
            self._publish_all()
            return self._unanswered

    def _write(self, flush: Flush) -> None:
        """Send what was copied. Raises Unavailable if it is not known to be written, Fenced if the one claim
        of all buckets is lost; a shard among others drops the buckets that it has lost."""
        again, fenced = self._book.done(flush, self._rows.flush(flush))
        self._unanswered = None
        if len(fenced) and self._fence is not None:
            raise Fenced(f"bucket {fenced[0]} has a new owner; this shard stops")
        self.drop([Bucket(b) for b in fenced.tolist()])
        if not flush.whole:
            self.counts.flushed_rows += flush.runs.rows
        elif len(again):
            raise Unavailable(f"bucket {again[0]} could not be written whole; it is tried again")
        else:
            self.counts.replaced_buckets += len(flush.buckets)
        if len(again):  # the store holds something else than this owner wrote last (PROTOCOL 11)
            log.warning("buckets are written whole: the row store lost or mixed writes", buckets=len(again))
            self._write(self._copied(lambda: self._store.collect_whole(again.tolist()), whole=True))

    def _publish_all(self) -> int:
        """All pieces of a round; returns rows. Under the lock.

        What is applied when the round starts has marked its rows by then, so the round, or one before it,
        has appended them all once every bucket had its turn. A round does not wait for what is pushed
        meanwhile: under load there is always more.
        """
        applied = self._smallest_applied()
        published, done = 0, self._store.drained() + self._spec.buckets
        while self._store.drained() < done:
            published += self._publish_some()
        self._published = self._published_to(applied)
        return published

    def _smallest_applied(self) -> dict[int, int]:
        return {p: min(offsets) for p, offsets in self._store.applied().items() if offsets}

    def _published_to(self, applied: Mapping[int, int]) -> PublishedTo:
        return PublishedTo(applied, dict(enumerate(self._rows_next)))

    def _publish_some(self) -> int:
        """One bounded piece of publishing, acknowledged; returns rows. Under the lock."""
        batch = self._store.collect_publish(PUBLISH_ROWS)
        appends = records_of(batch, self._topics.rows, self._book.fences)
        if appends:
            try:
                firsts = self._writer.append(appends)
            except FreshetError:
                self._store.put_back_published(batch)
                raise
            for append, first in zip(appends, firsts, strict=True):
                self._rows_next[append.partition] = max(
                    self._rows_next[append.partition], first + len(append.values)
                )
        self.counts.published_rows += len(batch)
        return len(batch)

    def _publish_loop(self) -> None:
        interval = self._spec.train.publish_interval_ms / 1000
        wait = interval
        while not self._stop.wait(wait):
            began = time.thread_time()
            self._guarded(self.publish)
            # Stretches when much changes: at most a tenth of a core goes into publishing. Counted in its own
            # time: an append that waits 100 ms for the disk would otherwise hold the next one back for 900.
            wait = max(interval, (time.thread_time() - began) * (1 / PUBLISH_SHARE - 1))

    def _flush_loop(self) -> None:
        interval = self._spec.train.flush_interval_ms / 1000
        wait = interval
        while not self._stop.wait(wait):
            began = time.thread_time()
            self._guarded(self.flush)
            self._guarded(self._evict)
            stretched = (time.thread_time() - began) * (1 / FLUSH_SHARE - 1)
            wait = max(interval, min(stretched, LONGEST_FLUSH_WAIT_S))

    def _load_loop(self) -> None:
        while True:
            self._to_load.wait()
            self._to_load.clear()
            while self._loader.waits and not self._stop.is_set():
                if not self._guarded(self.load_some, failed="not loaded, tried again"):
                    self._stop.wait(LOAD_AGAIN_S)
            if self._stop.is_set():
                return
            if not self._loader.loading():
                log.info("buckets are loaded", buckets=len(self._store.held()))

    def _evict(self) -> None:
        self._store.evict(self._book.clock_ms, EVICT_ROWS)

    def _guarded(self, work: Callable[[], object], failed: str = "not written, tried again") -> bool:
        """Run one round, and say whether it was done; what is unavailable is tried again, what is lost stops
        the shard."""
        if self._failed is not None or not self._held():
            return False
        try:
            work()
            return True
        except Unavailable as error:
            log.warning(failed, reason=str(error))
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

    def _hold_retention(self) -> None:
        """Retention passes neither what a restart must replay nor what a reader must follow from."""
        samples = self._book.smallest_applied()
        with suppress(Unavailable):  # a figure for operators; what was written is written
            found = self._log.all_bounds([TopicPartition(self._topics.samples, p) for p in samples])
            self.counts.room_blocks = {
                str(at.partition): samples[at.partition] - bounds.start for at, bounds in found.items()
            }
        share = self._spec.buckets // ROWS_PARTITIONS
        held = {TopicPartition(self._topics.samples, p): offset for p, offset in samples.items()}
        for p in range(ROWS_PARTITIONS):
            smallest = self._book.smallest_rows_offset(range(p * share, (p + 1) * share))
            if smallest is not None:
                held[TopicPartition(self._topics.rows, p)] = smallest
        self._log.hold("-".join(filter(None, ("shard", self._spec.name, self._name))), held)
