"""The console of a real system: it shows events, carries out commands, and outlives killed services."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from freshet.apps.local import Local, local
from freshet.config.settings import RunFolder
from freshet.errors import Unavailable
from freshet.process.run_state import read_state
from freshet.testing.conditions import wait_until

pytestmark = pytest.mark.system

SPEC = Path(__file__).parents[2] / "examples" / "quickstart" / "freshet.toml"
TOPICS = ("sport", "art", "food")


@dataclass
class Running:
    """A system with readers who click, and its console."""

    system: Local

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.system.console}{path}", timeout=20).raise_for_status().json()

    def state(self) -> Any:
        """The state; empty while the console itself is away."""
        try:
            return self.get("/api/state")
        except httpx.HTTPError:
            return {"services": [], "health": "", "versions": {"list": []}, "trace": None}

    def change(self, what: str, **body: Any) -> httpx.Response:
        token = (self.system.folder / "state" / "console.token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(f"{self.system.console}/api/{what}", json=body, headers=headers, timeout=20)

    def pid(self, name: str) -> int:
        pid = read_state(RunFolder(self.system.folder))[name]["pid"]
        assert isinstance(pid, int)
        return pid


@contextmanager
def readers(system: Local) -> Iterator[None]:
    """A reader who clicks, about twenty times a second."""
    stop, rng = threading.Event(), random.Random(3)

    def read() -> None:
        while not stop.wait(0.05):
            offered = [
                {"article": f"a{n}", "topic": TOPICS[n % 3], "age_s": 60.0} for n in rng.sample(range(50), 5)
            ]
            try:
                ranking = system.rank({"reader": f"u{rng.randrange(20)}"}, offered)
                article = offered[ranking.items[0].index]["article"]
                action = {"event_id": uuid.uuid4().hex, "request_id": ranking.request_id, "article": article}
                system.send(actions=[{**action, "type": "click", "ts": time.time_ns() // 1_000_000}])
            except Unavailable:
                continue  # a service was killed, and is not back yet

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("console") / "run"
    with local(SPEC, folder=folder, console=True, ready_s=120) as system, readers(system):
        yield Running(system)


def test_an_action_is_traced_through_every_stage(running: Running) -> None:
    wait_until("a trace is shown", lambda: bool(running.state()["trace"]), within_s=60)

    trace = running.state()["trace"]

    assert [s["stage"] for s in trace["stages"]] == ["logged", "joined", "trained", "published", "served"]
    times = [s["ms"] for s in trace["stages"]]
    assert times == sorted(times)
    assert times[0] > 0


def test_rows_of_an_item_are_shown_without_a_request_of_a_reader(running: Running) -> None:
    offered = [{"article": "a1", "topic": TOPICS[1], "age_s": 60.0}]

    def known() -> bool:
        ranking = running.system.rank(
            {"reader": "u1"}, offered, request_id="look", dry_run=True, explain=True
        )
        rows = ranking.items[0].rows
        return ranking.request_id == "look" and rows is not None and rows["article"].known == 1

    wait_until("the article has a row", known, within_s=60)


def test_every_edge_flows_and_the_whole_is_good(running: Running) -> None:
    state: dict[str, Any] = {}

    def flows() -> bool:
        state.clear()
        state.update(running.state())
        whole = state.get("health") == "good" and state["freshness_ms"] is not None
        return whole and all(e["rate"] for e in state["edges"])

    wait_until("something passes every edge", flows, within_s=60)

    assert [s["name"] for s in state["services"]] == ["gateway", "joiner", "trainer", "inference", "console"]
    assert all(s["memory_mb"] > 1 and s["pid"] for s in state["services"])
    assert state["freshness_ms"] is not None
    assert {t["table"]: bool(t["rows"]) for t in state["tables"]}["reader"]


def test_a_request_that_was_served_can_be_tried_and_is_explained(running: Running) -> None:
    wait_until("requests are seen", lambda: bool(running.get("/api/requests")), within_s=60)
    request = running.get("/api/requests")[0]
    asked = {"context": request["context"], "candidates": request["candidates"], "k": 3}

    answer = httpx.post(f"{running.system.console}/api/try", json=asked, timeout=20).raise_for_status().json()

    assert len(answer["items"]) == min(3, len(request["candidates"]))
    assert answer["explored"] is False
    assert set(answer["items"][0]["rows"]["reader"]) == {"known", "of", "age_s"}


def test_rolling_back_and_promoting_change_what_inference_serves(running: Running) -> None:
    def may_go_back() -> bool:
        versions = running.state()["versions"]
        stable = versions.get("aliases", {}).get("stable", 0)
        return any(0 < v["number"] < stable and v["verdict"] == "promoted" for v in versions["list"])

    wait_until("there is a promoted version before the one that serves", may_go_back, within_s=150)

    back = running.change("rollback").raise_for_status().json()["number"]

    def stays() -> bool:
        versions = running.state()["versions"]
        return versions.get("serving") == back and versions.get("pinned") is True

    wait_until("it serves, and stays there", stays, within_s=60)
    newest = running.state()["versions"]["list"][0]["number"]
    assert running.change("promote", number=newest).status_code == 200
    wait_until("the gate may go on", lambda: running.state()["versions"].get("pinned") is False, within_s=60)
    wait_until("it serves", lambda: running.state()["versions"].get("serving", -1) >= newest, within_s=60)


@pytest.mark.parametrize("name", ["gateway", "joiner", "trainer", "inference", "console"])
def test_a_killed_service_is_seen_and_comes_back(running: Running, name: str) -> None:
    wait_until("there is a past", lambda: bool(running.get("/api/history")["vitals"]), within_s=60)
    past = running.get("/api/history")["vitals"]
    before = read_state(RunFolder(running.system.folder))[name]["restarts"]
    assert isinstance(before, int)
    os.kill(running.pid(name), signal.SIGKILL)

    def back() -> bool:
        found = {s["name"]: s for s in running.state()["services"]}
        return name in found and found[name]["restarts"] == before + 1 and found[name]["state"] == "ready"

    wait_until(f"{name} was started again", back, within_s=90)
    wait_until("all is good", lambda: running.state()["health"] == "good", within_s=60)
    found = next(s for s in running.state()["services"] if s["name"] == name)
    assert found["last_exit"].startswith("signal 9")
    assert running.get("/api/history")["vitals"][: len(past)] == past, "whoever was killed"
