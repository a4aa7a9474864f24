"""Tracing turned on for a process, if its settings say so. OpenTelemetry is imported only then."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from freshet.config.settings import Settings
from freshet.errors import ConfigError
from freshet.extras import how_to_install
from freshet.observability.metrics import Metric, Reading
from freshet.observability.tracing import Tracer, install
from freshet.release import RELEASE

if TYPE_CHECKING:
    from freshet.observability.trace_export import Outbox

__all__ = ["SPANS", "span_readings", "start_traces"]

SPANS = Metric(
    "freshet_traces_spans",
    "counter",
    "spans",
    "Spans of traces: sent, dropped as too many waited, failed as the collector did not take them.",
    ("outcome",),
)

OUTCOMES = ("sent", "dropped", "failed")

CLOSE_S = 2.0
"""How long the end of a process waits for its last spans to be sent."""

SYSTEMS = {"kafka": "kafka", "sqlite": "freshet_sqlite"}

_outbox: Outbox | None = None


def start_traces(
    settings: Settings, *, role: str, instance: str, model: str, on: bool = True
) -> Callable[[], None]:
    """Trace from now on, if `settings` say so; returns what ends it. Raises ConfigError.

    Args:
        on: whether this role tells of anything at all.
    """
    global _outbox  # noqa: PLW0603 - one a process, as its tracer
    if not on or not settings.traces.ratio or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return _nothing
    try:
        from freshet.observability.trace_export import Outbox  # noqa: PLC0415 - so that who does not trace has none of it
    except ImportError as error:
        raise ConfigError(
            "environment",
            "FRESHET_TRACES_RATIO",
            settings.traces.ratio,
            "that the extra `tracing` is installed",
            f"{how_to_install('opentelemetry')} ({error})",
        ) from None
    scheme = settings.common.log_url.partition(":")[0]
    _outbox = outbox = Outbox(
        {
            "service.name": f"freshet-{role}",
            "service.namespace": "freshet",
            "service.instance.id": instance or f"{socket.gethostname()}-{os.getpid()}",
            "service.version": RELEASE,
            "freshet.model": model,
        },
        endpoint=settings.traces.endpoint,
        queue_spans=settings.traces.queue_spans,
    )
    install(Tracer(model, settings.traces.ratio, outbox.tell, system=SYSTEMS.get(scheme, scheme)))

    def stop() -> None:
        install(None)
        outbox.close(CLOSE_S)

    return stop


def _nothing() -> None:
    """Nothing was begun."""


def span_readings() -> Mapping[str, Reading]:
    """What became of spans so far."""
    counts = dict.fromkeys(OUTCOMES, 0) if _outbox is None else _outbox.counts()
    return {SPANS.name: {(outcome,): float(n) for outcome, n in counts.items()}}
