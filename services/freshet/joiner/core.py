"""Join of one partition: columns of events in, decided samples out. No I/O, no clock but the watermark.

`freshet._native.JoinState` holds the state and decides; this module is its numpy interface.
Letters: E served events, N impressions, actions or shown events, L labels, A aggregates, n samples.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from freshet._native import JoinState
from freshet.config.expression import Column
from freshet.config.spec.rules import within
from freshet.config.spec.topics import BLOCK_BYTES, block_bytes
from freshet.features import SampleColumns
from freshet.features.blocks import MAX_SAMPLES, encode_blocks
from freshet.joiner.commit import EVENT_COUNTERS, LABEL_COUNTERS, Ledger
from freshet.joiner.plan import AGGREGATE_KINDS, JoinPlan
from freshet.types import F32, F64, I64, U8, U32, U64, Bool, BytesColumn

ROLES = ("served", "shown", "action")
"""The joined streams, in the order of the native core's numbers."""


class Outcome(enum.IntEnum):
    """Result of an event when it is read (`freshet::join::Outcome`, with the same numbers)."""

    NEW = 0
    DUPLICATE = 1  # its id is known
    LATER_DUPLICATE = 2  # a duplicate dated later than the first event of its id
    LATE = 3  # older than the horizon, or all labels of the action were decided
    WAITING = 4  # its impression is not known yet
    ALREADY_TRUE = 5  # all labels of the action are true already
    OUT_OF_WINDOW = 6  # before its impression by more than the grace
    AFTER_WINDOW = 7  # after the windows of all labels that it meets; it waits for another impression
    NO_LABEL = 8  # the action matches no label


LATEST_MS = 2**53
"""Largest event time that the state accepts; the smallest is 0."""

REPLAY_EXCLUDED = (Outcome.LATER_DUPLICATE,)
"""Outcomes that depend on an event which a replay may not find any more; the commit names such events."""


@dataclass(frozen=True, slots=True, eq=False)
class ImpressionColumns:
    """N impressions in E served events. Positions are absolute in `data`, which may hold framing between
    events.

    begins <= prefix_ends <= element_begins <= element_ends <= suffix_begins <= ends. An event that is one
    impression has an empty element at the end of its prefix.
    """

    data: U8
    offsets: I64  # (E,) in the log, rising
    requests: U64  # (E,) 64-bit hash of the request
    schemas: U32  # (E,) schema id
    begins: I64  # (E,) first byte of the Avro binary
    prefix_ends: I64  # (E,)
    suffix_begins: I64  # (E,)
    ends: I64  # (E,)
    events: U32  # (N,) index of the impression's event, rising
    times_ms: I64  # (N,) event time
    keys: U64  # (N, 2) 128-bit impression key
    element_begins: I64  # (N,)
    element_ends: I64  # (N,)

    def __len__(self) -> int:
        return len(self.events)

    def where(self, chosen: Bool) -> ImpressionColumns:
        """Select impressions, and keep all events. `chosen`: (N,) bool."""
        if chosen.all():
            return self
        return replace(self, **{name: getattr(self, name)[chosen] for name in _ELEMENT_FIELDS})

    @property
    def places(self) -> tuple[I64, I64]:
        """(N,) int64 offset of each impression's record, and (N,) int64 index within it."""
        return _places(self.offsets[self.events])


_EVENT_FIELDS = (
    "offsets",
    "requests",
    "schemas",
    "begins",
    "prefix_ends",
    "suffix_begins",
    "ends",
)
_ELEMENT_FIELDS = ("events", "times_ms", "keys", "element_begins", "element_ends")


@dataclass(frozen=True, slots=True, eq=False)
class ShownColumns:
    """N events that report impressions as seen."""

    offsets: I64  # (N,) not falling; one record may hold several
    times_ms: I64  # (N,)
    keys: U64  # (N, 2) impression

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def places(self) -> tuple[I64, I64]:
        """(N,) int64 offset of each event's record, and (N,) int64 index within it."""
        return _places(self.offsets)

    def where(self, chosen: Bool) -> ShownColumns:
        """Select events. `chosen`: (N,) bool."""
        if chosen.all():
            return self
        return ShownColumns(self.offsets[chosen], self.times_ms[chosen], self.keys[chosen])


