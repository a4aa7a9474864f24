"""The compose file's containers, under a project name of their own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from freshet.process.ports import lease_ports
from tests.fixtures.members import Members

ROOT = Path(__file__).parents[2]
WHOLE, SMALL = ROOT / "docker-compose.yml", ROOT / "compose.small.yml"
TOKENS = ROOT / "compose.tokens.yml"
OURS = Path(__file__).with_name("compose.test.yml")
CONFIG = ROOT / "ops/docker/config"
PROJECT = os.environ.get("FRESHET_TEST_PROJECT", "freshet-test")
"""Two stacks may run at once if STACK_SUBNET is another, too."""

STATUS_PORTS: Mapping[str, int] = {
    "gateway": 7000,
    "inference": 7001,
    "joiner": 7010,
    "trainer": 7011,
    "shard": 7021,
    "embedder": 7031,
    "simulator": 7012,
}
UP_S = 180.0
EXACT = {"STACK_CODEC": "fp32"}
"""Variables for the ledger, which compares sums that int8, the codec between hosts, rounds."""


class Stack(Members):
    """Everything of docker-compose.yml, with a spec of the test's; its stores can be read from outside."""

    def __init__(
        self,
        spec_folder: Path,
        folder: Path,
        *,
        small: bool = False,
        tokens: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Nothing runs yet. `folder`: where versions are kept. `small`: one of each. `tokens`: the endpoints
        require them. `variables`: of the compose file."""
        super().__init__()
        each = range(1 if small else 2)
        self.names = (
            *(f"{role}-{i}" for role in ("shard", "embedder", "gateway", "inference") for i in each),
            "trainer-0",
            "joiner-0",
        )
        self._files = [WHOLE, *([SMALL] if small else []), *([TOKENS] if tokens else []), OURS]
        ports = dict(
            zip(("GATEWAY", "INFERENCE", "CONSOLE", "PROMETHEUS", "KAFKA"), lease_ports(5), strict=True)
        )
        self.gateway = f"http://127.0.0.1:{ports['GATEWAY']}"
        self.inference = f"http://127.0.0.1:{ports['INFERENCE']}"
        self.console = f"http://127.0.0.1:{ports['CONSOLE']}"
        self.prometheus = f"http://127.0.0.1:{ports['PROMETHEUS']}"
        self.kafka = f"127.0.0.1:{ports['KAFKA']}"
        versions = folder / "versions"
        versions.mkdir()
        versions.chmod(0o777)  # of another user's processes
        self.prometheus_config = folder / "prometheus.yml"  # a copy, which a test may change
        made = CONFIG / ("prometheus.small.yml" if small else "prometheus.yml")
        self.prometheus_config.write_bytes(made.read_bytes())
        subnet = os.environ.get("STACK_SUBNET", "10.83.7")
        self.redis = ",".join(f"{subnet}.1{i}:6379" for i in range(1 if small else 6))
        self._env = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "STACK_SPEC": str(spec_folder),
            "STACK_VERSIONS_FOLDER": str(versions),
            "STACK_PROMETHEUS_CONFIG": str(self.prometheus_config),
            "STACK_SUBNET": subnet,
            **{f"STACK_{name}_PORT": str(port) for name, port in ports.items()},
            **variables,
        }
        self._addresses: dict[str, str] = {}

    def up(self, *services: str) -> float:
        """Start all, or these, and wait until they are healthy; seconds that it took."""
        began = time.monotonic()
        self.docker("up", "--detach", "--no-build", "--wait", *services, within_s=UP_S)
        self._addresses.clear()  # a container that was started again may have another one
        return time.monotonic() - began

    def kill(self, *services: str) -> None:
        """SIGKILL the containers of services; they stay away until `up`."""
        self.docker("kill", *services)

    def reload_prometheus(self) -> None:
        """Have Prometheus read `prometheus_config` again."""
        self.docker("kill", "--signal", "SIGHUP", "prometheus")

    def stop(self, service: str) -> float:
        """End a service's container as an operator does, by SIGTERM; seconds that it took."""
        began = time.monotonic()
        self.docker("stop", service)
        return time.monotonic() - began

    def down(self, *, volumes: bool = False) -> None:
        """End all; volumes are kept unless they are to go."""
        self.docker("--profile", "simulator", "down", *(["--volumes"] if volumes else []), within_s=120)
        self._addresses.clear()

    def keep_words(self, folder: Path) -> None:
        """Write what the containers said, also of a test that fails, to a file of the folder."""
        said = folder / "containers.log"
        said.write_text(self.docker("ps", "--all") + self.docker("logs"))
        print(f"what the containers said: {said}")

    def url(self, name: str) -> str:
        """A container's own address: docker's networks are reached from the machine that they are on."""
        if name not in self._addresses:
            found = self.docker("ps", "--quiet", name).split()
            form = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
            self._addresses[name] = (
                _run(["docker", "inspect", "--format", form, found[0]], self._env, 30).split()[0]
                if found
                else "0.0.0.0"
            )
        return f"http://{self._addresses[name]}:{STATUS_PORTS[name.rstrip('-0123456789')]}"

    def change(self, variables: Mapping[str, str]) -> None:
        """Variables of the compose file from now on; containers stay as they are until they are made anew."""
        self._env.update(variables)

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self.docker("ps", "--quiet", service).split()[0]

    def engine(self, *words: str) -> str:
        """What `docker` itself prints. AssertionError, with its words, if it fails."""
        return _run(["docker", *words], self._env, 60.0)

    def forget(self, service: str) -> None:
        """Its container was made anew, and may have another address."""
        self._addresses.pop(service, None)

    def secret(self, service: str, name: str) -> str:
        """What stands in one of the files that a service is given below /run/freshet."""
        return self.docker("exec", "--no-TTY", service, "cat", f"/run/freshet/{name}").strip()

    def in_secrets(self, program: str, *words: str) -> str:
        """What a program prints that is run where all secrets are, in a container of its own."""
        return self.docker("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", program, "secrets", *words)

    def settings(self, folder: Path) -> dict[str, str]:
        """Settings by which a process of this machine reaches the stores. A password goes into the folder."""
        password = folder / "redis.password"
        password.write_text(self.in_secrets("cat", "/run/freshet/rows/redis.password").strip())
        return {
            "FRESHET_COMMON_LOG_URL": f"kafka://{self.kafka}/freshet?replication=1",
            "FRESHET_COMMON_ROWS_URL": f"redis://{self.redis}/freshet?user=freshet&password_file={password}",
            "FRESHET_COMMON_VERSIONS_URL": f"file:{folder / 'versions'}",
        }

    def docker(self, *words: str, within_s: float = 60.0) -> str:
        """What `docker compose` prints. AssertionError, with its words, if it fails."""
        files = [word for file in self._files for word in ("--file", str(file))]
        mine = ("--env-file", os.devnull)  # a .env of the developer would be of another deployment
        return _run(["docker", "compose", *mine, *files, *words], self._env, within_s)


def _run(command: list[str], env: Mapping[str, str], within_s: float) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=within_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-3000:]}"
    return done.stdout
