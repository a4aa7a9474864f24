"""A log that cannot be read for a moment: the partitions stay, and nothing is joined twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from freshet.errors import Unavailable
from freshet.joiner.partition import Task
from freshet.joiner.service import UNREACHABLE_S, Intervals, JoinerService
from freshet.log import Writer
from freshet.types import Append, BytesColumn, Records, TopicPartition
from tests.fixtures.join_events import Action, Served, label, plan_of
from tests.fixtures.joiner import LostAnswer, World

INTERVALS = Intervals(
    flush_interval_ms=0,
    commit_interval_ms=0,
    end_check_interval_ms=0,
    pin_interval_ms=0,
    count_interval_ms=0,
    retry_ms=0,
)


class FailingLog:
    """A log, or a reader of it, of which the methods in `failing` fail. Polls return the lowest partition
    first."""

    def __init__(self, inner: Any, failing: set[str]) -> None:
        self._inner, self._failing = inner, failing

    def reader(self) -> Any:
        return FailingLog(self._inner.reader(), self._failing)

    def poll(self, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
        if "poll" in self._failing:
            self._fail()
        return sorted(self._inner.poll(max_records, wait_s), key=lambda found: found[0].partition)

    def __getattr__(self, name: str) -> Any:
        if name in self._failing:
            return self._fail
        return getattr(self._inner, name)

    def _fail(self, *_: object, **__: object) -> None:
        raise Unavailable("the broker is silent")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, plan_of(label("click", 300), grace_ms=100), partitions=1)
    yield world
    world.close()


@pytest.fixture
def world_of_two(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, plan_of(label("click", 300), grace_ms=100), partitions=2)
    yield world
    world.close()


def opened(world: World, failing: set[str]) -> JoinerService:
    log: Any = FailingLog(world.log, failing)
    joiner = world.joiner(INTERVALS, replace(world.context(), log=log))
    joiner.watches_growth = True
    world.send([Served("r1", ("a",), 1_000)])
    joiner.open()
    joiner.step()
    return joiner


@pytest.mark.parametrize("read", ["poll", "all_bounds", "partition_counts", "assign"])
def test_a_failed_read_is_repeated_in_place(world: World, read: str) -> None:
    failing: set[str] = set()
    joiner = opened(world, failing)
    [task] = joiner.tasks.values()
    for request in ("r1", "r2"):  # the time of the first failure does not count in the second
        failing.add(read)
        joiner.partitions._on_change()  # the reader is assigned anew
        world.send([Served("r2", ("a",), 1_050), Action(f"{request}/a", 1_100)])
        for _ in range(3):
            joiner.step()
            world.clock.seconds += UNREACHABLE_S / 4
        failing.clear()
        joiner.step()

    assert joiner.tasks[0] is task
    assert task.events == 5
    assert world.samples()[0].value == 1.0
    joiner.close()


@pytest.mark.parametrize("read", ["poll", "all_bounds", "partition_counts"])
def test_a_read_that_fails_for_long_starts_anew(world: World, read: str) -> None:
    failing: set[str] = set()
    joiner = opened(world, failing)
    failing.add(read)
    joiner.step()
    world.clock.seconds += UNREACHABLE_S

    with pytest.raises(Unavailable, match="silent"):
        joiner.step()
    joiner.close()


@pytest.mark.parametrize("update", ["trim", "hold"])
def test_failed_retention_pins_are_skipped(world: World, update: str) -> None:
    failing = {update}
    joiner = opened(world, failing)
    for n in range(60):
        world.send([Served(f"q{n}", ("a",), 2_000 + 50 * n), Action(f"q{n}/a", 2_010 + 50 * n)])
        joiner.step()
    assert joiner.tasks[0].events == 121

    failing.clear()
    joiner.step()
    assert world.log.bounds(TopicPartition("m.joiner", 0)).start > 0
    joiner.close()


def test_records_are_read_once_if_another_partition_is_dropped(
    world_of_two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of_two
    monkeypatch.setattr(Task, "is_full", property(lambda task: task.partition == 0))

    def writer(name: str) -> Writer:
        opened = world.log.writer(name)
        return LostAnswer(opened, random.Random(1), 1.0) if name.endswith("-0") else opened

    log: Any = FailingLog(world.log, set())
    joiner = world.joiner(INTERVALS, replace(world.context(writer), log=log, all_partitions=False))
    joiner.partitions._shared = True
    joiner.open()
    for partition in range(2):
        world.writer.append([Append("served", partition, BytesColumn.of([b"junk"]))])
    joiner.step()
    assert list(joiner.tasks) == [1]
    world.writer.append([Append("served", 1, BytesColumn.of([b"later"]))])
    joiner.step()
    joiner.flush(only_due=False)

    letters = [orjson.loads(value) for _, value in world.values("m.dead-letters")]
    assert [(one["partition"], one["offset"]) for one in letters] == [(1, 0), (1, 1)]
    assert joiner.tasks[1].ledger().refused == joiner.tasks[1].events == 2
    joiner.close()
