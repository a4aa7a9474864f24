"""Start of tracing in a process. OpenTelemetry is imported only if the settings enable it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from freshet.config.settings import Settings
from freshet.errors import ConfigError
from freshet.extras import how_to_install
from freshet.observability.metrics import Metric
from freshet.observability.tracing import install
from freshet.release import RELEASE

if TYPE_CHECKING:
    from freshet.observability.tracer import ExportQueue

__all__ = ["SPANS", "start_traces"]

OUTCOMES = ("sent", "dropped", "failed")

CLOSE_S = 2.0
"""Time at the end of a process for sending its last spans."""

SYSTEMS = {"kafka": "kafka", "sqlite": "freshet_sqlite"}

_queue: ExportQueue | None = None

SPANS = Metric(
    "freshet_traces_spans",
    "counter",
    "spans",
    "Spans by outcome: sent, dropped (the queue was full), failed (the collector refused them).",
    ("outcome",),
    at=lambda _: dict.fromkeys(OUTCOMES, 0) if _queue is None else _queue.counts(),
)


def start_traces(
    settings: Settings, *, role: str, instance: str, model: str, on: bool = True
) -> Callable[[], None]:
    """Install the tracer if `settings` enable it and `on` (the role has spans); return its stop callback.

    Raises ConfigError if the extra `tracing` is not installed.
    """
    global _queue  # noqa: PLW0603 - one per process, as the tracer
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
    _queue = ExportQueue(otlp_exporter(settings.traces.endpoint), settings.traces.queue_spans)
    tracer = Tracer(
        TraceIds(model, settings.traces.ratio),
        _queue,
        sampler=_queue,
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
