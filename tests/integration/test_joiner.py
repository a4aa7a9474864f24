"""The joiner on a real log: killed anywhere, it neither loses nor doubles a sample."""

from __future__ import annotations

import base64
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from freshet.errors import Corrupt, DataLost, Fenced, Unavailable
from freshet.joiner.commit import Commit, Ledger
from freshet.joiner.plan import JoinPlan
from freshet.joiner.service import Intervals, JoinerService, JoinerStatus
from freshet.types import Append, BytesColumn, TopicPartition
from tests.fixtures.join_events import Action, Event, JsonDecoder, Served, label, plan_of
from tests.fixtures.joiner import LostAnswer, World, random_events

PLANS = {
    "early": plan_of(label("click", 300), label("buy", 900, given=0), grace_ms=120),
    "early, from the first event on": plan_of(
        label("click", 300), label("buy", 900, given=0), grace_ms=120, ramp=4
    ),
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
    while at < len(events) or joiner is None or not joiner.has_reached(joiner.ends()):
        world.clock.seconds += chance.random() * 0.3
        if joiner is None:
            kills += 1
            intervals = Intervals(
                flush_interval_ms=0,
                end_check_interval_ms=10**9,
                pin_interval_ms=0,
                poll_records=chance.randrange(1, 60),
            )
            faulty = world.context(lambda name: LostAnswer(world.log.writer(name), chance, 0.1))
            joiner = world.joiner(intervals, faulty)
            joiner.open()
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


CALM = Intervals(flush_interval_ms=0, commit_interval_ms=0, end_check_interval_ms=0, pin_interval_ms=10**9)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "log", plan_of(label("click", 300), grace_ms=100), partitions=1)
    yield world
    world.close()


def test_unreadable_events_are_dead_letters_once(world: World) -> None:
    world.send([Served("r1", ("a",), 1_000), b"junk"])
    joiner = world.joiner(CALM)
    joiner.open()
    joiner.step()
    joiner.close()  # killed
    joiner = world.joiner(CALM)
    joiner.open()
    joiner.step()

    [(_, value)] = world.values("m.dead-letters")
    letter = orjson.loads(value)
    assert (letter["topic"], letter["partition"], letter["offset"]) == ("served", 0, 1)
    assert base64.b64decode(letter["bytes"]) == b"junk"
    assert letter["reason"] == "expected JSON"
    assert last_ledger(world).refused == 1
    joiner.close()


def test_one_event_dated_years_ahead_closes_nothing(world: World) -> None:
    world.send([Served("r1", ("a",), 1_000)])
    world.send([Served("r2", ("a",), 10**13), Action("r1/a", 10**13)], time_ms=1_010)
    world.send([Action("r1/a", 1_100)])
    world.joiner().run(until_end=True)

    assert [s.value for s in world.samples()] == [1.0]
    letters = [orjson.loads(value)["reason"] for _, value in world.values("m.dead-letters")]
    assert len(letters) == 2
    assert all("ahead of the log's" in reason for reason in letters)


def test_when_nothing_comes_windows_close_as_time_passes(world: World) -> None:
    world.send([Served("r1", ("a",), 1_000)])
    joiner = world.joiner(CALM)
    joiner.open()
    joiner.step()
    world.clock.seconds += 0.399
    joiner.step()
    assert world.samples() == []
    world.clock.seconds += 0.001
    joiner.step()

    assert [s.value for s in world.samples()] == [0.0]
    joiner.close()


def test_events_after_a_pause_are_read_before_time_advances(world: World) -> None:
    world.send([Served("r1", ("a",), 1_000)])
    joiner = world.joiner(CALM)
    joiner.open()
    joiner.step()
    world.clock.seconds += 60.0  # the process was paused
    world.send([Action("r1/a", 1_100)])
    joiner.step()

    assert [s.value for s in world.samples()] == [1.0]
    joiner.close()


def test_a_joiner_with_nothing_to_say_commits_nothing(world: World) -> None:
    world.send([Served("r1", ("a",), 1_000), Action("r1/a", 1_100)])
    joiner = world.joiner(CALM)
    joiner.open()
    for _ in range(5):
        joiner.step()
    n = len(world.values("m.joiner"))
    for _ in range(20):
        world.clock.seconds += 0.01
        joiner.step()

    assert len(world.values("m.joiner")) == n
    joiner.close()


def test_a_second_joiner_fences_the_first(world: World) -> None:
    first, second = world.joiner(CALM), world.joiner(CALM)
    first.open()
    second.open()
    world.send([Served("r1", ("a",), 1_000), Action("r1/a", 1_100)])
    second.step()
    with pytest.raises(Fenced):
        first.step()

    assert len(world.samples()) == 1
    first.close()
    second.close()


def test_a_joiner_does_not_go_on_from_another_log(world: World) -> None:
    world.send([Served("r1", ("a",), 1_000)])
    world.joiner().run(until_end=True)
    context = world.context()
    topics = replace(context.topics, log_ids={**context.topics.log_ids, "served": "another"})
    stranger = world.joiner(context=replace(context, topics=topics))

    with pytest.raises(DataLost, match="created anew"):
        stranger.open()
    stranger.close()