@dataclass(frozen=True, slots=True, eq=False)
class ActionColumns:
    """N actions with the labels that they make true."""

    offsets: I64  # (N,) not falling; one record may hold several
    times_ms: I64  # (N,)
    keys: U64  # (N, 2) impression
    ids: U64  # (N, 2) hash of the event's id, or of its bytes
    masks: U32  # (N,) bit l: the condition of label l is met
    values: F64  # (N, A) input to each aggregate, also where the label's bit in `masks` is 0; NaN: null

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def places(self) -> tuple[I64, I64]:
        """(N,) int64 offset of each action's record, and (N,) int64 index within it."""
        return _places(self.offsets)

    def where(self, chosen: Bool) -> ActionColumns:
        """Select actions. `chosen`: (N,) bool."""
        if chosen.all():
            return self
        return ActionColumns(*(getattr(self, f.name)[chosen] for f in fields(self)))


JoinColumns = ImpressionColumns | ShownColumns | ActionColumns
"""Events of one stream."""


def datable(times_ms: I64) -> Bool:
    """Return (N,) bool: whether the state accepts (N,) int64 times in ms, instead of a ValueError."""
    found: Bool = (times_ms >= 0) & (times_ms <= LATEST_MS)
    return found


def _places(offsets: I64) -> tuple[I64, I64]:
    return offsets, np.arange(len(offsets)) - np.searchsorted(offsets, offsets, side="left")


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples in the order of the log: requests by their first impression's time."""

    ids: I64  # (n,)
    times_ms: I64  # (n,)
    requests: U64  # (n,)
    values: F32  # (n,) NaN in late samples, as their values are unknown
    weights: F32  # (n,)
    labels: U8  # (n,)
    schemas: U32  # (n,)
    payloads: BytesColumn  # (n,) Avro binary: prefix + element + suffix

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, chosen: Bool) -> Samples:
        """Select samples. `chosen`: (N,) bool, one for each of N samples."""
        if chosen.all():
            return self
        payloads = BytesColumn.of(self.payloads[int(i)] for i in np.flatnonzero(chosen))
        columns = ("ids", "times_ms", "requests", "values", "weights", "labels", "schemas")
        return replace(self, payloads=payloads, **{name: getattr(self, name)[chosen] for name in columns})


