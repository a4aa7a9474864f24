"""Metrics that every process publishes beside Prometheus' own `process_*`."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from freshet.http.tls import HANDSHAKES, handshakes, seconds_left
from freshet.observability.metrics import Metric, Reading, register
from freshet.observability.skipped import skipped
from freshet.observability.tombstones import tombstones
from freshet.process.memory import memory_limit
from freshet.process.traces import SPANS, span_readings
from freshet.release import RELEASE

__all__ = ["PROCESS_METRICS", "service_registry"]

PROCESS_METRICS = (
    SPANS,
    Metric("freshet_build_info", "gauge", "1", "1, labelled with the running release.", ("version",)),
    Metric("freshet_process_threads", "gauge", "threads", "Threads of the Python interpreter."),
    Metric(
        "freshet_process_memory_limit_bytes",
        "gauge",
        "bytes",
        "Memory limit of the process's cgroup; absent if there is none.",
    ),
    Metric(
        "freshet_certificate_seconds_left",
        "gauge",
        "seconds",
        "Time until the process's certificate expires, by the settings that name it; negative once it has. "
        "Absent without a certificate.",
        ("of",),
    ),
    HANDSHAKES,
    Metric(
        "freshet_skipped_state",
        "counter",
        "records, files or rows",
        "Damaged state that the process skipped, by its kind; the main work continues without it. "
        "`skipped` in `/status` names the newest place of each kind.",
        ("of",),
    ),
    Metric(
        "freshet_log_tombstones",
        "counter",
        "records",
        "Records without a value that this process has read and skipped. Compacted and change-data topics "
        "hold them; they are no fault.",
        ("topic",),
    ),
)


def service_registry() -> CollectorRegistry:
    """Create a registry with the metrics of the process; the service adds its own."""
    registry = CollectorRegistry()
    register(registry, PROCESS_METRICS, _readings)
    return registry


def _readings() -> Mapping[str, Reading]:
    readings: dict[str, Reading] = {
        "freshet_build_info": {(RELEASE,): 1.0},
        "freshet_process_threads": threading.active_count(),
        "freshet_certificate_seconds_left": seconds_left(),
        **span_readings(),
        HANDSHAKES.name: handshakes(),
        "freshet_skipped_state": {(kind,): count for kind, count in skipped().items()},
        "freshet_log_tombstones": {(topic,): float(n) for topic, n in tombstones().items()},
    }
    limit = memory_limit()
    return readings if limit is None else readings | {"freshet_process_memory_limit_bytes": limit}
