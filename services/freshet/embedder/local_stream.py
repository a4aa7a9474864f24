"""The batch stream within one process: a lane's own thread reads, decodes, looks up and pushes.

For native models it issues runs of batches; native code looks their rows up and pushes them
(`freshet.model.native_loop`).

Letters: U rows of a group, G gradients of a group, S floats of a row, K batches of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import structlog

from freshet.batches.stream import RunStream, TrainBatch, TrainRun
from freshet.clock import Clock, Stages, summed
from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Spec
from freshet.embedder.batch_builder import BatchBuilder, BuiltBatch, Slot
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import BatchPlan, Permits, partitions_of_lane
from freshet.embedder.partition_reader import BatchSizes, PartitionReader, lag_of
from freshet.embedder.recent_samples import RecentSamples
from freshet.embedder.staleness_limiter import StalenessLimiter
from freshet.errors import Refused, Unavailable
from freshet.log import EventLog
from freshet.model import NATIVE_KINDS
from freshet.model.inputs import Labels, ModelInputs
from freshet.model.native_loop import MOMENTS, Ended, LoopBatches, Ran
from freshet.observability.spans import record_batch, start_rows_call
from freshet.observability.trace_ids import TracedBatch
from freshet.observability.tracing import end_span, now_ns, running
from freshet.rows.service import NativeRows, RowService
from freshet.types import F32, I64, U8, U32, BytesColumn, Fence, OffsetRange

__all__ = ["STAGES", "LocalStream"]

log = structlog.get_logger("freshet.embedder")

RUN_S = 0.04
"""Seconds of a lane's run: measures and versions receive samples between two runs only."""
MOST_RUN_ROWS = 16_384
MOST_RUN_BATCHES = 256
"""Bounds of a run: a linear model learns so many in less than RUN_S."""

STAGES = ("read", "credit", "decode", "plan", "lookup", "push")
"""Stages of a lane: blocks from the log to a batch, waiting for a permit, decoding, unique keys, lookup of
rows, push of gradients."""


@dataclass
class _Lane:
    """The state of one lane: its reader, its batch in flight, and memory reused for every batch."""

    index: int
    source: PartitionReader
    decoder: BlockDecoder
    slot: Slot
    plans: list[BatchPlan] = field(default_factory=list)  # assembled, waiting for a permit
    permit: int = 0
    built: BuiltBatch | None = None  # in flight
    traced: Sequence[TracedBatch | None] = ()  # of the run in flight; empty: none is traced
    stages: Stages = field(default_factory=lambda: Stages(STAGES))


