"""The join of one partition: columns of events in, decided samples out. No I/O, no clock but the watermark.

The state and its decisions are native (`freshet._native.JoinState`); this is their face in numpy.
Letters: E served events, N impressions, actions or shown events, L labels, A aggregates, n samples.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace

import numpy as np

from freshet._native import JoinState
from freshet.config.expression import Column
from freshet.config.spec.rules import within
from freshet.joiner.ledger import EVENT_COUNTERS, LABEL_COUNTERS, Ledger
from freshet.joiner.plan import AGGREGATE_KINDS, JoinPlan
from freshet.types import F32, F64, I64, U8, U32, U64, Bool, BytesColumn

__all__ = [
    "ROLES",
    "ActionColumns",
    "ImpressionColumns",
    "Joiner",
    "Outcome",
    "Samples",
    "ShownColumns",
    "datable",
]

ROLES = ("served", "shown", "action")
"""The joined streams, in the order of the native core's numbers."""


class Outcome(enum.IntEnum):
    """What became of an event when it came (`freshet::join::Outcome`)."""

    NEW = 0
    REPEAT = 1
    GHOST = 2
    LATE = 3
    WAITING = 4
    AGAIN = 5
    OUTSIDE = 6
    BEYOND = 7
    NO_LABEL = 8


LATEST_MS = 2**53
"""Largest time of an event that the state takes; the smallest is 0."""

NOT_IN_A_REPLAY = (Outcome.GHOST,)
"""Outcomes that rest on an event which a replay may not find any more: the commit names such events."""


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
        """Only these impressions, of the same events. `chosen` is (N,)."""
        if chosen.all():
            return self
        return replace(self, **{name: getattr(self, name)[chosen] for name in _ELEMENT_FIELDS})

    @property
    def places(self) -> tuple[I64, I64]:
        """(N,) offset of each impression's record, and its number within it."""
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
    """N events that say which impression was seen."""

    offsets: I64  # (N,) not falling; one record may hold several
    times_ms: I64  # (N,)
    keys: U64  # (N, 2) impression

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def places(self) -> tuple[I64, I64]:
        """(N,) offset of each one's record, and its number within it."""
        return _places(self.offsets)

    def where(self, chosen: Bool) -> ShownColumns:
        """Only these."""
        if chosen.all():
            return self
        return ShownColumns(self.offsets[chosen], self.times_ms[chosen], self.keys[chosen])


@dataclass(frozen=True, slots=True, eq=False)
class ActionColumns:
    """N actions with the labels whose condition they meet."""

    offsets: I64  # (N,) not falling; one record may hold several
    times_ms: I64  # (N,)
    keys: U64  # (N, 2) impression
    ids: U64  # (N, 2) of the event: of its id, or of its bytes
    masks: U32  # (N,) bit l: the condition of label l is met
    values: F64  # (N, A) what it brings to each aggregate; NaN: null

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def places(self) -> tuple[I64, I64]:
        """(N,) offset of each one's record, and its number within it."""
        return _places(self.offsets)

    def where(self, chosen: Bool) -> ActionColumns:
        """Only these."""
        if chosen.all():
            return self
        return ActionColumns(*(getattr(self, f.name)[chosen] for f in fields(self)))


def datable(times_ms: I64) -> Bool:
    """(N,) whether the state takes events of these times; it raises ValueError for the others."""
    found: Bool = (times_ms >= 0) & (times_ms <= LATEST_MS)
    return found


