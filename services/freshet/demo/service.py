"""The simulator process: threads of readers, one sender of actions, status and metrics."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from freshet.clock import SYSTEM_CLOCK
from freshet.config.settings import Settings
from freshet.demo.connections import Connection, HttpConnection, Outbox, Targets, targets_by
from freshet.demo.news_site import NewsSite
from freshet.demo.readers import Counts, Pace, Readers
from freshet.demo.start_time import STATE_FILE, RunStart, read_start, save_start
from freshet.http.addresses import Address
from freshet.http.admin import Admin
from freshet.http.service_client import why_unready
from freshet.observability.metrics import Metric, register
from freshet.process.lifecycle import Cleanup
from freshet.process.telemetry import service_registry

__all__ = ["METRICS", "STATE_FILE", "Simulator", "run"]

METRICS = (
    Metric("freshet_simulator_impressions", "counter", "items", "Items shown to readers."),
    Metric("freshet_simulator_clicks", "counter", "clicks", "Clicks that readers make, some still to come."),
    Metric("freshet_simulator_purchases", "counter", "purchases", "Purchases that readers make."),
    Metric("freshet_simulator_abandoned", "counter", "visits", "Visits that got no page in time."),
    Metric("freshet_simulator_errors", "counter", "requests", "Requests that failed, each attempt."),
    Metric(
        "freshet_simulator_events_per_second",
        "gauge",
        "events/s",
        "Events created in the last seconds.",
        at="measured_rate",
    ),
    Metric(
        "freshet_simulator_waiting",
        "gauge",
        "actions",
        "Actions that wait for the gateway.",
        at="actions.waiting",
    ),
)


log = structlog.get_logger("freshet.simulator")

RETRY_S = 0.1
SEND_EVERY_S = 0.02
"""Interval between two batches of actions, so that the gateway appends many at once."""
VISITS_PER_THREAD = 20
"""Visits per second of each thread. A visit takes some milliseconds, most of them waiting."""

DRIFT = "a third of the readers, and two age groups of six, like other topics now"
MOST_DRIFTS = 100
"""The newest drifts, which `/status` lists."""


@dataclass(slots=True)
class _Running:
    """The parts of a simulation that has begun."""

    readers: Readers
    outbox: Outbox
    pace: Pace
    began: RunStart


class Simulator:
    """Sends the visits of one simulation; `run` blocks until it is stopped."""

    def __init__(
        self,
        settings: Settings,
        wanted: RunStart,
        events_per_s: float,
        targets: Targets | None = None,
    ) -> None:
        """Read the start of the run folder's simulation. `targets` default to the servers of this machine.

        Raises ConfigError if that simulation has other parameters.
        """
        self._targets = targets or targets_by(settings)
        self._settings, self._wanted, self._clock, self._rate = settings, wanted, SYSTEM_CLOCK, events_per_s
        self._file = settings.common.run.state / STATE_FILE
        self._began = read_start(self._file, wanted)
        self._running: _Running | None = None

    def run(self, stop: threading.Event) -> None:
        """Wait until the system is ready, then send visits at the given rate until `stop`."""
        if not self._wait_until_ready(stop):
            return
        now_ms = self._clock.now_ms()
        began = self._began or save_start(self._file, self._wanted, now_ms)
        pace, outbox = Pace(self._rate, self._clock.monotonic()), Outbox(self._clock)
        first = now_ms - began.began_ms  # above all earlier numbers, since visits take more than 1 ms each
        site = NewsSite(began.seed, began.plan)
        readers = Readers(site, outbox, pace, self._clock, began_ms=began.began_ms, first=first)
        self._running = running = _Running(readers, outbox, pace, began)
        log.info("visits begin", seed=began.seed, rate=self._rate, first_visit=first)
        visits_per_s = self._rate / site.options.shown
        count = min(24, max(2, math.ceil(visits_per_s / VISITS_PER_THREAD)))
        jobs: list[Callable[[], None]] = [
            partial(self._send_visits, running, stop, self._connect(self._targets.inferences, i))
            for i in range(count)
        ]
        jobs.append(lambda: self._send_actions(running, stop))
        threads = [
            threading.Thread(target=job, name=f"readers-{i}", daemon=True) for i, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def reason(self) -> str | None:
        """Return the reason why visits have not begun, or None."""
        return None if self._running is not None else "waiting for gateway and inference to be ready"

    def status(self) -> Mapping[str, Any]:
        """Return the JSON object of `/status`."""
        running, now_ms = self._running, self._clock.now_ms()
        counts = running.readers.counts if running else Counts()
        outbox = running.outbox if running else Outbox(self._clock)
        began = running.began if running else self._began
        rate = running.pace.measured_rate(self._clock.monotonic()) if running else 0.0
        return {
            "folder": str(self._settings.common.run.path.resolve()),
            "seed": self._wanted.seed,
            "rate": self._rate,
            "measured_rate": round(rate, 1),
            "began_ms": began.began_ms if began else None,
            "events": counts.impressions + counts.clicks + counts.purchases,
            "impressions": counts.impressions,
            "clicks": counts.clicks,
            "purchases": counts.purchases,
            "errors": counts.errors + outbox.errors,
            "abandoned": counts.abandoned,
            "actions": {
                "sent": outbox.sent,
                "waiting": outbox.waiting(),
                "refused": outbox.refused,
                "dropped": outbox.dropped,
            },
            "drifts": _drifts(began, now_ms) if began else [],
            "windows": running.readers.windows.closed(now_ms) if running else [],
        }

    def _connect(self, servers: Sequence[Address], first: int = 0) -> Connection:
        return HttpConnection(servers, first, token_file=self._settings.common.client_token_file)

    def _send_visits(self, running: _Running, stop: threading.Event, inference: Connection) -> None:
        while not stop.is_set():
            number, due_s = running.readers.next_visit()
            if stop.wait(max(0.0, due_s - self._clock.monotonic())):
                break
            try:
                running.readers.visit(number, inference, stop.wait)
            except Exception as error:  # a bug, or a malformed answer: further visits follow
                running.readers.counts.errors += 1
                log.error("a visit failed", visit=number, exc_info=error)
        inference.close()

    def _send_actions(self, running: _Running, stop: threading.Event) -> None:
        gateway = self._connect(self._targets.gateways)
        while not stop.is_set():
            try:
                sent = running.outbox.send_due(gateway)
            except Exception as error:
                running.outbox.errors += 1
                log.error("actions were not sent", exc_info=error)
                sent = False
            if sent is not True:
                stop.wait(RETRY_S if sent is False else SEND_EVERY_S)
        gateway.close()

    def _wait_until_ready(self, stop: threading.Event) -> bool:
        roles = self._targets.gateways, self._targets.inferences
        logged = False
        while not all(any(map(_is_ready, servers)) for servers in roles):
            if not logged:
                servers = [str(server) for each in roles for server in each]
                log.info("waiting for a gateway and an inference server to be ready", servers=servers)
                logged = True
            if stop.wait(RETRY_S):
                return False
        return True


def _is_ready(server: Address) -> bool:
    try:
        return not why_unready(server.port, host=server.host)
    except OSError:
        return False


def _drifts(began: RunStart, now_ms: int) -> list[dict[str, Any]]:
    passed = began.plan.passed((now_ms - began.began_ms) / 1_000)
    return [
        {"time_ms": began.began_ms + round(1_000 * began.plan.time_s(n)), "what": DRIFT}
        for n in range(max(1, passed - MOST_DRIFTS + 1), passed + 1)
    ]


def run(
    settings: Settings,
    wanted: RunStart,
    events_per_s: float,
    targets: Targets | None = None,
    *,
    stop: threading.Event,
) -> None:
    """Run a `Simulator` with its admin port until `stop`.

    Raises ConfigError if the port is not free, or the run folder's simulation has other parameters.
    """
    cleanup = Cleanup()
    simulator = Simulator(settings, wanted, events_per_s, targets=targets)
    registry = service_registry()
    register(registry, METRICS, simulator.status)
    admin = Admin(
        settings.common.bind_address,
        settings.simulator.admin_port,
        hosts=settings.common.hosts,
        registry=registry,
        ready=simulator.reason,
        status=simulator.status,
    )
    cleanup.add("admin", admin.close)
    try:
        simulator.run(stop)
    finally:
        cleanup.run()
