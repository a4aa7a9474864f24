"""The batch builder: unique keys of decoded samples, their rows in reused memory, and the trainer's batch.

Letters: B samples, N occurrences, F features of a group, U unique keys of a group, G gradients of a group, S
floats of a row, T floats of its optimiser state, R rows that travel beside the sums of K lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from freshet.batches.read_my_writes import LookupResult, LookupStart, ReadMyWrites
from freshet.batches.stream import TrainBatch
from freshet.clock import Stopwatch
from freshet.config.spec.layout import Layout, item_of
from freshet.config.spec.model import Spec
from freshet.embedder.block_decoder import DecodedBatch
from freshet.embedder.core import BatchPlan
from freshet.features import Decoded
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.observability.spans import start_rows_call
from freshet.observability.trace_ids import TracedBatch
from freshet.observability.tracing import running
from freshet.rows.service import KeyGroup, LookupsAfter, PoolsLists, Push, RowService, RowStates
from freshet.tables import Plan
from freshet.tables.plan import PooledLists
from freshet.types import F32, I32, I64, U32, U64, Bool, Fence, OffsetRange, TimeMs

# --- Pooled lists. To the trainer a pooled list is a list of one row, its vector, that no other sample uses;
# the gradient of this row is the gradient of the vector. That is exact for models that use a list only
# through the sum or mean of its rows, and do not step rows within a batch.

POOLING_KINDS = ("dlrm", "deepfm", "dcnv2")
"""Kinds of models that use a list only through the sum or mean of its rows. Native kinds step rows within
batches. A class of the user may be a dense model of its own, which the embedder does not load to find out."""

LEAST_GAIN = 2
"""Rows that a list feature must have for each sum that travels in place of them."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlaces:
    """The occurrences of one store group, as `GroupInputs` has them."""

    positions: I32  # (N,)
    feature_starts: U32  # (F + 1,)
    list_ends: Sequence[U32 | None]  # per feature (B,), or None


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """A group with pooled lists."""

    lists: PooledLists
    places: GroupPlaces  # among the R + K rows
    factors: F32  # (K, 1) of the lists' sums


def pools_of(rows: RowService, kind: str, *, states: bool) -> PoolsLists | None:
    """Return the row service if it pools lists for a model of this kind, else None.

    `states`: lookups fetch optimiser states. The trainer then steps copies of rows, and needs these.
    """
    return rows if kind in POOLING_KINDS and not states and isinstance(rows, PoolsLists) else None


def pooled(places: GroupPlaces, unique: int, pools: Sequence[str | None], shards: int) -> Pooled | None:
    """Return the group with those list features pooled for which it pays; None if there is none.

    Each shard may send a sum for each list, as long as a row. It pays if these are at most 1 / LEAST_GAIN of
    the feature's unique rows.

    Args:
        places: the occurrences among the unique rows.
        unique: U.
        pools: per feature "sum" or "mean"; None for features that are no lists.
        shards: that share the buckets.
    """
    starts = places.feature_starts.tolist()
    chosen: dict[int, I64] = {}  # feature -> (B,) occurrences of each list that have a row
    beside = np.zeros(unique, np.bool_)
    for f, ends in enumerate(places.list_ends):
        own = places.positions[starts[f] : starts[f + 1]]
        if ends is not None and pools[f] is not None:
            counts = _counts(own, ends)
            if _pays(own, int(np.count_nonzero(counts)), unique, shards):
                chosen[f] = counts
                continue
        beside[own[own >= 0]] = True
    return _pooled(places, chosen, beside, pools) if chosen else None


def _counts(positions: I32, ends: U32) -> I64:
    """Return the occurrences with a row of each list."""
    held: I64 = np.zeros(len(positions) + 1, np.int64)
    np.cumsum(positions >= 0, out=held[1:])
    return np.diff(held[ends.astype(np.int64)], prepend=0)


def _pays(positions: I32, lists: int, unique: int, shards: int) -> bool:
    if not lists or LEAST_GAIN * shards * lists > len(positions):
        return False
    used = np.zeros(unique, np.bool_)
    used[positions[positions >= 0]] = True
    return LEAST_GAIN * shards * lists <= int(np.count_nonzero(used))