class LocalStream(RunStream):
    """The `freshet.batches.stream.BatchStream` of one rank. Each lane's thread calls its methods.

    For rows in the same process, where a lookup takes tens of microseconds: nothing is done ahead.
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
        dense_applied: Callable[[], Mapping[int, Sequence[int]]],
        fence: Fence,
        lanes: int,
        clock: Clock,
        batch_rows: int,
        staleness_rows: int,
    ) -> None:
        self._topic, self._log, self._rows = topic, log, rows
        self._dense_applied, self._fence, self._clock = dense_applied, fence, clock
        self._builder = BatchBuilder(spec, layout)
        # The speed of the last run sizes the runs of all lanes: the lane of a shorter run would idle.
        self._rows_per_s = 0.0
        self._native = rows if isinstance(rows, NativeRows) else None
        self._limiter = StalenessLimiter(Permits(staleness_rows, sync=spec.train.mode == "sync"))
        self._recent = RecentSamples(spec.serve.gate.samples, clock)
        native = spec.model.kind in NATIVE_KINDS
        behind_rows = spec.train.behind_rows(native_loop=native)
        sizes = BatchSizes(batch_rows, behind_rows, spec.train.batch_wait_ms, warms_up=native)
        partitions = range(spec.partitions)
        self._lanes = [
            _Lane(
                i,
                PartitionReader(log, topic, partitions_of_lane(i, lanes, partitions), sizes, clock),
                decoder(),
                self._builder.slot(),
            )
            for i in range(lanes)
        ]

    def next_batch(self, lane: int, wait_s: float) -> TrainBatch | None:
        """Return the lane's next batch; see the protocol."""
        state = self._lanes[lane]
        plans = self._plans(state, wait_s, 0, 1)
        return self._issue(state, plans[0]) if plans else None

    def next_run(self, lane: int, wait_s: float) -> TrainRun | None:
        """Return the lane's next run; see the protocol."""
        state = self._lanes[lane]
        rows = min(MOST_RUN_ROWS, round(RUN_S * self._rows_per_s))
        plans = self._plans(state, wait_s, rows, MOST_RUN_BATCHES)
        return self._issue_run(state, plans) if plans else None

    def _plans(self, state: _Lane, wait_s: float, rows: int, batches: int) -> list[BatchPlan]:
        """Return the lane's next batches and acquire a permit; none if either is missing after `wait_s`."""
        if not state.source.started:
            state.source.rewind([self._rows.applied(), self._dense_applied()])
            state.plans = []
        deadline = self._clock.monotonic() + wait_s
        state.stages.begin()
        state.plans = state.plans or state.source.assemble_run(deadline, rows, batches)
        state.stages.mark("read")
        if not state.plans:
            return []
        # A lane has one batch in flight at a time, so the permit is for the largest.
        in_flight = max(plan.rows for plan in state.plans)
        left_s = max(0.0, deadline - self._clock.monotonic())
        state.permit = self._limiter.acquire(state.index, in_flight, left_s)
        state.stages.mark("credit")
        if not state.permit:
            return []
        plans, state.plans = state.plans, []
        return plans

    def push_gradients(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Push gradients, (G, S) float32 and counts (U,) uint32 a group; see the protocol.

        Raises Refused as the row service does, after rewinding the lane.
        """
        state = self._lanes[lane]
        built = state.built
        assert built is not None, "each batch is returned once, by the lane that took it"
        state.built = None
        state.stages.begin()
        self._limiter.end_step()
        try:
            if gradients is None:
                state.source.stop()
                return
            push = built.push(self._fence, gradients, counts)
            with running(start_rows_call(built.traced, "Push")):
                self._rows.push(push)
            if not batch.replayed:
                self._recent.add(built.inputs)
        except Refused as refused:
            self._start_again(state, batch.ranges, refused)
            raise
        finally:
            self._limiter.release(state.permit)
            state.stages.mark("push")

    def push_run(self, lane: int, run: TrainRun, ran: Ran | None) -> None:
        """Finish the lane's run; see the protocol.

        Raises Refused if a push was refused, Unavailable if a bucket is not held or not read yet.
        """
        state = self._lanes[lane]
        rows, traced = self._native, state.traced
        state.traced = ()
        assert rows is not None, "a run comes from a stream of native rows"
        self._limiter.end_step()
        try:
            if ran is None:
                state.source.stop()
                return
            for stage in ("plan", "lookup", "push"):
                state.stages.seconds[stage] += ran.seconds[stage]
            rows.pushed(ran.pushed, ran.skipped)
            if traced:
                self._trace(rows, traced, ran)
            if ran.pushed:
                starts = run.starts
                self._rows_per_s = starts[ran.trained] / max(sum(ran.seconds.values()), 1e-6)
                self._keep(run, ran, starts)
            if ran.ended is Ended.REFUSED:
                raise rows.refused(run.batches.ranges[ran.pushed])
            if ran.ended in (Ended.UNREAD, Ended.NOT_HELD):
                raise Unavailable(f"bucket {ran.bucket} is not held by this shard, or not read yet")
            if ran.pushed < len(run):
                state.source.stop()  # the rest of the run is issued again
        except Refused as refused:
            self._start_again(state, run.batches.ranges[ran.pushed if ran is not None else 0], refused)
            raise
        finally:
            self._limiter.release(state.permit)

    def flush(self, wait_s: float) -> bool:
        """Return True: `push_gradients` waits for the answer to its push."""
        return True

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """Return the newest learned samples; see the protocol."""
        return self._recent.newest(rows)

    def lag(self) -> Mapping[int, int]:
        """Return {partition: blocks that no batch has contained}."""
        lag: dict[int, int] = {}
        for state in self._lanes:
            source = state.source
            lag |= lag_of(self._log, self._topic, source.partitions, source.covered())
        return lag

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the lanes have spent in each of STAGES, summed over them."""
        return summed(state.stages for state in self._lanes)

    def close(self) -> None:
        """Close the readers."""
        for state in self._lanes:
            state.source.close()

    @staticmethod
    def _start_again(state: _Lane, ranges: Sequence[OffsetRange], refused: Refused) -> None:
        log.warning(
            "a push was refused; the lane restarts at the applied offsets",
            lane=state.index,
            ranges=list(map(str, ranges)),
            reason=str(refused),
        )
        state.source.stop()

    def _issue(self, state: _Lane, plan: BatchPlan) -> TrainBatch:
        start_ns = now_ns()
        decoded = state.decoder.decode(plan.blocks, plan.places)
        state.stages.mark("decode")
        replayed = state.source.replayed(plan)
        built = self._builder.build(plan, decoded, state.slot, replayed=replayed, stages=state.stages)
        built.traced = record_batch(plan.ranges, len(plan.blocks), decoded.request_ids, self._topic, start_ns)
        built.look_up(self._rows)
        state.stages.mark("lookup")
        state.built = built
        return built.batch(self._fence, looked=False)

    def _issue_run(self, state: _Lane, plans: Sequence[BatchPlan]) -> TrainRun:
        rows = self._native
        assert rows is not None, "a run comes from a stream of native rows"
        start_ns = now_ns()
        rows.admit([r for plan in plans for r in plan.ranges], self._fence)
        decoded = state.decoder.decode(
            BytesColumn.concat([plan.blocks for plan in plans]),
            tuple(at for plan in plans for at in plan.places),
        )
        assert decoded.block_ends is not None
        blocks = np.cumsum([len(plan.blocks) for plan in plans])
        ends = np.concatenate([np.zeros(1, np.int64), decoded.block_ends])[blocks]
        state.stages.mark("decode")
        if start_ns:
            starts = [0, *ends.tolist()]
            traced = [
                record_batch(p.ranges, len(p.blocks), decoded.request_ids[first:last], self._topic, start_ns)
                for p, first, last in zip(plans, starts, starts[1:], strict=False)
            ]
            state.traced = traced if any(traced) else ()
        replayed = [state.source.replayed(plan) for plan in plans]
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
                items=self._builder.items(decoded),
                ends=ends,
            ),
            traced=bool(state.traced),
        )

    def _wanted(self, ends: I64, replayed: Sequence[bool]) -> U8:
        """Return (K,) uint8 flags of the batches to copy for the gate: the newest, as many as it needs."""
        keep, wanted = np.zeros(len(ends), np.uint8), self._recent.wants()
        starts = [0, *ends.tolist()]
        for k in range(len(ends) - 1, -1, -1):
            if wanted <= 0:
                break
            if not replayed[k] and starts[k + 1] > starts[k]:
                keep[k] = 1
                wanted -= starts[k + 1] - starts[k]
        return keep

    def _keep(self, run: TrainRun, ran: Ran, starts: Sequence[int]) -> None:
        for k, groups in ran.kept:
            if k >= ran.pushed:
                continue
            part = run.samples.part(starts[k], starts[k + 1]).inputs.copied()
            self._recent.keep(replace(part, groups=groups))

    @staticmethod
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
