"""`freshet demo` as a process of its own, on free ports: start, look, kill parts of it, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

import freshet
from freshet.apps.ports import PORT_SETTINGS
from freshet.apps.status import collect
from freshet.config.settings import RunFolder
from freshet.http.service_client import figures_of
from freshet.process.ports import lease_ports
from freshet.process.process_info import birth_of
from freshet.process.run_state import read_run
from freshet.testing.conditions import wait_until

NAMES = (*PORT_SETTINGS, "simulator")
READY_S = 120.0


class Demo:
    """A demo in a folder; `start` may be called again after `kill` or `stop`."""

    def __init__(self, folder: Path, *, rate: int, seed: int | None = None) -> None:
        self.folder, self._arguments = folder, ["--rate", str(rate)]
        self._first = [] if seed is None else ["--seed", str(seed)]
        self.ports = dict(zip(NAMES, lease_ports(len(NAMES)), strict=True))
        self._said = folder.with_suffix(".out")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def said(self) -> str:
        """All that it has said on the terminal."""
        return self._said.read_text(errors="replace") if self._said.exists() else ""

    def start(self, *more: str) -> None:
        """Start it, without waiting until anything is ready."""
        variables = {**PORT_SETTINGS, "simulator": "FRESHET_SIMULATOR_ADMIN_PORT"}
        environment = {
            **os.environ,
            **{variables[name]: str(port) for name, port in self.ports.items()},
            "PYTHONPATH": str(Path(freshet.__file__).parents[1]),
        }
        command = [sys.executable, "-m", "freshet", "demo", str(self.folder), *self._arguments]
        with self._said.open("ab") as file:
            self._process = subprocess.Popen(
                [*command, *self._first, *more],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The supervisor."""
        assert self._process is not None, "not started"
        return self._process

    def figures(self, name: str) -> dict[str, Any]:
        """What a service says of itself; empty while it does not answer."""
        try:
            return figures_of(self.ports[name])
        except OSError:
            return {}

    def told(self, name: str) -> dict[str, Any]:
        """The figures of a service, once it answers: a busy machine lets one look pass."""
        found: dict[str, Any] = {}

        def answers() -> bool:
            found.update(self.figures(name))
            return bool(found)

        wait_until(f"{name} says how it is", answers, within_s=60)
        return found

    def status(self) -> dict[str, Any]:
        """What `freshet status` says."""
        return collect(self.folder)

    def pid(self, name: str) -> int | None:
        """The process of a service, as the supervisor knows it."""
        run = read_run(RunFolder(self.folder))
        pid = run.services.get(name, {}).get("pid") if run is not None else None
        return pid if isinstance(pid, int) else None

    def wait_until_ready(self) -> None:
        """All services say that they are."""

        def ready() -> bool:
            assert self.process.poll() is None, self.said
            if not (self.folder / "log" / "catalog.sqlite").exists():
                return False
            services = self.status()["services"]
            return set(services) == set(NAMES) and all(s["state"] == "ready" for s in services.values())

        wait_until("everything is ready", ready, within_s=READY_S)

    def kill(self, name: str) -> int:
        """SIGKILL a service; returns its process id."""
        pid = self.pid(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until_back(self, name: str, killed: int) -> float:
        """Until another process of the service is ready; returns how many seconds it took."""

        def back() -> bool:
            service = self.status()["services"][name]
            return service["pid"] not in (None, killed) and service["state"] == "ready"

        return wait_until(f"{name} is back", back, within_s=READY_S)

    def kill_supervisor(self) -> None:
        """SIGKILL the supervisor; its services end with it."""
        services = processes_of(self.folder)
        self.process.kill()
        self.process.wait()
        # A process that is ending has no command line any more, and lives for a moment still.
        wait_until("no process is left", lambda: not any(map(birth_of, services)), within_s=60)

    def stop(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def end(self) -> None:
        """Whatever state it is in: leave nothing running."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def summary(self) -> Mapping[str, Any]:
        """The last line of what it said, for a demo with --json."""
        found: Mapping[str, Any] = orjson.loads(self.said.strip().splitlines()[-1])
        return found


def processes_of(folder: Path) -> list[int]:
    """Ids of the living processes whose command line names the folder."""
    wanted = os.fsencode(folder)
    return [pid for pid in _pids() if wanted in _command(pid) and _state(pid) != "Z"]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []  # it has just ended


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
