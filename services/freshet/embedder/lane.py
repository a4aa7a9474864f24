"""Lanes of the batch pipeline, and the lane that does everything on its caller's thread.

`RowsAhead` meanwhile fetches rows of that lane's later batches from disk.
`freshet.embedder.prefetch_lane` has the lane with threads of its own. For native models a direct lane issues
runs of batches; native code looks their rows up and pushes them (`freshet.model.native_loop`).

Letters: U rows of a group, G gradients of a group, S floats of a row, K batches of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import structlog

from freshet.batches.read_my_writes import ReadMyWrites
from freshet.batches.stream import RecentSamples, TrainBatch, TrainRun
from freshet.clock import Stopwatch
from freshet.embedder.batch_builder import BatchBuilder, BuiltBatch, Slot
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import BatchPlan
from freshet.embedder.partition_reader import BatchSizes, PartitionReader
from freshet.embedder.staleness_limiter import StalenessLimiter
from freshet.errors import Refused, Unavailable
from freshet.log.topics import ModelContext
from freshet.model.inputs import Labels, ModelInputs
from freshet.model.native_loop import MOMENTS, Ended, LoopBatches, Ran
from freshet.observability.spans import record_batch, start_rows_call
from freshet.observability.trace_ids import TracedBatch
from freshet.observability.tracing import end_span, now_ns, running
from freshet.rows.service import LookupsAfter, NativeRows, RowService
from freshet.tables import Store
from freshet.types import F32, I64, U8, U32, U64, BytesColumn, Fence, OffsetRange

log = structlog.get_logger("freshet.embedder")

RUN_S = 0.04
"""Seconds of a lane's run: measures and versions receive samples between two runs only."""
MOST_RUN_ROWS = 16_384
MOST_RUN_BATCHES = 256
"""Bounds of a run: a linear model learns so many in less than RUN_S."""

STAGES = ("read", "credit", "decode", "plan", "lookup", "push")
"""Stages of a lane: blocks from the log to a batch, waiting for a permit, decoding, unique keys, lookup of
rows, push of gradients."""

DenseApplied = Callable[[], Mapping[int, Sequence[int]]]
"""Returns the trainer's applied offsets; raises Unavailable while they are unknown."""


@dataclass(frozen=True, slots=True)
class LanePartitions:
    """The partitions of one lane, all under one claim."""

    partitions: Sequence[int]
    fence: Fence  # carried by pushes and batches
    dense_applied: DenseApplied  # of the lane's rank


@dataclass(frozen=True, slots=True, eq=False)
class LaneContext:
    """The parts that the lanes of one pipeline share."""

    model: ModelContext
    rows: RowService
    ownership: Callable[[], int]  # see `OwnersChange`
    limiter: StalenessLimiter
    recent: RecentSamples
    builder: BatchBuilder
    sizes: BatchSizes
    lookups: Executor  # of a prefetching lane
    ahead: bool  # lookups do not wait for `next_batch`
    failed: Callable[[BaseException], None]
    arrived: Callable[[], None]  # a batch is ready
    own: ReadMyWrites | None = None  # None: the pipeline applies no pending gradients
    after: LookupsAfter | None = None  # mode `sync`: looks up beside the push before; None: after its answer


@dataclass(slots=True)
class LaneCounts:
    """Counts of a lane since its start."""

    batches: int = 0  # taken
    rewinds: int = 0  # after the first
    void_rows: int = 0  # samples of batches that were looked up and issued again
    lookup_s: float = 0.0  # of prefetched lookups, from request to rows, summed over batches
    push_s: float = 0.0  # of queued pushes, from gradients to acknowledgement, summed over batches


