"""Traces along one event: which events are traced, what their traces are called, and what is told of them.

Nothing is carried with an event. Its trace's id and whether it is recorded follow from the hash of its
request id, which every sample has anyway, so all services decide alike, also for events that others write to
the log and for events that were appended before tracing was turned on (ops/adr/0021). Three more kinds of
traces follow from what all who take part in them know: a batch's from its offset ranges, a version's from
its number, a record of changed rows' from its offset. Spans of one kind point at those of another by links.

This module knows no OpenTelemetry: spans are handed to whoever sends them (`freshet.process.traces`).
`active()` is None where tracing is off, and then nothing here costs more than that look.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from hashlib import blake2b
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import structlog

from freshet.types import I64, U64, Bool, OffsetRange

__all__ = [
    "Context",
    "Kind",
    "Span",
    "TracedBatch",
    "Tracer",
    "active",
    "current",
    "harmless",
    "install",
    "parsed_traceparent",
    "request_text",
    "within",
]

log = structlog.get_logger(__name__)

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool

MOST_LINKS = 128
"""Of one span, as OpenTelemetry limits it by default; and so many traced events of one batch are told of."""

MOST_CHARS = 1_000
"""Of a text in a span: spans wait in a queue, which bounds their number, and this their bytes."""

MOST_REQUEST_CHARS = 200
"""Of a request's id in a span: clients choose it, of any length."""

_M = (1 << 64) - 1
_EVENT, _EVENT_HIGH, _BATCH, _ROWS = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x27D4EB2F165667C5,
)


class Context(NamedTuple):
    """A span's name in the world."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0


@dataclass(frozen=True, slots=True)
class Span:
    """Something that was done."""

    name: str
    role: str  # who did it: gateway, joiner, embedder, paramserver, trainer, inference
    kind: Kind
    context: Context
    parent: Context | None
    start_ns: int  # wall clock
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: Sequence[Context] = ()
    error: str = ""  # why it failed, if it did
    asked_for: bool = False  # by a client, with its `traceparent`; not by the ratio


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """A batch that holds samples of traced events."""

    trace_id: int
    requests: Sequence[int]  # hashes of those events' requests
    events: Sequence[Context]  # the spans that wrote their samples

    def context(self, place: str) -> Context:
        """The span of a place: train, process, lookup or push."""
        return Context(self.trace_id, _span_id(self.trace_id, place))


class Tracer:
    """What is traced of one model in this process. Thread-safe."""

    def __init__(
        self,
        model: str,
        ratio: float,
        tell: Callable[[Span], None],
        *,
        system: str = "",
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`ratio` of events are traced, above 0 up to 1; `system` is the event log's name."""
        self._salt = int.from_bytes(blake2b(model.encode(), digest_size=8).digest(), "little")
        self._bound = min(max(int(ratio * 2**64), 1), 1 << 64)
        self._tell, self.ratio, self.system, self.now_ns = tell, ratio, system, now_ns
        # What spans of other traces link to: the newest, each list kept by one thread and read by another.
        self.batches: deque[Context] = deque(maxlen=MOST_LINKS)
        self.pushes: deque[Context] = deque(maxlen=MOST_LINKS)
        self.newest: dict[str, Context] = {}

    # --- which, and what they are called

    def sampled(self, requests: U64) -> Bool:
        """(N,) which events are traced, by the hashes of their requests."""
        return self._low(requests, _EVENT) <= np.uint64(self._bound - 1)

    def traced(self, requests: U64) -> list[int]:
        """The requests among these that are traced, each once, `MOST_LINKS` at most."""
        hits = requests[self.sampled(requests)]
        return [int(one) for one in np.unique(hits)[:MOST_LINKS]] if len(hits) else []

    def event(self, request: int, place: str) -> Context:
        """The span of an event's trace at a place where there is one: rank, served or samples."""
        trace_id = (_mix(request ^ self._salt ^ _EVENT_HIGH) << 64) | _mix(request ^ self._salt ^ _EVENT)
        trace_id = trace_id or 1
        return Context(trace_id, _span_id(trace_id, place))

    def batch(self, ranges: Sequence[OffsetRange], requests: U64) -> TracedBatch | None:
        """A batch, or None if no event of it is traced. All who have it derive the same."""
        found = self.traced(requests)
        if not found:
            return None
        low = self._salt ^ _BATCH
        for one in ranges:
            for number in (one.partition, one.start, one.stop):
                low = _mix(low ^ number)
        trace_id = (_mix(low) << 64) | low or 1
        return TracedBatch(trace_id, found, [self.event(one, "samples") for one in found])

    def version(self, spec_hash: str, number: int) -> Context:
        """The span that published a version."""
        text = f"{spec_hash}/{number}/{self._salt}".encode()
        trace_id = int.from_bytes(blake2b(text, digest_size=16).digest(), "little") or 1
        return Context(trace_id, _span_id(trace_id, "publish"))

    def rows(self, partition: int, offsets: I64) -> list[tuple[int, Context]]:
        """(Offset, the span that sent it) of the records of changed rows that are traced."""
        ids = offsets.astype(np.uint64) ^ np.uint64((partition << 48) & _M)
        low = self._low(ids, _ROWS)
        found = []
        for at in np.flatnonzero(low <= np.uint64(self._bound - 1))[:MOST_LINKS].tolist():
            trace_id = (_mix(int(low[at])) << 64) | int(low[at]) or 1
            found.append((int(offsets[at]), Context(trace_id, _span_id(trace_id, "send"))))
        return found

    def chosen(self) -> bool:
        """Whether to trace something that has no id to decide by."""
        return random.getrandbits(64) < self._bound  # nosec B311  # no secret

    def _low(self, ids: U64, seed: int) -> U64:
        """(N,) lower halves of trace ids: uniform, and what samplers by ratio look at."""
        x: U64 = ids ^ np.uint64(self._salt ^ seed)
        with np.errstate(over="ignore"):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return x ^ (x >> np.uint64(31))

    # --- telling

    def span(
        self,
        name: str,
        role: str,
        start_ns: int,
        *,
        kind: Kind = "internal",
        context: Context | None = None,
        parent: Context | None = None,
        end_ns: int | None = None,
        attributes: Mapping[str, Value] | None = None,
        links: Sequence[Context] = (),
        error: str = "",
        asked_for: bool = False,
    ) -> Context:
        """Tell of something that is over; without `context` a new span below its parent. Raises nothing."""
        if context is None:
            context = self.new(parent)
        end_ns = self.now_ns() if end_ns is None else end_ns
        made = Span(
            name,
            role,
            kind,
            context,
            parent,
            min(start_ns, end_ns),
            end_ns,
            {k: v[:MOST_CHARS] if isinstance(v, str) else v for k, v in (attributes or {}).items()},
            tuple(links)[:MOST_LINKS],
            error[:MOST_CHARS],
            asked_for,
        )
        try:
            self._tell(made)
        except Exception as failed:  # a trace is never worth an answer
            log.error("a trace could not be told of", exc_info=failed)
        return context

    @staticmethod
    def new(parent: Context | None = None) -> Context:
        """A span that nobody else needs to know: of the parent's trace, or of one of its own."""
        trace_id = parent.trace_id if parent is not None else random.getrandbits(128) or 1  # nosec B311
        return Context(trace_id, random.getrandbits(64) or 1)  # nosec B311  # no secret

    def on_topic(self, operation: str, topic: str, partition: int | None = None) -> dict[str, Value]:
        """Attributes of a span that sends to, or processes what comes from, a topic."""
        found: dict[str, Value] = {
            "messaging.system": self.system,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            "messaging.destination.name": topic,
        }
        if partition is not None:
            found["messaging.destination.partition.id"] = str(partition)
        return found


