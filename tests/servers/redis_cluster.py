"""Real Redis servers: one alone, or a cluster of three masters with a replica each; of `redis-server`, or of
what FRESHET_TEST_REDIS names."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_until
from tests.servers.processes import Process, run_to_end

MASTERS = 3
NODE_TIMEOUT_MS, HASTY_NODE_TIMEOUT_MS = 10_000, 2000
"""A master that is silent for so long is replaced, 1 to 2 s after: one that no test has struck should not be,
however busy the machine is; tests that wait for a failover take the shorter one."""

_START_S, _FORM_S = 60.0, 60.0


class RedisServer:
    """One server in one folder. Killed or stopped, it starts again on its data (an append-only file) and its
    port."""

    def __init__(self, folder: Path, options: Mapping[str, str] | None = None) -> None:
        """Prepare the folder; nothing runs yet. `options` go before ours."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.port, self._bus_port = lease_ports(2)
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "no",  # what is killed here is a process, never the machine
            "repl-diskless-sync-delay": "0",
            "repl-ping-replica-period": "1",
            "cluster-port": str(self._bus_port),
            **(options or {}),
        }
        file = folder / "redis.conf"
        file.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        file.chmod(0o600)
        self._process = Process([_server(), str(file)], folder / "redis.log")

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def cluster_address(self) -> str:
        """`:port@bus port`, as `nodes.conf` has it."""
        return f":{self.port}@{self._bus_port}"

    def start(self) -> None:
        """Start it and wait until it answers. Raises RuntimeError with the end of its log."""
        self._process.start(lambda said: "eady to accept connections" in said, within_s=_START_S)

    def restore(self, recorded: Path, ports: Mapping[str, RedisServer]) -> None:
        """Take over a node's recorded files; `ports` are {recorded port: the server that replaces it}."""
        shutil.copytree(recorded / "appendonlydir", self._folder / "appendonlydir")
        nodes = (recorded / "nodes.conf").read_text()
        (self._folder / "nodes.conf").write_text(
            re.sub(r":(\d+)@\d+", lambda found: ports[found[1]].cluster_address, nodes)
        )

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        self._process.launch()

    def stop(self) -> None:
        """End it as an operator would. Idempotent."""
        self._process.stop()

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def fill(self) -> None:
        """Let its memory be full: reads are answered, writes refused."""
        self.ask("CONFIG", "SET", "maxmemory", 1)

    def make_room(self) -> None:
        """Let it take writes again."""
        self.ask("CONFIG", "SET", "maxmemory", 0)

    @property
    def alive(self) -> bool:
        """Does it run, or is it paused?"""
        return self._process.alive

    def ask(self, *command: str | int, within_s: float = 5.0) -> Any:
        """The plain answer of this server to one command, no matter which node is master."""
        with redis.Redis(
            port=self.port, decode_responses=True, protocol=2, socket_timeout=within_s
        ) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()  # what it wrote is not wanted any more


