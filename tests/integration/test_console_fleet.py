"""The console beside several services of each role, at addresses that it was given a list of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freshet.config.settings import RunFolder
from freshet.console.instances import Places, listed_places
from freshet.console.services import Services
from freshet.console.traces import STAGES
from freshet.testing.conditions import wait_until
from tests.integration.console_world import ConsoleWorld, Fake, acting


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ConsoleWorld]:
    made = ConsoleWorld(tmp_path / "run")
    yield made
    made.close()


@contextmanager
def listed(world: ConsoleWorld, **counts: int) -> Iterator[tuple[dict[str, Fake], Places]]:
    """More fakes, so many of each role, and the list that names them all."""
    fakes = {f"{role}-{i}": Fake() for role, count in counts.items() for i in range(count)}
    for fake in fakes.values():
        fake.start()
    entries = [f"{name.rpartition('-')[0]}=127.0.0.1:{fake.port}" for name, fake in fakes.items()]
    try:
        yield fakes, listed_places(",".join(entries))
    finally:
        for fake in fakes.values():
            fake.stop()


FLEET = {"gateway": 2, "joiner": 2, "embedder": 2, "paramserver": 2, "trainer": 2, "inference": 2}


def test_of_a_fleet_every_instance_is_seen_and_roles_are_whole(world: ConsoleWorld) -> None:
    with listed(world, **FLEET) as (fakes, places):
        for i, shard in enumerate((fakes["paramserver-0"], fakes["paramserver-1"])):
            shard.answers["/status"] = (
                200,
                {"rows": {"reader": 5 + i}, "bytes": 100, "evicted": {"reader": 1}},
            )
        for i, replica in enumerate((fakes["inference-0"], fakes["inference-1"])):
            replica.answers["/status"] = (200, {"version": 4 + i, "freshness_ms": 250 - 50 * i})
        with world.console(places) as console:
            wait_until("all is good", lambda: console.state()["health"] == "good", within_s=60)
            state = console.state()

    assert [s["name"] for s in state["services"]] == sorted(fakes, key=list(fakes).index)
    assert {(s["state"], s["host"]) for s in state["services"]} == {("ready", "127.0.0.1")}
    assert [(r["role"], r["state"], r["ready"], r["of"]) for r in state["roles"]] == [
        (role, "ready", 2, 2) for role in FLEET
    ]
    assert state["freshness_ms"] == 250
    assert state["versions"]["serving"] == 4
    assert state["tables"][0] == {"table": "reader", "rows": 11, "bytes": None, "evicted": 2}
    assert state["rows_bytes"] == 200


def test_a_lost_gateway_and_replica_are_named(
    world: ConsoleWorld,
) -> None:
    with listed(world, **FLEET) as (fakes, places), world.console(places) as console:
        wait_until("all is good", lambda: console.state()["health"] == "good", within_s=60)
        fakes["gateway-1"].stop()
        fakes["inference-0"].stop()
        wait_until("it is noticed", lambda: len(console.state()["notes"]) == 2, within_s=60)
        state = console.state()
        fakes["inference-1"].answers["/v1/rank"] = (200, {"items": []})
        asked = {"candidates": [dict[str, str]()]}
        tried = [console.client.post("/api/try", json=asked).status_code for _ in range(3)]
        fakes["gateway-1"].start()
        fakes["inference-0"].start()
        wait_until("it is mended", lambda: console.state()["health"] == "good", within_s=60)

    assert state["health"] == "degraded"
    assert [note.partition(": [")[0] for note in state["notes"]] == [
        f"gateway-1: nothing answers at 127.0.0.1:{fakes['gateway-1'].port}",
        f"inference-0: nothing answers at 127.0.0.1:{fakes['inference-0'].port}",
    ]
    assert {r["role"]: (r["state"], r["ready"]) for r in state["roles"]} == {
        role: ("degraded", 1) if role in ("gateway", "inference") else ("ready", 2) for role in FLEET
    }
    assert tried == [200, 200, 200]


def test_a_silent_instance_hides_no_other(world: ConsoleWorld) -> None:
    silent = threading.Event()
    with listed(world, gateway=2, inference=1) as (fakes, places):
        fakes["gateway-1"].before["/health/ready"] = lambda: assert_heard(silent)
        with world.console(places) as console:
            shown = [("gateway-0", "ready"), ("gateway-1", "down"), ("inference", "ready")]

            def seen() -> list[tuple[str, str]]:
                return [(s["name"], s["state"]) for s in console.state()["services"]]

            wait_until("who answers is shown", lambda: seen() == shown, within_s=60)
            silent.set()


def assert_heard(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_host_that_is_being_looked_up_for_long_delays_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = threading.Event()

    def slow(port: int, *, host: str, timeout_s: float) -> str:
        assert host != "nowhere" or found.wait(60)
        return ""

    monkeypatch.setattr("freshet.console.services.why_unready", slow)
    monkeypatch.setattr("freshet.console.services.figures_of", lambda *_, **__: {})
    monkeypatch.setattr("freshet.console.services.read_metrics", lambda _: b"")  # no host is looked up
    monkeypatch.setattr("freshet.console.services.LOOK_S", 0.2)
    services = Services(RunFolder(tmp_path), listed_places("gateway=nowhere:1,joiner=127.0.0.1:1"))

    wait_until("who is known is shown", lambda: services.look()["joiner"].state == "ready", within_s=60)
    seen = services.look()
    assert seen["gateway"].state == "down"
    assert "it has not answered at nowhere:1" in seen["gateway"].reason
    assert services.look()["gateway"].state == "down", "and it is not asked again meanwhile"
    found.set()
    wait_until("it was found", lambda: services.look()["gateway"].state == "ready", within_s=60)
    services.close()


def test_an_action_is_followed_through_shards_to_every_replica(world: ConsoleWorld) -> None:
    asked: list[int] = []
    with listed(world, trainer=2, paramserver=2, inference=2) as (fakes, places):
        for replica in ("inference-0", "inference-1"):
            fakes[replica].answers["/status"] = (200, {"rows_next": {"0": 5}})
        fakes["inference-1"].before["/status"] = lambda: asked.append(1)

        def learn(end: int) -> None:
            for i in range(2):
                fakes[f"trainer-{i}"].answers["/progress"] = (200, {"applied": {"0": end}})
                published = {"applied": {"0": end}, "rows_next": {"0": 8 + i}}
                fakes[f"paramserver-{i}"].answers["/progress"] = (200, {"slices": 32, "published": published})
            fakes["inference-0"].answers["/status"] = (200, {"rows_next": {"0": 9}})

        with world.console(places) as console, acting(world, learn):
            wait_until("the slower replica is waited for", lambda: len(asked) > 20, within_s=60)
            assert console.state()["trace"] is None
            fakes["inference-1"].answers["/status"] = (200, {"rows_next": {"0": 9}})
            wait_until("a trace is shown", lambda: console.state()["trace"] is not None, within_s=60)
            trace = console.state()["trace"]

    assert [s["stage"] for s in trace["stages"]] == list(STAGES)


def test_a_published_port_accepts_localhost_and_configured_names(
    world: ConsoleWorld,
) -> None:
    with world.console(console_host="console,news.example") as console:
        asked = (
            "localhost:8080",
            "127.0.0.1:80",
            "console:7002",
            "NEWS.example",
            "other.example",
            "news.exampl",
        )
        answers = {
            host: console.client.get("/api/state", headers={"host": host}).status_code for host in asked
        }

    assert answers == dict.fromkeys(asked[:4], 200) | dict.fromkeys(asked[4:], 403)
