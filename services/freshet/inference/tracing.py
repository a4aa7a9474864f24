"""What inference tells of traced events and of what it follows: requests that were ranked, versions, rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from freshet.features import EventExtractor
from freshet.observability.tracing import Context, Tracer, Value, active, harmless, request_text, within
from freshet.types import I64, U64, BytesColumn

__all__ = ["Asked", "Came", "followed", "loading", "ranked", "requests_of", "sent"]


@dataclass(frozen=True, slots=True)
class Came:
    """When a rank request came, and for whom."""

    ns: int
    client: Context | None  # its span in its client's trace


@dataclass(frozen=True, slots=True)
class Asked:
    """A rank request that was answered."""

    came: Came
    answered_ns: int
    version: Context  # the span that published the version that scored it
    attributes: dict[str, Value]
    rows: Context | None  # the newest record of rows that was applied, of those that are traced


@harmless
def requests_of(extractor: EventExtractor, records: BytesColumn) -> U64:
    """(N,) hash of each framed record's request id, as samples will have it; 0 where it has none."""
    columns = extractor.extract(records, framed=True)
    found = np.zeros(len(records), np.uint64)
    found[columns.event_index] = columns.request
    return found


@harmless
def ranked(tracer: Tracer, asked: Asked, context: Context | None = None) -> Context:
    """A request was answered; without `context` it is in a trace of its own."""
    links = [one for one in (asked.version, asked.rows, asked.came.client) if one is not None]
    return tracer.span(
        "POST /v1/rank",
        "inference",
        asked.came.ns,
        end_ns=asked.answered_ns,
        kind="server",
        context=context,
        links=links,
        attributes={
            "http.request.method": "POST",
            "http.route": "/v1/rank",
            "http.response.status_code": 200,
            **asked.attributes,
        },
    )


@harmless
def sent(
    tracer: Tracer,
    topic: str,
    requests: U64,
    keys: Sequence[bytes],
    asked: Sequence[Asked | None],
    began_ns: int,
    error: str = "",
) -> None:
    """Served events were appended, or were not: those that are traced, each with its request."""
    for at in np.flatnonzero(tracer.sampled(requests)).tolist():
        request, of = int(requests[at]), asked[at]
        rank = tracer.event(request, "rank")
        if of is not None:
            ranked(tracer, of, rank)
        tracer.span(
            f"send {topic}",
            "inference",
            of.answered_ns if of is not None else began_ns,
            kind="producer",
            context=tracer.event(request, "served"),
            parent=rank if of is not None else None,
            attributes={
                **tracer.on_topic("send", topic),
                "freshet.request_id": request_text(keys[at]),
            },
            error=error,
        )


@contextmanager
def loading(spec_hash: str, number: int) -> Iterator[None]:
    """Take a dense version into service: a span of the version's trace, which log lines name."""
    tracer = active()
    if tracer is None:
        yield
        return
    published, began_ns = tracer.version(spec_hash, number), tracer.now_ns()
    span = tracer.new(published)
    with within(span):
        yield
    tracer.span(
        "load version",
        "inference",
        began_ns,
        kind="consumer",
        context=span,
        parent=published,
        attributes={"freshet.version": number},
    )


@harmless
def followed(tracer: Tracer, topic: str, partition: int, offsets: I64, began_ns: int) -> None:
    """Records of changed rows were applied: those that are traced."""
    for offset, context in tracer.rows(partition, offsets):
        tracer.newest["rows"] = tracer.span(
            f"process {topic}",
            "inference",
            began_ns,
            kind="consumer",
            parent=context,
            attributes={
                **tracer.on_topic("process", topic, partition),
                "messaging.kafka.offset": offset,
            },
        )
