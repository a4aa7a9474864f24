"""The batch stream for remote rows: it prefetches lookups and pushes gradients asynchronously."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from freshet.batches.read_my_writes import ReadMyWrites
from freshet.batches.stream import BatchStream, TrainBatch
from freshet.clock import Clock
from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Spec
from freshet.embedder.batch_builder import BatchBuilder
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import Permits
from freshet.embedder.partition_reader import BatchSizes, PartitionReader, lag_of
from freshet.embedder.prefetch_lane import LaneContext, LaneCounts, PrefetchLane
from freshet.embedder.recent_samples import RecentSamples
from freshet.embedder.staleness_limiter import StalenessLimiter
from freshet.log import EventLog
from freshet.model import NATIVE_KINDS
from freshet.model.inputs import ModelInputs
from freshet.rows.service import OwnersChange, RowService
from freshet.types import F32, U32, Fence

__all__ = ["DenseApplied", "PipelinedStream", "ReadMyWritesBy", "Share"]

CLOSE_WAIT_S = 5.0
"""Seconds for which `close` pushes queued gradients; the samples of others are trained on again."""

PAUSE_S = 0.005
"""Seconds between two polls of several lanes, unless rows arrive before."""

MOST_LOOKUPS = 32
"""The most concurrent lookups, each with a waiting thread: enough for 5 ms each way at 3,000 batches a
second."""


DenseApplied = Callable[[], Mapping[int, Sequence[int]]]
"""Returns the trainer's applied offsets; raises Unavailable while they are unknown."""


ReadMyWritesBy = Literal["stream", "trainer"]


@dataclass(frozen=True, slots=True)
class Share:
    """The partitions of one lane, all under one claim."""

    partitions: Sequence[int]
    fence: Fence  # carried by pushes and batches
    dense_applied: DenseApplied | None = None  # of the lane's rank; None: all lanes have the same rank


