from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from freshet.batches.frames import (
    Names,
    RequestHeader,
    batch_frame,
    batch_of,
    decode_header,
    empty_frame,
    gradients_frame,
    gradients_of,
    take_frame,
)
from freshet.batches.read_my_writes import LookupResult
from freshet.batches.stream import TrainBatch
from freshet.errors import ConfigError, FreshetError
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.rows.service import KeyGroup, RowStates
from freshet.rpc.frames import BadFrame, Frame, Kind, Part, decode_frame, encode_frame
from freshet.tables import KnownPushes
from freshet.types import F32, U64, Fence, OffsetRange, bucket_of
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire

NAMES = Names(("country",), ("click", "buy"), (3, 1), (2, 0), 16)
HEADER = RequestHeader(7, Fence(9), 1, 2, 3, 2, 50)
MAX = 1 << 20


KNOWN = KnownPushes(
    np.array([[3, 0, 17], [4, 0, 17]]),
    {g: np.arange(NAMES.buckets, dtype=np.uint32) % 2 for g in (0, 1)},
)


@pytest.mark.parametrize("column", ["segments", "labels", "widths"])
def test_more_columns_than_a_byte_numbers_are_refused(column: str) -> None:
    values: dict[str, Any] = {column: getattr(NAMES, column)[:1] * 256}

    with pytest.raises(ConfigError, match=r"256 names'\n  expected at most 255"):
        replace(NAMES, **values)


def a_batch(b: int = 4, seed: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, 7, b)).astype(np.uint32)
    items = int(ends[-1]) if b else 0
    first = GroupInputs(
        rng.normal(size=(5, 3)).astype(np.float32),
        rng.integers(-1, 5, b + items).astype(np.int32),
        np.array([0, b, b + items], np.uint32),
        [None, ends],
    )
    second = GroupInputs(
        rng.normal(size=(2, 1)).astype(np.float32),
        rng.integers(0, 2, b).astype(np.int32),
        np.array([0, b], np.uint32),
        [None],
    )
    labels = Labels(rng.integers(0, 2, b).astype(np.uint8), np.ones(b, np.float32), np.ones(b, np.float32))
    return TrainBatch(
        ranges=(OffsetRange(0, 3, 5), OffsetRange(4, 0, 1)),
        fence=Fence(12),
        inputs=ModelInputs(b, [first, second], rng.normal(size=(b, 2)).astype(np.float32), labels),
        sample_ids=rng.integers(-9, 9, b),
        request_ids=rng.integers(0, 9, b).astype(np.uint64),
        event_times_ms=np.arange(b) + 1_700_000_000_000,
        segments={"country": rng.integers(0, 9, b).astype(np.uint64)},
        served={"buy": rng.random(b).astype(np.float32)},
        replayed=True,
        explored=rng.random(b) < 0.5,
        items=rng.integers(0, 9, b).astype(np.uint64),
        looked=LookupResult(
            [
                keys_of(g, np.sort(rng.integers(1, 2**63, u).astype(np.uint64) * 2))
                for g, u in ((0, 5), (1, 2))
            ],
            RowStates([rng.random((5, 2), np.float32), np.empty((2, 0), np.float32)], KNOWN),
        ),
    )


def keys_of(group: int, keys: U64) -> KeyGroup:
    """Sort keys by bucket."""
    starts = np.searchsorted(bucket_of(keys, NAMES.buckets), np.arange(NAMES.buckets + 1)).astype(np.uint32)
    return KeyGroup(group, keys, np.full(len(keys), 3, np.uint8), starts)


