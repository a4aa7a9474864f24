"""All spans that freshet records: names, attributes, parents and links, by service.

Functions return None where tracing is off. `start_…` begins a span, which `tracing.running` or `end_…` ends;
`record_…` makes spans of work that is over, from the start that the service noted by `tracing.now_ns`.
`docs/tracing.md` shows how the spans make up traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from freshet.observability.trace_ids import TracedBatch
from freshet.observability.tracing import Context, context_of, current, traced
from freshet.types import I64, U64, Append, OffsetRange

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from freshet.observability.tracer import Tracer, Value

MOST_REQUEST_CHARS = 200
"""Characters of a request's id in a span: clients choose it, of any length."""

SAMPLES_SENT = 10_000
"""Number of events of which the first samples' span is remembered. If later samples of an event come after so
many others, it gets a second span of the same id, of which viewers show one."""

_CALLER = {"Lookup": "process", "Push": "train"}
"""A call to shards -> the place of its parent in its batch's trace."""


def request_text(key: bytes) -> str:
    """Return a request's id for spans and log lines: its first characters."""
    return key[: 4 * MOST_REQUEST_CHARS].decode(errors="replace")[:MOST_REQUEST_CHARS]


def _topic(tracer: Tracer, operation: str, topic: str, partition: int | None = None) -> dict[str, Any]:
    """Return the name, kind and attributes of a span that sends to a topic or processes its records."""
    attributes: dict[str, Value] = {
        "messaging.system": tracer.system,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }
    if partition is not None:
        attributes["messaging.destination.partition.id"] = str(partition)
    kind = "producer" if operation == "send" else "consumer"
    return {"name": f"{operation} {topic}", "kind": kind, "attributes": attributes}


def _newest(spans: deque[Context]) -> list[Context]:
    return [spans.popleft() for _ in range(len(spans))]  # another thread appends meanwhile


def _samples(ranges: Sequence[OffsetRange], samples: int) -> dict[str, Value]:
    return {"freshet.ranges": " ".join(map(str, ranges)), "freshet.samples": samples}


# --- HTTP, in the client's trace


def _http(route: str) -> dict[str, Any]:
    attributes = {"http.request.method": "POST", "http.route": route}
    return {"name": f"POST {route}", "kind": "server", "attributes": attributes}


@traced
def start_http_request(
    tracer: Tracer, service: str, route: str, headers: Mapping[bytes, bytes]
) -> Span | None:
    """Start the span of a request in its client's trace; None if the client records none."""
    client = tracer.client_span(headers.get(b"traceparent"))
    if client is None:
        return None
    return tracer.start(service, **_http(route), parent=client)


@traced
def end_http_request(tracer: Tracer, span: Span, status: int) -> None:
    """End the span of a request that was answered."""
    span.set_attribute("http.response.status_code", status)
    tracer.end(span, "" if status < 500 else f"answered with {status}")


# --- gateway

EventSend = tuple["Span", int]
"""The span of an event on its way to the log, and the event's index in the offsets of its append."""


def start_event_send(
    tracer: Tracer,
    role: str,
    topic: str,
    event: tuple[int, bytes, int],
    start_ns: int,
    client: Context | None,
) -> Span:
    """Start the span of an event (hash and text of its request's id, partition) of a stream's role; `client`:
    the span of its HTTP request."""
    request, request_id, partition = event
    served, first = tracer.ids.event(request, "served"), role == "served"
    span = tracer.start(
        "gateway",
        **_topic(tracer, "send", topic, partition),
        start_ns=start_ns,
        context=served if first else None,
        parent=None if first else served,
        links=[client] if client is not None else (),
    )
    span.set_attribute("freshet.request_id", request_text(request_id))
    return span


@traced
def end_event_sends(
    tracer: Tracer, sends: Iterable[EventSend], offsets: Sequence[int] | I64 | Exception
) -> None:
    """End the spans of events that were appended at these offsets, or of which the append failed."""
    for span, row in sends:
        if isinstance(offsets, Exception):
            tracer.end(span, str(offsets).splitlines()[0])
        else:
            span.set_attribute("messaging.kafka.offset", int(offsets[row]))
            tracer.end(span)


# --- joiner


@dataclass(frozen=True, slots=True)
class JoinedEvent:
    """A traced event with decided samples."""

    request: int  # hash of its request id
    time_ms: int  # event time of its first impression
    samples: int  # number of its samples
    block: int  # index of the block with its first sample, in the append
    decided_ns: int


