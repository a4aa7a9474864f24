"""The Redis Cluster of the compose file: formed once, and made whole when a node comes back empty."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.redis_cluster import RedisCluster, RedisServer
from tests.system.waiting import wait_until

pytestmark = pytest.mark.redis

SCRIPT = Path(__file__).parents[2] / "ops/docker/form-cluster"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """Six nodes that run, and do not know each other."""
    (tmp_path / "password").write_text("s3cret")
    made = RedisCluster(tmp_path / "nodes", {"user": "admin on >s3cret ~* &* +@all"})
    try:
        for node in made.nodes:
            node.start()
        yield made
    finally:
        made.kill()


def formed(cluster: RedisCluster, folder: Path) -> str:
    """Run it as the service `form-cluster` does; what it printed."""
    done = subprocess.run(
        ["/bin/sh", str(SCRIPT), *(node.address for node in cluster.nodes)],
        env={**os.environ, "ADMIN_PASSWORD_FILE": str(folder / "password")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the cluster is whole" in done.stdout
    return done.stdout


def lines(node: RedisServer) -> list[list[str]]:
    """Of `cluster nodes`: id, address, flags, master, ..., slots."""
    return [line.split() for line in str(node.ask("CLUSTER", "NODES")).splitlines()]


def masters(node: RedisServer) -> set[str]:
    return {line[0] for line in lines(node) if len(line) > 8}


def has_a_replica_each(node: RedisServer) -> bool:
    """As this node knows: three masters, three replicas, nobody else."""
    known = lines(node)
    replicas = [line[3] for line in known if "slave" in line[2] and "fail" not in line[2]]
    return len(known) == 6 and sorted(replicas) == sorted(masters(node))


def wait_until_whole(cluster: RedisCluster) -> None:
    wait_until(
        "each master has its replica, and all know it",
        lambda: all(map(has_a_replica_each, cluster.nodes)),
        within_s=60,
    )


def is_gone(former: str, node: RedisServer) -> bool:
    """Failed, and what it served is another's; or, which nobody votes about, another answers there."""
    (flags,) = (line[2].split(",") for line in lines(node) if line[0] == former)
    return "noaddr" in flags or ("fail" in flags and former not in masters(node))


def emptied(node: RedisServer) -> None:
    """It comes back on a new volume."""
    for path in Path(node.folder).iterdir():
        if path.name == "appendonlydir":
            shutil.rmtree(path)
        elif path.suffix not in (".conf", ".log") or path.name == "nodes.conf":
            path.unlink()
    node.start()


def test_it_is_formed_once(cluster: RedisCluster, tmp_path: Path) -> None:
    formed(cluster, tmp_path)
    wait_until_whole(cluster)
    before = masters(cluster.nodes[0])

    assert "creat" not in formed(cluster, tmp_path).lower()
    assert masters(cluster.nodes[5]) == before


@pytest.mark.parametrize("away_for_long", [True, False], ids=["after a failover", "at once"])
@pytest.mark.parametrize("lost", [0, 4], ids=["a master", "a replica"])
def test_a_node_that_came_back_empty_joins_as_a_replica(
    cluster: RedisCluster, tmp_path: Path, lost: int, away_for_long: bool
) -> None:
    formed(cluster, tmp_path)
    wait_until_whole(cluster)
    node, other = cluster.nodes[lost], cluster.nodes[1]
    (former,) = (line[0] for line in lines(node) if "myself" in line[2])
    node.kill()
    if away_for_long:
        wait_until("the others know that it is gone", lambda: is_gone(former, other), within_s=60)
    emptied(node)
    wait_until("the others know that it is gone", lambda: is_gone(former, other), within_s=60)

    said = formed(cluster, tmp_path)

    assert f"{node.address} came back empty" in said
    assert ("takes over" in said) == (lost == 0 and not away_for_long)

    wait_until_whole(cluster)
    assert former not in {line[0] for each in cluster.nodes for line in lines(each)}
