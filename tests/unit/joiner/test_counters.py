"""Counts of several joiners add up to the ledger, in any order of restarts."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from freshet.joiner.commit import Commit, EventCounts, Ledger
from freshet.joiner.service import Intervals, JoinerService
from tests.fixtures.join_events import Action, Event, Served, label, plan_of
from tests.fixtures.joiner import World, random_events

PLAN = plan_of(label("click", 300), grace_ms=100)
INTERVALS = Intervals(
    flush_interval_ms=0,
    commit_interval_ms=0,
    end_check_interval_ms=10**9,
    pin_interval_ms=10**9,
    status_interval_ms=0,
)


def counted(joiner: JoinerService) -> EventCounts:
    assert joiner.status is not None
    return joiner.status.counts


def ledger_of(world: World) -> Ledger:
    last = {partition: Commit.decode(value, "test").ledger for partition, value in world.values("m.joiner")}
    return Ledger.total(list(last.values()))


def test_successive_joiners_each_count_their_own_commits(tmp_path: Path) -> None:
    world, chance = World(tmp_path, PLAN), random.Random(7)
    events: list[Event | bytes] = [*random_events(chance, PLAN, requests=60, disorder_ms=50)]
    for at in range(5, len(events), 40):
        events.insert(at, b"junk")
    totals: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for at in range(0, len(events), 20):
        world.send(events[at : at + 20])
        joiner = world.joiner(INTERVALS)
        joiner.open()
        joiner.step()
        joiner.close()
        totals.update(counted(joiner).outcomes)
        refused.update(counted(joiner).refused["served"])

    ledger = ledger_of(world)
    assert totals == Counter(ledger.events)
    assert totals["actions_matched"] > 10
    assert totals["impressions_repeated"] > 5
    assert refused == Counter(unreadable=ledger.refused)
    assert ledger.refused > 2
    world.close()


def test_late_actions_and_impossible_times_are_counted(tmp_path: Path) -> None:
    world = World(tmp_path, PLAN, partitions=1)
    joiner = world.joiner(INTERVALS)
    joiner.open()
    world.send([Served("r1", ("a",), 1_000), Served("r2", ("a",), 9_000), Action("r2/a", 9_000)])
    joiner.step()
    joiner.step()
    world.send([Action("r1/a", 1_100)], time_ms=9_000)
    world.send([Action("r2/a", 10**13)], time_ms=9_000)
    joiner.step()
    joiner.step()

    counts = counted(joiner)
    assert counts.outcomes["actions_late"] == 1
    assert counts.outcomes["actions_matched"] == 1
    assert counts.refused == {
        "served": {"unreadable": 0, "no_schema": 0, "bad_time": 0, "too_large": 0},
        "action": {"unreadable": 0, "no_schema": 0, "bad_time": 1, "too_large": 0},
    }
    joiner.close()
    world.close()


def test_count_of_events_read_never_falls_on_a_restart(tmp_path: Path) -> None:
    """Prometheus treats a falling counter as a restart, and would count all events again."""
    world = World(tmp_path, PLAN)
    joiner = world.joiner(INTERVALS)
    joiner.open()
    world.send([Served(f"r{i}", ("a",), 1_000) for i in range(10)])
    joiner.step()
    joiner.open()
    world.send([Served(f"r{i}", ("a",), 1_000) for i in range(10, 13)])
    joiner.step()

    assert joiner.status is not None
    assert joiner.status.events == 13
    joiner.close()
    world.close()
