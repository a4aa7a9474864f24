from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.rows.grpc.frames import (
    PushedGroup,
    key_group,
    lookup_frame,
    lookup_of,
    push_frame,
    push_of,
)
from freshet.rows.grpc.handles import KeptKeys, KeysForgottenError, handle_of
from freshet.rows.service import KeyGroup, Push
from freshet.rpc.frames import BadFrame, Frame, Kind, Part, decode_frame, encode_frame
from freshet.tables.plan import PooledLists
from freshet.types import F32, Fence, OffsetRange, TimeMs
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire

BUCKETS, WIDTH = 16, 2
OWNED = np.ones(BUCKETS, np.bool_)
PUSH = Push((OffsetRange(0, 3, 7),), Fence(10), TimeMs(5), (), ())
LISTS = PooledLists(np.array([1, 3], np.int32), np.array([0, 2, 2, 3], np.int32), np.array([3, 1], np.uint32))
GRADIENTS: F32 = np.arange(8, dtype=np.float32).reshape(4, WIDTH)


def group_of(count: int = 4, lists: PooledLists | None = LISTS) -> KeyGroup:
    keys = np.arange(1, count + 1, dtype=np.uint64)
    return replace(key_group(0, keys, np.zeros(count, np.uint8), BUCKETS), lists=lists)


def decoded(data: bytes) -> Frame:
    return decode_frame(data, max_bytes=1 << 20)


def lookup(group: KeyGroup, *, states: bool = False) -> bytes:
    lists = {0: group.lists} if group.lists is not None else {}
    keys = [(0, group.keys, group.tables)]
    return lookup_frame(1, keys, RowCodec.FP32, create=True, states=states, lists=lists)


def push(group: KeyGroup, gradients: F32 = GRADIENTS, handle: bytes | None = None) -> bytes:
    part = PushedGroup(0, group.keys, group.tables, gradients, lists=group.lists)
    return push_frame(1, PUSH, [part], RowWire(), RowCodec.FP32, OWNED, handle)


def assert_equal(found: PooledLists | None, expected: PooledLists) -> None:
    assert found is not None
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_array_equal(found.counts, expected.counts)


@st.composite
def lists_of(draw: st.DrawFn) -> tuple[int, PooledLists]:
    rows = draw(st.integers(1, 30))
    lists = draw(st.lists(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9), max_size=9))
    beside = sorted(draw(st.sets(st.integers(0, rows - 1))))
    positions = np.array([p for one in lists for p in one], np.int32)
    counts = np.array([len(one) for one in lists], np.uint32)
    return rows, PooledLists(np.array(beside, np.int32), positions, counts)


@given(drawn=lists_of())
def test_lists_of_lookups_and_pushes_arrive_as_they_were(drawn: tuple[int, PooledLists]) -> None:
    rows, lists = drawn
    group = group_of(rows, lists)
    groups, create, states = lookup_of(decoded(lookup(group)), BUCKETS)
    assert (create, states) == (True, False)
    assert_equal(groups[0].lists, lists)
    gradients: F32 = np.ones((len(lists), WIDTH), np.float32)
    found = push_of(decoded(push(group, gradients)), BUCKETS, (WIDTH,), RowWire())
    assert_equal(found.groups[0].lists, lists)
    np.testing.assert_array_equal(found.gradients[0], gradients)


def test_a_push_by_handle_has_the_lists_of_its_lookup() -> None:
    group, kept = group_of(), KeptKeys()
    handle = handle_of([(0, group.keys, group.tables)], {0: LISTS})
    with pytest.raises(KeysForgottenError):
        push_of(decoded(push(group, handle=handle)), BUCKETS, (WIDTH,), RowWire(), kept.find)
    kept.add(lookup_of(decoded(lookup(group)), BUCKETS)[0])
    found = push_of(decoded(push(group, handle=handle)), BUCKETS, (WIDTH,), RowWire(), kept.find)
    assert_equal(found.groups[0].lists, LISTS)
    np.testing.assert_array_equal(found.gradients[0], GRADIENTS)
    assert len(push(group, handle=handle)) < len(push(group)) - 8 * len(group.keys)
    without = push(group_of(lists=None), handle=handle)
    with pytest.raises(BadFrame, match="expected a frame PUSH_LISTS"):
        push_of(decoded(without), BUCKETS, (WIDTH,), RowWire(), kept.find)


def test_handles_differ_with_the_lists() -> None:
    keys = [(0, group_of().keys, group_of().tables)]
    others = [
        replace(LISTS, rows=LISTS.rows[:1]),
        replace(LISTS, positions=LISTS.positions[::-1]),
        replace(LISTS, counts=LISTS.counts[::-1]),
    ]
    handles = {handle_of(keys, {0: lists}) for lists in (LISTS, *others)}
    assert len(handles | {handle_of(keys)}) == len(others) + 2


