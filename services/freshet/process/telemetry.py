"""Metrics that every process publishes beside Prometheus' own `process_*`, and the start of tracing.

OpenTelemetry is imported only if the settings enable it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from freshet.config.settings import Settings
from freshet.errors import ConfigError
from freshet.extras import how_to_install
from freshet.http.tls import HANDSHAKES, seconds_left
from freshet.observability.metrics import Metric, register
from freshet.observability.skipped_state import skipped, tombstones
from freshet.observability.tracing import install
from freshet.process.memory import memory_limit
from freshet.release import RELEASE

if TYPE_CHECKING:
    from freshet.observability.tracer import ExportQueue

OUTCOMES = ("sent", "dropped", "failed")

CLOSE_S = 2.0
"""Time at the end of a process for sending its last spans."""

SYSTEMS = {"kafka": "kafka", "sqlite": "freshet_sqlite"}

export_queue: ExportQueue | None = None

SPANS = Metric(
    "freshet_traces_spans",
    "counter",
    "spans",
    "Spans by outcome: sent, dropped (the queue was full), failed (the collector refused them).",
    ("outcome",),
    at=lambda _: dict.fromkeys(OUTCOMES, 0) if export_queue is None else export_queue.counts(),
)


def start_traces(
    settings: Settings, *, role: str, instance: str, model: str, on: bool = True
) -> Callable[[], None]:
    """Install the tracer if `settings` enable it and `on` (the role has spans); return its stop callback.

    Raises ConfigError if the extra `tracing` is not installed.
    """
    global export_queue  # noqa: PLW0603 - one per process, as the tracer
    if not on or not settings.traces.ratio or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return lambda: None
    try:
        from freshet.observability.trace_ids import TraceIds  # noqa: PLC0415
        from freshet.observability.tracer import ExportQueue, Tracer, otlp_exporter  # noqa: PLC0415 - OpenTelemetry
    except ImportError as error:
        raise ConfigError(
            "environment",
            "FRESHET_TRACES_RATIO",
            settings.traces.ratio,
            "that the extra `tracing` is installed",
            f"{how_to_install('opentelemetry')} ({error})",
        ) from None
    scheme = settings.common.log_url.partition(":")[0]
    export_queue = ExportQueue(otlp_exporter(settings.traces.endpoint), settings.traces.queue_spans)
    tracer = Tracer(
        TraceIds(model, settings.traces.ratio),
        export_queue,
        sampler=export_queue,
        resource={
            "service.name": f"freshet-{role}",
            "service.namespace": "freshet",
            "service.instance.id": instance or f"{socket.gethostname()}-{os.getpid()}",
            "service.version": RELEASE,
            "freshet.model": model,
        },
        system=SYSTEMS.get(scheme, scheme),
    )
    install(tracer)

    def stop() -> None:
        install(None)
        tracer.close(CLOSE_S)

    return stop


PROCESS_METRICS = (
    SPANS,
    Metric(
        "freshet_build_info",
        "gauge",
        "1",
        "1, labelled with the running release.",
        ("version",),
        at=lambda _: {RELEASE: 1},
    ),
    Metric(
        "freshet_process_threads",
        "gauge",
        "threads",
        "Threads of the Python interpreter.",
        at=lambda _: threading.active_count(),
    ),
    Metric(
        "freshet_process_memory_limit_bytes",
        "gauge",
        "bytes",
        "Least memory limit of the process's cgroup and the groups above it; absent if there is none.",
        at=lambda _: memory_limit(),
    ),
    Metric(
        "freshet_certificate_seconds_left",
        "gauge",
        "seconds",
        "Time until the process's certificate expires, by the settings that name it; negative once it has. "
        "Absent without a certificate.",
        ("of",),
        at=lambda _: seconds_left(),
    ),
    HANDSHAKES,
    Metric(
        "freshet_skipped_state",
        "counter",
        "records, files or rows",
        "Damaged state that the process skipped, by its kind; the main work continues without it. "
        "`skipped` in `/status` names the newest place of each kind.",
        ("of",),
        at=lambda _: skipped(),
    ),
    Metric(
        "freshet_log_tombstones",
        "counter",
        "records",
        "Records without a value that this process has read and skipped. Compacted and change-data topics "
        "hold them; they are no fault.",
        ("topic",),
        at=lambda _: tombstones(),
    ),
)


def service_registry() -> CollectorRegistry:
    """Create a registry with the metrics of the process; the service adds its own."""
    registry = CollectorRegistry()
    register(registry, PROCESS_METRICS, dict)
    return registry
