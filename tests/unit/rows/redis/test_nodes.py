"""Requests to the masters of a cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("redis")

from freshet.rows.redis import nodes
from freshet.rows.redis.connection import parse_url
from freshet.rows.redis.nodes import Nodes, Request


class Master:
    """A master whose answer arrives once answers of all masters are being read."""

    def __init__(self, name: str, all_read: threading.Barrier) -> None:
        self.name, self._all_read = name, all_read
        self.connection_pool = SimpleNamespace(get_connection=lambda: self, release=lambda _: None)

    def info(self, section: str) -> dict[str, int]:
        return {"cluster_enabled": 1}

    def send_packed_command(self, data: list[bytes]) -> None:
        assert data == [b"GET " + self.name.encode()]

    def read_response(self) -> str:
        self._all_read.wait(60)
        return self.name

    def disconnect(self) -> None:
        """No connection is open."""

    close = disconnect


class Cluster:
    """Masters by slot."""

    def __init__(self, masters: list[Master]) -> None:
        self._masters = masters
        self.nodes_manager = SimpleNamespace(
            get_node_from_slot=lambda slot: masters[slot], initialize=lambda: None
        )

    def get_primaries(self) -> list[Master]:
        return self._masters

    def get_redis_connection(self, node: Master) -> Master:
        return node

    def close(self) -> None:
        """No connection is open."""


def test_answers_to_small_requests_are_read_from_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    all_read = threading.Barrier(3)
    masters = [Master(name, all_read) for name in "abc"]
    opener: Any = SimpleNamespace(
        any_server=lambda: masters[0], cluster=lambda: Cluster(masters), check=lambda name, client: None
    )
    monkeypatch.setattr(nodes, "Opener", lambda url: opener)
    made = Nodes(parse_url("redis://a:1,b:1,c:1/model?patience=100ms"))
    try:
        requests = [Request(slot, [b"GET " + name.encode()], 1) for slot, name in enumerate("abc")]
        assert made.ask(requests, "reading") == [["a"], ["b"], ["c"]]
    finally:
        made.close()
