"""A restart finds what it needs in the log: retention pins, low offsets and commits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from freshet.joiner.commit import Commit
from freshet.joiner.service import Intervals
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.types import TopicPartition
from tests.fixtures.join_events import Action, Served, label, plan_of
from tests.fixtures.joiner import SetClock, World

START_MS = 10_000
CALM = Intervals(
    flush_interval_ms=0,
    commit_interval_ms=0,
    end_check_interval_ms=0,
    pin_interval_ms=10**9,
    status_interval_ms=0,
)


def requests_of(partition: int) -> list[str]:
    """Return names of requests that lie in one of two partitions."""
    return [name for n in range(100) if zlib.crc32((name := f"r{n}").encode()) % 2 == partition]


def last_commit(world: World) -> Commit:
    return Commit.decode(world.values("m.joiner")[-1][1], "test")


@pytest.fixture
def clock() -> SetClock:
    clock = SetClock()
    clock.wall_ms = START_MS
    return clock


@pytest.fixture
def log(tmp_path: Path, clock: SetClock) -> Iterator[SqliteEventLog]:
    log = SqliteEventLog(tmp_path, clock=clock)
    yield log
    log.close()


def test_restart_keeps_the_pins_of_partitions_without_events(
    tmp_path: Path, log: SqliteEventLog, clock: SetClock
) -> None:
    world = World(tmp_path, plan_of(label("click", 10**6)), 2, clock, log)
    pinning = replace(CALM, pin_interval_ms=0)
    joiner = world.joiner(pinning)
    joiner.open()
    for partition in (0, 1):
        world.send([Served(name, ("a",), START_MS) for name in requests_of(partition)[:20]])
    joiner.step()
    joiner.step()
    joiner.close()

    clock.wall_ms += 10_000
    clock.seconds += 10
    joiner = world.joiner(pinning)
    joiner.open()
    world.send([Served(requests_of(0)[30], ("a",), clock.wall_ms)])
    joiner.step()
    joiner.step()
    joiner.close()
    for topic in world.inputs.values():
        log.create_topic(topic, partitions=2, retention_ms=5_000)
    log.enforce_retention()

    joiner = world.joiner(pinning)
    joiner.open()
    assert {p: t.ledger().labels["click"]["pending"] for p, t in joiner.tasks.items()} == {0: 21, 1: 20}
    joiner.close()


def test_room_is_reported_once_the_start_of_the_log_is_known(tmp_path: Path) -> None:
    world = World(tmp_path, plan_of(label("click", 300)), 1)
    events = [
        (Served(f"r{n}", ("a",), 1_000 + 100 * n), Action(f"r{n}/a", 1_010 + 100 * n)) for n in range(50)
    ]
    world.send([event for pair in events for event in pair])
    world.joiner(CALM).run(until_end=True)
    low = last_commit(world).low
    for role, topic in world.inputs.items():
        world.log.trim(TopicPartition(topic, 0), low[role] - 5)
    joiner = world.joiner(CALM)
    joiner.open()
    joiner.report_status()
    assert joiner.status is not None
    assert joiner.status.room == {}
    world.clock.seconds += 1
    joiner.step()
    assert joiner.status.room == {0: 5}
    joiner.close()
    world.close()


def test_after_an_idle_spell_a_restart_needs_no_events(tmp_path: Path) -> None:
    world = World(tmp_path, plan_of(label("click", 1_000)), 1)
    joiner = world.joiner(CALM)
    joiner.open()
    world.send([Served("r1", ("a",), 5_000), Action("r1/a", 5_100), Served("r2", ("a",), 5_200)])

    def pass_s(seconds: int) -> int:
        for _ in range(10 * seconds):
            world.clock.seconds += 0.1
            joiner.step()
        return world.log.bounds(TopicPartition("m.joiner", 0)).end

    before = pass_s(2)
    assert last_commit(world).low != last_commit(world).next
    assert pass_s(3) == pass_s(3) == before + 1
    joiner.close()
    for topic in world.inputs.values():
        at = TopicPartition(topic, 0)
        world.log.trim(at, world.log.bounds(at).end)
    joiner = world.joiner(CALM)
    joiner.open()
    assert pass_s(3) == before + 1
    world.send([Served("r1", ("a",), 6_000), Served("r3", ("a",), 10_000)])
    pass_s(3)
    joiner.close()

    assert len(world.samples()) == 3
    assert last_commit(world).ledger.events["impressions_late"] == 1
    world.close()
