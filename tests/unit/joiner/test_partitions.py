"""The life of partitions: recoveries and appends on threads that the test controls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from freshet.errors import Fenced, FreshetError, TooLarge, Unavailable
from freshet.joiner.commit import Commit
from freshet.joiner.decoder import EventDecoder
from freshet.joiner.partitions import Partitions
from freshet.joiner.watermark import JoinerClocks
from freshet.log import Writer
from freshet.testing.conditions import wait_until
from freshet.types import Append
from tests.fixtures.join_events import JsonDecoder, label, plan_of
from tests.fixtures.joiner import World

DEADLINE_S = 60.0
PLAN = plan_of(label("click", 300), grace_ms=100)


class Opened:
    """A writer that opens and appends when the test permits it."""

    def __init__(self) -> None:
        self.may_open, self.requested = Event(), Event()
        self.may_append, self.closed = Event(), Event()
        self.error: FreshetError | None = None
        self.inner: Writer | None = None

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        assert self.may_append.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        assert self.inner is not None
        return self.inner.append(appends)

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()
        self.closed.set()


class Scene:
    """Partitions of three that share nothing, on a real log."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder, PLAN, 3)
        self.writers = [Opened() for _ in range(3)]
        self.changes = 0
        self.error_of_decoder: Exception | None = None
        context = replace(self.world.context(self.open_writer), all_partitions=False, decoder=self.decoder)
        self.partitions = Partitions(
            context,
            JoinerClocks(self.world.clock, log_counts=True),
            shared=True,
            stopping=lambda: False,
            on_change=self.on_change,
            on_flushed=lambda _task, _output: None,
        )

    def open_writer(self, name: str) -> Writer:
        writer = self.writers[int(name.rpartition("-")[2])]
        writer.requested.set()
        assert writer.may_open.wait(DEADLINE_S)
        writer.inner = self.world.log.writer(name)
        return writer

    def decoder(self) -> EventDecoder:
        if self.error_of_decoder is not None:
            raise self.error_of_decoder
        return JsonDecoder(PLAN)

    def on_change(self) -> None:
        self.changes += 1

    def run(self, *partitions: int) -> None:
        """Join partitions and wait until they run."""
        for partition in partitions:
            self.writers[partition].may_open.set()
        self.partitions.join(partitions, waiting=True)

    def read(self, partition: int) -> None:
        """Have the task of a partition read a record, so that it has a commit to flush."""
        self.partitions.tasks[partition].next["served"] += 1

    def committed(self) -> set[int]:
        return {p for p, value in self.world.values("m.joiner") if Commit.decode(value, "test")}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    for writer in scene.writers:
        writer.may_open.set()
        writer.may_append.set()
    scene.partitions.close()
    scene.world.close()


def test_slow_recovery_does_not_delay_others(scene: Scene) -> None:
    scene.partitions.join([0, 1])
    scene.writers[1].may_open.set()

    def runs() -> bool:
        scene.partitions.add_recovered()
        return set(scene.partitions.tasks) == {1}

    wait_until("the second partition runs", runs, within_s=60)
    assert scene.partitions.recovering == {0}
    assert scene.partitions.missing_of(range(3)) == [2]


def test_recovery_that_is_revoked_is_closed_and_never_runs(scene: Scene) -> None:
    scene.partitions.join([0, 1])
    assert scene.writers[0].requested.wait(DEADLINE_S)
    scene.partitions.revoke([0])
    assert scene.partitions.recovering == {1}
    for writer in scene.writers:
        writer.may_open.set()

    scene.partitions.add_recovered(waiting=True)
    assert set(scene.partitions.tasks) == {1}
    assert scene.writers[0].closed.is_set()
    assert not scene.writers[1].closed.is_set()


def test_failed_recovery_closes_its_writer_and_is_joined_again(scene: Scene) -> None:
    scene.error_of_decoder = Fenced("another was quicker")
    scene.run(2)

    assert scene.writers[2].closed.is_set()
    assert not scene.partitions.tasks
    assert scene.partitions.missing_of([2]) == [2]