def test_a_restart_reads_nothing_before_its_retention_pin(world: World) -> None:
    events: list[Event] = [Served(f"r{n}", ("a",), 1_000 + 20 * n) for n in range(200)]
    events += [Action(f"r{n}/a", 1_010 + 20 * n) for n in range(0, 200, 3)]
    events.sort(key=lambda e: e.time)
    intervals = replace(CALM, pin_interval_ms=0)
    joiner = world.joiner(intervals)
    joiner.open()
    for n in range(0, len(events) - 20, 10):
        world.send(events[n : n + 10])
        joiner.step()
        joiner.step()
    last = commits(world)[-1]
    joiner.close()
    for role, topic in world.inputs.items():
        world.log.trim(TopicPartition(topic, 0), last.low[role])
    assert min(last.low.values()) > 50
    assert world.log.bounds(TopicPartition("m.joiner", 0)).start > 0
    world.send(events[len(events) - 20 :])
    world.joiner().run(until_end=True)

    assert len({s.id for s in world.samples()}) == len(world.samples()) == 200
    assert sum(s.value for s in world.samples()) == 67


def test_a_restart_within_the_warm_up_needs_no_first_impression(
    tmp_path: Path,
) -> None:
    plan = plan_of(label("click", 300), grace_ms=100, ramp=8)
    events: list[Event] = [Served(f"r{n}", ("a",), 1_000 + 20 * n) for n in range(200)]
    events += [Action(f"r{n}/a", 1_010 + 20 * n) for n in range(0, 200, 3)]
    events.sort(key=lambda e: e.time)
    calm, world = (World(tmp_path / name, plan, partitions=1) for name in ("calm", "killed"))
    for joined in (calm, world):
        joiner = joined.joiner(CALM)
        joiner.open()
        for n in range(0, len(events), 10):
            joined.send(events[n : n + 10])
            joiner.step()
            joiner.step()
            if joined is world and n in (60, 140):  # at about 1,900 and 3,100 of 1,000 to 4,200
                joiner.close()
                last = commits(world)[-1]
                for role, topic in world.inputs.items():
                    world.log.trim(TopicPartition(topic, 0), last.low[role])
                joiner = joined.joiner(CALM)
                joiner.open()
        joiner.finish()
        joiner.close()

    assert last.low["served"] > 0
    assert {c.began_ms for c in commits(world)} == {1_000}
    assert {s.weight for s in world.samples() if s.value == 1.0} == {0.875, 1.0}
    assert world.samples() == calm.samples()
    calm.close()
    world.close()


def test_a_stopped_joiner_has_committed_all_that_it_read(world: World) -> None:
    joiner = world.joiner(replace(CALM, commit_interval_ms=10**9))
    world.send([Served("r1", ("a",), 1_000)])
    seen: list[int] = []

    def stop(status: JoinerStatus) -> None:
        seen.append(status.events)
        if status.events:
            joiner.stop.set()

    joiner.on_status = stop
    joiner.intervals = replace(joiner.intervals, status_interval_ms=0)
    joiner.run()

    assert seen[-1] == 1
    assert commits(world)[-1].next == {"served": 1, "action": 0}


def test_the_newest_event_time_is_of_samples_that_were_written(world: World) -> None:
    def newest_ms(joiner: JoinerService) -> int | None:
        joiner.step()
        assert joiner.status is not None
        return joiner.status.newest_ms

    lost = LostAnswer(world.log.writer("joiner-m"), random.Random(1), 0.0)
    joiner = world.joiner(replace(CALM, status_interval_ms=0), world.context(lambda _: lost))
    joiner.open()
    world.send([Served("r1", ("a",), 1_000), Served("r2", ("a",), 1_050)])
    assert newest_ms(joiner) is None

    world.send([Action("r2/a", 1_100)])
    assert newest_ms(joiner) == 1_050
    world.send([Action("r1/a", 1_110)])
    assert newest_ms(joiner) == 1_050

    world.send([Served("r3", ("a",), 1_120), Action("r3/a", 1_130)])
    lost.share = 1.0
    with pytest.raises(Unavailable):
        joiner.step()
    joiner.report_status()
    assert joiner.status is not None
    assert joiner.status.newest_ms == 1_050
    joiner.close()


def test_a_commit_that_the_replay_contradicts_is_corrupt(world: World) -> None:
    world.send([Served("r1", ("a",), 1_000)])
    joiner = world.joiner(CALM)
    joiner.open()
    joiner.step()
    joiner.close()
    plan = plan_of(label("click", 1), grace_ms=0)
    wrong = world.joiner(CALM, replace(world.context(), plan=plan, decoder=lambda: JsonDecoder(plan)))
    [commit] = commits(world)
    forged = replace(commit, watermark_ms=2_000)
    world.log.writer().append([Append("m.joiner", 0, BytesColumn.of([forged.encode()]))])

    with pytest.raises(Corrupt, match="pending"):
        wrong.open()
    wrong.close()
