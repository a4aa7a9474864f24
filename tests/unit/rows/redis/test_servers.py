"""Figures of a master from its INFO, as redis-py parses it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("redis")

from freshet.rows.redis.row_store import server_of
from freshet.rows.store import StoreServer

ONLINE = {"ip": "10.0.0.2", "port": 6379, "state": "online", "offset": 1, "lag": 0}
COPYING = ONLINE | {"state": "wait_bgsave"}
MEMORY = {"used_memory": 7, "maxmemory": 9}


@pytest.mark.parametrize(
    ("info", "replicas"),
    [
        ({"connected_slaves": 0}, 0),
        ({"connected_slaves": 2, "slave0": ONLINE, "slave1": ONLINE}, 2),
        ({"connected_slaves": 2, "slave0": ONLINE, "slave1": COPYING}, 1),
        ({"connected_slaves": 1}, 0),
        ({"connected_slaves": 2, "slave1": ONLINE}, 1),
        ({"slave0": ONLINE, "slave_repl_offset": 5, "slave_read_only": 1}, 1),
    ],
    ids=["none", "all", "one copies", "one is not listed", "the first is not listed", "without a count"],
)
def test_listed_online_replicas_are_counted(info: dict[str, Any], replicas: int) -> None:
    assert server_of("r0:6379", info | MEMORY) == StoreServer("r0:6379", replicas, 7, 9)


def test_a_managed_server_may_report_no_memory() -> None:
    assert server_of("r0:6379", {}) == StoreServer("r0:6379", 0, 0, 0)
