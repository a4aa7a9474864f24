"""The joiner on a real log: killed anywhere, it neither loses nor doubles a sample."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from freshet.errors import Unavailable
from freshet.joiner.commit import Commit
from freshet.joiner.ledger import Ledger
from freshet.joiner.plan import JoinPlan
from freshet.joiner.service import JoinerService, Pace
from tests.unit.joiner.support import Event, label, plan_of
from tests.unit.joiner.world import LostAnswer, World, random_events

PLANS = {
    "early": plan_of(label("click", 300), label("buy", 900, given=0), grace_ms=120),
    "window": plan_of(label("click", 300), label("buy", 900, given=0), grace_ms=120, early=False),
    "shown, a number, down-sampled": plan_of(
        label("click", 400),
        label("watch", 300, value="sum(action.amount) + last(action.amount)"),
        grace_ms=120,
        require_shown=True,
        negatives=0.5,
    ),
}


def commits(world: World) -> list[Commit]:
    return [Commit.decode(value, "test") for _, value in world.values("m.joiner")]


def last_ledger(world: World) -> Ledger:
    last: dict[int, Commit] = {}
    for partition, value in world.values("m.joiner"):
        last[partition] = Commit.decode(value, "test")
    return Ledger.total([commit.ledger for commit in last.values()])


def unkilled(folder: Path, plan: JoinPlan, events: list[Event]) -> World:
    world = World(folder, plan)
    world.send(events)
    joiner = world.joiner()
    joiner.run(until_end=True)
    return world


def step_or_die(joiner: JoinerService, chance: random.Random) -> JoinerService | None:
    """A step; None if the joiner died in it or after it."""
    try:
        joiner.step()
    except Unavailable:
        joiner.close()
        return None
    if chance.random() < 0.25:
        joiner.close()  # what was not appended is gone
        return None
    return joiner


def run_with_kills(
    folder: Path, plan: JoinPlan, events: list[Event], chance: random.Random
) -> tuple[World, int]:
    world = World(folder, plan)
    kills, at = 0, 0
    joiner: JoinerService | None = None
    while at < len(events) or joiner is None or not joiner._reached(joiner._ends()):
        world.clock.seconds += chance.random() * 0.3
        if joiner is None:
            kills += 1
            pace = Pace(
                flush_interval_ms=0,
                look_interval_ms=10**9,
                keep_interval_ms=0,
                poll_records=chance.randrange(1, 60),
            )
            joiner = world.joiner(pace)
            joiner.open()
            joiner._writers = [(LostAnswer(w, chance, 0.1), p) for w, p in joiner._writers]
        n = chance.randrange(16)
        world.send(events[at : at + n])
        at += n
        joiner = step_or_die(joiner, chance)
    joiner.close()
    world.joiner().run(until_end=True)
    return world, kills


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment_it_emits_what_an_unkilled_one_does(
    tmp_path: Path, name: str, seed: int
) -> None:
    plan, chance = PLANS[name], random.Random(f"{name} {seed}")
    events = random_events(chance, plan, requests=60, disorder_ms=100)
    calm = unkilled(tmp_path / "calm", plan, events)
    stormy, kills = run_with_kills(tmp_path / "stormy", plan, events, chance)

    expected, found = calm.samples(), stormy.samples()
    assert kills > 3
    assert len(expected) > 20
    assert Counter(found) == Counter(expected)
    assert max(Counter((s.partition, s.id) for s in found).values()) == 1
    assert any(c.since > 0 for c in commits(stormy)), (
        "the test is to replay from commits, not only from the start"
    )
    assert stormy.samples("m.samples.late") == []
    ledger = last_ledger(stormy)
    assert set(ledger.unexplained().values()) == {0}
    assert ledger.labels == last_ledger(calm).labels
    assert sum(
        n for counts in ledger.labels.values() for k, n in counts.items() if k.startswith("trained")
    ) == len(found)
    calm.close()
    stormy.close()