@pytest.mark.parametrize("b", [1, 4, 100])
def test_decoded_batch_equals_the_sent_one(b):
    sent = a_batch(b)
    data = batch_frame(3, 99, sent, NAMES, RowWire(), RowCodec.FP32)
    built = batch_of(decode_frame(data, max_bytes=MAX), NAMES, RowWire())
    assert built is not None
    number, batch = built
    assert (number, batch.ranges, batch.fence, batch.replayed) == (99, sent.ranges, 12, True)
    for name in ("sample_ids", "request_ids", "event_times_ms", "explored", "items"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(sent, name))
    np.testing.assert_array_equal(batch.segments["country"], sent.segments["country"])
    assert batch.served.keys() == {"buy"}
    np.testing.assert_array_equal(batch.inputs.dense, sent.inputs.dense)
    for got, group in zip(batch.inputs.groups, sent.inputs.groups, strict=True):
        np.testing.assert_array_equal(got.rows, group.rows)
        np.testing.assert_array_equal(got.positions, group.positions)
        np.testing.assert_array_equal(got.feature_starts, group.feature_starts)
        for one, other in zip(got.list_ends, group.list_ends, strict=True):
            np.testing.assert_array_equal([] if one is None else one, [] if other is None else other)
    assert batch.looked is not None
    assert sent.looked is not None
    known = batch.looked.states.known
    assert known is not None
    np.testing.assert_array_equal(known.offsets, KNOWN.offsets)
    for g, moments in KNOWN.moment_of.items():
        np.testing.assert_array_equal(known.moment_of[g], moments)
    for keys, others in zip(batch.looked.groups, sent.looked.groups, strict=True):
        for name in ("group", "keys", "tables", "bucket_starts"):
            np.testing.assert_array_equal(getattr(keys, name), getattr(others, name))
    for states, other_states in zip(batch.looked.states.floats, sent.looked.states.floats, strict=True):
        np.testing.assert_array_equal(states, other_states)
        assert states.flags.writeable, "they are stepped"


def test_batch_without_read_my_writes_carries_no_keys():
    sent = replace(a_batch(), looked=None)
    frame = decode_frame(batch_frame(3, 99, sent, NAMES, RowWire(), RowCodec.FP32), max_bytes=MAX)
    built = batch_of(frame, NAMES, RowWire())
    assert built is not None
    assert built[1].looked is None
    assert not frame.has(Part.KEYS)


def test_empty_answer_decodes_to_none():
    assert batch_of(decode_frame(empty_frame(1), max_bytes=MAX), NAMES, RowWire()) is None


def test_request_header_and_dense_vector_arrive():
    header, applied = decode_header(
        decode_frame(take_frame(5, HEADER, {0: 7, 3: 9}), max_bytes=MAX), Kind.NEXT_BATCH
    )
    assert (header, applied) == (HEADER, {0: 7, 3: 9})
    assert header.global_lane == 5


def test_gradients_of_another_shape_are_refused():
    sent = [np.ones((5, 3), np.float32), np.ones((2, 1), np.float32)]
    frame = decode_frame(gradients_frame(5, HEADER, {}, 1, sent, RowWire(), RowCodec.FP32), max_bytes=MAX)
    built, counts = gradients_of(frame, a_batch(), RowWire())
    np.testing.assert_array_equal(built[0], sent[0])
    assert counts is None
    wider = [np.ones((6, 3), np.float32), sent[1]]
    frame = decode_frame(gradients_frame(5, HEADER, {}, 1, wider, RowWire(), RowCodec.FP32), max_bytes=MAX)
    with pytest.raises(BadFrame):
        gradients_of(frame, a_batch(), RowWire())


COUNTS = [np.array([1, 3, 1, 2, 4], np.uint32), np.array([2, 1], np.uint32)]


def in_steps(b: int = 4) -> TrainBatch:
    """Return a batch that accepts several gradients a row."""
    batch = a_batch(b)
    assert batch.looked is not None
    return replace(batch, states=batch.looked.states.floats)


def counted_frame(codec: RowCodec = RowCodec.FP32) -> tuple[Frame, list[F32]]:
    """Return gradients with COUNTS, and COUNTS."""
    rng = np.random.default_rng(3)
    sent = [
        rng.normal(size=(int(of.sum()), width)).astype(np.float32)
        for of, width in zip(COUNTS, NAMES.widths, strict=True)
    ]
    return decode_frame(
        gradients_frame(5, HEADER, {}, 1, sent, RowWire(), codec, COUNTS), max_bytes=MAX
    ), sent


