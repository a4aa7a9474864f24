"""Topics of other systems (formats confluent and bare): a service that starts neither creates nor changes
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from freshet.config.spec.topics import topics_of
from freshet.errors import Mismatch
from freshet.gateway.service import Gateway, codecs_of
from freshet.inference.service import Inference
from freshet.log.topics import ensure_topic
from tests.fixtures.gateway import RANKED, SCHEMAS, SPEC
from tests.fixtures.serving import settings
from tests.fixtures.trained_model import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    action = replace(SPEC.events.action, format="confluent")
    world = World(tmp_path, replace(SPEC, events=replace(SPEC.events, action=action)), RANKED)
    yield world
    world.close()


def gateway(world: World) -> None:
    codecs = codecs_of(world.spec, SCHEMAS, world.log)
    Gateway(world.spec, world.log, codecs, settings().gateway).close()


def inference(world: World) -> None:
    Inference(world.parts, settings().inference).close()


def every_plan(world: World) -> None:
    for plan in topics_of(world.spec).plans:
        ensure_topic(world.log, plan)


STARTS = [gateway, inference, every_plan]


@pytest.mark.parametrize("start", STARTS)
def test_another_systems_topic_keeps_its_retention(world: World, start: Callable[[World], None]) -> None:
    topic = world.spec.events.action.topic
    before = world.log.create_topic(topic, partitions=world.spec.partitions + 1, retention_ms=None)

    start(world)

    assert world.log.topics()[topic] == before
    assert world.log.topics()[world.spec.events.served.topic].retention_ms is not None


@pytest.mark.parametrize("start", STARTS)
def test_a_missing_topic_of_another_system_ends_the_start(
    world: World, start: Callable[[World], None]
) -> None:
    topic = world.spec.events.action.topic

    with pytest.raises(Mismatch, match="no such topic"):
        start(world)

    assert topic not in world.log.topics()
