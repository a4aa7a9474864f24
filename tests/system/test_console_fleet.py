"""The console of a model in the production shape: two of each service on a real Kafka and a real Redis
Cluster. It shows them all, and goes on showing the others when some are killed.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_until, wait_until_nothing_differs
from tests.fixtures.commands import LEDGER
from tests.fixtures.fleet import Fleet
from tests.fixtures.traffic import Asker, Traffic
from tests.servers.kafka import Kafka
from tests.servers.processes import Process
from tests.servers.redis_cluster import RedisCluster

COUNTS = {"joiner": 2, "paramserver": 2, "embedder": 2, "trainer": 2, "inference": 2, "gateway": 2}
STAGES = ["logged", "joined", "trained", "published", "served"]
FLOWS = ("client>gateway", "gateway>joiner", "joiner>trainer", "trainer>inference", "inference>client")
TOKEN = "the-token-of-this-fleet"
KILLED = ("gateway-1", "inference-0")
SEED = 11
WHOLE_S = 240
"""For the whole fleet to be ready; beside other tests on two cores it has taken 120 s."""

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@pytest.fixture
def stores(kafka: Kafka, redis_cluster: RedisCluster, tmp_path: Path) -> Mapping[str, str]:
    """Settings of a model's stores of its own."""
    life = uuid.uuid4().hex[:8]
    return {
        "FRESHET_COMMON_LOG_URL": f"kafka://{kafka.bootstrap}/{life}?replication=1",
        "FRESHET_COMMON_ROWS_URL": f"redis://{redis_cluster.addresses}/{life}",
        "FRESHET_COMMON_VERSIONS_URL": f"file:{tmp_path / 'versions'}",
    }


class Console:
    """A console process beside a fleet, with the addresses of the others."""

    def __init__(self, fleet: Fleet, folder: Path, stores: Mapping[str, str]) -> None:
        self._port = lease_ports(1)[0]
        secret = folder / "secret"
        secret.write_text(f"{TOKEN}\n")
        services = [
            f"{name.rpartition('-')[0]}={fleet.url(name).removeprefix('http://')}" for name in fleet.names
        ]
        env = os.environ | stores | {
            "FRESHET_CONSOLE_SERVICES": ",".join(services),
            "FRESHET_CONSOLE_TOKEN_FILE": str(secret),
            "FRESHET_CONSOLE_HOST": "console",
            "FRESHET_CONSOLE_PORT": str(self._port),
            "FRESHET_COMMON_BIND_ADDRESS": "127.0.0.1",
        }  # fmt: skip
        command = [sys.executable, "-m", "freshet", "run", "console", str(LEDGER), "--folder"]
        self.process = Process([*command, str(folder / "console")], folder / "console.log", env)
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{self._port}",
            timeout=20,
            headers={"host": f"console:{self._port}"},  # as from another container
        )

    def state(self) -> dict[str, Any]:
        """What it shows; nothing while it starts."""
        try:
            found: dict[str, Any] = self._client.get("/api/state").raise_for_status().json()
        except httpx.HTTPError:
            return {"services": [], "roles": [], "notes": [], "edges": [], "health": "", "trace": None}
        return found

    def rates(self) -> dict[str, float | None]:
        """{from>to: what passes a second}."""
        return {f"{e['from']}>{e['to']}": e["rate"] for e in self.state()["edges"]}

    def trace_since(self, time_ms: int) -> dict[str, Any] | None:
        """The newest trace, if it ended after that."""
        trace: dict[str, Any] | None = self.state()["trace"]
        return trace if trace is not None and trace["stages"] and trace["at_ms"] > time_ms else None

    def post(self, what: str, body: Mapping[str, Any]) -> httpx.Response:
        """Ask for something to be done, with the token."""
        return self._client.post(f"/api/{what}", json=body, headers={"authorization": f"Bearer {TOKEN}"})

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self._client.close()


@pytest.fixture
def fleet(stores: Mapping[str, str], tmp_path: Path) -> Iterator[Fleet]:
    """Two of each, with readers who click."""
    made = Fleet(LEDGER, tmp_path, stores, COUNTS)
    try:
        made.start()
        yield made
    finally:
        made.kill()


