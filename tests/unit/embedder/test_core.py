import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.embedder.core import (
    Assembler,
    lanes_for,
    partitions_of_lane,
    rewind_offsets,
    rows_of_blocks,
)
from freshet.embedder.staleness_limiter import Permits
from freshet.types import BytesColumn, OffsetRange
from tests.fixtures.blocks import block, records


def test_batch_has_whole_blocks_up_to_the_row_limit():
    assembler = Assembler({0: 0})
    assembler.add(0, records([0, 1, 2], [100, 100, 100]))

    plan = assembler.next(256)

    assert plan is not None
    assert plan.ranges == (OffsetRange(0, 0, 2),)
    assert plan.rows == 200
    assert len(plan.blocks) == 2


def test_block_larger_than_a_batch_is_a_batch_alone():
    assembler = Assembler({0: 0})
    assembler.add(0, records([0, 1], [900, 10]))

    plan = assembler.next(256)

    assert plan is not None
    assert plan.ranges == (OffsetRange(0, 0, 1),)


def test_batch_fills_from_many_partitions():
    assembler = Assembler(dict.fromkeys(range(4), 0))
    for p in range(4):
        assembler.add(p, records([0], [10]))

    plan = assembler.next(256)

    assert plan is not None
    assert plan.ranges == tuple(OffsetRange(p, 0, 1) for p in range(4))


def test_offset_gap_belongs_to_the_range_after_it():
    assembler = Assembler({0: 5})
    assembler.add(0, records([7, 9], [1, 1]))

    plan = assembler.next(1)
    after = assembler.next(1)

    assert plan is not None
    assert after is not None
    assert plan.ranges == (OffsetRange(0, 5, 8),)
    assert after.ranges == (OffsetRange(0, 8, 10),)


def test_no_range_crosses_a_split():
    assembler = Assembler({0: 0, 1: 0}, {0: [2]})
    assembler.add(0, records([0, 1, 2, 3], [1, 1, 1, 1]))
    assembler.add(1, records([0], [1]))

    seen = []
    while plan := assembler.next(256):
        seen.append(plan.ranges)

    assert (OffsetRange(0, 0, 2),) in seen
    assert not any(r.partition == 0 and r.start < 2 < r.stop for ranges in seen for r in ranges)


def test_trailing_markers_are_covered():
    assembler = Assembler({0: 0})
    assembler.add(0, records([0], [1], next_offset=2))
    assembler.next(1)
    assert assembler.covered() == {0: 2}
    assembler.add(0, records([], [], next_offset=3))

    assert assembler.positions() == {0: 1}
    assert assembler.covered() == {0: 3}
    assert assembler.next(1) is None

    assembler.add(0, records([3], [1], next_offset=5))
    assert assembler.covered() == {0: 1}
    plan = assembler.next(1)

    assert plan is not None
    assert plan.ranges == (OffsetRange(0, 1, 4),)


def test_split_behind_a_gap_ends_the_range_before_it():
    assembler = Assembler({0: 0}, {0: [3]})
    assembler.add(0, records([0, 4], [1, 1]))

    assert [plan.ranges for plan in iter(lambda: assembler.next(256), None)] == [
        (OffsetRange(0, 0, 3),),
        (OffsetRange(0, 3, 5),),
    ]


def test_split_without_a_block_gets_an_empty_range():
    assembler = Assembler({0: 2, 1: 0}, {0: [4]})
    assembler.add(0, records([5], [1]))
    assembler.add(1, records([0], [1]))

    plans = list(iter(lambda: assembler.next(256), None))

    assert (OffsetRange(0, 2, 4),) in [plan.ranges for plan in plans]
    [empty] = [plan for plan in plans if plan.ranges == (OffsetRange(0, 2, 4),)]
    assert (len(empty.blocks), empty.rows) == (0, 0)
    assert assembler.positions() == {0: 6, 1: 1}


def test_blocks_out_of_order_are_refused():
    assembler = Assembler({0: 5})

    with pytest.raises(ValueError, match="must follow offset 4, found 3"):
        assembler.add(0, records([3], [1]))


@given(
    st.dictionaries(st.integers(0, 3), st.lists(st.integers(1, 300), max_size=12), min_size=1),
    st.integers(1, 512),
    st.data(),
)
def test_every_block_is_in_one_batch_of_contiguous_ranges(blocks, rows, data):
    splits = {p: data.draw(st.lists(st.integers(0, len(b)), max_size=3)) for p, b in blocks.items()}
    assembler = Assembler(dict.fromkeys(blocks, 0), splits)
    for p, sizes in blocks.items():
        assembler.add(p, records(list(range(len(sizes))), sizes))

    position = dict.fromkeys(blocks, 0)
    while plan := assembler.next(rows):
        assert len({r.partition for r in plan.ranges}) == len(plan.ranges)
        assert plan.rows <= rows or len(plan.blocks) == 1
        for r in plan.ranges:
            assert r.start == position[r.partition]
            assert not any(r.start < c < r.stop for c in splits[r.partition])
            position[r.partition] = r.stop
    assert position == {p: len(b) for p, b in blocks.items()}


def test_rows_of_blocks_are_those_of_their_headers():
    assert rows_of_blocks(BytesColumn.of([block(7), b"x", block(70_000)])).tolist() == [7, 1, 70_000]


def test_rewind_starts_at_the_smallest_applied_offset():
    starts, splits = rewind_offsets([{0: [3, 7], 1: [4]}, {0: [5], 1: [4]}])

    assert starts == {0: 3, 1: 4}
    assert splits == {0: [5, 7], 1: []}


def test_lookup_waits_while_rows_in_flight_exceed_the_bound():
    permits = Permits(512)
    first = permits.acquire(256)
    permits.acquire(256)
    assert permits.is_available()
    permits.acquire(256)
    assert not permits.is_available()

    permits.release(first)
    permits.release(first)

    assert permits.is_available()


def test_lane_holds_the_permit_of_its_void_batch():
    permits = Permits(4)
    permits.acquire(4, lane=1)
    void = permits.acquire(4, lane=0)

    permits.hold(void)

    assert not permits.is_available(lane=1)
    assert permits.is_available(lane=0)
    permits.acquire(4, lane=0)
    assert not permits.is_available(lane=0)


def test_held_permits_are_released_after_the_reissue():
    permits = Permits(0)
    permits.hold(permits.acquire(4, lane=0))
    assert not permits.is_available(lane=1)

    permits.release_held(0)

    assert permits.is_available(lane=1)


def test_sync_mode_looks_up_after_all_pushes_of_a_step():
    permits = Permits(1_000, sync=True)
    step = [permits.acquire(4, lane) for lane in (0, 1)]
    assert not permits.is_available(0)
    assert permits.is_available(2)

    permits.end_step()
    permits.release(step[0])
    assert not permits.is_available(0)
    assert not permits.is_available(2)
    permits.release(step[1])

    assert permits.is_available(0)


def test_lanes_follow_cores_staleness_and_partitions():
    assert lanes_for(cores=2, staleness_rows=512, batch_rows=256, partitions=8) == 2
    assert lanes_for(cores=32, staleness_rows=512, batch_rows=256, partitions=8) == 3
    assert lanes_for(cores=32, staleness_rows=99999, batch_rows=256, partitions=2) == 2
    assert [partitions_of_lane(i, 2, range(5)) for i in range(2)] == [(0, 2, 4), (1, 3)]
