"""Snapshots of the services: health and /status over HTTP; processes by the run folder, or by /metrics."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Any

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.settings import RunFolder
from freshet.console.instances import Instance, Places, Service
from freshet.errors import Corrupt, Unavailable
from freshet.http import tls
from freshet.http.addresses import Address
from freshet.http.service_client import figures_of, whole_body, why_unready
from freshet.process.process_info import is_alive, memory_mb
from freshet.process.run_state import read_state

EVERY_S = 5.0
"""Interval of reads of a process's metrics: memory changes slowly, and metrics cost more than a status."""

METRICS_TIMEOUT_S = 0.5
MOST_BYTES = 4 << 20
MIB = 1 << 20
SAME_S = 1.0
"""Largest difference between two start times of one process, which Linux computes from the boot time."""

_LINE = re.compile(
    rb"^process_(resident_memory_bytes|start_time_seconds) ([0-9.]+(?:e[+-]?[0-9]+)?)\s*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Figures of a process. None: not known."""

    memory_bytes: float | None = None
    began_s: float | None = None  # since 1970, by its machine's clock


def process_figures(metrics: bytes) -> ProcessFigures:
    """Return the figures of the process in a page of metrics, as Prometheus' clients write it."""
    found = {name: float(value) for name, value in _LINE.findall(metrics)}
    return ProcessFigures(found.get(b"resident_memory_bytes"), found.get(b"start_time_seconds"))


class Processes:
    """Figures of processes on other machines, with counts of their restarts. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._read: dict[str, tuple[float, ProcessFigures]] = {}  # name -> (time, figures)
        self._restarts: dict[str, int] = {}  # since the console's start

    def with_figures(self, service: Service, address: Address) -> Service:
        """Return the service with its process's figures, which are read every few seconds. Never raises."""
        name, now_s = service.name, self._clock.monotonic()
        read_s, figures = self._read.get(name, (float("-inf"), ProcessFigures()))
        if now_s - read_s >= EVERY_S:
            figures = self._query(name, address, figures)
            self._read[name] = now_s, figures
        return replace(
            service,
            memory_mb=None if figures.memory_bytes is None else round(figures.memory_bytes / MIB, 1),
            up_s=None
            if figures.began_s is None
            else round(max(0.0, self._clock.now_ms() / 1e3 - figures.began_s), 1),
            restarts=None if figures.began_s is None else self._restarts.get(name, 0),
        )

    def _query(self, name: str, address: Address, before: ProcessFigures) -> ProcessFigures:
        try:
            figures = process_figures(read_metrics(address))
        except (OSError, http.client.HTTPException, ValueError):  # such as 1.2.3
            return before
        if figures.began_s is not None and before.began_s is not None:
            with self._lock:
                restarted = abs(figures.began_s - before.began_s) > SAME_S
                self._restarts[name] = self._restarts.get(name, 0) + restarted
        return figures


def read_metrics(address: Address) -> bytes:
    """Return the page of metrics of a service; empty if it has none. Raises OSError and HTTPException."""
    connection = tls.connection(address.host, address.port, METRICS_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = whole_body(answer, MOST_BYTES)
        return body if answer.status == 200 else b""
    finally:
        connection.close()


TIMEOUT_S = 0.8
"""Longest wait for an answer of a service: less than the interval of looks."""

LOOK_S = 2.5 * TIMEOUT_S
"""Longest wait of a look for all services: two answers, one after the other. Resolving a host's name has no
bound and may take longer, but does not delay the others."""

BUSY_S = 3.0
"""Time for which a living process that does not answer counts as it was last seen."""

MOST_THREADS = 64


class Services:
    """The services of a model, queried concurrently. `look` belongs to one thread, the rest to any."""

    def __init__(self, folder: RunFolder, places: Places, clock: Clock = SYSTEM_CLOCK) -> None:
        """Query nothing yet. The state of `folder` is read if the places are supervised."""
        self._folder, self._places, self._clock = folder, places, clock
        self._listed = {i.name: i for i in (*places.instances, *places.optional)}
        self._needed = {i.name for i in places.instances}
        threads = min(MOST_THREADS, max(8, len(self._listed)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="look")
        self._queries: dict[str, Future[Service]] = {}  # the newest of each instance
        self._state: Mapping[str, Mapping[str, Any]] = {}
        self._answered: dict[str, tuple[float, Service]] = {}  # name -> (time, last answer)
        self._processes = Processes(clock)
        self._seen: Mapping[str, Service] = {}  # at the last look

    def look(self) -> dict[str, Service]:
        """Return all services as they are now, in the order of an event's path; also unsupervised ones."""
        self._read_state()
        found = self._query_all([*self._listed.values(), *self._others()])
        self._seen = {
            name: service
            for name, service in found.items()
            if name in self._needed or name in self._state or self._is_of_this_run(service)
        }
        return dict(self._seen)

    def of(self, role: str) -> list[Instance]:
        """Return the instances of a role, with their current addresses: the ready ones of the last look, or
        all if none was ready."""
        known = [self._placed(i) for i in (*self._listed.values(), *self._others()) if i.role == role]
        ready = [i for i in known if i.name in self._seen and self._seen[i.name].state == "ready"]
        return ready or [i for i in known if i.address.port]

    def close(self) -> None:
        """Stop querying."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_state(self) -> None:
        if not self._places.supervised:
            return
        try:
            self._state = read_state(self._folder)
        except (Corrupt, Unavailable):
            self._state = {}  # `freshet status` reports it; the services are still queried

    def _others(self) -> list[Instance]:
        """Return the instances that are only in the run folder."""
        return [Instance(n, n, Address("127.0.0.1", 0)) for n in self._state if n not in self._listed]

    def _placed(self, instance: Instance) -> Instance:
        """Return the instance with its address in the run folder, if it has one there."""
        known = self._state.get(instance.name)
        if known is None or not known["port"]:
            return instance
        return replace(instance, address=Address(known["host"], known["port"]))

    def _query_all(self, instances: Sequence[Instance]) -> dict[str, Service]:
        for instance in instances:
            under_way = self._queries.get(instance.name)
            if under_way is None or under_way.done():
                self._queries[instance.name] = self._pool.submit(self._service, self._placed(instance))
        wait_for([self._queries[i.name] for i in instances], LOOK_S)
        return {i.name: self._answer(i) for i in instances}

    def _answer(self, instance: Instance) -> Service:
        query = self._queries[instance.name]
        if query.done():
            error = query.exception()  # a bug with one service must not affect the others
            return query.result() if error is None else self._unknown(instance, f"not understood: {error!r}")
        slow = self._unknown(instance, f"it has not answered at {instance.address} for {LOOK_S:g} s")
        last = self._lately(instance.name, None)
        return slow if last is None else last

    def _is_of_this_run(self, service: Service) -> bool:
        """Check that the service at an optional port belongs to this run, not to another one here."""
        return service.state != "down" and service.figures.get("folder") == str(self._folder.path.resolve())

    def _unknown(self, instance: Instance, reason: str) -> Service:
        host = None if self._places.supervised else instance.address.host
        return Service(instance.name, instance.role, "down", reason, host, instance.address.port or None)

    def _service(self, instance: Instance) -> Service:
        name, (host, port) = instance.name, (instance.address.host, instance.address.port)
        state = self._state.get(name, {})
        pid = state.get("pid")
        pid = pid if isinstance(pid, int) and is_alive(pid, str(state.get("birth") or "")) else None
        last_exit = str(state.get("last_exit") or "")
        service = replace(self._unknown(instance, last_exit or "it is not started"), last_exit=last_exit)
        if pid is not None:
            service = replace(service, pid=pid, up_s=_up_s(state.get("since_s")), memory_mb=memory_mb(pid))
        if type(restarts := state.get("restarts")) is int:
            service = replace(service, restarts=restarts)
        if (name in self._state and pid is None) or not port:
            return service  # another process may use its port
        try:
            reason = why_unready(port, host=host, timeout_s=TIMEOUT_S)
            figures = figures_of(port, host=host, timeout_s=TIMEOUT_S)
        except OSError as error:
            if isinstance(error, TimeoutError) and (last := self._lately(name, pid)) is not None:
                return replace(service, state=last.state, reason=last.reason, figures=last.figures)
            if pid is None:
                return replace(service, reason=f"nothing answers at {instance.address}: {error}")
            return replace(service, state="starting", reason=f"it does not answer on port {port}: {error}")
        service = replace(service, state="starting" if reason else "ready", reason=reason, figures=figures)
        if not self._places.supervised:
            service = self._processes.with_figures(service, instance.address)
        self._answered[name] = self._clock.monotonic(), service
        return service

    def _lately(self, name: str, pid: int | None) -> Service | None:
        """Return this process's answer of the last seconds, as it may only be busy; None if there is none."""
        answered_s, last = self._answered.get(name, (float("-inf"), None))
        fresh = self._clock.monotonic() - answered_s < BUSY_S
        return last if last is not None and last.pid == pid and fresh else None


def _up_s(since_s: Any) -> float | None:
    return (
        round(max(0.0, time.time() - since_s), 1) if isinstance(since_s, (int, float)) and since_s else None
    )