class Lane:
    """The reader and decoder of one lane."""

    def __init__(self, index: int, mine: LanePartitions, decoder: BlockDecoder, context: LaneContext) -> None:
        model = context.model
        self.partitions = tuple(mine.partitions)
        self.counts = LaneCounts()
        self.stages = Stopwatch(STAGES)
        self._index, self._fence, self._dense_applied = index, mine.fence, mine.dense_applied
        self._context, self._clock, self._decoder = context, model.clock, decoder
        self._reader = PartitionReader(
            model.log, model.topics.samples, mine.partitions, context.sizes, model.clock
        )

    def _build(self, plan: BatchPlan, slot: Slot) -> BuiltBatch:
        """Decode a batch and find its unique keys."""
        start_ns = now_ns()
        decoded = self._decoder.decode(plan.blocks, plan.places)
        self.stages.mark("decode")
        replayed = self._reader.replayed(plan)
        built = self._context.builder.build(plan, decoded, slot, replayed=replayed, stages=self.stages)
        built.traced = self._record(plan, decoded.request_ids, start_ns)
        return built

    def _record(self, plan: BatchPlan, request_ids: U64, start_ns: int) -> TracedBatch | None:
        topic = self._reader.topic
        return record_batch(plan.ranges, len(plan.blocks), request_ids, topic, start_ns)


class RowsAhead:
    """Brings rows of one lane's later batches from a local disk into memory, while the lane trains.

    Only a hint: batches, offsets and dead letters are those of the lane itself, which decodes the blocks
    again; a lookup reads what is not fetched. The fetches run on a thread; the lane's thread calls this.
    """

    def __init__(self, store: Store, builder: BatchBuilder, decoder: BlockDecoder) -> None:
        """Fetch nothing yet; `decoder` is the lane's."""
        self._store, self._builder, self._decoder = store, builder, decoder
        self._slot = builder.slot()
        self._thread = ThreadPoolExecutor(1, "rows-ahead")
        self._last: Future[None] | None = None

    def begin(self, blocks: BytesColumn) -> Future[None] | None:
        """Begin to fetch the rows of blocks, after those begun before; returns the fetch begun before.

        The lane must wait for that one before it looks these rows up, or it would read them once more.
        """
        before = self._last
        self._last = self._thread.submit(self._fetch, blocks) if len(blocks) else None
        return before

    def _fetch(self, blocks: BytesColumn) -> None:
        columns = self._decoder.peek(blocks)
        if columns is not None:
            self._store.fetch(self._builder.keys(columns, self._slot))

    def close(self) -> None:
        """End the thread, after what it has begun. Idempotent."""
        self._thread.shutdown()