def _pooled(places: GroupPlaces, chosen: dict[int, I64], beside: Bool, pools: Sequence[str | None]) -> Pooled:
    rows = np.flatnonzero(beside).astype(np.int32)
    place_of: I32 = np.full(len(beside) + 1, -1, np.int32)  # the last is that of -1
    place_of[rows] = np.arange(len(rows), dtype=np.int32)
    starts, next_row = places.feature_starts.tolist(), len(rows)
    positions: list[I32] = []
    list_ends: list[U32 | None] = []
    elements: list[I32] = []
    counts: list[I64] = []
    factors: list[F32] = []
    for f, ends in enumerate(places.list_ends):
        own = places.positions[starts[f] : starts[f + 1]]
        if f not in chosen:
            positions.append(place_of[own])
            list_ends.append(ends)
            continue
        held = chosen[f] > 0
        sizes = chosen[f][held]
        positions.append(np.arange(next_row, next_row + len(sizes), dtype=np.int32))
        next_row += len(sizes)
        list_ends.append(np.cumsum(held).astype(np.uint32))
        elements.append(own[own >= 0])
        counts.append(sizes)
        mean = pools[f] == "mean"
        factors.append(np.float32(1) / sizes.astype(np.float32) if mean else np.ones(len(sizes), np.float32))
    new_starts = np.cumsum([0, *(len(p) for p in positions)], dtype=np.uint32)
    return Pooled(
        PooledLists(rows, np.concatenate(elements), np.concatenate(counts).astype(np.uint32)),
        GroupPlaces(np.concatenate(positions), new_starts, list_ends),
        np.concatenate(factors)[:, None],
    )


class Slot:
    """Reused memory of one batch in flight: plans, rows, states and gradients.

    It grows to the largest batch that it held. The arrays of a `BuiltBatch` are views of its slot.
    """

    def __init__(self, plans: list[Plan], widths: Sequence[int], states: Sequence[int] = ()) -> None:
        """Allocate nothing yet; `states`: T of each group, empty if lookups fetch no states."""
        self.plans = plans
        self._states = [np.empty((0, floats), np.float32) for floats in states]
        self.rows = [np.empty((0, width), np.float32) for width in widths]
        self._gradients = [np.empty((0, width), np.float32) for width in widths]

    def row_memory(self, group: int, rows: int) -> F32:
        """Return (rows, S) float32 memory for a group's rows."""
        self.rows[group] = _grown(self.rows[group], rows)
        return self.rows[group][:rows]

    def state_memory(self, group: int, rows: int) -> F32:
        """Return (rows, T) float32 memory for a group's optimiser states."""
        self._states[group] = _grown(self._states[group], rows)
        return self._states[group][:rows]

    def copy_gradients(self, gradients: Sequence[F32]) -> list[F32]:
        """Copy gradients, (G, S) float32 a group, into the slot: the model overwrites its own arrays."""
        copies = []
        for g, gradient in enumerate(gradients):
            self._gradients[g] = _grown(self._gradients[g], len(gradient))
            into = self._gradients[g][: len(gradient)]
            np.copyto(into, gradient)
            copies.append(into)
        return copies


@dataclass(slots=True, eq=False)
class BuiltBatch:
    """A batch from its decoded blocks to its push."""

    plan: BatchPlan
    decoded: DecodedBatch
    groups: list[KeyGroup]
    inputs: ModelInputs  # `look_up` fills its rows
    items: U64 | None
    replayed: bool
    looked: LookupResult | None = None  # `look_up` fills its states; None: lookups fetch rows only
    in_steps: bool = False  # the trainer steps rows within the batch
    traced: TracedBatch | None = None  # None: no event of the batch is traced
    factors: dict[int, F32] = field(default_factory=dict)
    """(K, 1) float32 for each group with pooled lists: factors of their sums, 1 or 1 / length."""

    def look_up(self, rows: RowService) -> None:
        """Look the rows up, creating absent ones. Raises as `RowService.lookup` does."""
        out = [group.rows for group in self.inputs.groups]
        states = None if self.looked is None else self.looked.states
        with running(start_rows_call(self.traced, "Lookup")):
            rows.lookup(self.groups, out, states=states)
        self._scale(out)

    def look_up_after(self, rows: LookupsAfter, pushes: Sequence[OffsetRange]) -> None:
        """Look the rows up as `look_up` does, once they contain these pushes.

        Raises as `LookupsAfter.lookup_after` does.
        """
        out = [group.rows for group in self.inputs.groups]
        states = None if self.looked is None else self.looked.states
        with running(start_rows_call(self.traced, "Lookup")):
            rows.lookup_after(pushes, self.groups, out, states=states)
        self._scale(out)

    def _scale(self, values: Sequence[F32]) -> None:
        for g, factors in self.factors.items():
            values[g][-len(factors) :] *= factors

    def apply_pending(self, own: ReadMyWrites, begun: LookupStart) -> None:
        """Apply the stream's pending writes that the lookup missed to the rows."""
        if self.looked is not None:
            own.apply_pending(self.looked, [group.rows for group in self.inputs.groups], begun)

    def batch(self, fence: Fence, *, looked: bool) -> TrainBatch:
        """Return the trainer's batch; `looked`: with the states from which the trainer applies writes."""
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
        """Return the push of gradients, (G, S) float32 and counts (U,) uint32 a group, with its ranges."""
        clock_ms = int(self.decoded.event_times_ms.max(initial=0))
        groups = self.groups
        if counts is not None:
            groups = [group.repeated(of) for group, of in zip(groups, counts, strict=True)]
        if self.factors:
            gradients = [of.copy() if g in self.factors else of for g, of in enumerate(gradients)]
            self._scale(gradients)
        return Push(self.plan.ranges, fence, TimeMs(clock_ms), groups, gradients)


