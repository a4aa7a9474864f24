"""The batch stream in one process: the embedder's work done on the lane's own thread."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from freshet.clock import Clock, Stages, summed
from freshet.embedder.core import Assembler, BatchPlan, Credits, cut_points, partitions_of_lane
from freshet.embedder.decoding import BlockDecoder, DecodedBatch
from freshet.errors import Refused
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.seams.batches import TrainBatch
from freshet.seams.eventlog import EventLog, Reader
from freshet.seams.rowservice import KeyGroup, Push, RowService
from freshet.spec.layout import Layout, item_of
from freshet.spec.model import Spec
from freshet.tables import Plan
from freshet.types import F32, U64, Fence, TimeMs, TopicPartition

__all__ = ["LocalStream"]

log = structlog.get_logger("freshet.embedder")

STAGES = ("read", "credit", "decode", "plan", "lookup", "push")
"""Of a lane's work here: blocks from the log to a batch, waiting for a credit, samples to keys and columns,
unique keys, their rows; and gradients to the rows."""

READ_AHEAD_BLOCKS = 64
"""Blocks read from the log at once: 16,384 samples at most, tens of milliseconds of work."""

RECENT_REST_S = 0.25
"""Between two rounds of copies for the gate: a batch's copy costs 75 µs, and at full speed 2,000 samples
come in 10 ms."""


@dataclass(slots=True)
class _InFlight:
    """What must be kept of a batch between lookup and push."""

    credit: int
    groups: Sequence[KeyGroup] = ()
    clock_ms: int = 0
    inputs: ModelInputs | None = None


@dataclass
class _Lane:
    """One lane's partitions, its place in them, and memory reused from batch to batch."""

    partitions: tuple[int, ...]
    reader: Reader
    decoder: BlockDecoder
    plans: list[Plan]
    rows: list[F32]
    assembler: Assembler | None = None  # None: ask what is applied, and start there
    replayed_until: dict[int, int] = field(default_factory=dict)
    waiting_since: float = 0.0
    plan: BatchPlan | None = None  # put together, waiting for a credit
    in_flight: _InFlight | None = None
    stages: Stages = field(default_factory=lambda: Stages(STAGES))