class DirectLane(Lane):
    """A lane without prefetch: the caller's thread reads, decodes, looks up and pushes.

    For rows in the same process, where a lookup takes tens of microseconds. It has one batch, or run, in
    flight at a time, in memory that it reuses. Rows of the next one that are on disk are fetched meanwhile.
    """

    def __init__(self, index: int, mine: LanePartitions, decoder: BlockDecoder, context: LaneContext) -> None:
        super().__init__(index, mine, decoder, context)
        self._slot = context.builder.slot()
        self._plans: list[BatchPlan] = []  # assembled, waiting for a permit
        self._permit = 0
        self._built: BuiltBatch | None = None  # in flight
        self._traced: Sequence[TracedBatch | None] = ()  # of the run in flight; empty: none is traced
        self._ahead: RowsAhead | None = None  # None: all rows are in memory
        rows = context.rows
        if isinstance(rows, NativeRows) and rows.store.memory_bound is not None:
            self._ahead = RowsAhead(rows.store, context.builder, decoder)

    def next_batch(self, wait_s: float) -> TrainBatch | None:
        """Return the next batch; see the protocol."""
        plans = self._next_plans(wait_s, 0, 1)
        if not plans:
            return None
        fetched = self._fetch_next(plans)
        built = self._build(plans[0], self._slot)
        if fetched is not None:
            fetched.result()
        built.look_up(self._context.rows)
        self.stages.mark("lookup")
        self._built = built
        return built.batch(self._fence, looked=False)

    def next_run(self, wait_s: float, rows_per_s: float) -> TrainRun | None:
        """Return the next run, sized by the speed of earlier ones; see the protocol."""
        rows = min(MOST_RUN_ROWS, round(RUN_S * rows_per_s))
        plans = self._next_plans(wait_s, rows, MOST_RUN_BATCHES)
        if not plans:
            return None
        fetched = self._fetch_next(plans)
        run = self._build_run(plans)
        if fetched is not None:
            fetched.result()
            self.stages.mark("lookup")
        return run

    def push_gradients(
        self, batch: TrainBatch, gradients: Sequence[F32] | None, counts: Sequence[U32] | None = None
    ) -> None:
        """Push gradients, (G, S) float32 and counts (U,) uint32 a group; see the protocol.

        Raises Refused as the row service does, after rewinding the lane.
        """
        built, self._built = self._built, None
        assert built is not None, "each batch is returned once, by the lane that took it"
        self.stages.begin()
        self._context.limiter.end_step()
        try:
            if gradients is None:
                self._reader.stop()
                return
            push = built.push(self._fence, gradients, counts)
            with running(start_rows_call(built.traced, "Push")):
                self._context.rows.push(push)
            if not batch.replayed:
                self._context.recent.add(built.inputs)
        except Refused as refused:
            self._rewind(batch.ranges, refused)
            raise
        finally:
            self._context.limiter.release(self._permit)
            self.stages.mark("push")

    def finish_run(self, run: TrainRun, ran: Ran | None) -> None:
        """Finish the run; see the protocol.

        Raises Refused if a push was refused, Unavailable if a bucket is not owned or not read yet.
        """
        rows, traced = self._native_rows, self._traced
        self._traced = ()
        self._context.limiter.end_step()
        try:
            if ran is None:
                self._reader.stop()
                return
            for stage in ("plan", "lookup", "push"):
                self.stages.seconds[stage] += ran.seconds[stage]
            rows.pushed(ran.pushed, ran.skipped)
            if traced:
                _trace(rows, traced, ran)
            if ran.pushed:
                self._keep(run, ran)
            if ran.ended is Ended.REFUSED:
                raise rows.refused(run.batches.ranges[ran.pushed])
            if ran.ended in (Ended.UNREAD, Ended.NOT_HELD):
                raise Unavailable(f"bucket {ran.bucket} is not owned by this shard, or not read yet")
            if ran.pushed < len(run):
                self._reader.stop()  # the rest of the run is issued again
        except Refused as refused:
            self._rewind(run.batches.ranges[ran.pushed if ran is not None else 0], refused)
            raise
        finally:
            self._context.limiter.release(self._permit)

    def flush(self, wait_s: float) -> bool:
        """Return True: `push_gradients` waits for the answer to its push."""
        return True

    def covered(self) -> dict[int, int]:
        """Return {partition: end of the assembled batches, past trailing markers}."""
        return self._reader.covered()

    def close(self, wait_s: float) -> None:
        """Close the reader. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()
        self._reader.close()

    @property
    def _native_rows(self) -> NativeRows:
        rows = self._context.rows
        assert isinstance(rows, NativeRows), "a run has native rows"
        return rows

    def _next_plans(self, wait_s: float, rows: int, batches: int) -> list[BatchPlan]:
        """Return the next batches and acquire a permit; none if either is missing after `wait_s`."""
        if not self._reader.started:
            self._reader.rewind([self._context.rows.applied(), self._dense_applied()])
            self._plans = []
        deadline = self._clock.monotonic() + wait_s
        self.stages.begin()
        self._plans = self._plans or self._reader.assemble_run(deadline, rows, batches)
        self.stages.mark("read")
        if not self._plans:
            return []
        # A lane has one batch in flight at a time, so the permit is for the largest.
        in_flight = max(plan.rows for plan in self._plans)
        left_s = max(0.0, deadline - self._clock.monotonic())
        self._permit = self._context.limiter.acquire(self._index, in_flight, left_s)
        self.stages.mark("credit")
        if not self._permit:
            return []
        plans, self._plans = self._plans, []
        self.counts.batches += len(plans)
        return plans

    def _fetch_next(self, plans: Sequence[BatchPlan]) -> Future[None] | None:
        """Begin to fetch rows of the batches after these; returns the fetch of these, if there is one."""
        if self._ahead is None:
            return None
        return self._ahead.begin(self._reader.next_blocks(sum(plan.rows for plan in plans)))

    def _rewind(self, ranges: Sequence[OffsetRange], refused: Refused) -> None:
        log.warning(
            "a push was refused; the lane restarts at the applied offsets",
            lane=self._index,
            ranges=list(map(str, ranges)),
            reason=str(refused),
        )
        self.counts.rewinds += 1
        self._reader.stop()

    def _build_run(self, plans: Sequence[BatchPlan]) -> TrainRun:
        start_ns = now_ns()
        self._native_rows.admit([r for plan in plans for r in plan.ranges], self._fence)
        decoded = self._decoder.decode(
            BytesColumn.concat([plan.blocks for plan in plans]),
            tuple(at for plan in plans for at in plan.places),
        )
        assert decoded.block_ends is not None
        blocks = np.cumsum([len(plan.blocks) for plan in plans])
        ends = np.concatenate([np.zeros(1, np.int64), decoded.block_ends])[blocks]
        self.stages.mark("decode")
        if start_ns:
            starts = [0, *ends.tolist()]
            traced = [
                self._record(plan, decoded.request_ids[first:last], start_ns)
                for plan, first, last in zip(plans, starts, starts[1:], strict=False)
            ]
            self._traced = traced if any(traced) else ()
        replayed = [self._reader.replayed(plan) for plan in plans]
        columns = decoded.columns
        labels = Labels(decoded.label_index, decoded.label_value, decoded.weight)
        times_ms, ranges = decoded.event_times_ms, [plan.ranges for plan in plans]
        return TrainRun(
            LoopBatches(columns.groups, columns.dense, labels, times_ms, ends, ranges),
            replayed,
            self._wanted(ends, replayed),
            TrainBatch(
                ranges=(),
                fence=self._fence,
                inputs=ModelInputs(columns.size, (), columns.dense, labels),
                sample_ids=decoded.sample_ids,
                request_ids=decoded.request_ids,
                event_times_ms=times_ms,
                segments=columns.segments,
                served=columns.served,
                explored=columns.explored,
                items=self._context.builder.items(decoded),
                ends=ends,
            ),
            traced=bool(self._traced),
        )

    def _wanted(self, ends: I64, replayed: Sequence[bool]) -> U8:
        """Return (K,) uint8 flags of the batches to copy for the gate: the newest, as many as it needs."""
        keep, wanted = np.zeros(len(ends), np.uint8), self._context.recent.wants()
        starts = [0, *ends.tolist()]
        for k in range(len(ends) - 1, -1, -1):
            if wanted <= 0:
                break
            if not replayed[k] and starts[k + 1] > starts[k]:
                keep[k] = 1
                wanted -= starts[k + 1] - starts[k]
        return keep

    def _keep(self, run: TrainRun, ran: Ran) -> None:
        """Keep the copied batches for the gate."""
        starts = run.starts
        for k, groups in ran.kept:
            if k >= ran.pushed:
                continue
            part = run.samples.part(starts[k], starts[k + 1]).inputs.copied()
            self._context.recent.keep(replace(part, groups=groups))


def _trace(rows: NativeRows, traced: Sequence[TracedBatch | None], ran: Ran) -> None:
    moments = ran.moments_ns
    if moments is None:
        return
    for k, one in enumerate(traced[: ran.trained]):
        if one is None:
            continue
        at = dict(zip(MOMENTS, moments[k].tolist(), strict=True))
        for place, method, began, end in (
            ("lookup", "Lookup", "planned", "looked_up"),
            ("push", "Push", "stepped", "pushed"),
        ):
            refused = place == "push" and k >= ran.pushed
            error = "the push was refused" if refused else ""
            rows.answered(method, one.context(place), at[began], at[end])
            if (span := start_rows_call(one, method, at[began])) is not None:
                end_span(span, error, at[end])
