"""Metrics that every process publishes beside Prometheus' own `process_*`."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry

from freshet.http.certificates import seconds_left
from freshet.http.tls import HANDSHAKES
from freshet.observability.metrics import Metric, register
from freshet.observability.skipped_state import skipped, tombstones
from freshet.process.memory import memory_limit
from freshet.process.traces import SPANS
from freshet.release import RELEASE

__all__ = ["PROCESS_METRICS", "service_registry"]

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
        "Memory limit of the process's cgroup; absent if there is none.",
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