class BatchBuilder:
    """Builds the batches of a spec. Thread-safe, since it has no state; a slot belongs to one batch."""

    def __init__(
        self,
        spec: Spec,
        layout: Layout,
        *,
        states: bool = False,
        in_steps: bool = False,
        pools: PoolsLists | None = None,
    ) -> None:
        """Build for a spec and its layout.

        Args:
            spec: the spec.
            layout: of the spec.
            states: lookups fetch optimiser states.
            in_steps: lookups fetch optimiser states, and the trainer steps rows within batches.
            pools: the row service, if its shards pool lists for this model (`pools_of`).
        """
        self._in_steps = in_steps
        self._states = [group.state_floats for group in layout.groups] if states or in_steps else None
        self._buckets, self._item = spec.buckets, item_of(spec, layout)
        self._widths = [group.width for group in layout.groups]
        self._pools = pools
        self._pooled = [[spec.features[f].pool for f in group.features] for group in layout.groups]
        self._tables = [
            np.array([spec.table(spec.features[f].table or "").id for f in group.features], np.uint8)
            for group in layout.groups
        ]

    def slot(self) -> Slot:
        """Return new memory for one batch."""
        plans = [Plan(tables=tables, buckets=self._buckets) for tables in self._tables]
        return Slot(plans, self._widths, self._states or ())

    def keys(self, columns: Decoded, slot: Slot) -> list[KeyGroup]:
        """Find the unique keys of decoded samples, in the slot's memory."""
        groups = []
        for g, (keys, built) in enumerate(zip(columns.groups, slot.plans, strict=True)):
            built.build(keys.keys, keys.feature_starts)
            groups.append(KeyGroup(g, built.keys, built.tables, built.bucket_starts))
        return groups

    def build(
        self, plan: BatchPlan, decoded: DecodedBatch, slot: Slot, *, replayed: bool, stages: Stopwatch
    ) -> BuiltBatch:
        """Find the unique keys of decoded samples and their positions, in the slot's memory."""
        groups = self.keys(decoded.columns, slot)
        inputs: list[GroupInputs] = []
        factors: dict[int, F32] = {}
        for g, (keys, built) in enumerate(zip(decoded.columns.groups, slot.plans, strict=True)):
            group = groups[g]
            places = GroupPlaces(built.positions, keys.feature_starts, keys.list_ends)
            found = None
            if self._pools is not None:
                found = pooled(places, len(built.keys), self._pooled[g], self._pools.pooling_shards())
            if found is not None:
                groups[g] = group = replace(group, lists=found.lists)
                places, factors[g] = found.places, found.factors
            rows = slot.row_memory(g, len(built.keys) if group.lists is None else len(group.lists))
            inputs.append(GroupInputs(rows, places.positions, places.feature_starts, places.list_ends))
        stages.mark("plan")
        labels = Labels(decoded.label_index, decoded.label_value, decoded.weight)
        columns = decoded.columns
        whole = ModelInputs(columns.size, inputs, columns.dense, labels)
        looked = None
        if self._states is not None:
            floats = [slot.state_memory(g, len(keys.keys)) for g, keys in enumerate(groups)]
            looked = LookupResult(groups, RowStates(floats))
        items = self.items(decoded)
        return BuiltBatch(
            plan, decoded, groups, whole, items, replayed, looked, self._in_steps, factors=factors
        )

    def items(self, decoded: DecodedBatch) -> U64 | None:
        """Return the (B,) uint64 key of each sample's item; None if the spec has no feature for it."""
        return item_keys(decoded.columns, self._item)


def item_keys(columns: Decoded, item: tuple[int, int] | None) -> U64 | None:
    """Return the (B,) uint64 key of each sample's item; `item`: its group and feature (`item_of`)."""
    if item is None:
        return None
    group, feature = item
    keys = columns.groups[group]
    start, stop = keys.feature_starts[feature : feature + 2].tolist()
    return keys.keys[start:stop]


def _grown(memory: F32, rows: int) -> F32:
    if len(memory) >= rows:
        return memory
    return np.empty((rows + rows // 4, memory.shape[1]), np.float32)