@pytest.fixture
def console(fleet: Fleet, stores: Mapping[str, str], tmp_path: Path) -> Iterator[Console]:
    """The console of the fleet."""
    made = Console(fleet, tmp_path, stores)
    made.process.launch()
    yield made
    made.close()


@pytest.fixture
def traffic(fleet: Fleet, console: Console) -> Iterator[Traffic]:
    """Events to both gateways, and rankings of both replicas, once all are ready: two busy cores take minutes
    to start a fleet beside its traffic."""
    wait_until_nothing_differs(lambda: _troubles(console), within_s=WHOLE_S)
    events = Traffic([fleet.url(name) for name in fleet.of("gateway")], SEED)
    askers = [Asker(fleet.url(name)) for name in fleet.of("inference")]
    events.start()
    for asker in askers:
        asker.start()
    yield events
    events.stop()
    for asker in askers:
        asker.stop()


@pytest.mark.usefixtures("traffic")
def test_a_fleet_is_shown_whole_and_what_is_killed_of_it_by_name(fleet: Fleet, console: Console) -> None:
    wait_until_nothing_differs(lambda: _troubles(console), within_s=WHOLE_S)
    wait_until_nothing_differs(lambda: _standing_still(console), within_s=60)
    wait_until("an action was followed to the end", lambda: console.trace_since(0) is not None, within_s=60)
    state = _state_when("all is good and learned from", console, _is_whole)

    assert sorted(s["name"] for s in state["services"]) == sorted(fleet.names)
    assert all(s["memory_mb"] > 10 and s["up_s"] > 0 for s in state["services"])
    assert {r["role"]: (r["state"], r["ready"], r["of"]) for r in state["roles"]} == {
        role: ("ready", count, count) for role, count in COUNTS.items()
    }
    assert [s["stage"] for s in state["trace"]["stages"]] == STAGES

    killed_ms = time.time_ns() // 1_000_000
    for name in KILLED:
        fleet.processes[name].kill()
    state = _state_when(
        "these two are missed, and nobody else",
        console,
        lambda said: [note.partition(":")[0] for note in said["notes"]] == list(KILLED),
    )
    assert state["health"] == "degraded"
    assert {r["role"]: r["state"] for r in state["roles"] if r["state"] != "ready"} == {
        "gateway": "degraded",
        "inference": "degraded",
    }
    later_ms = killed_ms + 5_000
    wait_until("actions are followed on", lambda: console.trace_since(later_ms) is not None, within_s=60)
    wait_until_nothing_differs(lambda: _standing_still(console), within_s=60)
    asked = {"context": {"user": "user-0"}, "candidates": [{"item": 1, "seq": 1}]}
    assert console.post("try", asked).status_code == 200
    assert console.post("rollback", {"number": 10**9}).status_code == 404, "the token is taken"

    for name in KILLED:
        fleet.processes[name].launch()
    wait_until_nothing_differs(lambda: _troubles(console), within_s=WHOLE_S)
    wait_until("their restarts are counted", lambda: _restarted(console) == set(KILLED), within_s=60)


def _state_when(what: str, console: Console, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The state for which that holds. The next snapshot may name a service that is slow at that moment."""
    found: dict[str, Any] = {}

    def seen() -> bool:
        found.clear()
        found.update(console.state())
        return holds(found)

    wait_until(what, seen, within_s=60)
    return found


def _is_whole(said: dict[str, Any]) -> bool:
    """Whether the snapshot has all: a service that is slow to answer lacks its part in the next one again."""
    return (
        said["health"] == "good"
        and said["trace"] is not None
        and said["freshness_ms"] is not None
        and said["versions"]["serving"] is not None
        and all(s["memory_mb"] for s in said["services"])
        and all(table["rows"] > 0 and table["bytes"] > 0 for table in said["tables"])
    )


def _troubles(console: Console) -> list[str]:
    """Why its state is not good; nothing once it is."""
    state = console.state()
    return [] if state["health"] == "good" else [f"health {state['health']!r}", *state["notes"]]


def _standing_still(console: Console) -> list[str]:
    rates = console.rates()
    return [f"nothing passes {edge}" for edge in FLOWS if not (rates.get(edge) or 0.0) > 0]


def _restarted(console: Console) -> set[str]:
    return {s["name"] for s in console.state()["services"] if s["restarts"]}
