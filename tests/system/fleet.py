"""A model's services as processes of their own, several of a role, on a Kafka and a Redis Cluster."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from freshet.testing.conditions import wait_until
from tests.fixtures.members import Members, role_of
from tests.servers.disk import Disk
from tests.servers.jumping_clock import JumpingClock, build_clock
from tests.servers.processes import Process, lasting_ports
from tests.servers.slow_link import SlowLink

START_S = 120.0
"""For a service to answer, beside others on two busy cores."""

PORTS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("GATEWAY_PORT",),
    "joiner": ("JOINER_ADMIN_PORT",),
    "paramserver": ("PARAMSERVER_ADMIN_PORT", "PARAMSERVER_PORT"),
    "embedder": ("EMBEDDER_ADMIN_PORT", "EMBEDDER_PORT"),
    "trainer": ("TRAINER_ADMIN_PORT",),
    "inference": ("INFERENCE_PORT",),
}
"""Settings of the ports of each role; the first answers `/status`."""

NAMED = ("joiner", "paramserver", "embedder")

LINKED: Mapping[str, int] = {"paramserver": 1, "embedder": 1}
"""Roles that are known to others by the address of a link, and which of PORTS it leads to."""

LINK_HOST = "127.0.0.2"


class Fleet(Members):
    """Processes of one model, by names such as `joiner-0`. Killed or paused, each comes back on its ports.

    Clients reach a shard or an embedder through a link of its own, which a test can break; each process
    has a wall clock of its own.
    """

    def __init__(
        self, spec: Path, folder: Path, stores: Mapping[str, str], counts: Mapping[str, int]
    ) -> None:
        """Nothing runs yet.

        Args:
            spec: the spec file.
            folder: a run folder for each process, and its log.
            stores: FRESHET_COMMON_…_URL of event log, row store and version store.
            counts: {role: processes}, in the order in which they start.
        """
        self._folder, self._stores = folder, dict(stores)
        self.names = [f"{role}-{i}" for role, count in counts.items() for i in range(count)]
        clock = build_clock(folder)
        self.clocks = {name: JumpingClock(clock, folder / f"{name}.clock") for name in self.names}
        self.links: dict[str, SlowLink] = {}
        self._ports = {name: self._ports_of(name) for name in self.names}
        self.processes = {name: self._process(name, spec) for name in self.names}
        self.disk = Disk(self.processes.values)
        super().__init__()

    def start(self) -> None:
        """Start all, and wait until each answers; who ends because the log is slow is started again, as by
        what runs services in a cluster."""
        for name in self.names:
            self.processes[name].launch()
        for name in self.names:
            wait_until(f"{name} answers", partial(self._answers, name), within_s=START_S)

    def _answers(self, name: str) -> bool:
        process = self.processes[name]
        if not process.alive:
            print(f"{name} ended with {process.returncode} at its start: {process.said()[-300:]}")
            process.launch()
        return bool(self.status(name))

    def url(self, name: str) -> str:
        """Where a process answers."""
        return f"http://127.0.0.1:{self._ports[name][0]}"

    def stop(self) -> None:
        """End all by SIGTERM, last started first."""
        for name in reversed(self.names):
            self.processes[name].stop()

    def kill(self) -> None:
        """SIGKILL all that run. Idempotent."""
        for process in self.processes.values():
            process.kill()
        for link in self.links.values():
            link.close()
        self.close()

    def _ports_of(self, name: str) -> list[int]:
        """Ports of a process; its link is there where it has one, at the same port of another address."""
        role = role_of(name)
        while True:
            ports = lasting_ports(len(PORTS[role]))
            if role in LINKED:
                port = ports[LINKED[role]]
                try:
                    self.links[name] = SlowLink((LINK_HOST, port), ("127.0.0.1", port), 0.0)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        continue
                    raise
            return ports

    def _process(self, name: str, spec: Path) -> Process:
        role = role_of(name)
        own = dict(zip(PORTS[role], map(str, self._ports[name]), strict=True))
        if role in NAMED:
            own[f"{role.upper()}_NAME"] = name
        if role in LINKED:
            own[f"{role.upper()}_ADVERTISED_HOST"] = LINK_HOST
        if role == "trainer":
            own["TRAINER_BATCHES"] = "embedders"
        env = {**os.environ, **self._stores, **self.clocks[name].environment}
        env |= {f"FRESHET_{key}": value for key, value in own.items()}
        folder = self._folder / name
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "freshet", "run", role, str(spec), "--folder", str(folder)]
        return Process(command, self._folder / f"{name}.log", env)
