"""What a Redis node's container starts by: the server, and a loop that keeps its users' file true."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.testing.conditions import wait_until
from tests.servers.processes import Process

ROOT = Path(__file__).parents[3]


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Path]:
    """The file that the script keeps for the server. This server does nothing, and turns are short."""
    for name, does in (("redis-server", "exec /bin/sleep 60"), ("sleep", "exec /bin/sleep 0.02")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "redis.acl").write_text("former")
    users = tmp_path / "users"
    settings = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "REDIS_DATA": str(tmp_path),
        "REDIS_SECRETS": str(tmp_path),
        "REDIS_USERS": str(users),
        "REDIS_CLUSTER": "no",
    }
    process = Process(["/bin/sh", str(ROOT / "ops/docker/start-redis")], tmp_path / "log", settings)
    process.launch()
    yield users
    process.kill()


def test_users_are_followed_after_a_turn_without_the_file(users: Path, tmp_path: Path) -> None:
    wait_until("the server's users", lambda: users.exists() and users.read_text() == "former", within_s=20)
    acl, log = tmp_path / "redis.acl", tmp_path / "log"
    acl.unlink()
    wait_until("a turn failed", lambda: "redis.acl: No such file" in log.read_text(), within_s=20)
    assert users.read_text() == "former"

    acl.write_text("new")

    wait_until("the new users", lambda: users.read_text() == "new", within_s=20)
