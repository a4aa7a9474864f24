"""A restart finds what it needs in the log: retention pins, low offsets and commits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from freshet.joiner import partition as tasks
from freshet.joiner.commit import Commit
from freshet.joiner.partition import Task
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


def test_slack_is_reported_once_the_start_of_the_log_is_known(tmp_path: Path) -> None:
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


def test_places_where_a_replay_may_begin_stay_few(tmp_path: Path) -> None:
    world = World(tmp_path, plan_of(label("click", 10**9)), 1)
    context = world.context()
    task = Task(0, world.plan, context.topics, context.decoder(), {"served": 0, "action": 0})
    low = {"served": 0, "action": 0}
    task.joiner.low = lambda role, next_offset: low[role]  # type: ignore[method-assign]
    flushed = task.flush(0)
    for n in range(100_000):
        step = replace(flushed.commit, next={"served": n + 1, "action": 2 * n + 1})
        task.on_appended(replace(flushed, commit=step), 2 * n)
    assert task.flush(0).commit.since == -1
    assert len(task._steps) < 10 * tasks.STEPS

    for n in range(0, 100_000, 1_000):
        low.update(served=n, action=2 * n)
        since = task.flush(0).commit.since
        assert 2 * n - 2 * 100_000 / tasks.STEPS <= since <= 2 * n
    world.close()


def test_replay_from_one_of_few_places_finds_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "STEPS", 4)
    world = World(tmp_path, plan_of(label("click", 2_000), label("buy", 500), grace_ms=100), 1)
    joiner = world.joiner(replace(CALM, end_check_interval_ms=10**9, pin_interval_ms=0))
    joiner.open()
    for n in range(300):
        at_ms = 1_000 + 20 * n
        world.send([Served(f"r{n}", ("a",), at_ms), Action(f"r{n // 2}/a", at_ms, id=f"{n}")])
        joiner.step()
    for _ in range(2):  # a replay keeps few places as well
        task = joiner.tasks[0]
        assert len(task._steps) < 30
        assert 0 < last_commit(world).since < last_commit(world).next["served"] - 100
        found = task.ledger(), task.joiner.ids, task.joiner.payload_bytes
        joiner.close()
        for role, topic in world.inputs.items():
            world.log.trim(TopicPartition(topic, 0), last_commit(world).low[role])
        joiner.open()
        task = joiner.tasks[0]
        assert (task.ledger(), task.joiner.ids, task.joiner.payload_bytes) == found
    joiner.finish()
    joiner.close()

    assert len(world.samples()) == len({s.id for s in world.samples()}) == 600
    world.close()
