"""Spans by OpenTelemetry's SDK: its tracers, batch processor and OTLP exporter. Imported only where tracing
is on; the extra `tracing` installs its dependencies.

Spans have the ids that `trace_ids` derives. Many are made after the work that they describe, with times that
were noted: a service often learns only then that the work is traced (a batch, once it is decoded).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

from opentelemetry.context import Context as Carrier
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as ScopeTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from freshet.observability.trace_ids import MOST_LINKS, TraceIds
from freshet.observability.tracing import ClientContext, Context
from freshet.release import RELEASE

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool

MOST_CHARS = 1_000
"""Characters of a text in a span: the queue bounds the number of spans, and this their bytes."""

CLIENT_SHARE = 10
"""A tenth of the queue is for spans that clients ask for with a `traceparent` header: every client can do so
with each request, and must not displace the spans of events."""

_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_DROP = SamplingResult(Decision.DROP)
_derived: ContextVar[Context | None] = ContextVar("freshet-derived-ids", default=None)


class Tracer:
    """Records the spans of one model in this process. Thread-safe."""

    def __init__(
        self,
        ids: TraceIds,
        processor: SpanProcessor,
        *,
        sampler: Sampler = ALWAYS_ON,
        resource: Mapping[str, str] | None = None,
        system: str = "",
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Record spans into `processor`.

        Args:
            sampler: may drop spans at their start; `ids` have decided before which events are traced.
            resource: describes this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override it.
            system: the event log's name, for `messaging.system`.
            now_ns: wall clock.
        """
        self.ids, self.system, self.now_ns = ids, system, now_ns
        self._provider = TracerProvider(
            sampler=sampler,
            resource=Resource.create(dict(resource or {})).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
            id_generator=_DerivedIds(),
            span_limits=SpanLimits(max_links=MOST_LINKS, max_attribute_length=MOST_CHARS),
        )
        self._provider.add_span_processor(processor)
        self._tracers: dict[str, ScopeTracer] = {}
        # Spans that later spans of other traces link to: the newest; one thread appends, another reads.
        self.batches: deque[Context] = deque(maxlen=MOST_LINKS)
        self.pushes: deque[Context] = deque(maxlen=MOST_LINKS)
        self.newest_rows: Context | None = None
        self.sent_samples: OrderedDict[int, None] = (
            OrderedDict()
        )  # requests with a span of their first samples

    def start(
        self,
        service: str,
        name: str,
        start_ns: int | None = None,
        *,
        kind: Kind = "internal",
        context: Context | None = None,
        parent: Context | None = None,
        attributes: Mapping[str, Value] | None = None,
        links: Sequence[Context] = (),
    ) -> Span:
        """Start a span now, or at a time that was noted.

        Args:
            service: the span's service: gateway, joiner, embedder, paramserver, trainer or inference.
            context: the span's ids; None: new ones, in the parent's trace.
        """
        carrier = Carrier()
        if parent is not None:
            carrier = set_span_in_context(NonRecordingSpan(_named(parent)), carrier)
        token = _derived.set(context)
        try:
            return self._of(service).start_span(
                name,
                carrier,
                SpanKind[kind.upper()],
                attributes,
                [Link(_named(one)) for one in links],
                self.now_ns() if start_ns is None else start_ns,
            )
        finally:
            _derived.reset(token)

    def end(self, span: Span, error: str = "", end_ns: int | None = None) -> None:
        """End a span, now or at a time that was noted; not before its start, in case the clock jumped."""
        if error:
            span.set_status(Status(StatusCode.ERROR, error[:MOST_CHARS]))
        end_ns = self.now_ns() if end_ns is None else end_ns
        span.end(max(end_ns, span.start_time or 0) if isinstance(span, ReadableSpan) else end_ns)

    @staticmethod
    def client_span(traceparent: bytes | None) -> ClientContext | None:
        """Return the client's span of a W3C `traceparent` header if the client records it; else None."""
        if traceparent is None:
            return None
        carrier = _PROPAGATOR.extract({"traceparent": traceparent.decode("latin-1")}, Carrier())
        found = get_current_span(carrier).get_span_context()
        recorded = found.is_valid and found.trace_flags.sampled
        return ClientContext(found.trace_id, found.span_id) if recorded else None

    def close(self, wait_s: float) -> None:
        """Send the waiting spans, for at most so long."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(wait_s)

    def _of(self, service: str) -> ScopeTracer:
        found = self._tracers.get(service)
        if found is None:
            found = self._tracers[service] = self._provider.get_tracer(f"freshet.{service}", RELEASE)
        return found


class _DerivedIds(RandomIdGenerator):
    """The ids of the span that is being recorded, if they are derived; else random ones."""

    def generate_trace_id(self) -> int:
        context = _derived.get()
        return super().generate_trace_id() if context is None else context.trace_id

    def generate_span_id(self) -> int:
        context = _derived.get()
        return super().generate_span_id() if context is None else context.span_id

    def is_trace_id_random(self) -> bool:
        return False


class ExportQueue(SpanProcessor, Sampler):
    """Passes spans to a `BatchSpanProcessor` up to a limit, never waits, and counts the outcomes.

    A full `BatchSpanProcessor` drops its oldest span, counts that for a MeterProvider only, and has no limit
    for some of the spans. So spans beyond the limits are dropped here: by a sampler at their start, which is
    cheapest, or at their end.
    """

    def __init__(self, exporter: SpanExporter, queue_spans: int, delay_ms: float | None = None) -> None:
        """Start the exporting thread.

        Args:
            queue_spans: that wait at most, a tenth of them requested by clients; more are dropped.
            delay_ms: between two exports; None: OTEL_BSP_SCHEDULE_DELAY, 5 s without it.
        """
        self._lock = threading.Lock()
        self._most, self._most_clients = queue_spans, max(1, queue_spans // CLIENT_SHARE)
        self._waiting = self._clients = 0  # all spans; those of them that clients requested
        self._counts = {"sent": 0, "dropped": 0, "failed": 0}
        self._batches = BatchSpanProcessor(
            _Counting(exporter, self._exported),
            max_queue_size=queue_spans,
            max_export_batch_size=min(512, queue_spans),
            schedule_delay_millis=delay_ms,
        )

    def should_sample(
        self, parent_context: Carrier | None, trace_id: int, name: str, *args: Any, **kwargs: Any
    ) -> SamplingResult:
        """Drop a span at its start if the queue is full."""
        with self._lock:
            dropped = self._drops(get_current_span(parent_context).get_span_context().is_remote)
        return _DROP if dropped else ALWAYS_ON.should_sample(parent_context, trace_id, name, *args, **kwargs)

    def get_description(self) -> str:
        """Name the sampler."""
        return "ExportQueue"

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or drop it if the queue is full."""
        client = _by_client(span)
        with self._lock:
            if self._drops(client):
                return
            self._waiting += 1
            self._clients += client
        self._batches.on_end(span)

    def _drops(self, client: bool) -> bool:
        full = self._waiting >= self._most or (client and self._clients >= self._most_clients)
        self._counts["dropped"] += full
        return full

    def counts(self) -> dict[str, int]:
        """Return spans sent, dropped as too many waited, and failed as the collector did not take them."""
        with self._lock:
            return dict(self._counts)

    def shutdown(self) -> None:
        """Send the waiting spans and stop."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def _exported(self, spans: Sequence[ReadableSpan], result: SpanExportResult) -> None:
        with self._lock:
            self._waiting -= len(spans)
            self._clients -= sum(map(_by_client, spans))
            self._counts["sent" if result is SpanExportResult.SUCCESS else "failed"] += len(spans)


class _Counting(SpanExporter):
    def __init__(
        self, exporter: SpanExporter, exported: Callable[[Sequence[ReadableSpan], SpanExportResult], None]
    ) -> None:
        self._exporter, self._exported = exporter, exported

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._exported(spans, result)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to the OTLP receiver at a base URL; empty: as OTEL_EXPORTER_OTLP_… say."""
    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)


def _by_client(span: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.is_remote


def _named(context: Context) -> SpanContext:
    remote = isinstance(context, ClientContext)
    return SpanContext(context.trace_id, context.span_id, is_remote=remote, trace_flags=_SAMPLED)
