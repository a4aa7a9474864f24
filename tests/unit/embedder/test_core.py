import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.embedder.core import (
    SAMPLE_BYTES,
    Assembler,
    Permits,
    lanes_for,
    partitions_of_lane,
    rewind_offsets,
    rows_of_blocks,
)
from freshet.types import BytesColumn, OffsetRange, Records


def block(rows: int) -> bytes:
    """A block of zeros: only its count and its size are looked at here."""
    return bytes([0xB1, 1, 0, 0]) + bytes(4) + rows.to_bytes(4, "little") + bytes(4 + rows * SAMPLE_BYTES)


def records(offsets: list[int], rows: list[int], next_offset: int | None = None) -> Records:
    values = BytesColumn.of(block(n) for n in rows)
    empty = BytesColumn(np.empty(0, np.uint8), np.zeros(len(offsets), np.int64))
    return Records(
        np.array(offsets, np.int64),
        np.zeros(len(offsets), np.int64),
        empty,
        values,
        next_offset if next_offset is not None else offsets[-1] + 1 if offsets else 0,
    )


def test_a_batch_is_whole_blocks_up_to_the_rows_asked_for():
    assembler = Assembler({0: 0})
    assembler.add(0, records([0, 1, 2], [100, 100, 100]))

    plan = assembler.next(256)

    assert plan is not None
    assert plan.ranges == (OffsetRange(0, 0, 2),)
    assert plan.rows == 200
    assert len(plan.blocks) == 2


def test_a_block_larger_than_a_batch_goes_alone():
    assembler = Assembler({0: 0})
    assembler.add(0, records([0, 1], [900, 10]))

    plan = assembler.next(256)

    assert plan is not None
    assert plan.ranges == (OffsetRange(0, 0, 1),)


def test_low_traffic_over_many_partitions_still_fills_a_batch():
    assembler = Assembler(dict.fromkeys(range(4), 0))
    for p in range(4):
        assembler.add(p, records([0], [10]))

    plan = assembler.next(256)

    assert plan is not None
    assert plan.ranges == tuple(OffsetRange(p, 0, 1) for p in range(4))


def test_a_gap_in_the_offsets_belongs_to_the_range_that_follows_it():
    assembler = Assembler({0: 5})
    assembler.add(0, records([7, 9], [1, 1]))

    plan = assembler.next(1)
    after = assembler.next(1)

    assert plan is not None
    assert after is not None
    assert plan.ranges == (OffsetRange(0, 5, 8),)
    assert after.ranges == (OffsetRange(0, 8, 10),)


def test_no_range_crosses_a_cut_point_and_a_cut_partition_stands_alone():
    assembler = Assembler({0: 0, 1: 0}, {0: [2]})
    assembler.add(0, records([0, 1, 2, 3], [1, 1, 1, 1]))
    assembler.add(1, records([0], [1]))

    seen = []
    while plan := assembler.next(256):
        seen.append(plan.ranges)

    assert (OffsetRange(0, 0, 2),) in seen
    assert not any(r.partition == 0 and r.start < 2 < r.stop for ranges in seen for r in ranges)


def test_markers_behind_the_last_block_count_as_covered_and_belong_to_the_next_range():
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


def test_a_cut_behind_a_gap_ends_the_range_before_it():
    assembler = Assembler({0: 0}, {0: [3]})
    assembler.add(0, records([0, 4], [1, 1]))

    assert [plan.ranges for plan in iter(lambda: assembler.next(256), None)] == [
        (OffsetRange(0, 0, 3),),
        (OffsetRange(0, 3, 5),),
    ]


def test_a_cut_without_a_block_before_it_gets_a_range_of_none():
    assembler = Assembler({0: 2, 1: 0}, {0: [4]})
    assembler.add(0, records([5], [1]))
    assembler.add(1, records([0], [1]))

    plans = list(iter(lambda: assembler.next(256), None))

    assert (OffsetRange(0, 2, 4),) in [plan.ranges for plan in plans]
    [empty] = [plan for plan in plans if plan.ranges == (OffsetRange(0, 2, 4),)]
    assert (len(empty.blocks), empty.rows) == (0, 0)
    assert assembler.positions() == {0: 6, 1: 1}


def test_blocks_that_do_not_follow_what_was_offered_are_refused():
    assembler = Assembler({0: 5})

    with pytest.raises(ValueError, match="must follow offset 4, found 3"):
        assembler.add(0, records([3], [1]))


@given(
    st.dictionaries(st.integers(0, 3), st.lists(st.integers(1, 300), max_size=12), min_size=1),
    st.integers(1, 512),
    st.data(),
)
def test_every_block_is_in_exactly_one_batch_and_ranges_are_contiguous(blocks, rows, data):
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


def test_rows_of_blocks_are_read_from_their_headers_and_a_stump_counts_as_one():
    assert rows_of_blocks(BytesColumn.of([block(7), b"x", block(70_000)])).tolist() == [7, 1, 70_000]


def test_work_starts_again_at_the_smallest_offset_and_the_others_are_cut_points():
    starts, splits = rewind_offsets([{0: [3, 7], 1: [4]}, {0: [5], 1: [4]}])

    assert starts == {0: 3, 1: 4}
    assert splits == {0: [5, 7], 1: []}


def test_a_lookup_waits_while_the_rows_of_other_batches_exceed_the_bound():
    permits = Permits(512)
    first = permits.acquire(256)
    permits.acquire(256)
    assert permits.is_available()
    permits.acquire(256)
    assert not permits.is_available()

    permits.release(first)
    permits.release(first)

    assert permits.is_available()


def test_a_void_batch_keeps_its_credit_for_the_lane_that_issues_it_again():
    permits = Permits(4)
    permits.acquire(4, lane=1)
    void = permits.acquire(4, lane=0)

    permits.hold(void)

    assert not permits.is_available(lane=1)
    assert permits.is_available(lane=0)
    permits.acquire(4, lane=0)
    assert not permits.is_available(lane=0)


def test_what_a_lane_kept_is_free_once_everything_void_was_issued_again():
    permits = Permits(0)
    permits.hold(permits.acquire(4, lane=0))
    assert not permits.is_available(lane=1)

    permits.release_held(0)

    assert permits.is_available(lane=1)


def test_in_mode_sync_nothing_is_looked_up_between_a_steps_first_push_and_its_last_acknowledgement():
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
