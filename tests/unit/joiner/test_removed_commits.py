"""A partition whose commits the log has removed is not joined again from the start of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.config.spec import load_spec
from freshet.config.spec.topics import topics_of
from freshet.demo import DEMO_SPEC
from freshet.errors import DataLost
from freshet.joiner.replay import last_commits
from freshet.types import TopicPartition
from tests.fixtures.join_events import Action, Served, label, plan_of
from tests.fixtures.joiner import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, plan_of(label("click", 300), grace_ms=100), partitions=1)
    yield world
    world.close()


def join_and_remove(world: World, *topics: str) -> None:
    """Join a click, then remove all records of these topics, as a retention by time does."""
    world.send([Served("r1", ("a",), 1_000), Action("r1/a", 1_100)])
    world.joiner().run(until_end=True)
    assert len(world.samples()) == 1
    for topic in topics:
        at = TopicPartition(topic, 0)
        world.log.trim(at, world.log.bounds(at).end)


def test_events_are_not_joined_again_without_commits(world: World) -> None:
    join_and_remove(world, "m.joiner")
    joiner = world.joiner()

    with pytest.raises(
        DataLost, match=r"(?s)m\.joiner.*expected the last commit, found none.*served, action"
    ):
        joiner.run(until_end=True)
    with pytest.raises(DataLost, match="expected the last commit"):
        last_commits(world.context(), [0])
    assert len(world.samples()) == 1


def test_without_events_a_partition_starts_anew(world: World) -> None:
    join_and_remove(world, "m.joiner", *world.inputs.values())
    assert last_commits(world.context(), [0]) == {0: None}
    world.send([Served("r2", ("a",), 2_000), Action("r2/a", 2_100)])

    with pytest.raises(DataLost, match="expected the last commit"):  # they may be joined already
        world.joiner().run(until_end=True)
    for topic in world.inputs.values():
        world.log.trim(TopicPartition(topic, 0), 2)
    joiner = world.joiner()
    joiner.open()
    world.send([Served("r3", ("a",), 3_000), Action("r3/a", 3_100)])
    joiner.step()
    joiner.finish()
    joiner.close()
    assert [sample.time for sample in world.samples()] == [1_000, 3_000]


def test_commits_are_kept_regardless_of_age() -> None:
    topics = topics_of(load_spec(DEMO_SPEC))
    retention_ms = {plan.name: plan.retention_ms for plan in topics.plans}

    assert retention_ms[topics.joiner] is None
    assert retention_ms[topics.samples] is not None
