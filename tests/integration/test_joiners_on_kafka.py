"""Joiners that share a model's partitions on a real Kafka: killed or asleep, nothing is lost or doubled."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from freshet.adapters import open_eventlog
from freshet.clock import SYSTEM_CLOCK
from freshet.joiner.commit import Commit, Ledger
from freshet.testing.conditions import wait_until
from tests.fixtures.join_events import Event
from tests.fixtures.joiner import World, random_events
from tests.integration.joiner_process import PARTITIONS, PLAN
from tests.servers.kafka import Kafka
from tests.servers.processes import Process

ALL = list(range(PARTITIONS))
WITHIN_S = 60.0
STAGES = 5


class Scene:
    """A log on Kafka, and joiners on it."""

    def __init__(self, kafka: Kafka, folder: Path) -> None:
        self.url, self._folder = f"kafka://{kafka.bootstrap}/{uuid4().hex}", folder
        self.world = World(folder, PLAN, PARTITIONS, other_log=open_eventlog(self.url))
        self.joiners: list[Process] = []

    def start(self, name: str) -> Process:
        command = [sys.executable, "-m", "tests.integration.joiner_process", self.url, name]
        joiner = Process(command, self._folder / f"{name}.log")
        self.joiners.append(joiner)
        joiner.start(lambda said: '"partitions"' in said, within_s=WITHIN_S)
        return joiner

    def ledger(self) -> Ledger:
        last = {p: Commit.decode(value, "test") for p, value in self.world.values("m.joiner")}
        return Ledger.total([commit.ledger for commit in last.values()])

    def close(self) -> None:
        for joiner in self.joiners:
            joiner.kill()
        self.world.close()


@pytest.fixture
def scene(kafka: Kafka, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(kafka, tmp_path)
    yield scene
    scene.close()


def last(joiner: Process) -> dict[str, Any]:
    """What it said last of how it stands."""
    lines = [line for line in joiner.said().splitlines() if line.startswith('{"partitions"')]
    said: dict[str, Any] = json.loads(lines[-1]) if lines else {"partitions": [], "samples": 0}
    return said


def holds(joiner: Process, partitions: list[int]) -> Callable[[], bool]:
    return lambda: bool(last(joiner)["partitions"] == partitions)


def test_replaced_joiners_join_every_impression_once(scene: Scene, tmp_path: Path) -> None:
    events = random_events(random.Random(7), PLAN, requests=400, disorder_ms=100)
    stages = [iter(_pieces(events, stage)) for stage in range(STAGES)]

    def send_until(done: Callable[[], bool], what: str) -> None:
        """Send a stage's events, a piece at each look, so that the joiners are busy when it happens."""
        pieces = stages.pop(0)

        def look() -> bool:
            scene.world.send(next(pieces, []))
            return done()

        wait_until(what, look, within_s=WITHIN_S)
        for piece in pieces:
            scene.world.send(piece)

    def joined(joiner: Process) -> Callable[[], bool]:
        before = last(joiner)["samples"]
        return lambda: bool(last(joiner)["samples"] > before)

    a = scene.start("a")
    wait_until("a takes all partitions", holds(a, ALL), within_s=WITHIN_S)
    b = scene.start("b")
    wait_until("a and b share them", lambda: holds(a, [0, 2])() and holds(b, [1, 3])(), within_s=WITHIN_S)
    send_until(joined(a), "a joins")
    a.kill()
    send_until(holds(b, ALL), "b takes those of a over")
    send_until(joined(b), "b joins them")
    b.pause()
    c = scene.start("c")
    send_until(holds(c, ALL), "c takes those of b over")
    b.resume()
    wait_until(
        "b and c share them",
        lambda: (
            len(last(b)["partitions"]) == 2 and sorted(last(b)["partitions"] + last(c)["partitions"]) == ALL
        ),
        within_s=WITHIN_S,
    )
    send_until(joined(c), "c joins its share")
    for joiner in (b, c):
        joiner.stop()
    rest = scene.world.joiner(context=replace(scene.world.context(), clock=SYSTEM_CLOCK))
    rest.run(until_end=True)
    rest.open()  # its writers wait for the markers of the last transactions, which are answered before
    rest.close()

    expected, found = _calm(tmp_path / "calm", events), scene.world.samples()
    assert len(expected.samples()) > 300
    assert scene.world.samples("m.samples.late") == []
    assert Counter(found) == Counter(expected.samples())
    ledger = scene.ledger()
    assert set(ledger.unexplained().values()) == {0}
    trained = [n for c in ledger.labels.values() for k, n in c.items() if k.startswith("trained")]
    assert sum(trained) == len(found)
    expected.close()


def _pieces(events: list[Event], stage: int) -> list[list[Event]]:
    share = -(-len(events) // STAGES)
    part = events[stage * share : (stage + 1) * share]
    return [part[at : at + 40] for at in range(0, len(part), 40)]


def _calm(folder: Path, events: list[Event]) -> World:
    world = World(folder, PLAN, PARTITIONS)
    world.send(events)
    world.joiner().run(until_end=True)
    return world
