"""Export of spans to a collector, without delay for the process; disabled tracing loads nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import orjson
import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from freshet.config.settings import Settings, load_settings
from freshet.errors import ConfigError
from freshet.http.app import App, Reply
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, ClientGoneError, Request, Response, error_response
from freshet.observability.logging import configure_logging
from freshet.observability.metrics import readings
from freshet.observability.trace_ids import TraceIds
from freshet.observability.tracer import ExportQueue, Tracer, otlp_exporter
from freshet.observability.tracing import ClientContext, Context, active, context_of, install, within
from freshet.process import telemetry
from freshet.process.telemetry import SPANS, start_traces
from freshet.testing.conditions import wait_until
from tests.fixtures.asgi import Message, answered
from tests.fixtures.spans import recording
from tests.servers.otlp import Receiver, receiver


def on(**variables: str) -> Settings:
    return load_settings({"FRESHET_TRACES_RATIO": "1", **variables})


def record(queue: ExportQueue, spans: int = 1, *, by_client: bool = False) -> None:
    tracer = Tracer(TraceIds("news", 1.0), queue, sampler=queue)
    parent = ClientContext(1, 2) if by_client else Context(1, 2)
    for _ in range(spans):
        tracer.end(tracer.start("gateway", "send actions", parent=parent))


class BlockedExporter(SpanExporter):
    """An exporter that blocks until `go`."""

    def __init__(self) -> None:
        self.go, self.called = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        assert self.go.wait(60)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing."""


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiver() as running:
        yield running


@pytest.fixture(autouse=True)
def _reset_tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(telemetry, "CLOSE_S", 20.0)
    yield
    install(None)
    telemetry.export_queue = None
    structlog.reset_defaults()


def test_a_span_arrives_as_it_is(collector: Receiver) -> None:
    queue = ExportQueue(otlp_exporter(collector.url + "/"), 10)
    tracer = Tracer(TraceIds("news", 1.0), queue, resource={"service.name": "freshet-gateway"})
    trace_id = 0x1234 << 64 | 0x5678
    span = tracer.start(
        "gateway",
        "send actions",
        1_000,
        kind="producer",
        context=Context(trace_id, 0x9ABC),
        parent=Context(trace_id, 0xDEF0),
        attributes={"messaging.system": "kafka", "freshet.samples": 3},
        links=[Context(7, 8)],
    )
    tracer.end(span, end_ns=2_000)
    tracer.close(10)

    (found,) = collector.spans
    assert (found.name, found.scope, found.service) == ("send actions", "freshet.gateway", "freshet-gateway")
    assert (found.trace_id, found.span_id) == ("00000000000012340000000000005678", "0000000000009abc")
    assert (found.parent, found.links) == ("000000000000def0", ((f"{7:032x}", f"{8:016x}"),))
    assert (found.start_ns, found.end_ns, found.kind, found.failed) == (1_000, 2_000, 4, False)
    assert found.attributes == {"messaging.system": "kafka", "freshet.samples": 3}
    assert queue.counts() == {"sent": 1, "dropped": 0, "failed": 0}


def test_variables_of_opentelemetry_override_settings(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ann")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop-events")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    stop = start_traces(on(), role="gateway", instance="", model="news")
    tracer = active()
    assert tracer is not None
    tracer.end(tracer.start("gateway", "x"))
    stop()

    (found,) = collector.spans
    assert (found.service, found.resource["deployment.environment"]) == ("shop-events", "test")
    assert found.resource["service.namespace"] == "freshet"
    assert collector.headers["x-tenant"] == "ann"
    assert active() is None


def test_slow_collector_drops_spans_without_delay() -> None:
    exporter = BlockedExporter()
    queue = ExportQueue(exporter, 8, delay_ms=1)
    record(queue, 8)
    assert exporter.called.wait(60)
    record(queue, 5)

    assert queue.counts() == {"sent": 0, "dropped": 5, "failed": 0}
    exporter.go.set()
    queue.shutdown()
    assert queue.counts() == {"sent": 8, "dropped": 5, "failed": 0}


