"""Promises of every event log; see `freshet.log`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from freshet.errors import ConfigError, DataLost, Fenced, Mismatch, TooLarge, Unavailable
from freshet.log import EventLog, GroupOutcome, GroupWriter, Reader
from freshet.types import Append, BytesColumn, Records, TopicPartition

__all__ = ["EventLogContract", "answered", "append_groups", "append_to", "read_all"]

DEADLINE_S = 60.0
"""Longest wait for a result that should come at once."""

T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)


def append_to(
    partition: TopicPartition,
    values: list[bytes],
    keys: list[bytes] | None = None,
    times: list[int] | None = None,
) -> Append:
    """Build an append of Python bytes."""
    return Append(
        partition.topic,
        partition.partition,
        BytesColumn.of(values),
        None if keys is None else BytesColumn.of(keys),
        None if times is None else np.array(times, np.int64),
    )


def answered(reader: Reader, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
    """Poll, again while a log stalls for a moment."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return reader.poll(max_records, wait_s)
        except Unavailable:
            if time.monotonic() >= deadline:
                raise


def read_all(
    reader: Reader, count: int, max_records: int = 1000
) -> dict[TopicPartition, list[tuple[int, bytes]]]:
    """Poll until `count` records came; return {partition: [(offset, value)]}."""
    found: dict[TopicPartition, list[tuple[int, bytes]]] = {}
    deadline = time.monotonic() + DEADLINE_S
    while sum(map(len, found.values())) < count:
        assert time.monotonic() < deadline, f"expected {count} records within {DEADLINE_S} s, found {found}"
        for partition, records in answered(reader, max_records, 0.5):
            assert records.next_offset > max(records.offsets, default=-1)
            found.setdefault(partition, []).extend(zip(records.offsets.tolist(), records.values, strict=True))
    return found


def append_groups(
    writer: GroupWriter, groups: Sequence[Sequence[Append]], within_s: float = DEADLINE_S
) -> list[GroupOutcome]:
    """Append groups and wait until each is answered; return their outcomes in order."""
    outcomes: dict[int, GroupOutcome] = {}

    def answer(index: int, outcome: GroupOutcome) -> None:
        assert index not in outcomes, f"group {index} is answered twice"
        outcomes[index] = outcome

    writer.append(groups, answer)
    deadline = time.monotonic() + within_s
    while len(outcomes) < len(groups):
        assert time.monotonic() < deadline, f"of {len(groups)} groups, these were answered: {outcomes}"
        writer.wait(0.05)
    return [outcomes[index] for index in range(len(groups))]


