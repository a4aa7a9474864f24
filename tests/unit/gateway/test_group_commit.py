"""Group commit: acknowledged events are in the log, failures are reported, and queues are bounded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from freshet.errors import Overloaded, TooLarge, Unavailable
from freshet.gateway import group_commit
from freshet.gateway.group_commit import Committer, Entry, QueueLimits, group_entries, offsets_of
from freshet.log import Answered, EventLog, GroupOutcome, GroupWriter, Writer
from freshet.log.records import CombinedWriter
from freshet.log.sqlite.event_log import open_url
from freshet.types import Append, TopicPartition
from tests.unit.gateway.slow_partition import SlowPartition


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = open_url(f"sqlite:{tmp_path}/log")
    log.create_topic("clicks", partitions=2)
    yield log
    log.close()


class Held:
    """A writer that waits at the gate before each append, and can fail."""

    def __init__(self, writer: GroupWriter) -> None:
        self.writer = writer
        self.gate = threading.Event()
        self.appends = 0
        self.error: Exception | None = None

    def append(self, groups: Sequence[Sequence[Append]], answered: Answered) -> None:
        assert self.gate.wait(60)
        self.appends += 1
        if self.error is None:
            self.writer.append(groups, answered)
            return
        for index in range(len(groups)):
            answered(index, self.error)

    def wait(self, within_s: float) -> None:
        self.writer.wait(within_s)

    def close(self) -> None:
        self.writer.close()


def committer(
    writer: GroupWriter,
    *,
    events: int = 100,
    size: int = 10_000,
    batch: int = 100,
    registry: CollectorRegistry | None = None,
) -> Committer:
    limits = QueueLimits(events, size)
    made = Committer(writer, limits, registry or CollectorRegistry(), wait_s=0.0, batch_events=batch)
    made.start()
    return made


def entry(value: bytes, partition: int = 0) -> Entry:
    return Entry("clicks", partition, b"k", value)


async def append(commit: Committer, entries: Sequence[Entry]) -> list[int]:
    """Offset of each entry, once all of them are durable."""
    done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    appends, places = group_entries(entries)

    def answer(outcomes: Sequence[GroupOutcome | None]) -> None:
        (outcome,) = outcomes
        assert outcome is not None
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(offsets_of(outcome, places))

    commit.submit([appends], answer)
    return await done


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main

    asyncio.run(bounded())


def values(log: EventLog, partition: int = 0) -> list[bytes]:
    reader = log.reader()
    reader.assign({TopicPartition("clicks", partition): 0})
    found = [v for _, records in reader.poll(1_000, 0) for v in records.values]
    reader.close()
    return found


def test_an_acknowledged_event_is_in_the_log_at_its_offset(log: EventLog) -> None:
    async def main() -> None:
        commit = committer(log.group_writer())
        assert await append(commit, [entry(b"a"), entry(b"b", 1), entry(b"c")]) == [0, 0, 1]
        assert await append(commit, [entry(b"d")]) == [2]
        assert await commit.close(60) == 0

    run(main())
    assert values(log) == [b"a", b"c", b"d"]
    assert values(log, 1) == [b"b"]


def test_requests_that_wait_together_share_one_append(log: EventLog) -> None:
    writer = Held(log.group_writer())

    async def main() -> None:
        commit = committer(writer)
        first = asyncio.ensure_future(append(commit, [entry(b"0")]))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(append(commit, [entry(b"%d" % i)])) for i in range(1, 9)]
        await asyncio.sleep(0)
        writer.gate.set()
        await first
        assert [offset for [offset] in await asyncio.gather(*others)] == list(range(1, 9))
        await commit.close(60)

    run(main())
    assert writer.appends <= 2


def test_an_append_holds_no_more_events_than_allowed(log: EventLog) -> None:
    writer = Held(log.group_writer())

    async def main() -> None:
        commit = committer(writer, batch=2)
        tasks = [asyncio.ensure_future(append(commit, [entry(b"x"), entry(b"y")])) for _ in range(3)]
        await asyncio.sleep(0)
        writer.gate.set()
        await asyncio.gather(*tasks)
        await commit.close(60)

    run(main())
    assert writer.appends == 3


@pytest.mark.parametrize(("events", "size"), [(2, 10_000), (100, 5)])
def test_a_full_queue_refuses_at_once_and_takes_again_later(log: EventLog, events: int, size: int) -> None:
    writer = Held(log.group_writer())

    async def main() -> None:
        commit = committer(writer, events=events, size=size)
        waiting = asyncio.ensure_future(append(commit, [entry(b"a"), entry(b"b")]))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="wait for the log"):
            await append(commit, [entry(b"c")])
        writer.gate.set()
        await waiting
        await append(commit, [entry(b"c")])
        await commit.close(60)

    run(main())
    assert values(log) == [b"a", b"b", b"c"]


def test_a_failed_append_fails_only_its_requests(log: EventLog) -> None:
    writer = Held(log.group_writer())
    writer.gate.set()

    async def main() -> None:
        commit = committer(writer)
        writer.error = Unavailable("disk full")
        with pytest.raises(Unavailable, match="disk full"):
            await append(commit, [entry(b"a")])
        health = [commit.healthy]
        writer.error = None
        assert await append(commit, [entry(b"b")]) == [0]
        health.append(commit.healthy)
        assert health == [False, True]
        await commit.close(60)

    run(main())
    assert values(log) == [b"b"]


def test_unchecked_requests_are_checked_once_before_the_append(log: EventLog) -> None:
    writer = Held(log.group_writer())

    async def main() -> None:
        commit = committer(writer)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        looked: list[int] = []

        def check() -> None:
            looked.append(commit.figures()["events_waiting"])
            commit.release_unchecked(2, 8)
            appends, _ = group_entries([entry(b"a"), entry(b"b")])
            commit.submit([appends], done.set_result)

        under_way = asyncio.ensure_future(append(commit, [entry(b"0")]))
        while not commit.appending:
            await asyncio.sleep(0)
        commit.reserve_unchecked(4, check)
        commit.reserve_unchecked(4, check)
        await asyncio.sleep(0)
        assert looked == []
        writer.gate.set()
        assert await done == [[1]]
        assert (await under_way, looked) == ([0], [2])
        await commit.close(60)
        assert commit.figures()["events_waiting"] == 0

    run(main())
    assert values(log) == [b"0", b"a", b"b"]


def test_a_check_that_raises_does_not_stop_other_checks(log: EventLog) -> None:
    async def main() -> None:
        commit = committer(log.group_writer())
        looked = asyncio.Event()

        def fail() -> None:
            commit.release_unchecked(1, 4)
            raise RuntimeError("of another stream")

        def check() -> None:
            commit.release_unchecked(1, 4)
            looked.set()

        commit.reserve_unchecked(4, fail)
        commit.reserve_unchecked(4, check)
        await looked.wait()
        assert await append(commit, [entry(b"a")]) == [0]
        assert commit.healthy
        await commit.close(60)

    run(main())


def test_a_full_queue_refuses_unchecked_requests(log: EventLog) -> None:
    writer = Held(log.group_writer())

    async def main() -> None:
        commit = committer(writer, events=2)
        waiting = asyncio.ensure_future(append(commit, [entry(b"a")]))
        await asyncio.sleep(0)
        commit.reserve_unchecked(1, lambda: commit.release_unchecked(1, 1))
        with pytest.raises(Overloaded, match="wait for the log"):
            commit.reserve_unchecked(1, lambda: None)
        writer.gate.set()
        await waiting
        await commit.close(60)

    run(main())


def test_closing_writes_queued_events_and_accepts_no_more(log: EventLog) -> None:
    writer = Held(log.group_writer())

    async def main() -> None:
        commit = committer(writer)
        waiting = asyncio.ensure_future(append(commit, [entry(b"a")]))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(commit.close(60))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="stopping"):
            await append(commit, [entry(b"b")])
        writer.gate.set()
        assert await closing == 0
        assert await waiting == [0]

    run(main())
    assert values(log) == [b"a"]


def test_requests_cancelled_by_a_stop_fail_as_unwritten(log: EventLog) -> None:
    writer = Held(log.group_writer())

    async def main() -> None:
        commit = committer(writer, batch=1)
        under_way = asyncio.ensure_future(append(commit, [entry(b"a")]))
        waiting = asyncio.ensure_future(append(commit, [entry(b"b")]))
        while not commit.appending:
            await asyncio.sleep(0)
        assert await commit.close(0.01) == 2
        assert commit.appending  # the writer is not to be closed yet
        for task in (under_way, waiting):
            with pytest.raises(Unavailable, match="send it again"):
                await task
        writer.gate.set()

    run(main())


def test_an_append_that_ends_soon_after_the_drain_is_waited_for(log: EventLog) -> None:
    writer = Held(log.group_writer())

    async def main() -> None:
        commit = committer(writer)
        under_way = asyncio.ensure_future(append(commit, [entry(b"a")]))
        under_way.add_done_callback(lambda _: writer.gate.set())  # cancelled at the end of the drain
        while not commit.appending:
            await asyncio.sleep(0)
        assert await commit.close(0.01, last_s=10) == 1
        assert [commit.appending] == [False]
        with pytest.raises(Unavailable, match="not known to be written"):
            await under_way

    run(main())
    assert values(log) == [b"a"]


HANGS = """
import asyncio, threading
from prometheus_client import CollectorRegistry
from freshet.gateway import group_commit
from freshet.gateway.group_commit import Committer, Entry, QueueLimits, group_entries

