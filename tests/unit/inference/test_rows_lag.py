"""Unread time of `rows`: one stalled partition shows, even if the others are fresh."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Unavailable
from freshet.inference.progress import REPORT_S, Mark, RowsWatch, unread_s, update_marks
from freshet.inference.rows import RowFollower, RowsState
from freshet.log import EventLog, Reader
from freshet.log.sqlite.event_log import open_url as open_log
from freshet.rows.sqlite.row_store import open_url as open_store
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_for
from freshet.types import Records, TopicPartition, bucket_of
from tests.fixtures.tables import keys_of
from tests.unit.inference.row_source import BUCKETS, TOPIC, Shard, serving_table

KEYS = [
    next(
        n for n in range(1, 1000) if int(bucket_of(keys_of(n), BUCKETS)[0]) * ROWS_PARTITIONS // BUCKETS == p
    )
    for p in range(ROWS_PARTITIONS)
]
"""A row of each partition of `rows`."""


def looked(*answers: tuple[float, Mapping[int, int], Mapping[int, int]]) -> dict[int, Mark]:
    """Marks after answers of the log: (time of the query, next offsets, ends)."""
    marks: dict[int, Mark] = {}
    for queried_s, following, ends in answers:
        marks = update_marks(marks, following, queried_s, ends)
    return marks


def test_a_partition_that_nothing_is_published_to_is_read() -> None:
    idle = {0: 7}

    marks = looked(*((float(s), idle, idle) for s in range(100)))

    assert unread_s(marks, idle, 99.5) == {0: 0.5}


def test_stalled_partition_is_unread_since_its_last_end() -> None:
    marks = looked((10, {0: 5}, {0: 5}), (11, {0: 5}, {0: 5}), (12, {0: 5}, {0: 6}), (13, {0: 5}, {0: 9}))

    assert unread_s(marks, {0: 5}, 80) == {0: 69}  # at 11 all that it held was read


def test_records_after_a_query_count_from_the_next_one() -> None:
    marks = looked((10, {0: 5}, {0: 5}), (11, {0: 6}, {0: 9}))

    assert unread_s(marks, {0: 8}, 12) == {0: 2}
    assert unread_s(marks, {0: 9}, 12) == {0: 1}
    assert unread_s(update_marks(marks, {0: 9}, 12, {0: 40}), {0: 9}, 12.5) == {0: 1.5}


def test_reader_that_never_reaches_the_end_is_behind() -> None:
    marks: dict[int, Mark] = {}
    seen = []
    for now in range(300):  # a record a second, of which those of a minute are not read yet
        marks = update_marks(marks, {0: max(0, now - 60)}, now, {0: now})
        seen.append(unread_s(marks, {0: max(0, now - 60)}, now + 0.5)[0])

    assert min(seen[60:]) > 59
    assert max(seen[60:]) < 122


def test_partition_not_followed_is_unread_from_the_first_query() -> None:
    marks = looked((10, {}, {0: 0, 1: 3}), (11, {}, {0: 0, 1: 3}))

    assert unread_s(marks, {}, 20) == {0: 9, 1: 10}


# --- a follower of a real log


class Withheld:
    """A log whose readers withhold `partition`, and which has no ends of topics while `away` is set."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.partition: int | None = None
        self.away = False

    def reader(self) -> Reader:
        inner, outer = self._log.reader(), self

        class Reading:
            def __init__(self) -> None:
                self._kept: list[tuple[TopicPartition, Records]] = []

            def poll(self, most: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
                found = [*self._kept, *inner.poll(most, wait_s)]
                self._kept = [one for one in found if one[0].partition == outer.partition]
                return [one for one in found if one[0].partition != outer.partition]

            def __getattr__(self, name: str) -> object:
                return getattr(inner, name)

        return Reading()  # type: ignore[return-value]

    def all_bounds(self, partitions: Sequence[TopicPartition]) -> object:
        if self.away:
            raise Unavailable("no broker reported the offsets of shop.rows\n  as they are away")
        return self._log.all_bounds(partitions)

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)


