"""The batch pipeline: samples of the log, with their rows, to the lanes of trainers, and gradients back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from freshet.batches.read_my_writes import ReadMyWrites
from freshet.batches.stream import RecentSamples, RunStream, TrainBatch, TrainRun
from freshet.clock import summed
from freshet.embedder.batch_builder import BatchBuilder, pools_of
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.lane import STAGES, DirectLane, LaneContext, LaneCounts, LanePartitions
from freshet.embedder.partition_reader import BatchSizes, lag_of
from freshet.embedder.prefetch_lane import PrefetchLane
from freshet.embedder.staleness_limiter import Permits, StalenessLimiter
from freshet.log.topics import ModelContext
from freshet.model import NATIVE_KINDS
from freshet.model.inputs import ModelInputs
from freshet.model.native_loop import Ran
from freshet.rows.service import LookupsAfter, OwnersChange, RowService
from freshet.types import F32, U32

CLOSE_WAIT_S = 5.0
"""Seconds for which `close` pushes queued gradients, of all lanes side by side; the samples of others are
trained on again."""

PAUSE_S = 0.005
"""Seconds between two polls of several lanes, unless rows arrive before."""

MOST_LOOKUPS = 32
"""The most concurrent lookups, each with a waiting thread: enough for 5 ms each way at 3,000 batches a
second."""

SYNC_SLOTS = 2
"""Batches of a lane in memory in mode `sync`: one is decoded while the other is in flight."""


ReadMyWritesBy = Literal["stream", "trainer"]


class BatchPipeline(RunStream):
    """The `freshet.batches.stream.BatchStream` between the log and a row service.

    With prefetch it is thread-safe, and a lane may have several batches out at once. `push_gradients` then
    never raises Refused, since pushes are asynchronous: after a refused push or a change of owners the lane
    rewinds, and drops the void batches when the trainer returns them.

    Without prefetch each lane's thread calls its methods, and reads, looks up and pushes itself.
    """

    def __init__(
        self,
        context: ModelContext,
        rows: RowService,
        decoder: Callable[[], BlockDecoder],
        lanes: Sequence[LanePartitions],
        *,
        prefetch: bool,
        recent: RecentSamples | None = None,
        read_my_writes: ReadMyWritesBy | None = None,
    ) -> None:
        """Start to read and look up, if it prefetches.

        Args:
            context: the model.
            rows: the row service.
            decoder: creates the decoder of a lane.
            lanes: the partitions of each lane.
            prefetch: lanes read, look up and push on threads of their own; in mode `sync` they look up once
                `next_batch` is called, or beside the push before. False: for rows in the same process.
            recent: stores samples for the gate beyond the life of this stream; None: a store of its own.
            read_my_writes: applies pending gradients to prefetched rows: this stream in `next_batch`, or the
                trainer from `TrainBatch.looked`; None: neither does.
        """
        spec, train = context.spec, context.spec.train
        self._context, self._closed = context, False
        self._limiter = StalenessLimiter(Permits(train.staleness_rows, sync=train.mode == "sync"))
        self._recent = recent or RecentSamples(spec.serve.gate.samples, context.clock)
        self._error: BaseException | None = None
        self._arrived = threading.Condition()
        # The speed of the last run sizes the runs of all lanes: the lane of a shorter run would idle.
        self._rows_per_s = 0.0
        ahead, native = prefetch and train.mode != "sync", spec.model.kind in NATIVE_KINDS
        in_flight = 1 + train.staleness_rows // train.batch_rows
        lookups = in_flight if ahead else max(1, SYNC_SLOTS * len(lanes))
        self._lookups = ThreadPoolExecutor(min(MOST_LOOKUPS, lookups), "look-up")
        self._own = own = ReadMyWrites(context.layout) if read_my_writes == "stream" and ahead else None
        states, in_steps = read_my_writes is not None and ahead, native and prefetch and train.batch_steps
        common = LaneContext(
            context,
            rows,
            rows.ownership if isinstance(rows, OwnersChange) else lambda: 0,
            self._limiter,
            self._recent,
            BatchBuilder(
                spec,
                context.layout,
                states=states,
                in_steps=in_steps,
                pools=pools_of(rows, spec.model.kind, states=states or in_steps),
            ),
            BatchSizes(
                train.batch_rows,
                train.behind_rows(native_loop=native and not prefetch),
                train.batch_wait_ms,
                warms_up=native,
            ),
            self._lookups,
            ahead,
            self._fail,
            self._notify,
            own,
            self._looks_up_after(rows, lanes) if prefetch and not ahead else None,
        )
        self._prefetching: list[PrefetchLane] = []
        self._direct: list[DirectLane] = []
        if prefetch:
            # One batch is decoded while the others are in flight. Read-my-writes keeps a write until the
            # batches looked up before it are taken, which needs as many slots again.
            slots = 1 + in_flight * (1 if own is None else 2) if ahead else SYNC_SLOTS
            self._prefetching += [
                PrefetchLane(i, mine, decoder(), common, slots=slots) for i, mine in enumerate(lanes)
            ]
        else:
            self._direct += [DirectLane(i, mine, decoder(), common) for i, mine in enumerate(lanes)]
        self._lanes: Sequence[PrefetchLane | DirectLane] = [*self._prefetching, *self._direct]
        for lane in self._prefetching:
            lane.start()

    def _looks_up_after(self, rows: RowService, lanes: Sequence[LanePartitions]) -> LookupsAfter | None:
        """Return the rows if a lookup beside the push before it finds what one after its answer would.

        It does if one lane makes all pushes, and no table counts lookups (admission), which now come earlier.
        """
        spec = self._context.spec
        alone = len(lanes) == 1 and len(lanes[0].partitions) == spec.partitions
        counted = any(table.admission > 1 for table in spec.tables)
        return rows if alone and not counted and isinstance(rows, LookupsAfter) else None

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
        """Push gradients, (G, S) float32 and counts (U,) uint32 a group; see the protocol.

        Raises Refused without prefetch, ValueError if the batch is not in flight.
        """
        self._lanes[lane].push_gradients(batch, gradients, counts)

    def next_run(self, lane: int, wait_s: float) -> TrainRun | None:
        """Return the lane's next run; only without prefetch. See the protocol."""
        return self._direct[lane].next_run(wait_s, self._rows_per_s)

    def finish_run(self, lane: int, run: TrainRun, ran: Ran | None) -> None:
        """Finish a run; see the protocol. Raises Refused, Unavailable as there."""
        if ran is not None and ran.pushed:
            self._rows_per_s = run.starts[ran.trained] / max(sum(ran.seconds.values()), 1e-6)
        self._direct[lane].finish_run(run, ran)

    def next_batch_of(
        self, lanes: Sequence[int], wait_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> tuple[int, TrainBatch] | None:
        """Return a lane and its next batch, for the first of these lanes that has one.

        None if no lane has one within `wait_s`, or once `wanted` returns False.
        """
        clock = self._context.clock
        deadline = clock.monotonic() + wait_s
        while wanted():
            for lane in lanes:
                if (batch := self.next_batch(lane, 0.0)) is not None:
                    return lane, batch
            left = deadline - clock.monotonic()
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

    def abandon(self, lane: int, batches: Sequence[TrainBatch]) -> None:
        """Issue again the batches that the lost trainer of a prefetching lane holds."""
        self._prefetching[lane].abandon(batches)

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """Return the newest learned samples; see the protocol."""
        return self._recent.newest(rows)

    def lag(self) -> Mapping[int, int]:
        """Return {partition: blocks that no batch has contained}."""
        log, topic = self._context.log, self._context.topics.samples
        lag: dict[int, int] = {}
        for lane in self._lanes:
            lag |= lag_of(log, topic, lane.partitions, lane.covered())
        return lag

    def seconds(self) -> dict[str, float]:
        """Return the seconds that batches have spent in each of STAGES, summed over the lanes.

        Lookups and pushes of prefetching lanes overlap the other stages.
        """
        total = dict.fromkeys(STAGES, 0.0) | summed(lane.stages for lane in self._lanes)
        for lane in self._lanes:
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
        with ThreadPoolExecutor(max(1, len(self._lanes)), "close") as threads:  # the waits of all at once
            list(threads.map(lambda lane: lane.close(CLOSE_WAIT_S), self._lanes))
        self._lookups.shutdown()

    def _notify(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for lane in self._prefetching:
            lane.end()