def test_spans_that_end_while_the_queue_is_full_are_dropped_too() -> None:
    exporter = BlockedExporter()
    queue = ExportQueue(exporter, 2, delay_ms=1)
    tracer = Tracer(TraceIds("news", 1.0), queue, sampler=queue)
    spans = [tracer.start("trainer", "train") for _ in range(5)]  # while there is space

    for span in spans:
        tracer.end(span)
    late = tracer.start("trainer", "train", context=Context(5, 6))

    assert queue.counts()["dropped"] == 4
    assert (late.is_recording(), context_of(late)) == (False, Context(5, 6)), "others know it by this name"
    exporter.go.set()
    queue.shutdown()
    assert queue.counts() == {"sent": 2, "dropped": 4, "failed": 0}


def test_client_spans_leave_space_for_event_spans() -> None:
    exporter = BlockedExporter()
    queue = ExportQueue(exporter, 20, delay_ms=1)
    record(queue, 100, by_client=True)
    assert queue.counts()["dropped"] == 98
    assert exporter.called.wait(60)
    record(queue, 19)

    assert queue.counts()["dropped"] == 99, "one more than the queue of 18 holds"
    exporter.go.set()
    wait_until("all were sent", lambda: queue.counts()["sent"] == 20, within_s=60)
    record(queue, by_client=True)  # there is space again
    queue.shutdown()
    assert queue.counts() == {"sent": 21, "dropped": 99, "failed": 0}


def test_refused_spans_are_counted(collector: Receiver) -> None:
    collector.refuses = True
    queue = ExportQueue(otlp_exporter(collector.url), 1, delay_ms=1)
    record(queue)
    wait_until("it was refused", lambda: queue.counts()["failed"] == 1, within_s=60)
    collector.refuses = False
    record(queue)
    queue.shutdown()

    assert queue.counts() == {"sent": 1, "dropped": 0, "failed": 1}


def test_unreachable_collector_does_not_delay_exit() -> None:
    exporter = BlockedExporter()
    tracer = Tracer(TraceIds("news", 1.0), ExportQueue(exporter, 8, delay_ms=1))
    tracer.end(tracer.start("gateway", "send actions"))
    assert exporter.called.wait(60)

    tracer.close(0.01)  # returns, while the exporter still waits

    assert not exporter.go.is_set()
    exporter.go.set()


def test_outcomes_of_spans_are_readings(collector: Receiver) -> None:
    given = on(FRESHET_TRACES_ENDPOINT=collector.url)
    stop = start_traces(given, role="joiner", instance="joiner-1", model="news")
    tracer = active()
    assert tracer is not None
    tracer.end(tracer.start("joiner", "x"))
    stop()

    assert readings([SPANS], ())["freshet_traces_spans"] == {
        ("sent",): 1.0,
        ("dropped",): 0.0,
        ("failed",): 0.0,
    }


def test_otel_sdk_disabled_turns_tracing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    start_traces(on(), role="joiner", instance="", model="news")()

    assert active() is None


def test_missing_extra_is_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "freshet.observability.tracer", None)

    with pytest.raises(ConfigError, match=r"\.\[tracing\]"):
        start_traces(on(), role="joiner", instance="", model="news")


@pytest.mark.parametrize(
    "variables",
    [
        {"FRESHET_TRACES_RATIO": "1.5"},
        {"FRESHET_TRACES_RATIO": "-0.1"},
        {"FRESHET_TRACES_ENDPOINT": "collector:4317"},
        {"FRESHET_TRACES_ENDPOINT": "http://ann:secret@collector"},
    ],
)
def test_a_bad_setting_stops_the_start(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="FRESHET_TRACES_"):
        load_settings(variables)