def request_text(key: bytes) -> str:
    """A request's id as spans and log lines give it: its beginning, if it is long."""
    return key[: 4 * MOST_REQUEST_CHARS].decode(errors="replace")[:MOST_REQUEST_CHARS]


def _mix(x: int) -> int:
    """The end of splitmix64: one to one, and every bit depends on all."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M
    return x ^ (x >> 31)


def _span_id(trace_id: int, place: str) -> int:
    return (
        _mix((trace_id & _M) ^ int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "little")) or 1
    )


def parsed_traceparent(header: bytes | None) -> Context | None:
    """The client's span of a W3C `traceparent` header, if the client records it; None for anything else."""
    parts = header.decode("latin-1").strip().split("-") if header else []
    lengths = [len(part) for part in parts[:4]]
    if lengths != [2, 32, 16, 2] or parts[0] == "ff" or (parts[0] == "00" and len(parts) != 4):
        return None
    if not all(c in "0123456789abcdef" for part in parts[:4] for c in part):
        return None
    found = Context(int(parts[1], 16), int(parts[2], 16))
    recorded = int(parts[3], 16) & 1
    return found if recorded and found.trace_id and found.span_id else None


_P = ParamSpec("_P")
_R = TypeVar("_R")


def harmless(tell: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """For whatever tells of traces on the path of data: a fault in it is logged, and stays in it."""

    @wraps(tell)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return tell(*args, **kwargs)
        except Exception as error:
            log.error("a trace could not be told of", exc_info=error)
            return None

    return guarded


_active: Tracer | None = None
_current: ContextVar[Context | None] = ContextVar("freshet-span", default=None)


def active() -> Tracer | None:
    """The process's tracer; None where tracing is off."""
    return _active


def install(tracer: Tracer | None) -> None:
    """Trace from now on by this one, or not at all."""
    global _active  # noqa: PLW0603 - one a process, set at its start
    _active = tracer


def current() -> Context | None:
    """What this thread, or task, is doing for a trace: log lines name it, calls to others carry it."""
    return _current.get()


@contextmanager
def within(context: Context | None) -> Iterator[None]:
    """Do something for a span."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
