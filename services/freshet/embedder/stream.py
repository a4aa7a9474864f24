"""The batch stream in one process: the embedder's work done on the lane's own thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from freshet.clock import Clock, Stages, summed
from freshet.embedder.core import BatchPlan, Credits, partitions_of_lane
from freshet.embedder.decoding import BlockDecoder
from freshet.embedder.desk import CreditDesk
from freshet.embedder.making import Made, Maker, Slot
from freshet.embedder.recent import Recent
from freshet.embedder.source import Sizes, Source, lag_of
from freshet.embedder.tracing import calling, processed
from freshet.errors import Refused
from freshet.model import NATIVE_KINDS
from freshet.model.inputs import ModelInputs
from freshet.seams.batches import TrainBatch
from freshet.seams.eventlog import EventLog
from freshet.seams.rowservice import RowService
from freshet.spec.layout import Layout
from freshet.spec.model import Spec
from freshet.tracing import active
from freshet.types import F32, Fence

__all__ = ["STAGES", "LocalStream"]

log = structlog.get_logger("freshet.embedder")

STAGES = ("read", "credit", "decode", "plan", "lookup", "push")
"""Of a lane's work here: blocks from the log to a batch, waiting for a credit, samples to keys and columns,
unique keys, their rows; and gradients to the rows."""


@dataclass
class _Lane:
    """One lane's partitions, its place in them, and memory reused from batch to batch."""

    index: int
    source: Source
    decoder: BlockDecoder
    slot: Slot
    plan: BatchPlan | None = None  # put together, waiting for a credit
    credit: int = 0
    made: Made | None = None  # in flight
    stages: Stages = field(default_factory=lambda: Stages(STAGES))


class LocalStream:
    """See `freshet.seams.batches.BatchStream`. One rank; a lane's methods are called by its own thread.

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
        self._maker = Maker(spec, layout)
        self._desk = CreditDesk(Credits(staleness_rows, sync=spec.train.mode == "sync"))
        self._recent = Recent(spec.serve.gate.samples, clock)
        native = spec.model.kind in NATIVE_KINDS
        sizes = Sizes(batch_rows, spec.train.behind_rows(native_loop=native), spec.train.batch_wait_ms)
        partitions = range(spec.partitions)
        self._lanes = [
            _Lane(
                i,
                Source(log, topic, partitions_of_lane(i, lanes, partitions), sizes, clock),
                decoder(),
                self._maker.slot(),
            )
            for i in range(lanes)
        ]

    def take(self, lane: int, wait_s: float) -> TrainBatch | None:
        """The lane's next batch; see the protocol."""
        state = self._lanes[lane]
        if not state.source.started:
            state.source.rewind([self._rows.applied(), self._dense_applied()])
            state.plan = None
        deadline = self._clock.monotonic() + wait_s
        state.stages.begin()
        state.plan = state.plan or state.source.assemble(deadline)
        state.stages.mark("read")
        if state.plan is None:
            return None
        state.credit = self._desk.take(lane, state.plan.rows, max(0.0, deadline - self._clock.monotonic()))
        state.stages.mark("credit")
        if not state.credit:
            return None
        plan, state.plan = state.plan, None
        return self._issue(state, plan)

    def give_back(self, lane: int, batch: TrainBatch, gradients: Sequence[F32] | None) -> None:
        """Push a batch's gradients, or return it unused; see the protocol."""
        state = self._lanes[lane]
        made = state.made
        assert made is not None, "a batch is given back once, by the lane that took it"
        state.made = None
        state.stages.begin()
        self._desk.step_over()
        try:
            if gradients is None:
                state.source.stop()
                return
            if made.traced is None:
                self._rows.push(made.push(self._fence, gradients))
            else:
                with calling(made.traced, "push", "Push"):
                    self._rows.push(made.push(self._fence, gradients))
            if not batch.replayed:
                self._recent.add(made.inputs)
        except Refused as refused:
            log.warning(
                "a push was refused; the lane starts again from what is applied",
                lane=lane,
                ranges=list(map(str, batch.ranges)),
                reason=str(refused),
            )
            state.source.stop()
            raise
        finally:
            self._desk.give_back(state.credit)
            state.stages.mark("push")

    def settled(self, wait_s: float) -> bool:
        """Always True: a push is answered before `give_back` returns."""
        return True

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """The newest samples with their rows before they were trained on; see the protocol."""
        return self._recent.newest(rows)

    def lag(self) -> Mapping[int, int]:
        """{partition: blocks that no batch has covered yet}."""
        lag: dict[int, int] = {}
        for state in self._lanes:
            source = state.source
            lag |= lag_of(self._log, self._topic, source.partitions, source.covered())
        return lag

    def seconds(self) -> dict[str, float]:
        """How long the lanes have been in each of STAGES, summed over them."""
        return summed(state.stages for state in self._lanes)

    def close(self) -> None:
        """Close the readers."""
        for state in self._lanes:
            state.source.close()

    def _issue(self, state: _Lane, plan: BatchPlan) -> TrainBatch:
        tracer = active()
        began_ns = 0 if tracer is None else tracer.now_ns()
        decoded = state.decoder.decode(plan.blocks, plan.places)
        state.stages.mark("decode")
        replayed = state.source.replayed(plan)
        made = self._maker.make(plan, decoded, state.slot, replayed=replayed, stages=state.stages)
        if tracer is not None:
            made.traced = processed(tracer, plan, decoded, self._topic, began_ns)
        made.look_up(self._rows)
        state.stages.mark("lookup")
        state.made = made
        return made.batch(self._fence, looked=False)
