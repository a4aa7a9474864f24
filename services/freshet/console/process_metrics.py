"""What a process on another machine tells of itself in /metrics, as Prometheus' clients write it: its memory,
and when it began.
"""

from __future__ import annotations

import http.client
import re
import threading
from dataclasses import dataclass, replace

from freshet.clock import Clock
from freshet.console.service_snapshot import Service
from freshet.http import tls
from freshet.http.addresses import Address
from freshet.http.service_client import whole_body

__all__ = ["Processes", "Told", "told_in"]

EVERY_S = 5.0
"""Between two questions to one process: memory moves slowly, and all metrics are more work than a status."""

PATIENCE_S = 0.5
MOST_BYTES = 4 << 20
MIB = 1 << 20
SAME_S = 1.0
"""By how much the beginning of one process may seem to differ: it is reckoned from the machine's start."""

_LINE = re.compile(
    rb"^process_(resident_memory_bytes|start_time_seconds) ([0-9.]+(?:e[+-]?[0-9]+)?)\s*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Told:
    """Of one process. None: it does not tell."""

    memory_bytes: float | None = None
    began_s: float | None = None  # since 1970, by its machine's clock


def told_in(metrics: bytes) -> Told:
    """What a page of metrics says of its process."""
    found = {name: float(value) for name, value in _LINE.findall(metrics)}
    return Told(found.get(b"resident_memory_bytes"), found.get(b"start_time_seconds"))


class Processes:
    """Remembers each process, and counts how often another one has taken its place. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._told: dict[str, tuple[float, Told]] = {}  # name -> (when, what)
        self._restarts: dict[str, int] = {}  # since the console began

    def told_of(self, service: Service, address: Address) -> Service:
        """The service with what its process tells; it is asked anew every few seconds. Raises nothing."""
        name, now_s = service.name, self._clock.monotonic()
        when, told = self._told.get(name, (float("-inf"), Told()))
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

    def _ask(self, name: str, address: Address, before: Told) -> Told:
        try:
            told = told_in(_metrics(address))
        except (OSError, http.client.HTTPException, ValueError):  # 1.2.3 is no number
            return before
        if told.began_s is not None and before.began_s is not None:
            with self._lock:
                again = abs(told.began_s - before.began_s) > SAME_S
                self._restarts[name] = self._restarts.get(name, 0) + again
        return told


def _metrics(address: Address) -> bytes:
    connection = tls.connection(address.host, address.port, PATIENCE_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = whole_body(answer, MOST_BYTES)
        return body if answer.status == 200 else b""
    finally:
        connection.close()