class LocalStream:
    """See `freshet.seams.batches.BatchStream`. One rank; a lane's methods are called by its own thread."""

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
        self._spec, self._layout, self._topic = spec, layout, topic
        self._item = item_of(spec, layout)
        self._log, self._rows = log, rows
        self._dense_applied, self._fence, self._clock = dense_applied, fence, clock
        self._batch_rows, self._behind_rows = batch_rows, max(batch_rows, spec.train.batch_behind_rows)
        self._credits = Credits(staleness_rows)
        self._changed = threading.Condition()  # guards credits and recent
        self._recent: deque[ModelInputs] = deque()
        self._recent_rows = self._fresh_rows = 0  # kept; of these, since the last rest
        self._resting_until = -math.inf
        partitions = range(spec.partitions)
        self._lanes = [
            _Lane(
                partitions_of_lane(i, lanes, partitions),
                log.reader(),
                decoder(),
                [self._new_plan(g) for g in range(len(layout.groups))],
                [np.empty((0, group.width), np.float32) for group in layout.groups],
            )
            for i in range(lanes)
        ]

    def take(self, lane: int, wait_s: float) -> TrainBatch | None:
        """The lane's next batch; see the protocol."""
        state = self._lanes[lane]
        if state.assembler is None:
            self._rewind(state)
        deadline = self._clock.monotonic() + wait_s
        state.stages.begin()
        state.plan = state.plan or self._assemble(state, deadline)
        state.stages.mark("read")
        if state.plan is None:
            return None
        credit = self._take_credit(state, state.plan, deadline)
        state.stages.mark("credit")
        if not credit:
            return None
        plan, state.plan = state.plan, None
        return self._issue(state, plan)

    def give_back(self, lane: int, batch: TrainBatch, gradients: Sequence[F32] | None) -> None:
        """Push a batch's gradients, or return it unused; see the protocol."""
        state = self._lanes[lane]
        flight = state.in_flight
        assert flight is not None, "a batch is given back once, by the lane that took it"
        state.in_flight = None
        state.stages.begin()
        try:
            if gradients is None:
                state.assembler = None
                return
            self._rows.push(
                Push(batch.ranges, self._fence, TimeMs(flight.clock_ms), flight.groups, gradients)
            )
            if flight.inputs is not None and not batch.replayed:
                self._remember(flight.inputs)
        except Refused as refused:
            log.warning("a push was refused; the lane starts again from what is applied", reason=str(refused))
            state.assembler = None
            raise
        finally:
            with self._changed:
                self._credits.give_back(flight.credit)
                self._changed.notify_all()
            state.stages.mark("push")

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """The newest samples with their rows before they were trained on; see the protocol."""
        with self._changed:
            newest = list(self._recent)
        first, total = len(newest), 0
        while first and total < rows:
            first -= 1
            total += newest[first].size
        return newest[first:]

    def lag(self) -> Mapping[int, int]:
        """{partition: blocks that no batch has covered yet}."""
        lag = {}
        for state in self._lanes:
            positions = state.assembler.positions() if state.assembler is not None else {}
            for p in state.partitions:
                bounds = self._log.bounds(TopicPartition(self._topic, p))
                lag[p] = bounds.end - positions.get(p, bounds.start)
        return lag

    def seconds(self) -> dict[str, float]:
        """How long the lanes have been in each of STAGES, summed over them."""
        return summed(state.stages for state in self._lanes)

    def close(self) -> None:
        """Close the readers."""
        for state in self._lanes:
            state.reader.close()

    def _new_plan(self, group: int) -> Plan:
        tables = [
            self._spec.table(self._spec.features[f].table or "").id
            for f in self._layout.groups[group].features
        ]
        return Plan(tables=np.array(tables, np.uint8), buckets=self._spec.buckets)

    def _rewind(self, state: _Lane) -> None:
        """Start from the smallest offset that any store has applied, with the others as cut points (rule
        7)."""
        starts, cuts = cut_points([self._rows.applied(), self._dense_applied()])
        mine = {p: starts[p] for p in state.partitions}
        state.assembler, state.plan = Assembler(mine, cuts), None
        state.replayed_until = {p: max([starts[p], *cuts[p]]) for p in state.partitions}
        state.reader.assign({TopicPartition(self._topic, p): offset for p, offset in mine.items()})

    def _assemble(self, state: _Lane, deadline: float) -> BatchPlan | None:
        """Wait for a full batch, but no longer than the batch's own wait once a block is there."""
        assembler = state.assembler
        assert assembler is not None
        wait_s = self._spec.train.batch_wait_ms / 1000
        while assembler.waiting() < self._batch_rows:
            now = self._clock.monotonic()
            if not assembler.waiting():
                state.waiting_since = now
            until = min(deadline, state.waiting_since + wait_s) if assembler.waiting() else deadline
            polled = state.reader.poll(READ_AHEAD_BLOCKS, max(0.0, until - now))
            for partition, records in polled:
                assembler.offer(partition.partition, records)
            if polled:
                continue
            if not assembler.waiting() or self._clock.monotonic() < state.waiting_since + wait_s:
                return None
            break
        behind = assembler.waiting() >= 2 * self._behind_rows
        return assembler.next(self._behind_rows if behind else self._batch_rows)

    def _take_credit(self, state: _Lane, plan: BatchPlan, deadline: float) -> bool:
        with self._changed:
            if not self._changed.wait_for(self._credits.free, max(0.0, deadline - self._clock.monotonic())):
                return False
            state.in_flight = _InFlight(self._credits.take(plan.rows))
            return True

    def _issue(self, state: _Lane, plan: BatchPlan) -> TrainBatch:
        decoded = state.decoder.decode(plan.blocks, plan.places)
        state.stages.mark("decode")
        inputs, groups = self._look_up(decoded, state)
        flight = state.in_flight
        assert flight is not None
        flight.groups, flight.inputs = groups, inputs
        flight.clock_ms = int(decoded.event_times_ms.max(initial=0))
        return TrainBatch(
            ranges=plan.ranges,
            fence=self._fence,
            inputs=inputs,
            sample_ids=decoded.sample_ids,
            request_ids=decoded.request_ids,
            event_times_ms=decoded.event_times_ms,
            segments=decoded.columns.segments,
            served=decoded.columns.served,
            replayed=any(r.start < state.replayed_until[r.partition] for r in plan.ranges),
            explored=decoded.columns.explored,
            items=self._items(decoded),
        )

    def _items(self, decoded: DecodedBatch) -> U64 | None:
        """(B,) the item's key of each sample, where the spec has a feature of it."""
        if self._item is None:
            return None
        group, place = self._item
        keys = decoded.columns.groups[group]
        start, stop = keys.feature_starts[place : place + 2].tolist()
        return keys.keys[start:stop]

    def _look_up(self, decoded: DecodedBatch, state: _Lane) -> tuple[ModelInputs, list[KeyGroup]]:
        """Unique keys, their rows, and the occurrences that use them, in the lane's memory."""
        plans = state.plans
        groups: list[KeyGroup] = []
        rows: list[F32] = []
        for g, (keys, plan) in enumerate(zip(decoded.columns.groups, plans, strict=True)):
            plan.build(keys.keys, keys.feature_starts)
            groups.append(KeyGroup(g, plan.keys, plan.tables, plan.bucket_starts))
            rows.append(self._memory(g, len(plan.keys), state.rows))
        state.stages.mark("plan")
        self._rows.lookup(groups, rows, create=True)
        state.stages.mark("lookup")
        inputs = [
            GroupInputs(rows[g], plan.positions, keys.feature_starts, keys.list_ends)
            for g, (keys, plan) in enumerate(zip(decoded.columns.groups, plans, strict=True))
        ]
        labels = Labels(decoded.label_index, decoded.label_value, decoded.weight)
        return ModelInputs(decoded.columns.size, inputs, decoded.columns.dense, labels), groups

    def _memory(self, group: int, rows: int, memory: list[F32]) -> F32:
        width = self._layout.groups[group].width
        if len(memory[group]) < rows:
            memory[group] = np.empty((rows + rows // 4, width), np.float32)
        return memory[group][:rows]

    def _remember(self, inputs: ModelInputs) -> None:
        """Keep a copy for the gate, which wants a few thousand rows every few seconds: not of every batch."""
        now = self._clock.monotonic()
        if now < self._resting_until:
            return
        kept = inputs.copied()  # the lane's memory is used again by its next batch
        wanted = self._spec.serve.gate.samples
        with self._changed:
            self._recent.append(kept)
            self._recent_rows += kept.size
            self._fresh_rows += kept.size
            while self._recent_rows - self._recent[0].size >= wanted:
                self._recent_rows -= self._recent.popleft().size
            if self._fresh_rows >= wanted:
                self._fresh_rows, self._resting_until = 0, now + RECENT_REST_S
