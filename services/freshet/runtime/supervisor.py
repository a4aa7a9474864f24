"""The supervisor of `freshet up`: starts the services, starts again what dies, stops them all in order.

It owns the run folder by a lock, and writes what runs to `state/services.json` for `freshet status`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import ConfigError, Corrupt
from freshet.runtime.supervision import Watch
from freshet.settings import RunFolder

__all__ = ["Process", "Supervisor", "read_state"]

log = structlog.get_logger("freshet.supervisor")

LOOK_S = 0.05
"""How often children are looked at: a restart is at most this late."""

STATE_FILE = "services.json"


@dataclass(frozen=True, slots=True)
class Process:
    """One service to run."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Child:
    process: Process
    watch: Watch = field(default_factory=Watch)
    popen: subprocess.Popen[bytes] | None = None
    since: float = 0.0  # wall clock, s


class Supervisor:
    """Runs processes until told to stop. One a run folder: a second one is refused with the first one's
    id."""

    def __init__(self, folder: RunFolder, processes: Sequence[Process], clock: Clock = SYSTEM_CLOCK) -> None:
        self._folder, self._clock = folder, clock
        self._children = [_Child(p) for p in processes]
        self._lock = _take_lock(folder.state / "supervisor.lock")
        self._logs: dict[str, IO[bytes]] = {}

    def run(self, stop: threading.Event, *, drain_s: float) -> Mapping[str, str]:
        """Keep everything running until `stop`; then stop it. Returns {service: how it ended}."""
        try:
            while not stop.is_set():
                self._look()
                stop.wait(LOOK_S)
            return self._stop_all(drain_s)
        finally:
            self._kill_all()  # does something only if an error came in between
            for file in self._logs.values():
                file.close()
            self._lock.close()

    def _look(self) -> None:
        changed = False
        now = self._clock.monotonic()
        for child in self._children:
            code = child.popen.poll() if child.popen is not None else None
            if child.popen is not None and code is not None:
                child.popen = None
                again = child.watch.exited(code, now)
                log.warning(
                    "service ended, starting it again",
                    name=child.process.name,
                    how=child.watch.last_exit,
                    in_s=round(again - now, 2),
                    see=str(self._folder.process_log(child.process.name)),
                )
                changed = True
            if child.watch.due(now):
                self._start(child, now)
                changed = True
        if changed:
            self._write_state()

    def _start(self, child: _Child, now: float) -> None:
        name = child.process.name
        if name not in self._logs:
            self._logs[name] = self._folder.process_log(name).open("ab")
        environment = {**os.environ, **child.process.environment, "FRESHET_SUPERVISOR_PID": str(os.getpid())}
        child.watch.started(now)
        try:
            child.popen = subprocess.Popen(
                child.process.command,
                stdin=subprocess.DEVNULL,
                stdout=self._logs[name],
                stderr=self._logs[name],
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the supervisor, which stops its children
            )
        except OSError as error:  # no such program, or no process or memory left: the others go on
            child.watch.exited(1, now)
            child.watch.last_exit = f"could not be started: {error}"
            log.error("service could not be started", name=name, reason=str(error))
        else:
            child.since = time.time()

    def _stop_all(self, drain_s: float) -> dict[str, str]:
        """Ask all of them, wait until the deadline, then insist."""
        ended: dict[str, str] = {}
        deadline = self._clock.monotonic() + drain_s
        for child in self._children:
            if child.popen is not None:
                child.popen.send_signal(signal.SIGTERM)
        for child in self._children:
            popen = child.popen
            if popen is None:
                ended[child.process.name] = child.watch.last_exit or "was not running"
                continue
            try:
                code = popen.wait(max(0.1, deadline - self._clock.monotonic()))
                ended[child.process.name] = "stopped" if code == 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
                ended[child.process.name] = f"killed: it had not stopped after {drain_s:g} s"
            child.popen = None
        self._write_state()
        return ended

    def _kill_all(self) -> None:
        for child in self._children:
            if child.popen is not None:
                child.popen.kill()
                child.popen.wait()

    def _write_state(self) -> None:
        services = {
            child.process.name: {
                "pid": child.popen.pid if child.popen is not None else None,
                "port": child.process.port,
                "since_s": child.since,
                "restarts": child.watch.restarts,
                "last_exit": child.watch.last_exit,
            }
            for child in self._children
        }
        target = self._folder.state / STATE_FILE
        temporary = target.with_suffix(".new")
        try:
            temporary.write_bytes(orjson.dumps({"supervisor": os.getpid(), "services": services}))
            temporary.replace(target)
        except OSError as error:  # a full disk stops no service that can do without it
            log.error("the state of the services could not be written", path=str(target), reason=str(error))


def read_state(folder: RunFolder) -> dict[str, dict[str, object]]:
    """{service: pid, port, since_s, restarts, last_exit} as last written; empty if nothing ever ran here.

    Raises Corrupt, naming the file, if it does not parse.
    """
    path = folder.state / STATE_FILE
    try:
        services = orjson.loads(path.read_bytes())["services"]
        return {str(name): dict(state) for name, state in services.items()}
    except FileNotFoundError:
        return {}
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"{path}: expected the state of services, found {error}; it is written anew by `freshet up`"
        ) from error


def _take_lock(path: Path) -> IO[str]:
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise ConfigError(
            "--folder",
            "",
            f"{path.parent.parent} is in use by process {owner}",
            "a run folder that no other `freshet up` runs in",
            f"stop it (kill {owner}), or take another folder with --folder",
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