@traced
def record_joined_samples(
    tracer: Tracer, events: Iterable[JoinedEvent], topic: str, partition: int, offset: int
) -> None:
    """Record events' windows, from event time to the decision, and the append of their samples, the first
    block at this offset."""
    for event in events:
        served = tracer.ids.event(event.request, "served")
        start_ns = min(event.time_ms * 1_000_000, event.decided_ns)
        join = tracer.start("joiner", "join", start_ns, parent=served, links=[served])
        join.set_attribute("freshet.samples", event.samples)
        tracer.end(join, end_ns=event.decided_ns)
        first = event.request not in tracer.sent_samples  # later samples (its other labels) have new ids
        tracer.sent_samples[event.request] = None
        if len(tracer.sent_samples) > SAMPLES_SENT:
            tracer.sent_samples.popitem(last=False)
        send = tracer.start(
            "joiner",
            **_topic(tracer, "send", topic, partition),
            start_ns=event.decided_ns,
            context=tracer.ids.event(event.request, "samples") if first else None,
            parent=context_of(join),
        )
        send.set_attribute("messaging.kafka.offset", offset + event.block)
        tracer.end(send)


# --- embedder


@traced
def record_batch(
    tracer: Tracer, ranges: Sequence[OffsetRange], blocks: int, request_ids: U64, topic: str, start_ns: int
) -> TracedBatch | None:
    """Record that blocks became a batch of samples of (N,) requests; None if no event of it is traced."""
    batch = tracer.ids.batch(ranges, request_ids)
    if batch is not None:
        what = _topic(tracer, "process", topic, ranges[0].partition if len(ranges) == 1 else None)
        context = batch.context("process")
        span = tracer.start("embedder", **what, start_ns=start_ns, context=context, links=batch.events)
        span.set_attribute("messaging.batch.message_count", blocks)
        span.set_attributes(_samples(ranges, len(request_ids)))
        tracer.end(span)
    return batch


def _rows(method: str) -> dict[str, Any]:
    return {"name": f"Rows/{method}", "attributes": {"rpc.service": "Rows", "rpc.method": method}}


@traced
def start_rows_call(
    tracer: Tracer, batch: TracedBatch | None, method: str, start_ns: int | None = None
) -> Span | None:
    """Start the span of a batch's Lookup or Push; None if the batch is not traced."""
    if batch is None:
        return None
    context, parent = batch.context(method.lower()), batch.context(_CALLER[method])
    what = _rows(method)
    return tracer.start("embedder", **what, kind="client", start_ns=start_ns, context=context, parent=parent)


# --- paramserver


@traced
def start_rows_answer(
    tracer: Tracer, method: str, caller: Context | None = None, start_ns: int | None = None
) -> Span | None:
    """Start the span of the answer to a Lookup or Push; None if its batch is not traced. `caller`: the call's
    span, if not the thread's."""
    parent = caller or current()
    if parent is None:
        return None
    return tracer.start("paramserver", **_rows(method), kind="server", start_ns=start_ns, parent=parent)


@traced
def end_push_answer(tracer: Tracer, span: Span, error: str = "", end_ns: int | None = None) -> None:
    """End the span of the answer to a Push; the next rows that are sent link to it."""
    tracer.end(span, error, end_ns)
    if not error:
        tracer.pushes.append(context_of(span))


@traced
def record_rows_sends(
    tracer: Tracer, appends: Sequence[Append], firsts: Sequence[int], start_ns: int
) -> None:
    """Record the traced records of changed rows, each append from its first offset on; they link to the
    traced pushes since the last of them."""
    sent = []
    for append, first in zip(appends, firsts, strict=True):
        offsets = np.arange(first, first + len(append.values), dtype=np.int64)
        sent += [(append, *one) for one in tracer.ids.rows(append.partition, offsets)]
    pushes = _newest(tracer.pushes) if sent else []
    for append, offset, context in sent:
        what = _topic(tracer, "send", append.topic, append.partition)
        span = tracer.start("paramserver", **what, start_ns=start_ns, context=context, links=pushes)
        span.set_attribute("messaging.kafka.offset", offset)
        tracer.end(span)


# --- trainer


@dataclass(frozen=True, slots=True)
class Training:
    """The span of a traced batch that a lane trains on."""

    span: Span
    batch: TracedBatch
    start_ns: int


@traced
def start_training(
    tracer: Tracer, ranges: Sequence[OffsetRange], request_ids: U64, start_ns: int | None = None
) -> Training | None:
    """Start the span of a batch that a lane has; None if no event of it is traced."""
    batch = tracer.ids.batch(ranges, request_ids)
    if batch is None:
        return None
    start_ns = tracer.now_ns() if start_ns is None else start_ns
    span = tracer.start(
        "trainer",
        "train",
        start_ns,
        context=batch.context("train"),
        parent=batch.context("process"),
        attributes=_samples(ranges, len(request_ids)),
        links=batch.events,
    )
    return Training(span, batch, start_ns)


