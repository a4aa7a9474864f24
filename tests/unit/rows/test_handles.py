import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.rows.grpc.frames import PushedGroup, key_group, push_frame, push_of
from freshet.rows.grpc.handles import PAUSE_S, KeptKeys, KeysForgottenError, SentHandles, handle_of
from freshet.rows.service import KeyGroup, Push
from freshet.rpc.frames import BadFrame, Frame, Part, decode_frame
from freshet.tables.plan import PooledLists
from freshet.types import Fence, OffsetRange, TimeMs
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire

BUCKETS, WIDTH = 16, 2
OWNED = np.ones(BUCKETS, np.bool_)
PUSH = Push((OffsetRange(0, 3, 7),), Fence(10), TimeMs(5), (), ())


def group_of(*keys: int, table: int = 0) -> KeyGroup:
    found = np.sort(np.array(keys, np.uint64))
    return key_group(0, found, np.full(len(found), table, np.uint8), BUCKETS)


def handle(group: KeyGroup) -> bytes:
    return handle_of([(group.group, group.keys, group.tables)])


def decoded(data: bytes, kept: KeptKeys) -> Push:
    frame = decode_frame(data, max_bytes=1 << 20)
    return push_of(frame, BUCKETS, (WIDTH,), RowWire(), kept.find)


def test_handles_differ_with_groups_keys_and_tables() -> None:
    keys, tables = np.array([1, 2], np.uint64), np.array([0, 1], np.uint8)
    cases = [
        [(0, keys, tables)],
        [(1, keys, tables)],
        [(0, keys[:1], tables[:1]), (1, keys[1:], tables[1:])],
        [(0, keys, tables[::-1])],
        [(0, keys[::-1], tables)],
    ]
    assert len({handle_of(case) for case in cases}) == len(cases)
    assert handle_of(cases[0]) == handle_of([(0, keys.copy(), tables.copy())])


def test_the_newest_lookups_are_kept() -> None:
    kept, groups = KeptKeys(most_lookups=2), [group_of(n) for n in (1, 2, 3)]
    for group in (groups[0], groups[1], groups[0], groups[2]):
        kept.add([group])
    assert [kept.find(handle(group)) is not None for group in groups] == [True, False, True]


def test_kept_bytes_are_bounded() -> None:
    kept = KeptKeys(most_bytes=4000)
    groups = [group_of(*range(n, n + 100)) for n in range(0, 1000, 100)]
    for group in groups:
        kept.add([group])
        assert kept.bytes <= 4000
    assert 2 <= len(kept) < 10
    assert kept.find(handle(groups[-1])) is not None
    kept.add([group_of(*range(1000))])
    assert (len(kept), kept.bytes) == (0, 0), "one that is too large leaves none"


def test_kept_keys_do_not_keep_their_message() -> None:
    message = np.arange(1 << 20, dtype=np.uint64)
    rows, counts = message[:8].view(np.int32)[:2], message[:8].view(np.uint32)[:2]
    lists = PooledLists(rows, rows, counts)
    group = KeyGroup(
        0, message[:2], message[2:3].view(np.uint8)[:2], message[3:4].view(np.uint32), lists=lists
    )
    kept, released = KeptKeys(), weakref.ref(message)
    kept.add([group])
    del message, group, lists, rows, counts
    assert len(kept) == 1
    assert released() is None


def test_a_client_forgets_all_handles_and_pauses() -> None:
    now = [100.0]
    sent = SentHandles(lambda: now[0])
    sent.add(b"a")
    assert sent.has(b"a")
    assert not sent.has(b"b")
    sent.forget()
    sent.add(b"b")
    assert not sent.has(b"b")
    now[0] += PAUSE_S
    assert sent.has(b"b")
    assert not sent.has(b"a")


