"""Bounds of one flush and one commit; a partition that fails does not affect the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

import pytest

from freshet.coordination.assignment import PartitionAssignment
from freshet.errors import Mismatch, TooLarge, Unavailable
from freshet.joiner import partition as tasks
from freshet.joiner.commit import Commit
from freshet.joiner.service import Intervals, JoinerService
from freshet.log import Writer
from freshet.types import Append, Fence
from tests.fixtures.join_events import Action, Served, label, plan_of
from tests.fixtures.joiner import World

PLAN = plan_of(label("click", 300), grace_ms=100, early=False)
CONTEXT = "c" * 5_000


def requests(count: int, every_ms: int = 1_000, items: int = 4) -> list[Served]:
    names = tuple(f"i{n}" for n in range(items))
    return [Served(f"{CONTEXT}{r}", names, 1_000 + r * every_ms) for r in range(count)]


def commits(world: World) -> list[Commit]:
    return [Commit.decode(value, "test") for _, value in world.values("m.joiner")]


def test_windows_that_close_together_are_flushed_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "READY_BYTES", 200_000)  # samples of ten requests
    whole, parts = World(tmp_path / "whole", PLAN, 1), World(tmp_path / "parts", PLAN, 1)
    for world in (whole, parts):
        world.send(requests(100))
    parts.joiner().run(until_end=True)
    monkeypatch.setattr(tasks, "READY_BYTES", 1 << 40)
    whole.joiner().run(until_end=True)

    assert sorted(parts.samples()) == sorted(whole.samples())
    assert len(parts.samples()) == 400
    trained = [c.ledger.labels["click"]["trained_negative"] for c in commits(parts)]
    assert max(b - a for a, b in zip([0, *trained], trained, strict=False)) <= 4 * 11
    watermarks = [c.watermark_ms for c in commits(parts) if c.watermark_ms is not None]
    assert watermarks == sorted(watermarks)
    whole.close()
    parts.close()


def test_a_joiner_killed_between_the_parts_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "READY_BYTES", 200_000)
    world = World(tmp_path, PLAN, 1)
    world.send(requests(60))
    for _ in range(40):
        joiner = world.joiner(Intervals(flush_interval_ms=0, end_check_interval_ms=10**9, pin_interval_ms=0))
        joiner.open()
        joiner.step()
        joiner.close()
    world.joiner().run(until_end=True)

    assert len(world.samples()) == len({sample.id for sample in world.samples()}) == 240
    world.close()


class FailingOnce:
    """A writer of which the next append writes nothing once `fails` is set."""

    fails = False

    def __init__(self, inner: Writer) -> None:
        self._inner = inner

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        if FailingOnce.fails:
            FailingOnce.fails = False
            raise Unavailable("cannot append; nothing was written")
        return self._inner.append(appends)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("all_partitions", [True, False])
def test_failed_flush_of_a_full_task_loses_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_partitions: bool
) -> None:
    monkeypatch.setattr(tasks, "READY_BYTES", 40)
    world = World(tmp_path, plan_of(label("click", 1_000)), 1)
    context = replace(
        world.context(lambda name: FailingOnce(world.log.writer(name))), all_partitions=all_partitions
    )
    joiner = world.joiner(context=context)
    joiner.open()
    world.send([Served(f"r{n}", ("a", "b", "c"), 1_000) for n in range(20)])
    joiner.step()
    joiner.flush()
    world.send([Action(f"r{n}/{item}", 1_100) for n in range(20) for item in "abc"])
    FailingOnce.fails = True
    with pytest.raises(Unavailable, match="nothing was written"):
        joiner.step()
    joiner.run(until_end=True)

    assert len(world.samples()) == len({sample.id for sample in world.samples()}) == 60
    assert commits(world)[-1].ledger.labels["click"]["trained_positive"] == 60
    world.close()


def test_repeats_that_a_commit_names_are_few_or_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "COMMIT_SKIPS", 40)
    monkeypatch.setattr(tasks, "PIECE_BYTES", 10_000)
    world = World(tmp_path, PLAN, 1)
    first = requests(80, every_ms=1, items=8)
    again = [Served(r.request, r.items, r.time + 5) for r in first]
    wider = [Served(r.request, (*r.items, "new"), r.time + 5) for r in first]
    world.send([*first, *again, *wider])
    world.joiner().run(until_end=True)

    named = [c.exclusions.elements_count for c in commits(world)]
    assert sum(named) == 80 * 8
    assert max(named) <= 40 + 8 * 3
    assert sum(len(c.exclusions.records.get("served", ())) for c in commits(world)) == 80
    assert len(world.samples()) == 80 * 9
    world.close()


class Refusing:
    """A writer that refuses this partition's samples while `refuses` is set."""

    refuses = True

    def __init__(self, inner: Writer, partition: int) -> None:
        self._inner, self._partition = inner, partition

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        if Refusing.refuses and any(
            a.topic == "m.samples" and a.partition == self._partition for a in appends
        ):
            raise TooLarge("a record is too large; the topic takes less than before")
        return self._inner.append(appends)

    def close(self) -> None:
        self._inner.close()


class Mine:
    """An assignment of all partitions to this joiner."""

    fences: ClassVar = {p: Fence(1) for p in range(4)}

    def join(self, wait_s: float) -> None:
        """Join at once."""

    def update(self, on_revoke: Callable[[AbstractSet[int]], None]) -> bool:
        return False


def test_unwritable_partition_does_not_affect_others(tmp_path: Path) -> None:
    Refusing.refuses = True
    world = World(tmp_path, PLAN, 4)
    world.send([Served(f"r{n}", ("a", "b"), 1_000 + n) for n in range(200)])
    world.send([Served(f"late{n}", ("a",), 50_000) for n in range(200)])
    intervals = Intervals(
        flush_interval_ms=0, commit_interval_ms=0, end_check_interval_ms=0, assignment_interval_ms=0
    )
    context = replace(world.context(lambda name: Refusing(world.log.writer(name), 2)), all_partitions=False)
    joiner = JoinerService(context, assignment=cast(PartitionAssignment, Mine()), intervals=intervals)
    joiner.open()

    def until(done: Callable[[], bool]) -> None:
        for _ in range(2_000):
            world.clock.seconds += 0.05
            joiner.step()
            if done():
                return
        raise AssertionError("it did not come to that")

    until(
        lambda: (
            {s.partition for s in world.samples()} == {0, 1, 3}
            and joiner.status is not None
            and bool(joiner.status.trouble)
        )
    )
    assert joiner.status is not None
    assert "partition 2 is not joined: a record is too large" in str(joiner.status.trouble)
    Refusing.refuses = False
    until(lambda: 2 in joiner.tasks)
    joiner.report_status()
    assert joiner.status.trouble is None
    until(lambda: {s.partition for s in world.samples()} == {0, 1, 2, 3})
    until(lambda: joiner.status is not None and joiner.status.trouble is None)
    joiner.finish()
    joiner.close()
    ids = [sample.id for sample in world.samples()]
    assert len(ids) == len(set(ids)) == 600
    world.close()


def test_log_with_inexact_writers_ends_a_joiner_with_assignment(tmp_path: Path) -> None:
    world = World(tmp_path, PLAN, 4)

    def open_writer(_name: str) -> Writer:
        raise Mismatch("found Kafka 4.3 or later")

    context = replace(world.context(open_writer), all_partitions=False)
    intervals = Intervals(assignment_interval_ms=0)
    joiner = JoinerService(context, assignment=cast(PartitionAssignment, Mine()), intervals=intervals)
    with pytest.raises(Mismatch, match=r"4\.3 or later"):
        joiner.run()
    world.close()