class PipelinedStream(BatchStream):
    """A prefetching `freshet.batches.stream.BatchStream`. Thread-safe.

    A lane may have several batches out at once. `push_gradients` never raises Refused, since pushes are
    asynchronous: after a refused push or a change of owners the lane rewinds, and drops the void batches when
    the trainer returns them.
    """

    def __init__(
        self,
        *,
        spec: Spec,
        layout: Layout,
        topic: str,
        log: EventLog,
        rows: RowService,
        decoder: Callable[[], BlockDecoder],
        dense_applied: DenseApplied,
        lanes: Sequence[Share],
        clock: Clock,
        batch_rows: int,
        staleness_rows: int,
        recent: RecentSamples | None = None,
        read_my_writes: ReadMyWritesBy | None = None,
    ) -> None:
        """Start to read and look up.

        Args:
            spec: the spec.
            layout: of the spec.
            topic: the topic of samples.
            log: the event log.
            rows: the row service.
            decoder: creates the decoder of a lane.
            dense_applied: returns the trainer's applied offsets; called again after Unavailable.
            lanes: the partitions of each lane.
            clock: for deadlines and stages.
            batch_rows: rows of a batch.
            staleness_rows: bound of the rows in flight.
            recent: stores samples for the gate beyond the life of this stream; None: a store of its own.
            read_my_writes: applies pending gradients to prefetched rows: this stream in `next_batch`, or the
                trainer from `TrainBatch.looked`; None: neither does.
        """
        self._topic, self._log, self._clock = topic, log, clock
        self._closed = False
        self._limiter = StalenessLimiter(Permits(staleness_rows, sync=spec.train.mode == "sync"))
        self._recent = recent or RecentSamples(spec.serve.gate.samples, clock)
        ahead, native = spec.train.mode != "sync", spec.model.kind in NATIVE_KINDS
        in_flight = 1 + staleness_rows // batch_rows if ahead else max(1, len(lanes))
        self._lookups = ThreadPoolExecutor(min(MOST_LOOKUPS, in_flight), "look-up")
        self._error: BaseException | None = None
        self._lanes: list[PrefetchLane] = []
        self._arrived = threading.Condition()
        self._own = own = ReadMyWrites(layout) if read_my_writes == "stream" and ahead else None
        common = LaneContext(
            rows,
            rows.ownership if isinstance(rows, OwnersChange) else lambda: 0,
            self._limiter,
            self._recent,
            BatchBuilder(
                spec,
                layout,
                states=read_my_writes is not None and ahead,
                in_steps=native,
            ),
            self._lookups,
            clock,
            ahead,
            self._fail,
            self._notify,
            own,
        )
        behind_rows = spec.train.behind_rows(native_loop=False)
        sizes = BatchSizes(batch_rows, behind_rows, spec.train.batch_wait_ms, warms_up=native)
        # One batch is decoded while the others are in flight. Read-my-writes keeps a write until the batches
        # looked up before it are taken, which needs as many slots again.
        slots = 1 + (in_flight if ahead else 1) * (1 if own is None else 2)
        self._lanes += [
            PrefetchLane(
                i,
                PartitionReader(log, topic, share.partitions, sizes, clock),
                decoder(),
                share.fence,
                share.dense_applied or dense_applied,
                common,
                slots=slots,
            )
            for i, share in enumerate(lanes)
        ]
        for lane in self._lanes:
            lane.start()

    def next_batch(self, lane: int, wait_s: float) -> TrainBatch | None:
        """Return the lane's next batch; raises the error of a failed lane. See the protocol."""
        if self._error is not None:
            raise self._error
        batch = self._lanes[lane].next_batch(wait_s)
        if batch is None and self._error is not None:
            raise self._error
        return batch

    def push_gradients(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Queue the push of gradients, (G, S) float32 and counts (U,) uint32 a group; see the protocol."""
        self._lanes[lane].push_gradients(batch, gradients, counts)

    def next_batch_of(
        self, lanes: Sequence[int], wait_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> tuple[int, TrainBatch] | None:
        """Return a lane and its next batch, for the first of these lanes that has one.

        None if no lane has one within `wait_s`, or once `wanted` returns False.
        """
        deadline = self._clock.monotonic() + wait_s
        while wanted():
            for lane in lanes:
                if (batch := self.next_batch(lane, 0.0)) is not None:
                    return lane, batch
            left = deadline - self._clock.monotonic()
            if left <= 0 or self._closed:
                return None
            with self._arrived:  # the next poll finds a batch that arrived since the last
                self._arrived.wait(min(left, PAUSE_S))
        return None

    def flush_lane(self, lane: int, wait_s: float) -> bool:
        """Wait like `flush` for one lane."""
        return self._lanes[lane].flush(wait_s)

    def flush(self, wait_s: float) -> bool:
        """Wait until all pushes are acknowledged; see the protocol."""
        return all(lane.flush(wait_s) for lane in self._lanes)

    def abandon(self, lane: int) -> None:
        """Issue the batches again that a lane's lost trainer holds."""
        self._lanes[lane].abandon()

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """Return the newest learned samples; see the protocol."""
        return self._recent.newest(rows)

    def lag(self) -> Mapping[int, int]:
        """Return {partition: blocks that no taken batch has contained}."""
        lag: dict[int, int] = {}
        for lane in self._lanes:
            lag |= lag_of(self._log, self._topic, lane.partitions, lane.covered())
        return lag

    def seconds(self) -> dict[str, float]:
        """Return the seconds that batches have spent in each stage; lookups and pushes overlap the others."""
        total = dict.fromkeys(("read", "credit", "decode", "plan", "lookup", "push"), 0.0)
        for lane in self._lanes:
            for name, seconds in lane.stages.seconds.items():
                total[name] += seconds
            total["lookup"] += lane.counts.lookup_s
            total["push"] += lane.counts.push_s
        return total

    def counts(self) -> list[LaneCounts]:
        """Return the counts of each lane."""
        return [lane.counts for lane in self._lanes]

    @property
    def stepped_rows(self) -> int:
        """Steps of pending gradients applied to prefetched rows since the start."""
        return self._own.stepped_rows if self._own is not None else 0

    @property
    def limiter(self) -> StalenessLimiter:
        """The staleness limiter, for metrics."""
        return self._limiter

    def close(self) -> None:
        """Push queued gradients, then release all resources. Idempotent."""
        self._closed = True
        for lane in self._lanes:
            lane.close(CLOSE_WAIT_S)
        self._lookups.shutdown()

    def _notify(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for lane in self._lanes:
            lane.end()