class Joiner:
    """Pending impressions, ids and windows of one partition. Used by one thread at a time.

    Only `advance` moves the watermark; between two calls, the order of batches of different topics does not
    matter.
    """

    def __init__(self, plan: JoinPlan) -> None:
        self.plan = plan
        self._aggregates = plan.aggregates
        self._out_of_bounds = {label.name: 0 for label in plan.labels if label.bounds is not None}
        self._state = JoinState(
            windows_ms=[label.window_ms for label in plan.labels],
            given=[label.given for label in plan.labels],
            numeric=[label.value is not None for label in plan.labels],
            aggregate_labels=[label for label, _ in self._aggregates],
            aggregate_kinds=[AGGREGATE_KINDS.index(kind) for _, kind in self._aggregates],
            grace_ms=plan.grace_ms,
            require_shown=plan.require_shown,
            early=plan.early,
            negatives=plan.negatives,
            ramp=plan.ramp,
        )

    @property
    def horizon_ms(self) -> int:
        """H: event time for which an id stays known after its event; older events are late (PROTOCOL 20)."""
        return self._state.horizon_ms

    @property
    def payload_bytes(self) -> int:
        """Bytes of memory held for the payloads of undecided impressions."""
        return self._state.payload_bytes

    @property
    def ids(self) -> int:
        """Number of impressions and actions with known ids."""
        return self._state.ids

    def on_served(self, batch: ImpressionColumns) -> U8:
        """Join impressions; returns (N,) uint8 outcomes. Raises ValueError for spans outside the data."""
        outcomes = np.empty(len(batch), np.uint8)
        columns = {
            name: np.ascontiguousarray(getattr(batch, name)) for name in (*_EVENT_FIELDS, *_ELEMENT_FIELDS)
        }
        columns["times"] = columns.pop("times_ms")
        self._state.on_served(data=batch.data, outcomes=outcomes, **columns)
        return outcomes

    def on_shown(self, batch: ShownColumns) -> U8:
        """Mark impressions as seen; returns (N,) uint8 outcomes."""
        outcomes = np.empty(len(batch), np.uint8)
        self._state.on_shown(batch.offsets, batch.times_ms, batch.keys, outcomes)
        return outcomes

    def on_actions(self, batch: ActionColumns) -> U8:
        """Join actions; returns (N,) uint8 outcomes."""
        outcomes = np.empty(len(batch), np.uint8)
        self._state.on_actions(
            batch.offsets, batch.times_ms, batch.keys, batch.ids, batch.masks, batch.values, outcomes
        )
        return outcomes

    def advance(self, watermark_ms: int) -> None:
        """Decide the samples that are due at this watermark, which never decreases."""
        self._state.advance(watermark_ms)

    def due(self, watermark_ms: int) -> bool:
        """Return whether `advance` would close a window."""
        return self._state.due(watermark_ms)

    def restart_at(self, watermark_ms: int) -> None:
        """Set the watermark at which a replay begins, before any event."""
        self._state.restart_at(watermark_ms)

    def set_back(self, watermark_ms: int) -> None:
        """Set the watermark back (PROTOCOL 19).

        Batches until `end_recall` repeat events that were read before: impressions that were late or
        forgotten become known again, as decided; late or forgotten actions and shown events wait for
        impressions that are still to come. None is counted again.

        Raises ValueError if the watermark is higher than the present one.
        """
        self._state.set_back(watermark_ms)

    def end_recall(self) -> None:
        """End the repetition of events that `set_back` began; new events follow."""
        self._state.end_recall()

    @property
    def began_ms(self) -> int | None:
        """Event time in ms of the first impression, where the label-delay warm-up begins; None: none yet."""
        return self._state.began

    def begin_at(self, began_ms: int) -> None:
        """Set `began_ms` before any event of a replay, which may not find the first impression."""
        self._state.begin_at(began_ms)

    @property
    def has_ready(self) -> bool:
        """Whether decided or late samples are ready."""
        return bool(self._state.ready(False)[0] or self._state.ready(True)[0])

    @property
    def ready_bytes(self) -> int:
        """Payload bytes of the decided and late samples that are ready."""
        return int(self._state.ready(False)[1] + self._state.ready(True)[1])

    def take_samples(self) -> Samples:
        """Return the samples decided since the last call."""
        samples, aggregates = self._take(late=False)
        return self._with_values(samples, aggregates) if self._out_of_bounds or self._aggregates else samples

    def take_out_of_bounds(self) -> dict[str, int]:
        """Return {label with bounds: samples that `take_samples` dropped since}; `no_value` has them, too."""
        found = self._out_of_bounds
        self._out_of_bounds = dict.fromkeys(found, 0)
        return found

    def take_late_samples(self) -> Samples:
        """Return samples of impressions older than the horizon, one per label, with unknown values."""
        return self._take(late=True)[0]

    def discard(self) -> None:
        """Drop the ready samples: a replay does not write them again."""
        self._state.discard()

    def low(self, role: str, next_offset: int) -> int:
        """Return the smallest offset of a stream that a restart at the present watermark must read."""
        return self._state.low(ROLES.index(role), next_offset)

    def ledger(self, refused: int = 0) -> Ledger:
        """Return the counts so far."""
        names = [label.name for label in self.plan.labels]
        counters = np.empty(len(names) * len(LABEL_COUNTERS) + len(EVENT_COUNTERS), np.int64)
        pending = np.empty(len(names), np.int64)
        self._state.counters(counters)
        self._state.pending(pending)
        return Ledger.of(names, counters, pending, self._state.waiting, refused)

    def set_counters(self, ledger: Ledger) -> None:
        """Set the counters to those of a commit, at the end of a replay."""
        self._state.set_counters(ledger.counters())

    def _take(self, *, late: bool) -> tuple[Samples, F64]:
        n, size = self._state.ready(late)
        samples = Samples(
            np.empty(n, np.int64),
            np.empty(n, np.int64),
            np.empty(n, np.uint64),
            np.empty(n, np.float32),
            np.empty(n, np.float32),
            np.empty(n, np.uint8),
            np.empty(n, np.uint32),
            BytesColumn(np.empty(size, np.uint8), np.empty(n, np.int64)),
        )
        aggregates = np.empty((n, 0 if late else len(self._aggregates)), np.float64)
        self._state.take(
            late,
            samples.ids,
            samples.times_ms,
            samples.requests,
            samples.values,
            samples.weights,
            samples.labels,
            samples.schemas,
            samples.payloads.ends,
            samples.payloads.data,
            aggregates,
        )
        return samples, aggregates

    def _with_values(self, samples: Samples, aggregates: F64) -> Samples:
        """Compute the values of numeric labels; drop and count samples without one, or with one out of
        bounds.

        Args:
            samples: n samples; `values` changes in place.
            aggregates: (n, A) float64.
        """
        kept = np.ones(len(samples), bool)
        for index, label in enumerate(self.plan.labels):
            rows = np.flatnonzero(samples.labels == index)
            if (label.value is None and label.bounds is None) or not len(rows):
                continue
            matched = samples.values[rows] == 1.0
            value = samples.values[rows]
            if label.value is not None:
                columns = [a for a, (of, _) in enumerate(self._aggregates) if of == index]
                parts = [Column(aggregates[rows, a], np.isnan(aggregates[rows, a])) for a in columns]
                number = label.value.finish(parts).filled(np.nan)
                with np.errstate(over="ignore"):  # beyond 32 bits it is infinite, and out of any bounds
                    value = number.astype(np.float32)
                missing = ~np.isfinite(value)
            else:
                number, missing = value.astype(np.float64), np.zeros(len(rows), np.bool_)
            if label.bounds is not None:
                outside = ~np.isnan(number) & ~within(label.bounds, value)
                self._out_of_bounds[label.name] += int(outside.sum())
                missing |= outside
            for was in matched[missing]:
                self._state.no_value(index, bool(was))
            samples.values[rows] = value
            kept[rows[missing]] = False
        return samples.where(kept)