appends, _ = group_entries([Entry("clicks", 0, b"k", b"v")])

class Hanging:
    def append(self, groups, answered):
        threading.Event().wait()

async def main():
    commit = Committer(Hanging(), QueueLimits(9, 9), CollectorRegistry(), wait_s=0.0, batch_events=9)
    commit.start()
    commit.submit([appends], lambda outcomes: None)
    while not commit.appending:
        await asyncio.sleep(0)
    print(await commit.close(0.0))

asyncio.run(main())
"""


def test_a_hanging_append_does_not_delay_the_process_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=False
    )

    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_a_record_too_large_fails_alone_among_clients(log: EventLog) -> None:
    writer = Held(CombinedWriter(TooLargeAbove(log.writer(), 100)))

    async def main() -> None:
        commit = committer(writer, size=1_000_000)
        first = asyncio.ensure_future(append(commit, [entry(b"0")]))
        await asyncio.sleep(0)
        sizes = [1, 2, 3, 500, 5, 6, 600]
        others = [asyncio.ensure_future(append(commit, [entry(b"x" * n, n % 2)])) for n in sizes]
        await asyncio.sleep(0)
        writer.gate.set()
        await first
        found = await asyncio.gather(*others, return_exceptions=True)
        large = [isinstance(outcome, TooLarge) for outcome in found]
        assert large == [n > 100 for n in sizes]
        assert commit.healthy
        assert commit.figures()["events_appended"] == 6
        assert commit.figures()["events_waiting"] == 0
        await commit.close(60)

    run(main())
    assert sorted(map(len, values(log) + values(log, 1))) == [1, 1, 2, 3, 5, 6]


class TooLargeAbove:
    """A writer of a log that takes only so many bytes a record."""

    def __init__(self, writer: Writer, limit: int) -> None:
        self.writer, self.limit = writer, limit

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        if any(len(value) > self.limit for one in appends for value in one.values):
            raise TooLarge("a record is too large")
        return self.writer.append(appends)

    def close(self) -> None:
        self.writer.close()


def test_a_slow_partition_delays_only_its_own_requests(log: EventLog) -> None:
    writer = SlowPartition(log.group_writer())

    async def main() -> None:
        commit = committer(writer)
        slow = [asyncio.ensure_future(append(commit, [entry(b"%d" % i, 1)])) for i in range(2)]
        for number in range(50):  # each is a turn of its own, begun while the first is unanswered
            assert await append(commit, [entry(b"%d" % number)]) == [number]
            if number == 10:
                slow.append(asyncio.ensure_future(append(commit, [entry(b"2", 1)])))
        assert not any(task.done() for task in slow)
        assert commit.healthy
        assert commit.figures()["events_waiting"] == 3
        writer.released.set()
        assert await asyncio.gather(*slow) == [[0], [1], [2]]
        assert commit.figures()["events_waiting"] == 0
        assert await commit.close(60) == 0

    run(main())
    assert values(log, 1) == [b"0", b"1", b"2"]


def test_a_turn_does_not_wait_for_a_partition_known_as_slow(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SlowPartition(log.group_writer())

    async def main() -> None:
        commit = committer(writer)
        slow = [asyncio.ensure_future(append(commit, [entry(b"0", 1)]))]
        for number in range(2):  # in the slow one's turn or after it
            assert await append(commit, [entry(b"%d" % number)]) == [number]
        monkeypatch.setattr(group_commit, "TURN_S", 600.0)
        for number in range(2, 5):
            slow.append(asyncio.ensure_future(append(commit, [entry(b"%d" % number, 1)])))
            assert await append(commit, [entry(b"%d" % number)]) == [number]
        writer.released.set()
        assert await asyncio.gather(*slow) == [[0], [1], [2], [3]]
        assert await commit.close(60) == 0

    run(main())


def test_a_partition_that_fails_fails_only_its_requests(log: EventLog) -> None:
    writer, registry = SlowPartition(log.group_writer()), CollectorRegistry()
    writer.error = Unavailable("no leader")

    async def main() -> None:
        commit = committer(writer, registry=registry)
        slow = asyncio.ensure_future(append(commit, [entry(b"a"), entry(b"b", 1)]))
        others = [asyncio.ensure_future(append(commit, [entry(b"%d" % i)])) for i in range(3)]
        assert await asyncio.gather(*others) == [[0], [1], [2]]
        writer.released.set()
        with pytest.raises(Unavailable, match="no leader"):
            await slow
        assert commit.healthy, "the log takes other events meanwhile"
        figures = commit.figures()
        assert (figures["events_appended"], figures["appends_failed"]) == (3, 1)
        assert await commit.close(60) == 0

    run(main())
    assert registry.get_sample_value("freshet_gateway_append_failures_total") == 1


def test_groups_of_one_request_are_answered_one_by_one(log: EventLog) -> None:
    writer = SlowPartition(log.group_writer())

    async def main() -> None:
        commit, found = committer(writer), list[list[GroupOutcome | None]]()
        groups = [group_entries([entry(b"%d" % p, p), entry(b"x", p)])[0] for p in (1, 0)]
        commit.submit(groups, lambda outcomes: found.append(list(outcomes)))
        while not found:
            await asyncio.sleep(0)
        assert commit.figures()["events_waiting"] == 2
        writer.released.set()
        assert await commit.close(60) == 0
        assert found == [[None, [0]], [[0], [0]]]

    run(main())


def test_closing_waits_for_groups_of_earlier_turns(log: EventLog) -> None:
    writer = SlowPartition(log.group_writer())

    async def main() -> None:
        commit = committer(writer)
        slow = asyncio.ensure_future(append(commit, [entry(b"a", 1)]))
        await asyncio.sleep(0)
        assert await append(commit, [entry(b"b")]) == [0]
        closing = asyncio.ensure_future(commit.close(60))
        await asyncio.sleep(0)
        assert not closing.done()
        writer.released.set()
        assert await closing == 0
        assert await slow == [0]
        assert not commit.appending

    run(main())


def test_groups_unanswered_after_the_drain_fail(log: EventLog) -> None:
    writer = SlowPartition(log.group_writer())

    async def main() -> None:
        commit = committer(writer)
        slow = asyncio.ensure_future(append(commit, [entry(b"a", 1)]))
        await asyncio.sleep(0)
        assert await append(commit, [entry(b"b")]) == [0]
        assert await commit.close(0.01) == 1
        assert commit.appending  # the writer is not to be closed yet
        with pytest.raises(Unavailable, match="not known to be written"):
            await slow
        writer.released.set()

    run(main())


def test_a_writer_that_raises_fails_what_it_has_not_answered(log: EventLog) -> None:
    writer = SlowPartition(log.group_writer())
    writer.wait = Mock(side_effect=RuntimeError("odd"))  # type: ignore[method-assign]

    async def main() -> None:
        commit = committer(writer)
        slow = asyncio.ensure_future(append(commit, [entry(b"a", 1)]))
        with pytest.raises(RuntimeError, match="odd"):
            await slow
        assert await append(commit, [entry(b"b")]) == [0]
        assert await commit.close(60) == 0

    run(main())