class RedisCluster:
    """Three masters and a replica of each, formed in seconds."""

    def __init__(self, folder: Path, options: Mapping[str, str] | None = None) -> None:
        """Prepare the folder; nothing runs yet. `options` are every node's, besides ours."""
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "cluster-replica-validity-factor": "0",  # a replica is good enough however long it was apart
            **(options or {}),
        }
        self.nodes = [RedisServer(folder / str(i), settings) for i in range(2 * MASTERS)]

    @property
    def addresses(self) -> str:
        """`host:port,host:port,...`, as URLs name it."""
        return ",".join(node.address for node in self.nodes)

    def start(self) -> None:
        """Start all nodes and form the cluster; returns when every master has its replica."""
        for node in self.nodes:
            node.start()
        addresses = [node.address for node in self.nodes]
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", "1", "--cluster-yes"]
        run_to_end(create, within_s=_FORM_S)
        self.wait_until_whole()

    def restore(self, recorded: Path) -> None:
        """Start on the files of another cluster of this form: `recorded`/N holds a node's, and its `port`.

        `nodes.conf` names every node's ports; those of this cluster take their place.
        """
        ports = {(recorded / str(i) / "port").read_text(): node for i, node in enumerate(self.nodes)}
        for i, node in enumerate(self.nodes):
            node.restore(recorded / str(i), ports)
            node.start()
        self.wait_until_whole()

    def kill(self) -> None:
        """SIGKILL all nodes."""
        for node in self.nodes:
            node.kill()

    def masters(self) -> list[RedisServer]:
        """The nodes that serve slots now, as most nodes see it."""
        ports = {self._owner(slot)[0] for slot in range(0, 16_384, 256)}
        return [node for node in self.nodes if node.port in ports]

    def master_of(self, key: str) -> RedisServer:
        """The node that serves a key now, as most nodes see it."""
        return self._by_port(self._owner(key_slot(key.encode()))[0])

    def replica_of(self, key: str) -> RedisServer:
        """A replica of a key's master."""
        return self._by_port(self._owner(key_slot(key.encode()))[1])

    def fail_over_soon(self) -> None:
        """Have silent masters replaced after `HASTY_NODE_TIMEOUT_MS`, until `heal`. All nodes must answer."""
        self._set_node_timeout(HASTY_NODE_TIMEOUT_MS)

    def wait_until_moved(self, key: str, master: RedisServer) -> None:
        """Until another node than `master` serves the key."""
        wait_until("a failover", lambda: self.master_of(key) is not master, within_s=_FORM_S)

    def wait_until_whole(self) -> None:
        """Until all nodes run, agree, and every master has a replica that follows it."""
        wait_until("a whole cluster", self.is_whole, within_s=_FORM_S)

    def heal(self) -> None:
        """Resume and start whatever a test paused or killed."""
        for node in self.nodes:
            if node.alive:
                node.resume()
            else:
                node.start()
        self._set_node_timeout(NODE_TIMEOUT_MS)
        self.wait_until_whole()

    def __enter__(self) -> RedisCluster:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def _set_node_timeout(self, milliseconds: int) -> None:
        for node in self.nodes:
            node.ask("CONFIG", "SET", "cluster-node-timeout", milliseconds, within_s=60.0)
            node.ask("CONFIG", "REWRITE", within_s=60.0)  # it holds after a restart

    def _by_port(self, port: int) -> RedisServer:
        return next(node for node in self.nodes if node.port == port)

    def _owner(self, slot: int) -> list[int]:
        """Ports of the master of a slot, then of its replicas, as most of those see it that answer."""
        seen: dict[tuple[int, ...], int] = {}
        for node in self.nodes:
            try:
                ranges: list[list[Any]] = node.ask("CLUSTER", "SLOTS")
            except redis.RedisError:
                continue
            for first, last, *servers in ranges:
                if first <= slot <= last:
                    ports: tuple[int, ...] = tuple([int(server[1]) for server in servers])
                    seen[ports] = seen.get(ports, 0) + 1
        most_seen = max(seen, key=seen.__getitem__)
        return list(most_seen)

    def is_whole(self) -> bool:
        """Whether all nodes run, agree, and every master has a replica that follows it."""
        masters = set()
        for node in self.nodes:
            try:
                info = node.ask("CLUSTER", "INFO")
                role, slots = node.ask("ROLE"), node.ask("CLUSTER", "SLOTS")
            except redis.RedisError:
                return False
            if "cluster_state:ok" not in info or any(len(servers) < 2 for _, _, *servers in slots):
                return False
            if role[0] == "master":
                masters.add(node.port)
                if not role[2]:
                    return False
            elif role[3] != "connected":
                return False
        return len(masters) == MASTERS


def _server() -> str:
    server = os.environ.get("FRESHET_TEST_REDIS", "redis-server")
    if shutil.which(server) is None:
        raise RuntimeError(f"expected {server} on PATH: run ops/install-redis, or pytest -m 'not redis'")
    return server