def test_decoded_gradients_of_several_steps_equal_the_sent_ones():
    frame, sent = counted_frame()
    gradients, counts = gradients_of(frame, in_steps(), RowWire())
    assert counts is not None
    for g, of in enumerate(COUNTS):
        np.testing.assert_array_equal(counts[g], of)
        np.testing.assert_array_equal(gradients[g], sent[g])


def test_batch_flag_permits_several_gradients_a_row():
    for sent in (in_steps(), a_batch()):
        built = batch_of(
            decode_frame(batch_frame(3, 9, sent, NAMES, RowWire(), RowCodec.FP32), max_bytes=MAX),
            NAMES,
            RowWire(),
        )
        assert built is not None
        assert built[1].looked is not None
        assert (built[1].states is None) == (sent.states is None)
        for mine, floats in zip(built[1].states or (), built[1].looked.states.floats, strict=False):
            assert mine is floats


def test_several_gradients_without_states_are_refused():
    frame, _ = counted_frame()
    with pytest.raises(BadFrame, match="without states"):
        gradients_of(frame, a_batch(), RowWire())


@pytest.mark.parametrize(
    "counts",
    [
        np.array([1, 3, 1, 2, 3], np.uint16),  # one gradient belongs to no row
        np.array([1, 3, 1, 2, 5], np.uint16),  # more than samples
        np.array([0, 4, 1, 2, 4], np.uint16),  # a row without a gradient
        np.array([1, 3, 1, 2], np.uint16),  # fewer than rows
        np.array([1, 3, 1, 2, 4], np.uint32),  # of another type
        np.array([[1, 3, 1, 2, 4]], np.uint16),
    ],
)
def test_counts_that_do_not_fit_the_batch_are_refused(counts):
    good, _ = counted_frame()
    bad = replace(good, sections={**good.sections, (Part.COUNTS, 0): counts})
    with pytest.raises(BadFrame):
        gradients_of(decode_frame(encode_frame(bad), max_bytes=MAX), in_steps(), RowWire())


@given(
    st.integers(0, 7),
    st.sampled_from(list(RowCodec)),
    st.sampled_from([Part.COUNTS, Part.VALUES]),
    st.integers(0, 2),
    st.sampled_from(["u1", "<u2", "<u4", "<f4", "i1"]),
    st.lists(st.integers(0, 12), min_size=1, max_size=2),
    st.integers(0, 2**32 - 1),
)
def test_any_gradients_fit_their_rows_or_are_refused(flags, codec, part, group, dtype, shape, seed):
    good, _ = counted_frame(codec)
    drawn = np.random.default_rng(seed).integers(0, 5 if part == Part.COUNTS else 100, shape)
    sections = {**good.sections, (part, group): drawn.astype(dtype)}
    try:
        gradients, counts = gradients_of(replace(good, flags=flags, sections=sections), in_steps(), RowWire())
    except BadFrame:
        return
    assert (counts is not None) == bool(flags & 4)
    for g, inputs in enumerate(in_steps().inputs.groups):
        of = np.ones(len(inputs.rows), np.int64) if counts is None else counts[g]
        assert gradients[g].shape == (of.sum(), inputs.rows.shape[1])
        assert of.min() >= 1


