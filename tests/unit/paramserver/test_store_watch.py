"""Figures of the row store's servers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from freshet.errors import Unavailable
from freshet.observability.metrics import readings
from freshet.paramserver.service import STORE_METRICS, StoreWatch
from freshet.rows.store import StoreServer
from freshet.testing.conditions import wait_until


class Servers:
    """Two masters that answer unless `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def servers(self) -> Sequence[StoreServer]:
        if self.error is not None:
            raise self.error
        return [StoreServer("a:1", 1, 10, 100), StoreServer("b:1", 0, 20, 0)]


def test_figures_of_the_servers_are_read() -> None:
    watch = StoreWatch(Servers(), poll_s=3600)
    watch.start()
    try:
        wait_until("they were looked at", lambda: bool(watch.seen), within_s=60)
    finally:
        watch.stop()

    assert readings(STORE_METRICS, watch.seen) == {
        "freshet_paramserver_store_replicas": {("a:1",): 1, ("b:1",): 0},
        "freshet_paramserver_store_used_bytes": {("a:1",): 10, ("b:1",): 20},
        "freshet_paramserver_store_limit_bytes": {("a:1",): 100, ("b:1",): 0},
    }


@pytest.mark.parametrize("error", [Unavailable("b:1 cannot be reached"), KeyError("slave1")], ids=repr)
def test_figures_are_absent_while_servers_are_silent(error: Exception) -> None:
    servers = Servers()
    watch = StoreWatch(servers)
    watch.poll_servers()
    servers.error = error
    watch.poll_servers()
    assert set(map(len, readings(STORE_METRICS, watch.seen).values())) == {0}

    servers.error = None
    watch.poll_servers()
    assert readings(STORE_METRICS, watch.seen)["freshet_paramserver_store_replicas"] == {
        ("a:1",): 1,
        ("b:1",): 0,
    }


def test_failed_polls_are_logged_once() -> None:
    servers = Servers()
    servers.error = KeyError("slave1")
    watch = StoreWatch(servers)
    with capture_logs() as said:
        for _ in range(3):
            watch.poll_servers()
        assert [line["reason"] for line in said] == ["KeyError('slave1')"]
        servers.error = None
        watch.poll_servers()
        servers.error = Unavailable("b:1 cannot be reached")
        watch.poll_servers()
    assert [line["reason"] for line in said[1:]] == ["b:1 cannot be reached"]