@traced
def end_training(
    tracer: Tracer,
    training: Training,
    error: str = "",
    end_ns: int | None = None,
    *,
    lane: int,
    step: int,
    learned: bool,
) -> None:
    """End the span of a batch, and record for each of its traced events that it was learned from."""
    end_ns = tracer.now_ns() if end_ns is None else end_ns
    training.span.set_attributes({"freshet.lane": lane, "freshet.step": step, "freshet.learned": learned})
    tracer.end(training.span, error, end_ns)
    if learned and not error:
        context = training.batch.context("train")
        tracer.batches.append(context)
        for event in training.batch.events:
            learn = tracer.start("trainer", "learn", training.start_ns, parent=event, links=[context])
            tracer.end(learn, end_ns=end_ns)


@traced
def record_publication(
    tracer: Tracer, spec_hash: str, number: int, step: int, verdict: str, start_ns: int
) -> None:
    """Record that a version was written and judged; it links to the traced batches since the last one."""
    span = tracer.start(
        "trainer",
        "publish version",
        start_ns,
        kind="producer",
        context=tracer.ids.version(spec_hash, number),
        links=_newest(tracer.batches),
        attributes={"freshet.version": number, "freshet.step": step, "freshet.verdict": verdict},
    )
    tracer.end(span)


# --- inference


@traced
def start_version_load(tracer: Tracer, spec_hash: str, number: int) -> Span:
    """Start the span of a dense version's load."""
    published, attributes = tracer.ids.version(spec_hash, number), {"freshet.version": number}
    return tracer.start("inference", "load version", kind="consumer", parent=published, attributes=attributes)


@traced
def record_rows_applied(tracer: Tracer, topic: str, partition: int, offsets: I64, start_ns: int) -> None:
    """Record the traced ones of (N,) records of changed rows, which inference has applied."""
    for offset, context in tracer.ids.rows(partition, offsets):
        what = _topic(tracer, "process", topic, partition)
        span = tracer.start("inference", **what, start_ns=start_ns, parent=context)
        span.set_attribute("messaging.kafka.offset", offset)
        tracer.end(span)
        tracer.newest_rows = context_of(span)


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """A rank request that was answered."""

    start_ns: int
    end_ns: int
    links: Sequence[Context]  # the version and the newest traced rows that it was scored with; the client
    attributes: Mapping[str, Value]


@traced
def rank_answer(
    tracer: Tracer,
    start_ns: int,
    client: Context | None,
    version: tuple[str, int],
    candidates: int,
    *,
    logged: bool,
) -> RankAnswer:
    """Return a request's answer, to be recorded with its served events. If these are not logged, it is
    recorded here, by chance. `version`: its spec's hash and its number."""
    links = [tracer.ids.version(*version), tracer.newest_rows, client]
    attributes: dict[str, Value] = {"freshet.version": version[1], "freshet.candidates": candidates}
    answer = RankAnswer(start_ns, tracer.now_ns(), [one for one in links if one is not None], attributes)
    if not logged and tracer.ids.chosen():
        _record_rank(tracer, answer, None)
    return answer


def _record_rank(tracer: Tracer, answer: RankAnswer, context: Context | None) -> None:
    what = _http("/v1/rank")
    span = tracer.start("inference", **what, start_ns=answer.start_ns, context=context, links=answer.links)
    span.set_attributes({"http.response.status_code": 200, **answer.attributes})
    tracer.end(span, end_ns=answer.end_ns)


@traced
def record_served_sends(
    tracer: Tracer,
    topic: str,
    requests: U64,
    keys: Sequence[bytes],
    answers: Sequence[RankAnswer | None],
    start_ns: int,
    error: str,
) -> None:
    """Record that served events of (N,) requests were appended, or were not; the traced ones with their
    rank request."""
    for at in np.flatnonzero(tracer.ids.sampled(requests)).tolist():
        request, answer = int(requests[at]), answers[at]
        rank = tracer.ids.event(request, "rank")
        if answer is not None:
            _record_rank(tracer, answer, rank)
            start_ns = answer.end_ns
        span = tracer.start(
            "inference",
            **_topic(tracer, "send", topic),
            start_ns=start_ns,
            context=tracer.ids.event(request, "served"),
            parent=None if answer is None else rank,
        )
        span.set_attribute("freshet.request_id", request_text(keys[at]))
        tracer.end(span, error)