def test_lasting_error_of_recovery_is_retried_at_growing_delays(scene: Scene) -> None:
    scene.error_of_decoder = TooLarge("a record is too large")
    for delay_s in (1.0, 2.0, 4.0):
        scene.run(1)
        assert scene.partitions.failed[1].delay_s == delay_s
        assert scene.partitions.missing_of([1]) == []
        scene.world.clock.seconds += delay_s
        assert scene.partitions.missing_of([1]) == [1]


def test_revoked_partition_is_failed_no_more(scene: Scene) -> None:
    scene.error_of_decoder = TooLarge("a record is too large")
    scene.run(0, 1)
    scene.partitions.revoke([1])
    assert set(scene.partitions.failed) == {0}


def test_bug_in_a_recovery_is_raised(scene: Scene) -> None:
    scene.error_of_decoder = KeyError("a bug")
    with pytest.raises(KeyError):
        scene.run(1)


def test_errors_of_a_revoked_recovery_are_ignored(scene: Scene) -> None:
    scene.error_of_decoder = KeyError("the topic was deleted")
    scene.partitions.join([0, 1])
    for writer in scene.writers:
        writer.may_open.set()
    scene.partitions.close()
    assert scene.writers[1].closed.wait(DEADLINE_S)
    assert scene.partitions.recovering == set()


def test_flush_is_in_progress_until_its_append_is_recorded(scene: Scene) -> None:
    scene.run(0, 1)
    scene.read(0)
    assert scene.partitions.begin_flushes(commit_all=True)
    assert scene.partitions.appending_since(1.0) == {0}
    scene.partitions.complete_flushes()
    assert scene.partitions.appending_since(1.0) == {0}

    scene.read(1)
    scene.world.clock.seconds = 2.0
    scene.writers[0].may_append.set()
    scene.partitions.complete_flushes([0])
    assert not scene.partitions.tasks[0].has_progress
    assert scene.committed() == {0}
    assert not scene.partitions.begin_flushes(commit_all=True, only=[0])
    assert scene.partitions.begin_flushes(commit_all=True)
    assert scene.partitions.appending_since(2.0) == set()
    assert scene.partitions.appending_since(2.5) == {1}


def test_failed_append_ends_its_partition_alone(scene: Scene) -> None:
    scene.run(0, 1)
    before = scene.changes
    for partition in (0, 1):
        scene.read(partition)
        scene.writers[partition].may_append.set()
    scene.writers[0].error = Unavailable("not known to be written")
    scene.partitions.begin_flushes(commit_all=True)
    scene.partitions.complete_flushes([0, 1])

    assert set(scene.partitions.tasks) == {1}
    assert scene.writers[0].closed.is_set()
    assert scene.changes == before + 1
    assert scene.partitions.missing_of([0, 1]) == [0]


def test_revoked_partition_is_committed_before_it_is_dropped(scene: Scene) -> None:
    scene.run(0, 1)
    for partition in (0, 1):
        scene.read(partition)
        scene.writers[partition].may_append.set()
    scene.partitions.revoke([0])

    assert scene.committed() == {0}
    assert set(scene.partitions.tasks) == {1}
    assert scene.writers[0].closed.is_set()


def test_events_of_ended_partitions_still_count(scene: Scene) -> None:
    scene.run(0)
    scene.partitions.tasks[0].events = 7
    scene.partitions.close()
    assert scene.partitions.ended_events == 7


def test_partition_that_is_not_shared_fails_the_joiner(tmp_path: Path) -> None:
    def refuse(_name: str) -> Writer:
        raise Fenced("another has opened the writer")

    world = World(tmp_path, PLAN, 1)
    partitions = Partitions(
        world.context(refuse),
        JoinerClocks(world.clock, log_counts=True),
        shared=False,
        stopping=lambda: False,
        on_change=lambda: None,
        on_flushed=lambda _task, _output: None,
    )
    with pytest.raises(Fenced):
        partitions.join([0], waiting=True)
    partitions.close()
    world.close()