def test_kept_lists_count_in_the_bound() -> None:
    plain, with_lists = KeptKeys(), KeptKeys()
    plain.add([group_of(lists=None)])
    with_lists.add([group_of()])
    assert with_lists.bytes - plain.bytes == LISTS.nbytes


def changed(data: bytes, part: Part, array: object, kind: Kind | None = None) -> Frame:
    frame = decoded(data)
    sections = {**frame.sections, (part, 0): np.asarray(array)}
    return decoded(encode_frame(replace(frame, sections=sections, kind=kind or frame.kind)))


BAD_LISTS = {
    "a count too many": (Part.LIST_COUNTS, np.array([3, 2], np.uint16)),
    "a list without elements": (Part.LIST_COUNTS, np.array([4, 0], np.uint16)),
    "counts that would need gigabytes": (Part.LIST_COUNTS, np.full(4, 65535, np.uint16)),
    "no counts": (Part.LIST_COUNTS, np.empty(0, np.uint16)),
    "a position past the keys": (Part.POSITIONS, np.array([0, 2, 2, 4], np.uint16)),
    "a position of no row": (Part.POSITIONS, np.array([0, 2, 65535, 3], np.uint16)),
    "too many bits": (Part.BESIDE, np.zeros(2, np.uint8)),
}


@pytest.mark.parametrize("bad", BAD_LISTS)
def test_malformed_lists_are_refused(bad: str) -> None:
    part, array = BAD_LISTS[bad]
    with pytest.raises(BadFrame):
        lookup_of(changed(lookup(group_of()), part, array), BUCKETS)
    with pytest.raises(BadFrame):
        push_of(changed(push(group_of()), part, array), BUCKETS, (WIDTH,), RowWire())


def test_frames_of_lists_are_of_kinds_that_earlier_shards_refuse() -> None:
    """They know LOOKUP and PUSH, and would leave the lists out."""
    kinds = [decoded(lookup(group_of())).kind, decoded(push(group_of())).kind]
    assert kinds == [14, 15]
    assert kinds == [Kind.LOOKUP_LISTS, Kind.PUSH_LISTS]
    assert decoded(lookup(group_of(lists=None))).kind == Kind.LOOKUP
    assert decoded(push(group_of(lists=None))).kind == Kind.PUSH
    as_lookup = replace(decoded(lookup(group_of())), kind=Kind.LOOKUP)
    with pytest.raises(BadFrame, match="has lists, which a frame of kind 2 cannot have"):
        lookup_of(as_lookup, BUCKETS)


def test_states_and_steps_of_rows_do_not_go_with_lists() -> None:
    with pytest.raises(BadFrame, match="states"):
        lookup_of(decoded(lookup(group_of(), states=True)), BUCKETS)
    counted = changed(push(group_of()), Part.COUNTS, np.ones(4, np.uint16))
    with pytest.raises(BadFrame, match="several gradients"):
        push_of(counted, BUCKETS, (WIDTH,), RowWire())


@pytest.mark.parametrize("rows", [3, 5])
def test_a_push_has_a_gradient_of_each_row_beside_and_each_list(rows: int) -> None:
    with pytest.raises(BadFrame, match="expected 4 gradients"):
        push_of(decoded(push(group_of(), np.ones((rows, WIDTH), np.float32))), BUCKETS, (WIDTH,), RowWire())


@given(data=st.data())
def test_any_sections_are_decoded_or_refused(data: st.DataObject) -> None:
    part = data.draw(st.sampled_from([Part.LIST_COUNTS, Part.POSITIONS, Part.BESIDE]))
    dtype = data.draw(st.sampled_from([np.dtype(name) for name in ("u1", "u2", "i4", "u4")]))
    limit = np.iinfo(dtype)
    numbers = st.one_of(st.integers(0, 5), st.integers(limit.min, limit.max))
    array = np.array(data.draw(st.lists(numbers, max_size=8)), dtype)
    for encoded, decode in (
        (lookup(group_of()), lambda frame: lookup_of(frame, BUCKETS)[0]),
        (push(group_of()), lambda frame: push_of(frame, BUCKETS, (WIDTH,), RowWire()).groups),
    ):
        try:
            groups = decode(changed(encoded, part, array))
        except BadFrame:
            continue
        lists = groups[0].lists
        assert lists is not None
        rows: F32 = np.ones((len(groups[0].keys), WIDTH), np.float32)
        assert lists.row_gradients(lists.looked_up(rows), len(rows)).shape == rows.shape