class World:
    """A shard, a server that follows its rows, and a clock that stands still."""

    def __init__(self, folder: Path) -> None:
        self.clock = SettableClock(monotonic_s=0)
        self.plain_log, self.store = open_log(f"sqlite:{folder}/log"), open_store(f"sqlite:{folder}/rows")
        self.log = Withheld(self.plain_log)
        self.shard = Shard(self.plain_log, self.store)
        self.follower = RowFollower(
            self.log,  # type: ignore[arg-type]
            self.store,
            TOPIC,
            serving_table,
            spec_hash="hash",
            wait_s=0.01,
        )
        self.watch = RowsWatch(self.log, self.follower, TOPIC, self.clock)  # type: ignore[arg-type]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.follower.run, args=(self._stop,))

    def follow(self) -> None:
        self._thread.start()
        wait_for(lambda: self.follower.state.sink is not None)

    def second(self, partitions: Sequence[int] = ()) -> None:
        """A second, in which a row of each of these partitions changes and all that can be read is."""
        self.clock.advance(1)
        if partitions:
            self.shard.train([KEYS[p] for p in partitions], 1.0, clock_ms=self.clock.now_ms())
            self.shard.publish()
        ends = {p: self.plain_log.bounds(TopicPartition(TOPIC, p)).end for p in range(ROWS_PARTITIONS)}
        wait_for(lambda: all(self.follower.state.next[p] == ends[p] for p in self._read(ends)))
        self.watch.poll()

    def _read(self, ends: Mapping[int, int]) -> list[int]:
        return [p for p in ends if p != self.log.partition]

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(60)
        assert not self._thread.is_alive()
        self.store.close()
        self.plain_log.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def every_second(world: World, seconds: int, partitions: Sequence[int]) -> list[float]:
    seen = []
    for _ in range(seconds):
        world.second(partitions)
        seen.append(world.watch.worst_s)
    return seen


@pytest.mark.slow
def test_stalled_partition_shows_while_rows_are_fresh(world: World) -> None:
    world.follow()
    assert every_second(world, 5, range(ROWS_PARTITIONS)) == [0] * 5

    world.log.partition = 3
    seen = every_second(world, 60, range(ROWS_PARTITIONS))

    assert world.follower.state.event_time_ms == world.clock.now_ms(), "the others hide it"
    assert seen == [*range(1, 61)]
    assert world.watch.reason == (
        "shop.rows[3] is not known to have been read to its end for 60 s, and is followed from offset 5"
    )
    world.log.partition = None
    assert every_second(world, 2, range(ROWS_PARTITIONS)) == [0, 0]
    assert world.watch.reason == ""


@pytest.mark.slow
def test_one_partition_that_nothing_is_published_to_is_no_fault(world: World) -> None:
    world.follow()
    others = [p for p in range(ROWS_PARTITIONS) if p != 3]

    assert every_second(world, 60, others) == [0] * 60
    assert every_second(world, 60, []) == [0] * 60
    assert world.watch.reason == ""


def test_unread_time_grows_while_the_log_reports_no_ends(world: World) -> None:
    world.follow()
    world.second()
    world.log.away = True

    assert every_second(world, 11, [0]) == [*range(1, 12)]
    expected = "the log does not say where it ends: no broker reported the offsets of shop.rows"
    assert expected in world.watch.reason
    assert "\n" not in world.watch.reason
    world.log.away = False
    assert every_second(world, 1, [0]) == [0]
    assert world.watch.reason == ""


def test_unread_time_grows_if_the_log_never_reports_ends(world: World) -> None:
    world.follow()
    world.log.away = True

    assert every_second(world, 12, [0]) == [*range(0, 12)]
    assert "the log does not say where it ends" in world.watch.reason
    world.log.away = False
    every_second(world, 1, [0])
    assert every_second(world, 1, [0]) == [0]


def test_a_recreated_topic_is_read_at_its_new_end() -> None:
    marks = looked((10, {0: 900}, {0: 900}), (11, {0: 0}, {0: 20}), (12, {0: 20}, {0: 20}))

    assert unread_s(marks, {0: 20}, 12.5) == {0: 0.5}


def test_before_rows_are_served_nothing_is_unread(world: World) -> None:
    world.clock.advance(1000)
    world.watch.poll()
    assert (world.watch.worst_s, world.watch.reason) == (0, "")


def test_watch_reports_a_stalled_partition_until_it_stops(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshet.inference.progress.POLL_S", 0.001)
    world.follower.state = RowsState(serving_table(), 1, dict.fromkeys(range(ROWS_PARTITIONS), 0))
    world.shard.train([KEYS[3]], 1.0)
    world.shard.publish()
    stop = threading.Event()
    world.watch.poll()
    with capture_logs() as said:
        thread = threading.Thread(target=world.watch.run, args=(stop,))
        thread.start()
        try:
            assert not said
            world.clock.advance(REPORT_S + 1)
            # A look that began before the clock's step says so of every partition, until the next look.
            stands = "shop.rows[3] is not known to have been read to its end for 11 s"
            wait_for(lambda: any(line["reason"].startswith(stands) for line in said))
        finally:
            stop.set()
            thread.join(60)
    assert not thread.is_alive()
