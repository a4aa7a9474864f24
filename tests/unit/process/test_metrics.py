"""Metrics that every process has."""

from __future__ import annotations

from prometheus_client import generate_latest

from freshet.process.telemetry import PROCESS_METRICS, service_registry
from freshet.release import RELEASE


def test_registry_has_threads_and_release() -> None:
    text = generate_latest(service_registry()).decode()
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line[0] != "#"}

    assert values[f'freshet_build_info{{version="{RELEASE}"}}'] == 1
    assert values["freshet_process_threads"] >= 1
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    limited = {"freshet_process_memory_limit_bytes"}
    assert names - limited == {metric.exposed for metric in PROCESS_METRICS} - limited
