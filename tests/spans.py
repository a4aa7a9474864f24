"""Spans as they are recorded, for tests to compare."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from freshet.observability.trace_ids import TraceIds
from freshet.observability.tracer import Tracer
from freshet.observability.tracing import Context

__all__ = ["Recorded", "recording"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span that has ended."""

    name: str
    role: str
    kind: str
    context: Context
    parent: Context | None
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[Context, ...]
    error: str
    by_client: bool  # whether its parent is a client's span


class _Recorder(SpanProcessor):
    def __init__(self, spans: list[Recorded]) -> None:
        self._spans = spans

    def on_end(self, span: ReadableSpan) -> None:
        assert span.instrumentation_scope is not None
        assert span.start_time is not None
        assert span.end_time is not None
        parent = None if span.parent is None else _context(span.parent)
        self._spans.append(
            Recorded(
                span.name,
                span.instrumentation_scope.name.removeprefix("freshet."),
                span.kind.name.lower(),
                _context(span.context),
                parent,
                span.start_time,
                span.end_time,
                dict(span.attributes or {}),
                tuple(_context(link.context) for link in span.links),
                span.status.description or "",
                span.parent is not None and span.parent.is_remote,
            )
        )


def _context(context: Any) -> Context:
    return Context(context.trace_id, context.span_id)


def recording(
    model: str = "news",
    ratio: float = 1.0,
    *,
    system: str = "kafka",
    now_ns: Callable[[], int] = time.time_ns,
) -> tuple[Tracer, list[Recorded]]:
    """Return a tracer and the list that its spans come into."""
    spans: list[Recorded] = []
    return Tracer(TraceIds(model, ratio), _Recorder(spans), system=system, now_ns=now_ns), spans
