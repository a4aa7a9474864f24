"""Which events are traced, and the ids of their traces and spans. Pure.

Nothing is carried with an event. Its trace id and whether it is recorded follow from the hash of its request
id, which every sample has, so all services decide alike, also for events that others write to the log and for
events that were appended before tracing was turned on (ops/adr/0021). The ids of three more kinds of traces
follow from data that all participants have: a batch's from its offset ranges, a version's from its number, a
record of changed rows' from its offset. Links connect spans of different kinds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from freshet.observability.tracing import Context
from freshet.types import I64, U64, Bool, OffsetRange

MOST_LINKS = 128
"""Links of one span, OpenTelemetry's default limit; so many traced events of one batch get spans."""

_M = (1 << 64) - 1
_EVENT, _EVENT_HIGH, _BATCH, _ROWS = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x27D4EB2F165667C5,
)


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """A batch that holds samples of traced events."""

    trace_id: int
    events: Sequence[Context]  # the spans that wrote their samples

    def context(self, place: str) -> Context:
        """Return the ids of the span at a place: train, process, lookup or push."""
        return Context(self.trace_id, _span_id(self.trace_id, place))


class TraceIds:
    """The ids of one model's traces; the same in every process. Thread-safe."""

    def __init__(self, model: str, ratio: float) -> None:
        """Trace `ratio` of the model's events, above 0 up to 1."""
        self._salt = int.from_bytes(blake2b(model.encode(), digest_size=8).digest(), "little")
        self._bound = min(max(int(ratio * 2**64), 1), 1 << 64)

    def sampled(self, requests: U64) -> Bool:
        """Return (N,) which events are traced, given the (N,) hashes of their requests."""
        return self._low(requests, _EVENT) <= np.uint64(self._bound - 1)

    def traced(self, requests: U64) -> list[int]:
        """Return the traced ones of these (N,) requests, each once, `MOST_LINKS` at most."""
        hits = requests[self.sampled(requests)]
        return [int(one) for one in np.unique(hits)[:MOST_LINKS]] if len(hits) else []

    def event(self, request: int, place: str) -> Context:
        """Return the ids of an event's span at a place: rank, served or samples."""
        trace_id = (_mix(request ^ self._salt ^ _EVENT_HIGH) << 64) | _mix(request ^ self._salt ^ _EVENT)
        trace_id = trace_id or 1
        return Context(trace_id, _span_id(trace_id, place))

    def batch(self, ranges: Sequence[OffsetRange], requests: U64) -> TracedBatch | None:
        """Return a batch's ids, given the (N,) hashes of its samples' requests; None if none is traced."""
        found = self.traced(requests)
        if not found:
            return None
        low = self._salt ^ _BATCH
        for one in ranges:
            for number in (one.partition, one.start, one.stop):
                low = _mix(low ^ number)
        trace_id = (_mix(low) << 64) | low or 1
        return TracedBatch(trace_id, [self.event(one, "samples") for one in found])

    def version(self, spec_hash: str, number: int) -> Context:
        """Return the ids of the span that published a version."""
        text = f"{spec_hash}/{number}/{self._salt}".encode()
        trace_id = int.from_bytes(blake2b(text, digest_size=16).digest(), "little") or 1
        return Context(trace_id, _span_id(trace_id, "publish"))

    def rows(self, partition: int, offsets: I64) -> list[tuple[int, Context]]:
        """Return (offset, ids of the span that sent it) of the traced records among (N,) of changed rows."""
        ids = offsets.astype(np.uint64) ^ np.uint64((partition << 48) & _M)
        low = self._low(ids, _ROWS)
        found = []
        for at in np.flatnonzero(low <= np.uint64(self._bound - 1))[:MOST_LINKS].tolist():
            trace_id = (_mix(int(low[at])) << 64) | int(low[at]) or 1
            found.append((int(offsets[at]), Context(trace_id, _span_id(trace_id, "send"))))
        return found

    def chosen(self) -> bool:
        """Decide at random, by the ratio, for a request that has no id."""
        return random.getrandbits(64) < self._bound  # nosec B311  # no secret

    def _low(self, ids: U64, seed: int) -> U64:
        """Return (N,) lower halves of trace ids: uniform, and the bits that samplers by ratio compare."""
        x: U64 = ids ^ np.uint64(self._salt ^ seed)
        with np.errstate(over="ignore"):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return x ^ (x >> np.uint64(31))


def _mix(x: int) -> int:
    """Finish splitmix64: one to one, and every bit depends on all."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M
    return x ^ (x >> 31)


def _span_id(trace_id: int, place: str) -> int:
    return (
        _mix((trace_id & _M) ^ int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "little")) or 1
    )
