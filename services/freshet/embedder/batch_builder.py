"""Making a batch: unique keys and their rows in memory that is used again, and what the trainer is handed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet.batches.read_my_writes import Begun, Looked, OwnWrites
from freshet.batches.stream import TrainBatch
from freshet.clock import Stages
from freshet.config.spec.layout import Layout, item_of
from freshet.config.spec.model import Spec
from freshet.embedder.block_decoder import DecodedBatch
from freshet.embedder.core import BatchPlan
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.observability.spans import start_rows_call
from freshet.observability.trace_ids import TracedBatch
from freshet.observability.tracing import running
from freshet.rows.service import KeyGroup, Push, RowService, RowStates
from freshet.tables import Plan
from freshet.types import F32, U32, U64, Fence, TimeMs

__all__ = ["Made", "Maker", "Slot"]


class Slot:
    """Memory of one batch in flight, used again for the next: plans, rows, gradients.

    It grows to the largest batch that it held. What a `Made` shows lies here until the slot is used again.
    """

    def __init__(self, plans: list[Plan], widths: Sequence[int], states: Sequence[int] = ()) -> None:
        """`states`: floats of optimiser state of each group's rows, if they are wanted."""
        self.plans = plans
        self._states = [np.empty((0, floats), np.float32) for floats in states]
        self.rows = [np.empty((0, width), np.float32) for width in widths]
        self._gradients = [np.empty((0, width), np.float32) for width in widths]

    def room(self, group: int, rows: int) -> F32:
        """(rows, S) of this group's row memory."""
        self.rows[group] = _grown(self.rows[group], rows)
        return self.rows[group][:rows]

    def state_room(self, group: int, rows: int) -> F32:
        """(rows, T) of this group's memory of states."""
        self._states[group] = _grown(self._states[group], rows)
        return self._states[group][:rows]

    def keep(self, gradients: Sequence[F32]) -> list[F32]:
        """A copy of the gradients in memory of the slot: the model's own is overwritten by its next batch."""
        kept = []
        for g, gradient in enumerate(gradients):
            self._gradients[g] = _grown(self._gradients[g], len(gradient))
            into = self._gradients[g][: len(gradient)]
            np.copyto(into, gradient)
            kept.append(into)
        return kept


@dataclass(slots=True, eq=False)
class Made:
    """A batch between its blocks and its push."""

    plan: BatchPlan
    decoded: DecodedBatch
    groups: list[KeyGroup]
    inputs: ModelInputs  # its rows are filled by `look_up`
    items: U64 | None
    replayed: bool
    looked: Looked | None = None  # filled in by the lookup; None: nothing is wanted beside the rows
    in_steps: bool = False  # the trainer steps its rows within the batch
    traced: TracedBatch | None = None  # None: no event of it is traced

    def look_up(self, rows: RowService) -> None:
        """Fill in the rows, creating those that are absent. Raises as `RowService.lookup` does."""
        out = [group.rows for group in self.inputs.groups]
        states = None if self.looked is None else self.looked.states
        with running(start_rows_call(self.traced, "Lookup")):
            rows.lookup(self.groups, out, states=states)

    def bring_up(self, own: OwnWrites, begun: Begun) -> None:
        """Take into the rows what their lookup did not know of the stream's own writes."""
        if self.looked is not None:
            own.bring_up(self.looked, [group.rows for group in self.inputs.groups], begun)

    def batch(self, fence: Fence, *, looked: bool) -> TrainBatch:
        """What the trainer is handed; `looked`: it brings the rows up itself."""
        decoded = self.decoded
        return TrainBatch(
            ranges=self.plan.ranges,
            fence=fence,
            inputs=self.inputs,
            sample_ids=decoded.sample_ids,
            request_ids=decoded.request_ids,
            event_times_ms=decoded.event_times_ms,
            segments=decoded.columns.segments,
            served=decoded.columns.served,
            replayed=self.replayed,
            explored=decoded.columns.explored,
            items=self.items,
            looked=self.looked if looked else None,
            states=self.looked.states.floats if self.looked is not None and self.in_steps else None,
        )

    def push(self, fence: Fence, gradients: Sequence[F32], counts: Sequence[U32] | None = None) -> Push:
        """Its gradients with the ranges that they stand for; `counts`: as `BatchStream.give_back`."""
        clock_ms = int(self.decoded.event_times_ms.max(initial=0))
        groups = self.groups
        if counts is not None:
            groups = [group.repeated(of) for group, of in zip(groups, counts, strict=True)]
        return Push(self.plan.ranges, fence, TimeMs(clock_ms), groups, gradients)


class Maker:
    """Makes batches of a spec. Thread-safe, as it keeps nothing; slots belong to who uses them."""

    def __init__(self, spec: Spec, layout: Layout, *, states: bool = False, in_steps: bool = False) -> None:
        """`states`: batches have room for their rows' optimiser state. `in_steps`: so have they, and the
        trainer steps rows within them."""
        self._in_steps = in_steps
        self._states = [group.state_floats for group in layout.groups] if states or in_steps else None
        self._buckets, self._item = spec.buckets, item_of(spec, layout)
        self._widths = [group.width for group in layout.groups]
        self._tables = [
            np.array([spec.table(spec.features[f].table or "").id for f in group.features], np.uint8)
            for group in layout.groups
        ]

    def slot(self) -> Slot:
        """New memory for one batch."""
        plans = [Plan(tables=tables, buckets=self._buckets) for tables in self._tables]
        return Slot(plans, self._widths, self._states or ())

    def make(
        self, plan: BatchPlan, decoded: DecodedBatch, slot: Slot, *, replayed: bool, stages: Stages
    ) -> Made:
        """Unique keys of decoded samples and the occurrences that use them, in the slot's memory."""
        groups: list[KeyGroup] = []
        inputs: list[GroupInputs] = []
        for g, (keys, built) in enumerate(zip(decoded.columns.groups, slot.plans, strict=True)):
            built.build(keys.keys, keys.feature_starts)
            unique = built.keys
            groups.append(KeyGroup(g, unique, built.tables, built.bucket_starts))
            rows = slot.room(g, len(unique))
            inputs.append(GroupInputs(rows, built.positions, keys.feature_starts, keys.list_ends))
        stages.mark("plan")
        labels = Labels(decoded.label_index, decoded.label_value, decoded.weight)
        columns = decoded.columns
        whole = ModelInputs(columns.size, inputs, columns.dense, labels)
        looked = None
        if self._states is not None:
            floats = [slot.state_room(g, len(keys.keys)) for g, keys in enumerate(groups)]
            looked = Looked(groups, RowStates(floats))
        items = self.items(decoded)
        return Made(plan, decoded, groups, whole, items, replayed, looked, self._in_steps)

    def items(self, decoded: DecodedBatch) -> U64 | None:
        """(B,) the item's key of each sample, where the spec has a feature of it."""
        if self._item is None:
            return None
        group, place = self._item
        keys = decoded.columns.groups[group]
        start, stop = keys.feature_starts[place : place + 2].tolist()
        return keys.keys[start:stop]


def _grown(memory: F32, rows: int) -> F32:
    if len(memory) >= rows:
        return memory
    return np.empty((rows + rows // 4, memory.shape[1]), np.float32)
