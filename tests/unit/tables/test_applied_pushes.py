"""The pushes that looked-up rows contain, by bucket, over groups and shards."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freshet.tables import KeyGroup, KnownPushes
from freshet.types import I64, OffsetRange

BUCKETS, PARTITIONS = 8, 2

counts = st.lists(st.integers(0, 2), min_size=BUCKETS, max_size=BUCKETS)
offsets = st.lists(
    st.lists(st.integers(0, 2), min_size=PARTITIONS, max_size=PARTITIONS), min_size=BUCKETS, max_size=BUCKETS
)


def group_of(number: int, rows: list[int]) -> KeyGroup:
    """Return a group with these numbers of rows in each bucket."""
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.uint32)
    return KeyGroup(number, np.arange(sum(rows), dtype=np.uint64), np.zeros(sum(rows), np.uint8), starts)


def read_offsets(known: KnownPushes, group: int, bucket: int) -> list[int]:
    moment = known.moment_of[group][bucket] if known.moment_of else 0
    found: list[int] = known.offsets[moment].tolist()
    return found


@given(rows=st.tuples(counts, counts), read=st.tuples(offsets, offsets))
def test_offsets_of_each_bucket_with_keys_are_kept(rows, read):
    groups = [group_of(g, of) for g, of in enumerate(rows)]
    known = KnownPushes.of(groups, [np.array(one, np.int64) for one in read])

    looked_up = [(g, b) for g in range(2) for b in range(BUCKETS) if rows[g][b]]
    assert [read_offsets(known, g, b) for g, b in looked_up] == [read[g][b] for g, b in looked_up]
    assert len(known.offsets) == len({tuple(read[g][b]) for g, b in looked_up})


@given(
    rows=st.tuples(counts, counts),
    read=st.tuples(offsets, offsets),
    of=st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
def test_merged_offsets_equal_those_of_each_shard(rows, read, of):
    owners = np.array(of)
    parts, arrays = [], [np.array(one, np.int64) for one in read]
    for shard in range(3):
        mine = [np.where(owners == shard, one, 0).tolist() for one in rows]
        groups = [group_of(g, one) for g, one in enumerate(mine) if any(one)]
        if groups:
            parts.append((owners == shard, KnownPushes.of(groups, [arrays[g.group] for g in groups])))
    known = KnownPushes.merged([0, 1], parts)

    looked_up = [(g, b) for g in range(2) for b in range(BUCKETS) if rows[g][b]]
    assert [read_offsets(known, g, b) for g, b in looked_up] == [read[g][b] for g, b in looked_up]


def test_buckets_of_one_moment_need_no_map():
    same: I64 = np.full((BUCKETS, PARTITIONS), 7, np.int64)
    known = KnownPushes.of([group_of(0, [1] * BUCKETS)], [same])
    assert (known.offsets.tolist(), known.moment_of) == ([[7, 7]], {})
    halves = [(np.arange(BUCKETS) % 2 == i, known) for i in range(2)]
    merged = KnownPushes.merged([0], halves)
    assert (merged.offsets.tolist(), merged.moment_of) == ([[7, 7]], {})


def test_a_push_is_contained_once_all_its_ranges_are():
    known = KnownPushes(np.array([[3, 5], [4, 5], [4, 6]]))
    assert known.knowing([OffsetRange(0, 3, 4)]) == [False, True, True]
    assert known.knowing([OffsetRange(0, 3, 4), OffsetRange(1, 5, 6)]) == [False, False, True]
    assert known.knowing([OffsetRange(2, 0, 1)]) == [False] * 3, "of that partition nothing is told"


def test_a_lookup_without_keys_contains_no_push():
    none = KnownPushes.of([group_of(0, [0] * BUCKETS)], [np.zeros((BUCKETS, PARTITIONS), np.int64)])
    assert (len(none.offsets), len(KnownPushes.of([], []).offsets)) == (0, 0)
    assert len(KnownPushes.merged([0], []).offsets) == 0
