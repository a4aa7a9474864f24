"""Asking the services how they are: health and /status over HTTP; processes from the run folder, where it
knows them, else from /metrics.
"""

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

__all__ = ["TIMEOUT_S", "ProcessFigures", "Processes", "Services", "process_figures"]

EVERY_S = 5.0
"""Between two questions to one process: memory moves slowly, and all metrics are more work than a status."""

METRICS_TIMEOUT_S = 0.5
MOST_BYTES = 4 << 20
MIB = 1 << 20
SAME_S = 1.0
"""By how much the beginning of one process may seem to differ: it is reckoned from the machine's start."""

_LINE = re.compile(
    rb"^process_(resident_memory_bytes|start_time_seconds) ([0-9.]+(?:e[+-]?[0-9]+)?)\s*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Of one process. None: it does not tell."""

    memory_bytes: float | None = None
    began_s: float | None = None  # since 1970, by its machine's clock


def process_figures(metrics: bytes) -> ProcessFigures:
    """What a page of metrics says of its process."""
    found = {name: float(value) for name, value in _LINE.findall(metrics)}
    return ProcessFigures(found.get(b"resident_memory_bytes"), found.get(b"start_time_seconds"))


class Processes:
    """Remembers each process, and counts how often another one has taken its place. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._told: dict[str, tuple[float, ProcessFigures]] = {}  # name -> (when, what)
        self._restarts: dict[str, int] = {}  # since the console began

    def with_figures(self, service: Service, address: Address) -> Service:
        """The service with what its process tells; it is asked anew every few seconds. Raises nothing."""
        name, now_s = service.name, self._clock.monotonic()
        when, told = self._told.get(name, (float("-inf"), ProcessFigures()))
        if now_s - when >= EVERY_S:
            told = self._ask(name, address, told)
            self._told[name] = now_s, told
        return replace(
            service,
            memory_mb=None if told.memory_bytes is None else round(told.memory_bytes / MIB, 1),
            up_s=None
            if told.began_s is None
            else round(max(0.0, self._clock.now_ms() / 1e3 - told.began_s), 1),
            restarts=None if told.began_s is None else self._restarts.get(name, 0),
        )

    def _ask(self, name: str, address: Address, before: ProcessFigures) -> ProcessFigures:
        try:
            told = process_figures(_metrics(address))
        except (OSError, http.client.HTTPException, ValueError):  # 1.2.3 is no number
            return before
        if told.began_s is not None and before.began_s is not None:
            with self._lock:
                again = abs(told.began_s - before.began_s) > SAME_S
                self._restarts[name] = self._restarts.get(name, 0) + again
        return told


def _metrics(address: Address) -> bytes:
    connection = tls.connection(address.host, address.port, METRICS_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = whole_body(answer, MOST_BYTES)
        return body if answer.status == 200 else b""
    finally:
        connection.close()


TIMEOUT_S = 0.8
"""How long a service may take to answer: less than a look's interval."""

LOOK_S = 2.5 * TIMEOUT_S
"""How long a look waits for all: two answers, one after the other. Looking a host's name up, which nothing
bounds, may take longer; the others are not kept waiting by it."""

BUSY_S = 3.0
"""How long a process that lives may miss looks and still counts as it was seen last."""

MOST_THREADS = 64


class Services:
    """The services of a model, asked all at once. `look` is one thread's; the rest may be called by any."""

    def __init__(self, folder: RunFolder, places: Places, clock: Clock = SYSTEM_CLOCK) -> None:
        """`folder`: of this run, whose state is read if the places are supervised."""
        self._folder, self._places, self._clock = folder, places, clock
        self._listed = {i.name: i for i in (*places.instances, *places.optional)}
        self._needed = {i.name for i in places.instances}
        threads = min(MOST_THREADS, max(8, len(self._listed)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="look")
        self._asking: dict[str, Future[Service]] = {}  # looks that are under way
        self._state: Mapping[str, Mapping[str, Any]] = {}
        self._answered: dict[str, tuple[float, Service]] = {}  # name -> (when, what it said)
        self._processes = Processes(clock)
        self._seen: Mapping[str, Service] = {}  # by the last look

    def look(self) -> dict[str, Service]:
        """Every service as it is now, in the order of an event's way; also those nobody supervises."""
        self._read_state()
        found = self._ask_all([*self._listed.values(), *self._others()])
        self._seen = {
            name: service
            for name, service in found.items()
            if name in self._needed or name in self._state or self._is_ours(service)
        }
        return dict(self._seen)

    def of(self, role: str) -> list[Instance]:
        """Instances of a role, where they answer now: those that were ready at the last look, or all of
        them if none was."""
        known = [self._placed(i) for i in (*self._listed.values(), *self._others()) if i.role == role]
        ready = [i for i in known if i.name in self._seen and self._seen[i.name].state == "ready"]
        return ready or [i for i in known if i.address.port]

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_state(self) -> None:
        if not self._places.supervised:
            return
        try:
            self._state = read_state(self._folder)
        except (Corrupt, Unavailable):
            self._state = {}  # `freshet status` says so; the services are asked all the same

    def _others(self) -> list[Instance]:
        """Those that only the run folder knows."""
        return [Instance(n, n, Address("127.0.0.1", 0)) for n in self._state if n not in self._listed]

    def _placed(self, instance: Instance) -> Instance:
        """Where the run folder knows it, if it does."""
        known = self._state.get(instance.name)
        if known is None or not known["port"]:
            return instance
        return replace(instance, address=Address(known["host"], known["port"]))

    def _ask_all(self, instances: Sequence[Instance]) -> dict[str, Service]:
        for instance in instances:
            under_way = self._asking.get(instance.name)
            if under_way is None or under_way.done():
                self._asking[instance.name] = self._pool.submit(self._service, self._placed(instance))
        wait_for([self._asking[i.name] for i in instances], LOOK_S)
        return {i.name: self._answer(i) for i in instances}

    def _answer(self, instance: Instance) -> Service:
        asked = self._asking[instance.name]
        if asked.done():
            error = asked.exception()
            # A fault of ours with one of them leaves the others as they are.
            return asked.result() if error is None else self._unknown(instance, f"not understood: {error!r}")
        slow = self._unknown(instance, f"it has not answered at {instance.address} for {LOOK_S:g} s")
        last = self._lately(instance.name, None)
        return slow if last is None else last

    def _is_ours(self, service: Service) -> bool:
        """Whether what answers at a port that nobody named is of this run, and not of another one here."""
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
            return service  # another process may have its port
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
        """What this process said within the last seconds: one that is only busy has not gone anywhere."""
        when, said = self._answered.get(name, (float("-inf"), None))
        fresh = self._clock.monotonic() - when < BUSY_S
        return said if said is not None and said.pid == pid and fresh else None


def _up_s(since_s: Any) -> float | None:
    return (
        round(max(0.0, time.time() - since_s), 1) if isinstance(since_s, (int, float)) and since_s else None
    )
