"""What every process tells of itself: memory, processor time, files, since when, and which release it is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from freshet.release import RELEASE
from freshet.runtime.metrics import Metric, Reading, register

__all__ = ["PROCESS_METRICS", "memory_limit", "process_readings", "service_registry"]

PROCESS_METRICS = (
    Metric("freshet_build_info", "gauge", "1", "1, with the release that runs.", ("version",)),
    Metric("freshet_process_start_seconds", "gauge", "seconds since 1970", "When the process began."),
    Metric("freshet_process_memory_bytes", "gauge", "bytes", "Resident memory of the process."),
    Metric(
        "freshet_process_memory_limit_bytes",
        "gauge",
        "bytes",
        "What its container or unit may take (cgroup); left out where nothing limits it.",
    ),
    Metric("freshet_process_cpu_seconds", "counter", "seconds", "Processor time, of user and system."),
    Metric("freshet_process_threads", "gauge", "threads", "Threads of the Python interpreter."),
    Metric("freshet_process_open_files", "gauge", "files", "Files and sockets that are open."),
)

_PAGE = os.sysconf("SC_PAGESIZE")
_STARTED = time.time()
_UNLIMITED = 1 << 60
"""Version 1 of cgroups says a number near 2^63 where nothing is limited."""

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def service_registry() -> CollectorRegistry:
    """A registry that tells of this process; the service's own metrics join it."""
    registry = CollectorRegistry()
    register(registry, PROCESS_METRICS, process_readings)
    return registry


def process_readings() -> Mapping[str, Reading]:
    """The process as it is now; what the system does not tell is left out."""
    times = os.times()
    readings: dict[str, Reading] = {
        "freshet_build_info": {(RELEASE,): 1.0},
        "freshet_process_start_seconds": _STARTED,
        "freshet_process_cpu_seconds": times.user + times.system,
        "freshet_process_threads": threading.active_count(),
    }
    try:
        readings["freshet_process_memory_bytes"] = (
            int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
        )
        readings["freshet_process_open_files"] = len(os.listdir("/proc/self/fd"))
    except (OSError, ValueError, IndexError):
        pass  # no Linux
    limit = memory_limit()
    if limit is not None:
        readings["freshet_process_memory_limit_bytes"] = limit
    return readings


def memory_limit(paths: tuple[str, ...] = _LIMITS) -> int | None:
    """Bytes that this process's cgroup may take; None where there is no limit, or it cannot be found out."""
    for path in paths:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):  # not there; or "max"
            continue
        if limit < _UNLIMITED:
            return limit
    return None
