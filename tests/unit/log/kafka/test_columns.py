"""Records read ahead are handed out once, in order, in turns; markers move positions."""

from collections.abc import Iterable
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freshet.log.kafka.reader import Ahead, flatten
from freshet.observability.skipped_state import tombstones
from freshet.types import BytesColumn, Records, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def records(start: int, count: int) -> Records:
    return records_at(range(start, start + count))


def records_at(places: Iterable[int]) -> Records:
    offsets = np.array(list(places), np.int64)
    values = BytesColumn.of([b"%d" % offset for offset in offsets])
    return Records(offsets, offsets, BytesColumn.of([b""] * len(offsets)), values, int(offsets[-1]) + 1)


@dataclass(frozen=True)
class Step:
    partition: TopicPartition
    count: int  # records that come
    again: int  # records before them that come once more
    twice: bool  # all of these twice
    gap: int  # markers behind them
    take: int  # records to return at most; 0: none


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([T0, T1]),
        st.integers(0, 5),
        st.integers(0, 3),
        st.booleans(),
        st.integers(0, 2),
        st.integers(0, 7),
    ),
    max_size=20,
)


@given(STEPS)
def test_every_record_is_returned_once_in_order_up_to_the_end(steps: list[Step]) -> None:
    ahead, ends = Ahead({T0: 0, T1: 0}), {T0: 0, T1: 0}
    came: dict[TopicPartition, list[int]] = {T0: [], T1: []}
    got: dict[TopicPartition, list[int]] = {T0: [], T1: []}
    position = {T0: 0, T1: 0}

    def take(most: int) -> bool:
        found = ahead.pop_records(most)
        assert sum(len(part) for _, part in found) <= most
        for at, part in found:
            assert list(part.values) == [b"%d" % offset for offset in part.offsets.tolist()]
            got[at] += part.offsets.tolist()
            assert part.next_offset > position[at]
            position[at] = part.next_offset
        return bool(found)

    for step in steps:
        new = range(ends[step.partition], ends[step.partition] + step.count)
        earlier = came[step.partition][::-1][: step.again][::-1]
        if run := [*earlier, *new] * (1 + step.twice):
            assert ahead.add(step.partition, records_at(run)) == len(run) - len(new)
        came[step.partition] += new
        ends[step.partition] += step.count + step.gap
        ahead.moved(step.partition, ends[step.partition])
        if step.take:
            take(step.take)
    while take(3):
        pass
    assert (got, position, ahead.bytes) == (came, ends, 0)


def test_a_long_partition_does_not_starve_the_others() -> None:
    ahead = Ahead({T0: 0, T1: 0})
    ahead.add(T0, records(0, 100))
    ahead.add(T1, records(0, 1))
    assert {at for _ in range(2) for at, _ in ahead.pop_records(1)} == {T0, T1}


class Message:
    """As much of the client's message as `flatten` reads."""

    def __init__(self, place: int, partition: int, value: bytes | None) -> None:
        self._place, self._partition, self._value = place, partition, value

    def topic(self) -> str:
        return "in-kafka"

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._place

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_000 + self._place

    def value(self) -> bytes | None:
        return self._value

    def key(self) -> bytes | None:
        return b"k%d" % self._place


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([None, b"", b"abc"])), max_size=12))
def test_null_values_are_passed_over_and_counted(chosen: list[tuple[int, bytes | None]]) -> None:
    """A null is no record; an empty value is one, and positions pass both."""
    messages = [Message(10 + i, partition, value) for i, (partition, value) in enumerate(chosen)]
    before = tombstones().get("t", 0)
    found: dict[int, list[tuple[int, int, bytes, bytes]]] = {0: [], 1: []}
    reached: dict[int, int] = {}
    with patch("freshet.log.kafka.reader.Message", Message):
        pieces = list(flatten(messages, {"in-kafka": "t"}))  # type: ignore[arg-type]
    for at, records in pieces:
        rows = zip(
            records.offsets.tolist(), records.times_ms.tolist(), records.keys, records.values, strict=True
        )
        found[at.partition] += rows
        reached[at.partition] = records.next_offset
    for partition in (0, 1):
        mine = [(m.offset(), m.value()) for m in messages if m.partition() == partition]
        assert found[partition] == [(o, 1_000 + o, b"k%d" % o, v) for o, v in mine if v is not None]
        assert reached.get(partition) == (mine[-1][0] + 1 if mine else None)
    assert tombstones().get("t", 0) - before == sum(value is None for _, value in chosen)
