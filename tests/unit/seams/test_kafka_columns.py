"""Records read ahead are handed out once, in order, in turns; markers move positions."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freshet.seams.eventlog.kafka_columns import Ahead
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
    take: int  # records asked for; 0: none


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
def test_every_record_is_handed_out_once_in_order_and_positions_reach_the_end(steps: list[Step]) -> None:
    ahead, ends = Ahead({T0: 0, T1: 0}), {T0: 0, T1: 0}
    came: dict[TopicPartition, list[int]] = {T0: [], T1: []}
    got: dict[TopicPartition, list[int]] = {T0: [], T1: []}
    position = {T0: 0, T1: 0}

    def take(most: int) -> bool:
        found = ahead.take(most)
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
    assert {at for _ in range(2) for at, _ in ahead.take(1)} == {T0, T1}
