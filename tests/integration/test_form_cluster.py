"""The Redis Cluster of the compose file: formed once, and made whole when a node lost its volume. Nodes are
started by the script that containers start by."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_until
from tests.servers.processes import Process

pytestmark = pytest.mark.redis

ROOT = Path(__file__).parents[2]
USERS = """user default on >default ~* &* +@all
user replica on >replica resetkeys resetchannels -@all +psync +replconf +ping
user admin on >s3cret ~* &* +@all
"""
KEYS = [f"key-{i}" for i in range(300)]


class Node:
    """One of the six."""

    def __init__(self, folder: Path, secrets: Path) -> None:
        self.data = folder
        self.data.mkdir()
        self.port, bus = lease_ports(2)
        options = ["--port", self.port, "--cluster-port", bus, "--bind", "127.0.0.1", "--appendfsync", "no"]
        options += ["--repl-diskless-sync-delay", 0, "--repl-ping-replica-period", 1]
        self._process = Process(
            ["/bin/sh", str(ROOT / "ops/docker/start-redis"), *map(str, options)],
            folder.with_suffix(".log"),
            {
                **os.environ,
                "REDIS_DATA": str(self.data),
                "REDIS_SECRETS": str(secrets),
                "REDIS_USERS": str(folder.with_suffix(".acl")),
            },
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process.start(lambda said: "eady to accept connections" in said, within_s=60)

    def kill(self) -> None:
        self._process.kill()

    def empty(self) -> None:
        """Its volume is lost."""
        self.kill()
        shutil.rmtree(self.data)
        self.data.mkdir()

    def ask(self, *command: str) -> Any:
        with redis.Redis(
            port=self.port, username="admin", password="s3cret", decode_responses=True, protocol=2
        ) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def tries(self) -> int:
        """How often it has requested a copy from its master."""
        said = self.data.with_suffix(".log").read_text()
        return said.count("Unable to AUTH to MASTER") + said.count("Finished with success")

    def follows(self, master: str) -> bool:
        """Is it a replica of that one?"""
        return any("myself,slave" in line[2] and line[3] == master for line in self.known())

    def known(self) -> list[list[str]]:
        """Lines of `cluster nodes`: id, address, flags, master, ..., slots."""
        return [line.split() for line in str(self.ask("CLUSTER", "NODES")).splitlines()]

    def masters(self) -> set[str]:
        return {line[0] for line in self.known() if len(line) > 8}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Sequence[Node]]:
    """Six that run, and do not know each other."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "redis.conf").write_text("masteruser replica\nmasterauth replica\n")
    (secrets / "redis.acl").write_text(USERS)
    (tmp_path / "password").write_text("s3cret")
    made = [Node(tmp_path / f"node-{i}", secrets) for i in range(6)]
    try:
        for node in made:
            node.start()
        yield made
    finally:
        for node in made:
            node.kill()


def form(nodes: Sequence[Node], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script as the service `form-cluster` does."""
    return subprocess.run(
        ["/bin/sh", str(ROOT / "ops/docker/form-cluster"), *(node.address for node in nodes)],
        env={**os.environ, "ADMIN_PASSWORD_FILE": str(folder / "password")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def formed(nodes: Sequence[Node], folder: Path) -> str:
    """What it printed; then each master has a replica that has all that its master has."""
    done = form(nodes, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until("all know three masters and a replica of each", lambda: is_whole(nodes), within_s=60)
    return done.stdout


def is_whole(nodes: Sequence[Node]) -> bool:
    for node in nodes:
        known = node.known()
        replicas = [line[3] for line in known if "slave" in line[2] and "fail" not in line[2]]
        if len(known) != 6 or sorted(replicas) != sorted(node.masters()):
            return False
        told = str(node.ask("INFO", "replication"))
        if "role:slave" in told and "master_link_status:up" not in told:
            return False
    return True


def owner(nodes: Sequence[Node], key: str) -> Node:
    for node in nodes:
        ranges = [part for line in node.known() if "myself" in line[2] for part in line[8:]]
        for part in ranges:
            first, _, last = part.partition("-")
            if int(first) <= key_slot(key.encode()) <= int(last or first):
                return node
    raise AssertionError(f"no node serves {key}")


def write(nodes: Sequence[Node]) -> None:
    for key in KEYS:
        owner(nodes, key).ask("SET", key, key)


def kept(nodes: Sequence[Node]) -> bool:
    return all(owner(nodes, key).ask("GET", key) == key for key in KEYS)


def is_gone(former: str, node: Node) -> bool:
    """Whether it failed and another serves its slots; or another node answers there, which takes no vote."""
    (flags,) = (line[2].split(",") for line in node.known() if line[0] == former)
    return "noaddr" in flags or ("fail" in flags and former not in node.masters())


def id_of(node: Node) -> str:
    return str(node.ask("CLUSTER", "MYID"))


def test_it_is_formed_once(nodes: Sequence[Node], tmp_path: Path) -> None:
    formed(nodes, tmp_path)
    write(nodes)
    before = nodes[0].masters()

    assert "creat" not in formed(nodes, tmp_path).lower()
    assert nodes[5].masters() == before
    assert kept(nodes)


@pytest.mark.parametrize(
    ("lost", "away"),
    [
        (0, "until its replica serves"),
        (0, "for a moment"),
        (0, "while all were stopped"),
        (4, "for a moment"),
    ],
)
def test_a_node_that_lost_its_volume_becomes_a_replica(
    nodes: Sequence[Node], tmp_path: Path, lost: int, away: str
) -> None:
    formed(nodes, tmp_path)
    write(nodes)
    node, other = nodes[lost], nodes[1]
    former = id_of(node)
    replicas = [each for each in nodes if each.follows(former)]
    node.empty()
    if away == "until its replica serves":
        wait_until("the others know that it is gone", lambda: is_gone(former, other), within_s=60)
    elif away == "while all were stopped":
        for each in nodes:
            each.kill()
        for each in nodes:
            if each is not node:
                each.start()
    asked = [each.tries() for each in replicas]
    node.start()
    wait_until("the others know that it is gone", lambda: is_gone(former, other), within_s=60)
    if away != "until its replica serves":  # now it would be served emptiness

        def has_asked(replica: Node, before: int) -> bool:  # or serves, if it was away for too long
            return replica.tries() > before or not replica.follows(former)

        wait_until(
            "its replica has asked it for a copy",
            lambda: all(map(has_asked, replicas, asked)),
            within_s=60,
        )

    said = formed(nodes, tmp_path)

    assert f"{node.address} came back empty" in said
    assert former not in {line[0] for each in nodes for line in each.known()}
    assert kept(nodes)
    other.kill()
    other.start()
    assert "came back" not in formed(nodes, tmp_path)
    assert kept(nodes)


def test_where_a_node_does_not_answer_nothing_is_changed(nodes: Sequence[Node], tmp_path: Path) -> None:
    formed(nodes, tmp_path)
    write(nodes)
    silent = id_of(nodes[0])
    nodes[0].kill()
    wait_until("its replica serves", lambda: is_gone(silent, nodes[1]), within_s=60)

    done = form(nodes, tmp_path)

    assert done.returncode == 1
    assert f"{nodes[0].address} does not answer" in done.stderr
    assert silent in {line[0] for line in nodes[1].known()}
    nodes[0].start()
    formed(nodes, tmp_path)
    assert kept(nodes)