@given(
    st.lists(
        st.tuples(st.integers(1, 2**64 - 1), st.integers(1, 4)), max_size=9, unique_by=lambda one: one[0]
    )
)
def test_a_push_by_handle_equals_one_with_keys(rows: list[tuple[int, int]]) -> None:
    rows = sorted(rows)
    group = group_of(*(key for key, _ in rows))
    repeated = group.repeated(np.array([n for _, n in rows], np.uint32))
    gradients = np.arange(WIDTH * len(repeated.keys), dtype=np.float32).reshape(-1, WIDTH)
    pushed = [PushedGroup.of(0, repeated.keys, repeated.tables, gradients)]
    kept = KeptKeys()
    kept.add([group])
    for named in (None, handle(group)):
        found = decoded(push_frame(1, PUSH, pushed, RowWire(), RowCodec.FP32, OWNED, named), kept)
        np.testing.assert_array_equal(found.groups[0].keys, repeated.keys)
        np.testing.assert_array_equal(found.groups[0].tables, repeated.tables)
        np.testing.assert_array_equal(found.groups[0].bucket_starts, repeated.bucket_starts)
        np.testing.assert_array_equal(found.gradients[0], gradients)


def test_a_push_of_forgotten_keys_is_not_decoded() -> None:
    group = group_of(1, 2)
    pushed = [PushedGroup(0, group.keys, group.tables, np.zeros((2, WIDTH), np.float32))]
    data = push_frame(1, PUSH, pushed, RowWire(), RowCodec.FP32, OWNED, handle(group))
    with pytest.raises(KeysForgottenError):
        decoded(data, KeptKeys())


@pytest.mark.parametrize("counts", [[1, 1], [0, 3], [1, 65535], [2, 1, 0], [3]])
def test_counts_must_be_those_of_the_gradients(counts: list[int]) -> None:
    group = group_of(1, 2)
    kept = KeptKeys()
    kept.add([group])
    gradients = np.zeros((3, WIDTH), np.float32)
    pushed = [PushedGroup(0, group.keys, group.tables, gradients, np.array(counts, np.uint32))]
    for named in (None, handle(group)):
        with pytest.raises(BadFrame):
            decoded(push_frame(1, PUSH, pushed, RowWire(), RowCodec.FP32, OWNED, named), kept)


def test_a_handle_of_other_rows_than_gradients_is_refused() -> None:
    group, other = group_of(1, 2), group_of(1, 2, 3)
    kept = KeptKeys()
    kept.add([other])
    pushed = [PushedGroup(0, group.keys, group.tables, np.zeros((2, WIDTH), np.float32))]
    with pytest.raises(BadFrame):
        decoded(push_frame(1, PUSH, pushed, RowWire(), RowCodec.FP32, OWNED, handle(other)), kept)


@given(st.binary(max_size=20))
def test_any_handle_is_found_or_refused(data: bytes) -> None:
    group = group_of(1, 2)
    pushed = [PushedGroup(0, group.keys, group.tables, np.zeros((2, WIDTH), np.float32))]
    sent = push_frame(1, PUSH, pushed, RowWire(), RowCodec.FP32, OWNED, handle(group))
    frame = decode_frame(sent, max_bytes=1 << 20)
    sections = {**frame.sections, (Part.HANDLE, 0): np.frombuffer(data, np.uint8)}
    kept = KeptKeys()
    kept.add([group])
    with pytest.raises((BadFrame, KeysForgottenError)):
        push_of(replace(frame, sections=sections), BUCKETS, (WIDTH,), RowWire(), kept.find)


def test_more_gradients_than_counts_hold_repeat_keys() -> None:
    keys = np.repeat(np.array([1, 2], np.uint64), [65_536, 1])
    pushed = PushedGroup.of(0, keys, np.zeros(65_537, np.uint8), np.zeros((65_537, WIDTH), np.float32))
    assert pushed.counts is None
    assert len(pushed.keys) == 65_537
    assert isinstance(push_frame(1, PUSH, [pushed], RowWire(), RowCodec.FP32, OWNED), bytes)


def test_a_frame_without_keys_moves_offsets_alone() -> None:
    frame: Frame = decode_frame(push_frame(1, PUSH, [], RowWire(), RowCodec.FP32, OWNED), max_bytes=1 << 20)
    push = push_of(frame, BUCKETS, (WIDTH,), RowWire())
    assert (push.ranges, list(push.groups)) == ((OffsetRange(0, 3, 7),), [])