def test_log_lines_have_trace_id(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner")
    with within(Context(0xAB, 0xCD)):
        structlog.get_logger().info("joined")
    structlog.get_logger().info("not traced")

    first, second = (orjson.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["trace_id"], first["span_id"]) == (f"{0xAB:032x}", f"{0xCD:016x}")
    assert "trace_id" not in second


OFF = """
import sys, threading
from freshet.apps import services
from freshet.gateway import service as a
from freshet.inference import service as b
from freshet.joiner import service as c
from freshet.embedder import service as d
from freshet.paramserver import service as e
from freshet.trainer import service as f
from freshet.observability.metrics import readings
from freshet.process.telemetry import SPANS, start_traces
from freshet.config.settings import load_settings
before = threading.active_count()
start_traces(load_settings({}), role="gateway", instance="", model="news")()
print(sorted(m for m in sys.modules if m.split(".")[0] == "opentelemetry"), threading.active_count() - before)
"""


@pytest.mark.slow
def test_disabled_tracing_loads_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[] 0"


def test_failed_request_is_in_trace_and_log_of_client(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("gateway")
    tracer, spans = recording()
    install(tracer)
    sent: list[Message] = []

    def fails(request: Request, reply: Reply) -> None:
        assert request.span is not None
        raise KeyError("a bug")

    async def ask() -> None:
        app = App(CollectorRegistry(), BodyLimits(1_000, 1), role="gateway")
        app.route_hot(Endpoint("POST", "/v1/events", "Fails.", ()), fails)
        sent.extend(await answered(app, "/v1/events", {b"traceparent": f"00-{5:032x}-{6:016x}-01".encode()}))

    asyncio.run(ask())

    (span,) = spans
    assert (span.name, span.role, span.kind) == ("POST /v1/events", "gateway", "server")
    assert (span.parent, span.context.trace_id) == (Context(5, 6), 5)
    assert span.attributes["http.response.status_code"] == sent[0]["status"] == 500
    assert span.error
    assert span.by_client
    line = orjson.loads(capsys.readouterr().err)
    assert (line["trace_id"], line["span_id"]) == (f"{5:032x}", f"{span.context.span_id:016x}")


def test_span_of_a_request_ends_with_its_reply(caplog: pytest.LogCaptureFixture) -> None:
    tracer, spans = recording()
    install(tracer)
    sent: list[Message] = []

    def fails_late(request: Request, reply: Reply) -> None:
        reply(Response(200, b"{}"))
        raise KeyError("a bug behind the reply")

    async def ask() -> None:
        app = App(CollectorRegistry(), BodyLimits(1_000, 1), role="gateway")
        app.route_hot(Endpoint("POST", "/v1/events", "Fails late.", ()), fails_late)
        sent.extend(await answered(app, "/v1/events", {b"traceparent": f"00-{5:032x}-{6:016x}-01".encode()}))

    asyncio.run(ask())

    assert sent[0]["status"] == 200
    assert [(span.attributes["http.response.status_code"], span.error) for span in spans] == [(200, "")]
    assert [r.message for r in caplog.records if r.name.startswith("opentelemetry")] == []


def test_disconnected_client_is_counted_as_gone() -> None:
    tracer, spans = recording()
    install(tracer)
    registry, sent = CollectorRegistry(), list[Message]()

    def gives_up(request: Request, reply: Reply) -> None:
        is_gone = request.watch_client()
        assert not is_gone()

        def look() -> None:
            if is_gone():
                reply(error_response(ClientGoneError()))
            else:
                asyncio.get_running_loop().call_soon(look)

        look()

    async def ask() -> None:
        app = App(registry, BodyLimits(1_000, 1), role="inference")
        app.route_hot(Endpoint("POST", "/v1/rank", "Waits.", ()), gives_up)
        headers = {b"traceparent": f"00-{5:032x}-{6:016x}-01".encode()}
        sent.extend(await answered(app, "/v1/rank", headers, gone=True))

    asyncio.run(ask())

    labels = {"route": "/v1/rank", "status": "gone", "door": "passed"}
    assert registry.get_sample_value("freshet_http_requests_total", labels) == 1
    assert registry.get_sample_value("freshet_http_request_seconds_count", {"route": "/v1/rank"}) == 1
    assert [span.attributes["http.response.status_code"] for span in spans] == [499]
    assert (sent, spans[0].error) == ([], "")