WRONG: dict[str, tuple[Part, int, NDArray[Any]]] = {
    "positions beyond the rows": (Part.POSITIONS, 1, np.array([0, 2, 0, 0], np.uint16)),
    "positions far beyond the rows": (Part.POSITIONS, 1, np.array([0, 65534, 0, 0], np.uint16)),
    "positions of many rows": (Part.POSITIONS, 1, np.array([0, -1, 0, 0], np.int32)),
    "a feature with too few occurrences": (Part.FEATURE_STARTS, 1, np.array([0, 3], np.uint32)),
    "features that do not start at 0": (Part.FEATURE_STARTS, 1, np.array([1, 4], np.uint32)),
    "a label that the spec has not": (Part.LABEL_INDEX, 0, np.array([0, 2, 0, 0], np.uint8)),
    "lists that fall": (Part.LIST_ENDS, 0, np.array([[3, 2, 6, 6]], np.uint32)),
    "lists that end elsewhere": (Part.LIST_ENDS, 0, np.array([[0, 0, 0, 99]], np.uint32)),
    "a range that is none": (Part.RANGES, 0, np.array([[0, 5, 5]], np.int64)),
    "keys that are not sorted": (Part.KEYS, 1, np.array([2**63, 1], np.uint64)),
    "keys of fewer rows": (Part.KEYS, 1, np.array([1], np.uint64)),
    "tables of fewer rows": (Part.TABLES, 0, np.array([4, 0, 0], np.uint8)),
    "states that are not finite": (Part.STATES, 0, np.full((5, 2), np.nan, np.float32)),
    "states of another width": (Part.STATES, 0, np.zeros((5, 3), np.float32)),
    "what is known as a list": (Part.MOMENTS, 0, np.zeros(4, np.int64)),
    "a moment that is not there": (Part.MOMENT_OF, 1, np.full(NAMES.buckets, 2, np.uint32)),
    "moments of fewer buckets": (Part.MOMENT_OF, 0, np.zeros(NAMES.buckets - 1, np.uint32)),
    "times of fewer samples": (Part.EVENT_TIMES, 0, np.zeros(3, np.int64)),
}


@pytest.mark.parametrize("what", WRONG)
def test_inconsistent_columns_are_refused(what):
    good = decode_frame(batch_frame(3, 99, a_batch(), NAMES, RowWire(), RowCodec.FP32), max_bytes=MAX)
    part, group, array = WRONG[what]
    bad = Frame(good.kind, good.id, good.codec, good.flags, {**good.sections, (part, group): array})
    with pytest.raises(BadFrame):
        batch_of(decode_frame(encode_frame(bad), max_bytes=MAX), NAMES, RowWire())


@given(
    st.integers(0, 30),
    st.sampled_from(list(Part)),
    st.integers(0, 2),
    st.sampled_from(["u1", "<u4", "<i4", "<i8", "<u8", "<f4", "?"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=2),
    st.integers(0, 2**32 - 1),
)
def test_any_frame_is_a_consistent_batch_or_is_refused(kind, part, group, dtype, shape, seed):
    good = decode_frame(batch_frame(3, 99, a_batch(), NAMES, RowWire(), RowCodec.FP32), max_bytes=MAX)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 256, size).astype(np.uint8)
    array = raw.view(dtype).reshape(shape)
    bad = Frame(good.kind, kind, good.codec, 0, {**good.sections, (part, group): array})
    try:
        built = batch_of(bad, NAMES, RowWire())
    except FreshetError:
        return
    assert built is not None
    if built[1].looked is not None:
        for keys, inputs in zip(built[1].looked.groups, built[1].inputs.groups, strict=True):
            assert len(keys.keys) == len(keys.tables) == len(inputs.rows) == keys.bucket_starts[-1]
    for one in built[1].inputs.groups:
        assert -1 <= one.positions.min(initial=-1) <= one.positions.max(initial=-1) < max(len(one.rows), 1)
        assert one.feature_starts[-1] == len(one.positions)


@given(st.sampled_from(list(Part)), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))
def test_any_header_names_a_possible_lane_or_is_refused(part, numbers):
    good = decode_frame(take_frame(5, HEADER, {0: 7}), max_bytes=MAX)
    bad = Frame(good.kind, 1, good.codec, 0, {**good.sections, (part, 0): np.array(numbers, np.int64)})
    try:
        header, _ = decode_header(bad, Kind.NEXT_BATCH)
    except FreshetError:
        return
    assert 0 <= header.rank < header.ranks
    assert 0 <= header.lane < header.lanes
