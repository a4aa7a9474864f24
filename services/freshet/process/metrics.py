"""What every process tells of itself beside Prometheus' own `process_*` metrics: release, threads, limit."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from freshet.http.certificates import seconds_left
from freshet.http.tls import HANDSHAKES, handshakes
from freshet.observability.metrics import Metric, Reading, register
from freshet.observability.skipped import skipped
from freshet.observability.tombstones import tombstones
from freshet.process.memory import memory_limit
from freshet.process.traces import SPANS, span_readings
from freshet.release import RELEASE

__all__ = ["PROCESS_METRICS", "service_registry"]

PROCESS_METRICS = (
    SPANS,
    Metric("freshet_build_info", "gauge", "1", "1, with the release that runs.", ("version",)),
    Metric("freshet_process_threads", "gauge", "threads", "Threads of the Python interpreter."),
    Metric(
        "freshet_process_memory_limit_bytes",
        "gauge",
        "bytes",
        "What its container or unit may take (cgroup); left out where nothing limits it.",
    ),
    Metric(
        "freshet_certificate_seconds_left",
        "gauge",
        "seconds",
        "Until the certificate that it shows expires, by whose settings name it; below 0 once it has. Left "
        "out where it shows none.",
        ("of",),
    ),
    HANDSHAKES,
    Metric(
        "freshet_skipped_state",
        "counter",
        "records, files or rows",
        "State that was damaged and was left out, by what it is of: the main work goes on without it. "
        "`skipped` in "
        "`/status` names the newest place of each.",
        ("of",),
    ),
    Metric(
        "freshet_log_tombstones",
        "counter",
        "records",
        "Records without a value that this process has read and passed over, as compacted and change-data "
        "topics hold them. They are no fault.",
        ("topic",),
    ),
)


def service_registry() -> CollectorRegistry:
    """A registry that tells of this process; the service's own metrics join it."""
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
