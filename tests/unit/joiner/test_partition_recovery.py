"""Partitions on their way to a joiner, and flushes under way: what becomes of them; the test holds their
threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any, cast

import pytest

from freshet.errors import Fenced, Unavailable
from freshet.joiner.appends import Flush, Flushes
from freshet.joiner.partition import Task
from freshet.joiner.replay import Entering
from freshet.types import Append
from tests.system.waiting import wait_until

DEADLINE_S = 30.0


class Opened:
    """A writer that may be told to wait, or to fail."""

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


class House:
    """Writers and tasks by partition; each opens when it may."""

    def __init__(self, partitions: int) -> None:
        self.writers = [Opened() for _ in range(partitions)]
        self.errors: dict[int, Exception] = {}
        self.entering = Entering(self.writer_of, self.task_of)

    def writer_of(self, group: tuple[int, ...]) -> Opened:
        writer = self.writers[group[0]]
        writer.asked.set()
        assert writer.may.wait(DEADLINE_S)
        return writer

    def task_of(self, partition: int, given_up: Callable[[], bool]) -> Task:
        if given_up():
            raise Unavailable("given up")
        if partition in self.errors:
            raise self.errors[partition]
        return cast(Task, partition)


@pytest.fixture
def house() -> Iterator[House]:
    house = House(3)
    yield house
    for writer in house.writers:
        writer.may.set()
    house.entering.close()


def test_one_that_is_slow_does_not_hold_up_the_others(house: House) -> None:
    house.entering.begin([(0,), (1,)])
    house.writers[1].may.set()
    found: list[Any] = []

    def let_in() -> bool:
        found.extend(house.entering.take())
        return bool(found)

    wait_until("the second is in", let_in, within_s=20)
    assert [(entered.partitions, entered.tasks) for entered in found] == [((1,), [1])]
    assert house.entering.partitions == {0}


def test_what_was_given_up_is_closed_and_never_let_in(house: House) -> None:
    house.entering.begin([(0,), (1,)])
    assert house.writers[0].asked.wait(DEADLINE_S)
    house.entering.give_up([0])
    assert house.entering.partitions == {1}
    for writer in house.writers:
        writer.may.set()

    assert [entered.partitions for entered in house.entering.take(waiting=True)] == [(1,)]
    assert house.writers[0].closed.is_set()
    assert not house.writers[1].closed.is_set()


def test_a_partition_that_cannot_be_rebuilt_says_why_and_its_writer_is_closed(house: House) -> None:
    house.errors[2] = Fenced("another was quicker")
    house.writers[2].may.set()
    house.entering.begin([(2,)])

    [entered] = house.entering.take(waiting=True)
    assert isinstance(entered.error, Fenced)
    assert entered.writer is None
    assert house.writers[2].closed.is_set()


def test_what_goes_wrong_with_a_partition_that_was_given_up_concerns_nobody(house: House) -> None:
    house.errors[0] = KeyError("the topic was deleted")
    house.entering.begin([(0,), (1,)])
    for writer in house.writers:
        writer.may.set()
    house.entering.close()
    assert house.writers[1].closed.wait(DEADLINE_S)
    assert house.entering.partitions == set()


class Told:
    """As a task: flushes nothing but its commit, and hears where it went."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.at: list[int] = []

    def flush(self, now_ms: int) -> Any:
        class Output:
            appends = (cast(Append, f"commit of {self.partition}"),)
            dead_letters: tuple[bytes, ...] = ()
            joined = ()

        return Output()

    def appended(self, outputs: Any, commit_offset: int) -> None:
        self.at.append(commit_offset)


def test_a_flush_is_busy_until_it_is_taken_and_its_task_hears_of_it_then() -> None:
    flushes, writer, task = Flushes(), Opened(), Told(4)
    flushes.begin(Flush(writer, [cast(Task, task)], "dead-letters", 0), 0.0)
    assert flushes.busy == {4}
    assert flushes.take() == []

    writer.may.set()
    [flush] = flushes.take([4])
    assert flushes.busy == set()
    assert flush.error is None
    assert task.at == []
    flush.settle()
    assert task.at == [0]
    flushes.close()


def test_a_flush_that_fails_says_why() -> None:
    flushes, writer = Flushes(), Opened()
    writer.error = Unavailable("not known to be written")
    writer.may.set()
    flushes.begin(Flush(writer, [cast(Task, Told(1))], "dead-letters", 0), 0.0)

    [flush] = flushes.take([1])
    assert isinstance(flush.error, Unavailable)
    flushes.close()