def _places(offsets: I64) -> tuple[I64, I64]:
    return offsets, np.arange(len(offsets)) - np.searchsorted(offsets, offsets, side="left")


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples in their order on the log: by the time of their request's first impression, a request's
    together.
    """

    ids: I64  # (n,)
    times_ms: I64  # (n,)
    requests: U64  # (n,)
    values: F32  # (n,) NaN in late ones: nobody knows
    weights: F32  # (n,)
    labels: U8  # (n,)
    schemas: U32  # (n,)
    payloads: BytesColumn  # (n,) Avro binary: prefix + element + suffix

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, chosen: Bool) -> Samples:
        """Only these."""
        if chosen.all():
            return self
        payloads = BytesColumn.of(self.payloads[int(i)] for i in np.flatnonzero(chosen))
        columns = ("ids", "times_ms", "requests", "values", "weights", "labels", "schemas")
        return replace(self, payloads=payloads, **{name: getattr(self, name)[chosen] for name in columns})


class Joiner:
    """Pending impressions, ids and windows of one partition. Used by one thread at a time.

    The watermark moves only in `advance`; between two of them the order of batches of different topics does
    not matter.
    """

    def __init__(self, plan: JoinPlan) -> None:
        self.plan = plan
        self._aggregates = plan.aggregates
        self._outside = {label.name: 0 for label in plan.labels if label.bounds is not None}
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
        """H: ids are known this long after their event, in event time; older events are late (PROTOCOL
        20).
        """
        return self._state.horizon_ms

    @property
    def payload_bytes(self) -> int:
        """Memory held for the bytes of undecided impressions."""
        return self._state.payload_bytes

    @property
    def ids(self) -> int:
        """Impressions and actions whose ids are known."""
        return self._state.ids

    def on_served(self, batch: ImpressionColumns) -> U8:
        """Take impressions; returns (N,) outcomes. Raises ValueError for spans outside the data."""
        outcomes = np.empty(len(batch), np.uint8)
        columns = {
            name: np.ascontiguousarray(getattr(batch, name)) for name in (*_EVENT_FIELDS, *_ELEMENT_FIELDS)
        }
        columns["times"] = columns.pop("times_ms")
        self._state.on_served(data=batch.data, outcomes=outcomes, **columns)
        return outcomes

    def on_shown(self, batch: ShownColumns) -> U8:
        """Take note of what was seen; returns (N,) outcomes."""
        outcomes = np.empty(len(batch), np.uint8)
        self._state.on_shown(batch.offsets, batch.times_ms, batch.keys, outcomes)
        return outcomes

    def on_actions(self, batch: ActionColumns) -> U8:
        """Join actions; returns (N,) outcomes."""
        outcomes = np.empty(len(batch), np.uint8)
        self._state.on_actions(
            batch.offsets, batch.times_ms, batch.keys, batch.ids, batch.masks, batch.values, outcomes
        )
        return outcomes

    def advance(self, watermark_ms: int) -> None:
        """Decide what is due at this watermark; it never goes back."""
        self._state.advance(watermark_ms)

    def due(self, watermark_ms: int) -> bool:
        """Would `advance` find a window that closes."""
        return self._state.due(watermark_ms)

    def restart_at(self, watermark_ms: int) -> None:
        """Before any event: the watermark at which a replay begins."""
        self._state.restart_at(watermark_ms)

    def set_back(self, watermark_ms: int) -> None:
        """Put the watermark back (PROTOCOL 19).

        Batches until `end_recall` repeat events that were read before: impressions that were late or
        forgotten become known again, as decided; actions and shown events of that kind wait for impressions
        that are still to come. None is counted again.

        Raises ValueError if the watermark is higher than the present one.
        """
        self._state.set_back(watermark_ms)

    def end_recall(self) -> None:
        """All events were repeated that `set_back` asks for; new ones follow."""
        self._state.end_recall()

    @property
    def began_ms(self) -> int | None:
        """Event time of the first impression that was ever taken: from it the ramp counts. None: none yet."""
        return self._state.began

    def begin_at(self, began_ms: int) -> None:
        """Before any event of a replay: what `began_ms` was, as a replay may not find that impression."""
        self._state.begin_at(began_ms)

    @property
    def has_ready(self) -> bool:
        """Are there decided or late samples to be taken."""
        return bool(self._state.ready(False)[0] or self._state.ready(True)[0])

    @property
    def ready_bytes(self) -> int:
        """Payload bytes of the decided and late samples to be taken."""
        return int(self._state.ready(False)[1] + self._state.ready(True)[1])

    def take(self) -> Samples:
        """The samples decided since the last call."""
        samples, aggregates = self._take(late=False)
        return self._with_values(samples, aggregates) if self._outside or self._aggregates else samples

    def take_out_of_bounds(self) -> dict[str, int]:
        """Label with bounds -> samples that `take` dropped for them since then; `no_value` has them."""
        found = self._outside
        self._outside = dict.fromkeys(found, 0)
        return found

    def take_late(self) -> Samples:
        """Samples of impressions older than the horizon, one per label, their values unknown."""
        return self._take(late=True)[0]

    def discard(self) -> None:
        """Drop what is ready: in a replay it was emitted before."""
        self._state.discard()

    def low(self, role: str, next_offset: int) -> int:
        """Smallest offset of a stream that a restart at the present watermark must read again."""
        return self._state.low(ROLES.index(role), next_offset)

    def ledger(self, refused: int = 0) -> Ledger:
        """Counts so far."""
        names = [label.name for label in self.plan.labels]
        counters = np.empty(len(names) * len(LABEL_COUNTERS) + len(EVENT_COUNTERS), np.int64)
        pending = np.empty(len(names), np.int64)
        self._state.counters(counters)
        self._state.pending(pending)
        return Ledger.of(names, counters, pending, self._state.waiting, refused)

    def set_counters(self, ledger: Ledger) -> None:
        """After a replay: count on from what the commit says."""
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
        """Compute the values of numeric labels; those without, or with one out of bounds, are dropped and
        counted.
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
                with np.errstate(over="ignore"):  # beyond 32 bits it is outside of any bounds, and no number
                    value = number.astype(np.float32)
                missing = ~np.isfinite(value)
            else:
                number, missing = value.astype(np.float64), np.zeros(len(rows), np.bool_)
            if label.bounds is not None:
                outside = ~np.isnan(number) & ~within(label.bounds, value)
                self._outside[label.name] += int(outside.sum())
                missing |= outside
            for was in matched[missing]:
                self._state.no_value(index, bool(was))
            samples.values[rows] = value
            kept[rows[missing]] = False
        return samples.where(kept)
