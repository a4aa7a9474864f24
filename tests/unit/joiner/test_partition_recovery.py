"""Partition recovery and flushes in progress, with threads that the test controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any, cast

import pytest

from freshet.errors import Fenced, Unavailable
from freshet.joiner.appends import Flush, PendingFlushes
from freshet.joiner.partition import Task
from freshet.joiner.replay import PartitionRecovery
from freshet.testing.conditions import wait_until
from freshet.types import Append

DEADLINE_S = 30.0


class Opened:
    """A writer whose opening can wait or fail."""

    def __init__(self) -> None:
        self.may, self.asked, self.closed = Event(), Event(), Event()
        self.error: Exception | None = None
        self.appended: list[Sequence[Append]] = []

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        assert self.may.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.appended.append(appends)
        return range(len(appends))

    def close(self) -> None:
        self.closed.set()


class Openings:
    """Writers and tasks by partition; each opens when the test permits it."""

    def __init__(self, partitions: int) -> None:
        self.writers = [Opened() for _ in range(partitions)]
        self.errors: dict[int, Exception] = {}
        self.recovery = PartitionRecovery(self.writer_of, self.task_of)

    def writer_of(self, group: tuple[int, ...]) -> Opened:
        writer = self.writers[group[0]]
        writer.asked.set()
        assert writer.may.wait(DEADLINE_S)
        return writer

    def task_of(self, partition: int, cancelled: Callable[[], bool]) -> Task:
        if cancelled():
            raise Unavailable("given up")
        if partition in self.errors:
            raise self.errors[partition]
        return cast(Task, partition)


@pytest.fixture
def openings() -> Iterator[Openings]:
    openings = Openings(3)
    yield openings
    for writer in openings.writers:
        writer.may.set()
    openings.recovery.close()


def test_slow_recovery_does_not_delay_others(openings: Openings) -> None:
    openings.recovery.begin([(0,), (1,)])
    openings.writers[1].may.set()
    found: list[Any] = []

    def let_in() -> bool:
        found.extend(openings.recovery.pop_finished())
        return bool(found)

    wait_until("the second is in", let_in, within_s=20)
    assert [(entered.partitions, entered.tasks) for entered in found] == [((1,), [1])]
    assert openings.recovery.partitions == {0}


def test_cancelled_recovery_is_closed_and_never_returned(openings: Openings) -> None:
    openings.recovery.begin([(0,), (1,)])
    assert openings.writers[0].asked.wait(DEADLINE_S)
    openings.recovery.cancel([0])
    assert openings.recovery.partitions == {1}
    for writer in openings.writers:
        writer.may.set()

    assert [entered.partitions for entered in openings.recovery.pop_finished(waiting=True)] == [(1,)]
    assert openings.writers[0].closed.is_set()
    assert not openings.writers[1].closed.is_set()


def test_failed_recovery_has_its_error_and_closes_its_writer(openings: Openings) -> None:
    openings.errors[2] = Fenced("another was quicker")
    openings.writers[2].may.set()
    openings.recovery.begin([(2,)])

    [entered] = openings.recovery.pop_finished(waiting=True)
    assert isinstance(entered.error, Fenced)
    assert entered.writer is None
    assert openings.writers[2].closed.is_set()


def test_errors_of_a_cancelled_recovery_are_ignored(openings: Openings) -> None:
    openings.errors[0] = KeyError("the topic was deleted")
    openings.recovery.begin([(0,), (1,)])
    for writer in openings.writers:
        writer.may.set()
    openings.recovery.close()
    assert openings.writers[1].closed.wait(DEADLINE_S)
    assert openings.recovery.partitions == set()


class RecordingTask:
    """A task that flushes only a commit, and records its offset."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.at: list[int] = []

    def flush(self, now_ms: int) -> Any:
        class Output:
            appends = (cast(Append, f"commit of {self.partition}"),)
            dead_letters: tuple[bytes, ...] = ()
            joined = ()

        return Output()

    def on_appended(self, outputs: Any, commit_offset: int) -> None:
        self.at.append(commit_offset)


def test_flush_is_busy_until_its_task_records_the_offset() -> None:
    flushes, writer, task = PendingFlushes(), Opened(), RecordingTask(4)
    flushes.begin(Flush(writer, [cast(Task, task)], "dead-letters", 0), 0.0)
    assert flushes.busy == {4}
    assert flushes.pop_finished() == []

    writer.may.set()
    [flush] = flushes.pop_finished([4])
    assert flushes.busy == set()
    assert flush.error is None
    assert task.at == []
    flush.report_appended()
    assert task.at == [0]
    flushes.close()


def test_failed_flush_has_its_error() -> None:
    flushes, writer = PendingFlushes(), Opened()
    writer.error = Unavailable("not known to be written")
    writer.may.set()
    flushes.begin(Flush(writer, [cast(Task, RecordingTask(1))], "dead-letters", 0), 0.0)

    [flush] = flushes.pop_finished([1])
    assert isinstance(flush.error, Unavailable)
    flushes.close()