class EventLogContract:
    """Subclass it and define the fixture `open_log`."""

    named_writers_are_atomic_over_topics = True
    trims_at_once = True  # False: the log trims some time after `trim`
    keeps_given_times = True  # False: records have the log's own time, whatever `Append.times_ms` says

    @pytest.fixture
    def open_log(self) -> Callable[[], EventLog]:
        """Return a function that opens the same, initially empty, log, as another process would."""
        raise NotImplementedError("give the fixture `open_log`")

    @pytest.fixture
    def log(self, open_log: Callable[[], EventLog]) -> Iterator[EventLog]:
        """Return the log with a topic `t` of two partitions."""
        log = open_log()
        log.create_topic("t", partitions=2)
        yield log
        log.close()

    def retain(self, log: EventLog) -> bool:
        """Make the log remove all records beyond its retention time; return False if it cannot."""
        return False

    # Topics

    def test_a_topic_is_as_it_was_created(self, log: EventLog) -> None:
        info = log.create_topic("other.topic", partitions=3, retention_ms=1000)
        assert (info.name, info.partitions, info.retention_ms) == ("other.topic", 3, 1000)
        assert log.topics()["other.topic"] == info
        assert set(log.topics()) >= {"t", "other.topic"}

    def test_creating_a_topic_again_returns_the_one_that_exists(
        self, log: EventLog, open_log: Callable[[], EventLog]
    ) -> None:
        other = open_log()
        assert other.create_topic("t", partitions=2).log_id == log.topics()["t"].log_id
        other.close()

    def test_a_topics_retention_is_that_of_whoever_created_it_last(
        self, log: EventLog, open_log: Callable[[], EventLog]
    ) -> None:
        other = open_log()
        assert other.create_topic("t", partitions=2, retention_ms=60_000).retention_ms == 60_000
        other.close()
        again = open_log()
        deadline = time.monotonic() + DEADLINE_S
        while again.topics()["t"].retention_ms != 60_000:  # brokers apply it a moment after their answer
            assert time.monotonic() < deadline
        again.close()

    def test_creating_a_topic_with_other_partitions_is_a_mismatch(self, log: EventLog) -> None:
        with pytest.raises(Mismatch, match="2"):
            log.create_topic("t", partitions=4)

    def test_partitions_of_topics_are_counted(self, log: EventLog) -> None:
        log.create_topic("u", partitions=3)
        assert log.partition_counts(["t", "u", "no-such-topic"]) == {"t": 2, "u": 3}

    def test_a_topic_that_grows_keeps_its_records_and_id(
        self, log: EventLog, open_log: Callable[[], EventLog]
    ) -> None:
        other = open_log()  # which knows the topic from before
        before = other.topics()["t"].log_id
        old, new = TopicPartition("t", 1), TopicPartition("t", 3)
        log.writer().append([append_to(old, [b"kept"])])
        if not log.traits.many_hosts:  # freshet alone writes its topics
            with pytest.raises(ConfigError):
                log.grow_topic("t", 4)
            log.grow_topic("t", 2)  # which it has
            other.close()
            return
        log.grow_topic("t", 4)
        log.grow_topic("t", 3)  # fewer than there are: nothing to do
        assert other.partition_counts(["t"]) == {"t": 4}
        assert other.topics()["t"].log_id == before
        log.writer().append([append_to(new, [b"new"])])
        reader = other.reader()
        reader.assign({old: 0, new: 0})
        assert read_all(reader, 2) == {old: [(0, b"kept")], new: [(0, b"new")]}
        other.close()

    def test_two_topics_have_two_log_ids(self, log: EventLog) -> None:
        assert log.create_topic("u", partitions=1).log_id != log.topics()["t"].log_id

    @pytest.mark.parametrize("name", ["", "UPPER", ".hidden", "a/b", "a b", "x" * 202])
    def test_a_bad_topic_name_is_refused(self, log: EventLog, name: str) -> None:
        with pytest.raises(ConfigError):
            log.create_topic(name, partitions=1)

    def test_a_topic_made_by_another_process_is_seen(
        self, log: EventLog, open_log: Callable[[], EventLog]
    ) -> None:
        other = open_log()
        other.create_topic("late", partitions=1)
        assert log.writer().append([append_to(TopicPartition("late", 0), [b"x"])]) == [0]
        other.close()

    def test_an_unknown_topic_or_partition_is_a_key_error(self, log: EventLog) -> None:
        for partition in (TopicPartition("nowhere", 0), TopicPartition("t", 2)):
            with pytest.raises(KeyError):
                log.bounds(partition)
            with pytest.raises(KeyError):
                log.all_bounds([T0, partition])
            with pytest.raises(KeyError):
                log.writer().append([append_to(partition, [b"x"])])
            with pytest.raises(KeyError):
                log.writer("w").append([append_to(T0, [b"x"]), append_to(partition, [b"x"])])
        assert log.bounds(T0).end == 0

    # Appends and reads

    def test_records_are_read_in_the_order_of_appends(self, log: EventLog) -> None:
        values = [b"one", b"", b"three" * 1000]
        keys = [b"k1", b"k2", b""]
        assert log.writer().append([append_to(T0, values, keys, [5, 3, 9])]) == [0]
        reader = log.reader()
        reader.assign({T0: 0})
        ((partition, records),) = reader.poll(10, DEADLINE_S)
        assert partition == T0
        assert records.offsets.tolist() == [0, 1, 2]
        assert list(records.values) == values
        assert list(records.keys) == keys
        assert records.times_ms.tolist() == [5, 3, 9] or not self.keeps_given_times
        assert records.next_offset == 3

    def test_records_of_empty_bytes_are_records(self, log: EventLog) -> None:
        log.writer().append([append_to(T0, [b"", b""])])
        reader = log.reader()
        reader.assign({T0: 0})
        assert read_all(reader, 2) == {T0: [(0, b""), (1, b"")]}

    def test_offsets_go_on_after_the_log_is_opened_anew(
        self, log: EventLog, open_log: Callable[[], EventLog]
    ) -> None:
        log.writer().append([append_to(T0, [b"a", b"b"])])
        log.close()
        again = open_log()
        first = again.bounds(T0).end
        assert first >= 2
        assert again.writer().append([append_to(T0, [b"c"])])[0] >= first
        again.close()

    def test_appends_of_one_call_get_their_own_first_offsets(self, log: EventLog) -> None:
        first = log.writer().append(
            [append_to(T0, [b"a", b"b"]), append_to(T1, [b"c"]), append_to(T0, [b"d"])]
        )
        assert first == [0, 0, 2]

    def test_an_append_of_nothing_writes_nothing(self, log: EventLog) -> None:
        assert len(log.writer().append([append_to(T0, [])])) == 1
        assert log.bounds(T0).end == 0

    @pytest.mark.parametrize("name", [None, "w"])
    def test_a_record_too_large_is_refused_before_anything_is_written(
        self, log: EventLog, name: str | None
    ) -> None:
        large = bytes(log.topics()["t"].max_record_bytes + 1)
        with pytest.raises(TooLarge):
            log.writer(name).append([append_to(T0, [b"a"]), append_to(T1, [b"b", large])])
        assert (log.bounds(T0).end, log.bounds(T1).end) == (0, 0)

    def test_an_append_may_have_neither_keys_nor_times(self, log: EventLog) -> None:
        before_ms = time.time_ns() // 1_000_000
        log.writer().append([append_to(T0, [b"a"])])
        reader = log.reader()
        reader.assign({T0: 0})
        ((_, records),) = answered(reader, 1, DEADLINE_S)
        assert list(records.keys) == [b""]
        assert abs(int(records.times_ms[0]) - before_ms) < DEADLINE_S * 1e3

    def test_a_large_append_is_read_whole(self, log: EventLog) -> None:
        values = [bytes([i % 251]) * 5000 for i in range(1000)]
        log.writer().append([append_to(T0, values)])
        reader = log.reader()
        reader.assign({T0: 0})
        assert read_all(reader, 1000, max_records=300)[T0] == list(enumerate(values))

    def test_a_reader_of_another_handle_sees_an_acknowledged_append(
        self, log: EventLog, open_log: Callable[[], EventLog]
    ) -> None:
        other = open_log()
        reader = other.reader()
        reader.assign({T0: 0})
        assert answered(reader, 10, 0.0) == []
        log.writer().append([append_to(T0, [b"a"])])
        assert read_all(reader, 1) == {T0: [(0, b"a")]}
        other.close()

    def test_a_waiting_reader_is_woken_by_an_append(self, log: EventLog) -> None:
        reader = log.reader()
        reader.assign({T0: 0})
        writer = log.writer()
        thread = threading.Thread(target=lambda: writer.append([append_to(T0, [b"a"])]))
        thread.start()
        found = reader.poll(10, DEADLINE_S)
        thread.join()
        assert [len(records) for _, records in found] == [1]

    def test_reading_starts_in_the_middle_of_an_append(self, log: EventLog) -> None:
        log.writer().append([append_to(T0, [b"a", b"b", b"c"], [b"k", b"l", b"m"], [1, 2, 3])])
        reader = log.reader()
        reader.assign({T0: 1})
        ((_, records),) = reader.poll(1, DEADLINE_S)
        assert (records.offsets.tolist(), list(records.values), list(records.keys)) == ([1], [b"b"], [b"l"])
        assert records.times_ms.tolist() == [2] or not self.keeps_given_times
        assert read_all(reader, 1) == {T0: [(2, b"c")]}

    def test_a_reader_assigned_at_the_end_reads_later_records(self, log: EventLog) -> None:
        writer = log.writer()
        writer.append([append_to(T0, [b"a", b"b"])])
        reader = log.reader()
        reader.assign({T0: 2})
        writer.append([append_to(T0, [b"c"])])
        assert read_all(reader, 1) == {T0: [(2, b"c")]}

    def test_a_poll_returns_at_most_the_requested_records(self, log: EventLog) -> None:
        log.writer().append([append_to(T0, [b"x"] * 100), append_to(T1, [b"y"] * 100)])
        reader = log.reader()
        reader.assign({T0: 0, T1: 0})
        seen = 0
        while seen < 200:
            found = reader.poll(7, DEADLINE_S)
            assert 0 < sum(len(records) for _, records in found) <= 7
            assert len({partition for partition, _ in found}) == len(found)
            seen += sum(len(records) for _, records in found)

    @pytest.mark.parametrize("max_records", [1, 10])
    def test_a_long_partition_does_not_starve_the_others(self, log: EventLog, max_records: int) -> None:
        log.writer().append([append_to(T0, [b"x"] * 5000)])
        log.writer().append([append_to(T1, [b"y"])])
        reader = log.reader()
        reader.assign({T0: 0, T1: 0})
        polled: set[TopicPartition] = set()
        for _ in range(4_000 // max_records):  # a reader that starves T1 returns 5,000 of T0 before
            polled |= {partition for partition, _ in reader.poll(max_records, DEADLINE_S)}
            if len(polled) == 2:
                break
        assert polled == {T0, T1}

    def test_assign_forgets_the_earlier_partitions(self, log: EventLog) -> None:
        log.writer().append([append_to(T0, [b"a"]), append_to(T1, [b"b"])])
        reader = log.reader()
        reader.assign({T0: 0})
        reader.assign({T1: 0})
        assert read_all(reader, 1) == {T1: [(0, b"b")]}
        assert answered(reader, 10, 0.0) == []

    def test_concurrent_appends_neither_lose_nor_mix_records(self, log: EventLog) -> None:
        writer = log.writer()
        first: dict[tuple[int, int], int] = {}

        def work(thread: int) -> None:
            for i in range(20):
                first[thread, i] = writer.append(
                    [append_to(T0, [b"%d:%d:%d" % (thread, i, j) for j in range(3)])]
                )[0]

        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        reader = log.reader()
        reader.assign({T0: 0})
        values = dict(read_all(reader, 240)[T0])
        assert sorted(values) == list(range(240))
        for (thread, i), offset in first.items():
            assert [values[offset + j] for j in range(3)] == [b"%d:%d:%d" % (thread, i, j) for j in range(3)]

    # Groups

    def test_each_group_is_answered_with_its_own_offsets(self, log: EventLog) -> None:
        groups = [[append_to(T0, [b"a", b"b"])], [append_to(T1, [b"c"]), append_to(T0, [b"d"])], []]
        assert append_groups(log.group_writer(), groups) == [[0], [0, 2], []]
        reader = log.reader()
        reader.assign({T0: 0, T1: 0})
        assert read_all(reader, 4) == {T0: [(0, b"a"), (1, b"b"), (2, b"d")], T1: [(0, b"c")]}

    @pytest.mark.parametrize("bad", ["too large", "no partition", "no topic", "columns"])
    def test_a_group_that_cannot_be_written_fails_alone(self, log: EventLog, bad: str) -> None:
        wrong, error = {
            "too large": (append_to(T0, [bytes(log.topics()["t"].max_record_bytes + 1)]), TooLarge),
            "no partition": (append_to(TopicPartition("t", 2), [b"x"]), KeyError),
            "no topic": (append_to(TopicPartition("nowhere", 0), [b"x"]), KeyError),
            "columns": (append_to(T0, [b"x"], [b"k", b"l"]), ValueError),
        }[bad]
        groups = [[append_to(T0, [b"%d" % i])] for i in range(5)]
        groups[3:3] = [[append_to(T1, [b"of the same group"]), wrong]]
        found = append_groups(log.group_writer(), groups)
        assert isinstance(found.pop(3), error)
        assert found == [[i] for i in range(5)]
        assert log.bounds(T1).end == 0

    def test_groups_of_a_partition_are_written_in_their_order(self, log: EventLog) -> None:
        writer, offsets = log.group_writer(), list[int]()

        def answer(_index: int, outcome: GroupOutcome) -> None:
            assert not isinstance(outcome, Exception)
            offsets.extend(outcome)

        for number in range(0, 200, 2):  # without waiting for the answers
            writer.append([[append_to(T0, [b"%d" % (number + i)])] for i in range(2)], answer)
        deadline = time.monotonic() + DEADLINE_S
        while len(offsets) < 200:
            assert time.monotonic() < deadline
            writer.wait(0.05)
        assert sorted(offsets) == list(range(200))
        reader = log.reader()
        reader.assign({T0: 0})
        assert read_all(reader, 200)[T0] == [(n, b"%d" % n) for n in range(200)]

    def test_a_closed_writer_has_answered_every_group(self, log: EventLog) -> None:
        writer, outcomes = log.group_writer(), dict[int, GroupOutcome]()

        def answer(index: int, outcome: GroupOutcome) -> None:
            assert index not in outcomes
            outcomes[index] = outcome

        writer.append([[append_to(T0, [b"x"])] for _ in range(20)], answer)
        writer.close()
        writer.wait(0.05)
        assert sorted(outcomes) == list(range(20))
        acknowledged = [found for found in outcomes.values() if not isinstance(found, Exception)]
        errors = [found for found in outcomes.values() if isinstance(found, Exception)]
        assert all(isinstance(error, Unavailable) for error in errors)
        assert len(acknowledged) <= log.bounds(T0).end <= 20
        (late,) = append_groups(writer, [[append_to(T0, [b"late"])]])
        assert isinstance(late, Unavailable)

    # Named writers

    def test_a_named_writer_appends_to_topics_of_one_group_at_once(self, log: EventLog) -> None:
        if not self.named_writers_are_atomic_over_topics:
            pytest.skip("this log promises no such thing")
        log.create_topic("a", partitions=1, group="g")
        log.create_topic("b", partitions=1, group="g")
        a, b = TopicPartition("a", 0), TopicPartition("b", 0)
        log.writer("joiner").append([append_to(a, [b"1"]), append_to(b, [b"2"])])
        reader = log.reader()
        reader.assign({a: 0, b: 0})
        assert read_all(reader, 2) == {a: [(0, b"1")], b: [(0, b"2")]}

    def test_a_later_writer_of_the_name_fences_the_earlier(
        self, log: EventLog, open_log: Callable[[], EventLog]
    ) -> None:
        earlier = log.writer("w")
        earlier.append([append_to(T0, [b"a"])])
        other = open_log()
        later = other.writer("w")
        with pytest.raises(Fenced):
            earlier.append([append_to(T0, [b"lost"])])
        later.append([append_to(T0, [b"b"])])
        with pytest.raises(Fenced):
            earlier.append([append_to(T1, [b"lost"])])
        reader = log.reader()
        reader.assign({T0: 0, T1: 0})
        assert [value for _, value in read_all(reader, 2)[T0]] == [b"a", b"b"]
        other.close()

    def test_a_writer_is_fenced_even_if_neither_had_appended_before(self, log: EventLog) -> None:
        earlier = log.writer("w")
        log.writer("w")
        log.create_topic("after", partitions=1)
        with pytest.raises(Fenced):
            earlier.append([append_to(TopicPartition("after", 0), [b"lost"])])

    def test_writers_of_other_names_and_nameless_ones_are_not_fenced(self, log: EventLog) -> None:
        first, nameless = log.writer("one"), log.writer()
        log.writer("two")
        first.append([append_to(T0, [b"a"])])
        nameless.append([append_to(T0, [b"b"])])
        reader = log.reader()
        reader.assign({T0: 0})
        assert [value for _, value in read_all(reader, 2)[T0]] == [b"a", b"b"]

    @pytest.mark.parametrize("name", [None, "w"])
    def test_a_reader_reaches_the_end_of_the_bounds(self, log: EventLog, name: str | None) -> None:
        writer = log.writer(name)
        for _ in range(3):
            writer.append([append_to(T0, [b"a", b"b"])])
        reader, position, seen = log.reader(), 0, 0
        reader.assign({T0: 0})
        deadline = time.monotonic() + DEADLINE_S
        while seen < 6 or position < log.bounds(T0).end:
            assert time.monotonic() < deadline, f"read {seen} records up to {position}"
            for _, records in answered(reader, 3, 0.5):
                position, seen = records.next_offset, seen + len(records)
        assert seen == 6
        reader.assign({T0: position})

    def test_an_empty_answer_says_that_everything_was_read(self, log: EventLog) -> None:
        log.writer("w").append([append_to(T0, [b"x"] * 3000), append_to(T1, [b"y"] * 10)])
        log.writer("w")  # opens once a commit is visible, which brokers acknowledge before
        reader, seen = log.reader(), 0
        reader.assign({T0: 0, T1: 0})
        while found := answered(reader, 100, 0.0):
            seen += sum(len(records) for _, records in found)
        assert seen == 3010

    # Offsets, times, retention

    def test_an_empty_partition_starts_and_ends_at_zero(self, log: EventLog) -> None:
        bounds = log.bounds(T0)
        assert (bounds.start, bounds.end) == (0, 0)

    def test_bounds_of_many_partitions_are_those_of_each(self, log: EventLog) -> None:
        log.writer().append([append_to(T1, [b"a", b"b"])])
        assert log.all_bounds([T0, T1]) == {T0: log.bounds(T0), T1: log.bounds(T1)}
        assert log.all_bounds([]) == {}

    def test_reading_beyond_the_end_is_data_lost(self, log: EventLog) -> None:
        log.writer().append([append_to(T0, [b"a"])])
        reader = log.reader()
        with pytest.raises(DataLost):
            reader.assign({T0: log.bounds(T0).end + 1})

    def test_trimmed_records_are_data_lost(self, log: EventLog) -> None:
        for i in range(5):
            log.writer().append([append_to(T0, [b"%d" % i] * 2)])
        log.trim(T0, 5)
        if not self.trims_at_once:
            pytest.skip("this log trims at its leisure")
        assert (log.bounds(T0).start, log.bounds(T0).end) == (5, 10)
        reader = log.reader()
        with pytest.raises(DataLost):
            reader.assign({T0: 4})
        reader.assign({T0: 5})
        assert [offset for offset, _ in read_all(reader, 5)[T0]] == [5, 6, 7, 8, 9]

    def test_a_reader_overtaken_by_retention_gets_an_error(self, log: EventLog) -> None:
        if not self.trims_at_once:
            pytest.skip("this log trims at its leisure")
        reader = log.reader()
        reader.assign({T0: 0})
        for _ in range(3):
            log.writer().append([append_to(T0, [b"x"])])
        log.trim(T0, 2)
        with pytest.raises(DataLost):
            reader.poll(10, DEADLINE_S)

    def test_offsets_are_never_reused_after_a_trim(self, log: EventLog) -> None:
        log.writer().append([append_to(T0, [b"a", b"b"])])
        log.trim(T0, 2)
        assert log.writer().append([append_to(T0, [b"c"])]) == [2]

    def test_a_retention_pin_is_replaced_by_a_later_one(self, log: EventLog) -> None:
        log.create_topic("t", partitions=2, retention_ms=60_000)
        log.create_topic("other", partitions=1, retention_ms=60_000)
        other, starts = TopicPartition("other", 0), []
        for at in (T0, other):
            log.writer().append([append_to(at, [b"a", b"b"], times=[1, 1])])
        for held in ({T0: 0, other: 0}, {T0: 0}, {}):
            log.hold("shard", held)
            if self.retain(log):
                starts.append((log.bounds(T0).start, log.bounds(other).start))
        if not starts:
            pytest.skip("this log cannot be made to apply retention")
        assert starts == [(0, 0), (0, 2), (2, 2)]

    def test_pins_of_several_names_hold_until_each_is_gone(
        self, log: EventLog, open_log: Callable[[], EventLog]
    ) -> None:
        log.create_topic("t", partitions=2, retention_ms=60_000)
        log.writer().append([append_to(T0, [b"a", b"b", b"c"], times=[1, 1, 1])])
        other = open_log()
        other.hold("one", {T0: 0})
        log.hold("two", {T0: 1})
        other.close()
        if not self.retain(log):
            pytest.skip("this log cannot be made to apply retention")
        starts = [log.bounds(T0).start]
        for name in ("one", "two"):
            log.hold(name, {})
            self.retain(log)
            starts.append(log.bounds(T0).start)
        assert starts == [0, 1, 3]

    def test_retention_keeps_records_that_have_not_expired(self, log: EventLog) -> None:
        log.create_topic("t", partitions=2, retention_ms=3_600_000)
        now_ms = time.time_ns() // 1_000_000
        log.writer().append([append_to(T0, [b"a"], times=[1])])
        log.writer().append([append_to(T0, [b"b"], times=[now_ms])])
        if not self.retain(log):
            pytest.skip("this log cannot be made to apply retention")
        assert (log.bounds(T0).start, log.bounds(T0).end) == (1, 2)

    def test_the_first_offset_of_a_time_is_found(self, log: EventLog) -> None:
        if not self.keeps_given_times:
            pytest.skip("records of this log have its own times")
        writer = log.writer()
        assert log.offset_at(T0, 0) == 0
        for times in ([10, 20], [15, 40], [30, 50]):
            writer.append([append_to(T0, [b"x"] * 2, times=times)])
        found = {time_ms: log.offset_at(T0, time_ms) for time_ms in (0, 10, 11, 20, 21, 40, 41, 50, 51)}
        assert found == {0: 0, 10: 0, 11: 1, 20: 1, 21: 3, 40: 3, 41: 5, 50: 5, 51: 6}

    def test_closing_twice_is_once(self, log: EventLog) -> None:
        for part in (log.reader(), log.writer(), log.group_writer(), log):
            part.close()
            part.close()
