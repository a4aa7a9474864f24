"""Metrics that every process has."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import generate_latest

from freshet.process.memory import memory_limit
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


def test_memory_limit_is_that_of_the_cgroup(tmp_path: Path) -> None:
    v2, v1 = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    paths = (str(v2), str(v1))

    assert memory_limit(paths) is None
    v2.write_text("max\n")
    v1.write_text("9223372036854771712\n")
    assert memory_limit(paths) is None
    v1.write_text("1048576\n")
    assert memory_limit(paths) == 1 << 20
    v2.write_text("2097152\n")
    assert memory_limit(paths) == 2 << 20
