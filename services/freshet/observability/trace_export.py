"""Spans to a collector: OpenTelemetry's exporter behind a bounded queue. Imported only where tracing is on;
the extra `tracing` brings what it needs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from freshet.observability.tracing import Context, Span
from freshet.release import RELEASE

__all__ = ["Outbox"]

_KINDS = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}
ASKED_SHARE = 10
"""One of so many places in the queue is for spans that clients ask for by a header: whoever is let in may ask
for one with each request, and the traces of events must have room beside them."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Outbox:
    """Takes spans, never waits, and counts what became of them."""

    def __init__(
        self,
        resource: Mapping[str, str],
        *,
        endpoint: str,
        queue_spans: int,
        exporter: SpanExporter | None = None,
        delay_ms: float | None = None,
    ) -> None:
        """Begin to send, from a thread.

        Args:
            resource: who sends; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before it.
            endpoint: base URL of an OTLP receiver; empty: as OTEL_EXPORTER_OTLP_… say.
            queue_spans: that wait at most, a tenth of them of those that clients asked for; more are dropped.
            exporter: instead of OTLP over HTTP.
            delay_ms: between two rounds of sending; None: OTEL_BSP_SCHEDULE_DELAY, 5 s without it.
        """
        url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        self._resource = Resource.create(dict(resource)).merge(OTELResourceDetector().detect())
        self._queue_spans = queue_spans
        self._lock = threading.Lock()
        self._waiting = 0  # all; of them those that clients asked for
        self._asked: set[Context] = set()
        self._most_asked = max(1, queue_spans // ASKED_SHARE)
        self._counts = {"sent": 0, "dropped": 0, "failed": 0}
        self._processor = BatchSpanProcessor(
            _Counting(exporter or OTLPSpanExporter(endpoint=url), self._left),
            max_queue_size=queue_spans,
            max_export_batch_size=min(512, queue_spans),
            schedule_delay_millis=delay_ms,
        )

    def tell(self, span: Span) -> None:
        """Take a span, if there is room."""
        with self._lock:
            full = self._waiting >= self._queue_spans
            if full or (span.asked_for and len(self._asked) >= self._most_asked):
                self._counts["dropped"] += 1
                return
            self._waiting += 1
            if span.asked_for:
                self._asked.add(span.context)
        self._processor.on_end(self._readable(span))

    def counts(self) -> dict[str, int]:
        """Spans that were sent, dropped for want of room, and lost since the collector did not take them."""
        with self._lock:
            return dict(self._counts)

    def flush(self) -> None:
        """Send what waits, now, on the caller's thread."""
        self._processor.force_flush()

    def close(self, wait_s: float) -> None:
        """Send what waits, for so long at most."""
        closing = threading.Thread(target=self._processor.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(wait_s)

    def _left(self, spans: Sequence[ReadableSpan], *, sent: bool) -> None:
        with self._lock:
            self._waiting -= len(spans)
            self._counts["sent" if sent else "failed"] += len(spans)
            if self._asked:
                self._asked.difference_update(
                    Context(one.context.trace_id, one.context.span_id) for one in spans if one.context
                )

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_named(span.context),
            parent=_named(span.parent) if span.parent is not None else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            links=[Link(_named(link)) for link in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_scope(span.role),
        )


class _Left(Protocol):
    def __call__(self, spans: Sequence[ReadableSpan], *, sent: bool) -> None:
        """These spans wait no more."""


class _Counting(SpanExporter):
    """An exporter that tells what became of spans; whatever goes wrong in it stays in it."""

    def __init__(self, exporter: SpanExporter, left: _Left) -> None:
        self._exporter, self._left = exporter, left

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._left(spans, sent=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _named(context: Context) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote=False, trace_flags=_SAMPLED)


@cache
def _scope(role: str) -> InstrumentationScope:
    return InstrumentationScope(f"freshet.{role}", RELEASE)
