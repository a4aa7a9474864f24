"""Figures of a process on another machine, from the metrics of Prometheus' client."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from freshet.console.instances import Service
from freshet.console.services import EVERY_S, Processes, ProcessFigures, process_figures
from freshet.http.addresses import Address
from freshet.http.admin import Admin
from freshet.process.process_info import memory_mb
from freshet.testing.clock import SettableClock

SERVICE = Service("gateway", "gateway", "ready", "", "127.0.0.1", 1)


def test_figures_are_found_among_others() -> None:
    page = b"""# HELP process_resident_memory_bytes Resident memory size in bytes.
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 5.8544128e+07
process_resident_memory_bytes_x 1
freshet_process_start_time_seconds 3
process_start_time_seconds 1.76384e+09
"""
    assert process_figures(page) == ProcessFigures(58_544_128.0, 1_763_840_000.0)


@pytest.mark.parametrize("page", [b"", b"process_resident_memory_bytes NaN\n", b"\xff\xfe", b"process_start"])
def test_missing_figures_are_not_known(page: bytes) -> None:
    assert process_figures(page) == ProcessFigures()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """Return the address of this process's metrics."""
    monkeypatch.setattr("freshet.console.services.METRICS_TIMEOUT_S", 20.0)
    admin = Admin("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: None, status=dict)
    yield Address("127.0.0.1", admin.port)
    admin.close()


def test_memory_and_age_of_a_process_are_read(own: Address) -> None:
    clock = SettableClock()
    clock.jump(time.time_ns() // 1_000_000)
    seen = Processes(clock).with_figures(SERVICE, own)

    known = memory_mb(os.getpid())
    assert known is not None
    assert seen.memory_mb == pytest.approx(known, rel=0.2)
    assert seen.up_s is not None
    assert 0 < seen.up_s < 86_400
    assert seen.restarts == 0


def test_a_silent_process_keeps_its_last_figures(own: Address) -> None:
    clock, nowhere = SettableClock(), Address("127.0.0.1", 1)
    processes = Processes(clock)

    assert processes.with_figures(SERVICE, nowhere).memory_mb is None
    clock.advance(EVERY_S)
    first = processes.with_figures(SERVICE, own)
    clock.advance(EVERY_S)
    assert processes.with_figures(SERVICE, nowhere).memory_mb == first.memory_mb


def test_a_page_that_no_exporter_writes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([b"process_resident_memory_bytes 1048576\n", b"process_resident_memory_bytes 1.2.3\n"])
    monkeypatch.setattr("freshet.console.services.read_metrics", lambda _: next(pages))
    clock = SettableClock()
    processes = Processes(clock)

    assert processes.with_figures(SERVICE, Address("127.0.0.1", 1)).memory_mb == 1.0
    clock.advance(10)
    assert processes.with_figures(SERVICE, Address("127.0.0.1", 1)).memory_mb == 1.0


def test_another_process_in_its_place_is_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    began = 1_000.0
    monkeypatch.setattr(
        "freshet.console.services.read_metrics", lambda _: f"process_start_time_seconds {began}\n".encode()
    )
    clock = SettableClock()
    processes, anywhere = Processes(clock), Address("h", 1)

    def restarts() -> int | None:
        clock.advance(EVERY_S)
        return processes.with_figures(SERVICE, anywhere).restarts

    assert [restarts(), restarts()] == [0, 0]
    began = 1_000.01  # the machine's clock was set by a little
    assert restarts() == 0
    began = 2_000.0
    assert [restarts(), restarts()] == [1, 1]
