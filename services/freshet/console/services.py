"""Asking the services how they are: health and /status over HTTP, processes from the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.console.core import Service
from freshet.errors import Corrupt
from freshet.runtime.asking import figures_of, why_unready
from freshet.runtime.processes import is_alive, memory_mb
from freshet.runtime.run_state import read_state
from freshet.settings import RunFolder

__all__ = ["PATIENCE_S", "Services"]

PATIENCE_S = 0.8
"""How long a service may take to answer: less than a look's interval."""

BUSY_S = 3.0
"""How long a process that lives may miss looks and still counts as it was seen last."""


class Services:
    """The services of a run, asked all at once."""

    def __init__(
        self,
        folder: RunFolder,
        ports: Mapping[str, int],
        optional: Mapping[str, int],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`ports`: where each service answers, unless the run folder's state knows another place; `optional`:
        of those that are shown only if they answer and are of this run folder, or are supervised."""
        self._folder, self._ports, self._optional = folder, dict(ports), dict(optional)
        self._clock = clock
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="look")
        self._state: Mapping[str, Mapping[str, Any]] = {}
        self._answered: dict[str, tuple[float, Service]] = {}  # name -> (when, what it said)

    def look(self) -> dict[str, Service]:
        """Every service as it is now, in the order of an event's way; also those nobody supervises."""
        try:
            self._state = read_state(self._folder)
        except (Corrupt, OSError):
            self._state = {}  # `freshet status` says so; the services are asked all the same
        names = dict.fromkeys([*self._ports, *self._state, *self._optional])
        jobs = {name: self._pool.submit(self._service, name) for name in names}
        found = {name: job.result() for name, job in jobs.items()}
        return {
            name: service
            for name, service in found.items()
            if name in self._ports or name in self._state or self._is_ours(service)
        }

    def port(self, name: str) -> int | None:
        """Where a service answers."""
        known = self._state.get(name, {}).get("port")
        return known if isinstance(known, int) and known else (self._ports | self._optional).get(name)

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_ours(self, service: Service) -> bool:
        """Whether what answers at a port that nobody named is of this run, and not of another one here."""
        return service.state != "down" and service.figures.get("folder") == str(self._folder.path.resolve())

    def _service(self, name: str) -> Service:
        state, port = self._state.get(name, {}), self.port(name)
        pid = state.get("pid")
        pid = pid if isinstance(pid, int) and is_alive(pid, str(state.get("birth") or "")) else None
        last_exit = str(state.get("last_exit") or "")
        service = Service(name, "down", last_exit or "it is not started", port, last_exit=last_exit)
        if pid is not None:
            service = replace(service, pid=pid, up_s=_up_s(state.get("since_s")), memory_mb=memory_mb(pid))
        if type(restarts := state.get("restarts")) is int:
            service = replace(service, restarts=restarts)
        if (name in self._state and pid is None) or not port:
            return service  # another process may have its port
        try:
            reason = why_unready(port, timeout_s=PATIENCE_S)
            figures = figures_of(port, timeout_s=PATIENCE_S)
        except OSError as error:
            if isinstance(error, TimeoutError) and (last := self._lately(name, pid)) is not None:
                return replace(service, state=last.state, reason=last.reason, figures=last.figures)
            if pid is None:
                return replace(service, reason=f"nothing answers on port {port}")
            return replace(service, state="starting", reason=f"it does not answer on port {port}: {error}")
        service = replace(service, state="starting" if reason else "ready", reason=reason, figures=figures)
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