_HEAD_BYTES = block_bytes(0, 0)
_SAMPLE_BYTES = block_bytes(1, 0) - _HEAD_BYTES


def encode_samples(
    samples: Samples, max_bytes: int = BLOCK_BYTES, max_samples: int = MAX_SAMPLES
) -> BytesColumn:
    """Encode samples as blocks in order, each with one schema id.

    A block ends at a request boundary, after `max_samples` samples or before it exceeds `max_bytes`. A
    request that alone exceeds `max_bytes` is split between samples; its blocks follow each other in one
    append. Only a sample that alone exceeds `max_bytes` makes a larger block (schemas/README.md, "Samples:
    blocks").
    """
    ends = np.array([stop for _, stop in block_bounds(samples, max_bytes, max_samples)], np.int64)
    if not len(ends):
        return BytesColumn.of([])
    schemas = samples.schemas[ends - 1]
    parts = []
    first = start = 0
    # A run of blocks with one schema is encoded in one call; schemas change rarely.
    for last in [*np.flatnonzero(schemas[1:] != schemas[:-1]).tolist(), len(ends) - 1]:
        stop = int(ends[last])
        parts.append(
            encode_blocks(
                int(schemas[last]),
                SampleColumns(
                    sample_ids=samples.ids[start:stop],
                    event_times_ms=samples.times_ms[start:stop],
                    request_ids=samples.requests[start:stop],
                    values=samples.values[start:stop],
                    weights=samples.weights[start:stop],
                    labels=samples.labels[start:stop],
                ),
                payloads=samples.payloads.slice(start, stop),
                block_ends=ends[first : last + 1] - start,
            )
        )
        first, start = last + 1, stop
    return BytesColumn.concat(parts)


def block_bounds(
    samples: Samples, max_bytes: int = BLOCK_BYTES, max_samples: int = MAX_SAMPLES
) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of each block, as indices of samples."""
    n = len(samples)
    if not n:
        return
    new_schema = np.flatnonzero(samples.schemas[1:] != samples.schemas[:-1]) + 1
    new_request = np.flatnonzero(samples.requests[1:] != samples.requests[:-1]) + 1
    schema_ends = np.append(new_schema, n)
    group_ends = np.append(np.union1d(new_schema, new_request), n)
    # Bytes up to each sample's end: a block of one sample has 40 bytes besides its payload, each further 37.
    sizes = samples.payloads.ends + np.arange(1, n + 1) * _SAMPLE_BYTES
    start = before = 0
    while start < n:
        limit = before + max_bytes - _HEAD_BYTES
        fitting = max(start + 1, int(np.searchsorted(sizes, limit, side="right")))
        most = min(
            fitting, start + max_samples, int(schema_ends[np.searchsorted(schema_ends, start, side="right")])
        )
        fits = int(np.searchsorted(group_ends, most, side="right")) - 1
        first = int(np.searchsorted(group_ends, start, side="right"))
        # The first request is kept whole, even beyond max_samples, unless it has too many bytes.
        stop = min(int(group_ends[max(fits, first)]), fitting)
        yield start, stop
        start, before = stop, int(sizes[stop - 1])
