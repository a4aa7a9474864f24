"""The simulator as a process: readers on threads, one sender of actions, figures for the console."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.settings import Settings
from freshet.demo.connection import Door, HttpDoor
from freshet.demo.metrics import METRICS
from freshet.demo.outbox import Outbox
from freshet.demo.readers import Counts, Pace, Readers
from freshet.demo.start_time import STATE_FILE, Began, begin, read_began
from freshet.demo.targets import Targets, targets_by
from freshet.demo.world import World
from freshet.http.addresses import Address
from freshet.http.admin import Admin
from freshet.http.service_client import why_unready
from freshet.observability.metrics import Reading, register
from freshet.process.lifecycle import Cleanup
from freshet.process.metrics import service_registry

__all__ = ["STATE_FILE", "Simulator", "run"]

log = structlog.get_logger("freshet.simulator")

LOOK_S = 0.1
SEND_EVERY_S = 0.02
"""How often actions that have come due are sent: together, so that the gateway writes them together."""
VISITS_OF_A_THREAD = 20
"""Visits a second for each thread: one takes some milliseconds, most of it waiting."""

DRIFT = "a third of the readers, and two age groups of six, like other topics now"
MOST_DRIFTS = 100
"""Drifts that `/status` tells of, the last ones."""


@dataclass(slots=True)
class _Running:
    """A world that has begun."""

    readers: Readers
    outbox: Outbox
    pace: Pace
    began: Began


class Simulator:
    """Readers of one world. `run` blocks until told to stop."""

    def __init__(
        self,
        settings: Settings,
        wanted: Began,
        events_per_s: float,
        clock: Clock = SYSTEM_CLOCK,
        targets: Targets | None = None,
    ) -> None:
        """`targets`: whom readers visit; without them gateway and inference of this machine.

        Raises ConfigError if the run folder has another world.
        """
        self._targets = targets or targets_by(settings)
        self._settings, self._wanted, self._clock, self._rate = settings, wanted, clock, events_per_s
        self._file = settings.common.run.state / STATE_FILE
        self._began = read_began(self._file, wanted)
        self._running: _Running | None = None

    def run(self, stop: threading.Event) -> None:
        """Wait until the system answers, then visit it at the pace that was asked for."""
        if not self._until_ready(stop):
            return
        now_ms = self._clock.now_ms()
        began = self._began or begin(self._file, self._wanted, now_ms)
        pace, outbox = Pace(self._rate, self._clock.monotonic()), Outbox(self._clock)
        first = now_ms - began.began_ms  # above every number used before: there was less than a visit a ms
        world = World(began.seed, began.plan)
        readers = Readers(world, outbox, pace, self._clock, began_ms=began.began_ms, first=first)
        self._running = running = _Running(readers, outbox, pace, began)
        log.info("readers come", seed=began.seed, rate=self._rate, first_visit=first)
        visits_per_s = self._rate / world.options.shown
        count = min(24, max(2, math.ceil(visits_per_s / VISITS_OF_A_THREAD)))
        jobs: list[Callable[[], None]] = [
            partial(self._read, running, stop, self._door(self._targets.inferences, i)) for i in range(count)
        ]
        jobs.append(lambda: self._send(running, stop))
        threads = [
            threading.Thread(target=job, name=f"readers-{i}", daemon=True) for i, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def reason(self) -> str | None:
        """None, or why no reader comes yet."""
        return None if self._running is not None else "waiting for gateway and inference to be ready"

    def status(self) -> Mapping[str, Any]:
        """Figures of this process; windows only once all their clicks have been made."""
        running, now_ms = self._running, self._clock.now_ms()
        counts = running.readers.counts if running else Counts()
        outbox = running.outbox if running else Outbox(self._clock)
        began = running.began if running else self._began
        return {
            "folder": str(self._settings.common.run.path.resolve()),
            "seed": self._wanted.seed,
            "rate": self._rate,
            "measured_rate": round(running.pace.measured(self._clock.monotonic()), 1) if running else 0.0,
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

    def readings(self) -> Mapping[str, Reading]:
        """For `/metrics`."""
        if self._running is None:
            return {}
        readers, outbox = self._running.readers, self._running.outbox
        prefix = "freshet_simulator_"
        return {
            f"{prefix}impressions": readers.counts.impressions,
            f"{prefix}clicks": readers.counts.clicks,
            f"{prefix}purchases": readers.counts.purchases,
            f"{prefix}abandoned": readers.counts.abandoned,
            f"{prefix}errors": readers.counts.errors + outbox.errors,
            f"{prefix}events_per_second": self._running.pace.measured(self._clock.monotonic()),
            f"{prefix}waiting": outbox.waiting(),
        }

    def _read(self, running: _Running, stop: threading.Event, door: Door) -> None:
        while not stop.is_set():
            number, due_s = running.readers.turn()
            if stop.wait(max(0.0, due_s - self._clock.monotonic())):
                break
            try:
                running.readers.visit(number, door, stop.wait)
            except Exception as error:  # a fault of ours, or an answer that is not one: readers go on coming
                running.readers.counts.errors += 1
                log.error("a visit failed", visit=number, exc_info=error)
        door.close()

    def _door(self, servers: Sequence[Address], first: int = 0) -> Door:
        return HttpDoor(servers, first, token_file=self._settings.common.client_token_file)

    def _send(self, running: _Running, stop: threading.Event) -> None:
        door = self._door(self._targets.gateways)
        while not stop.is_set():
            try:
                taken = running.outbox.send_due(door)
            except Exception as error:
                running.outbox.errors += 1
                log.error("actions were not sent", exc_info=error)
                taken = False
            if taken is not True:
                stop.wait(LOOK_S if taken is False else SEND_EVERY_S)
        door.close()

    def _until_ready(self, stop: threading.Event) -> bool:
        roles = self._targets.gateways, self._targets.inferences
        told = False
        while not all(any(map(_ready, servers)) for servers in roles):
            if not told:
                servers = [str(server) for each in roles for server in each]
                log.info("waiting for a gateway and an inference server to be ready", servers=servers)
                told = True
            if stop.wait(LOOK_S):
                return False
        return True


def _ready(server: Address) -> bool:
    try:
        return not why_unready(server.port, host=server.host)
    except OSError:
        return False


def _drifts(began: Began, now_ms: int) -> list[dict[str, Any]]:
    passed = began.plan.passed((now_ms - began.began_ms) / 1_000)
    return [
        {"time_ms": began.began_ms + round(1_000 * began.plan.time_s(n)), "what": DRIFT}
        for n in range(max(1, passed - MOST_DRIFTS + 1), passed + 1)
    ]


def run(
    settings: Settings,
    wanted: Began,
    events_per_s: float,
    targets: Targets | None = None,
    *,
    stop: threading.Event,
) -> None:
    """Simulate until `stop` is set; `targets` as `Simulator` takes them.

    Raises ConfigError if the port cannot be had, or the run folder has another world.
    """
    cleanup = Cleanup()
    simulator = Simulator(settings, wanted, events_per_s, targets=targets)
    registry = service_registry()
    register(registry, METRICS, simulator.readings)
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
