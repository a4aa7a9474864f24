"""Sparse frames: what goes in comes out, in the shortest form; bytes that are no frame are refused."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.trainer.reducers.sparse_frame import (
    HEAD,
    SEGMENT,
    Form,
    Part,
    Values,
    decode_frame,
    decode_indexes,
    encode_frame,
    encode_indexes,
    form_of,
    quantized,
    varint_bytes,
)
from freshet.types import I64, U8
from tests.fixtures.effort import examples

SIZES = [300, 17, 1000]
LARGE = 2**32 - 1


def oracle(indexes: list[int]) -> bytes:
    """Return LEB128 bytes of the gaps, one at a time."""
    encoded, before = bytearray(), -1
    for index in indexes:
        gap, before = index - before - 1, index
        while gap >= 0x80:
            encoded.append(gap & 0x7F | 0x80)
            gap >>= 7
        encoded.append(gap)
    return bytes(encoded)


def parts_of(seed: int, kind: Values, shares: tuple[float, ...]) -> list[Part]:
    """Return random parts of the segments; a share below 0 stands for one that is not finite."""
    rng = np.random.default_rng(seed)
    parts = []
    for size, share in zip(SIZES, shares, strict=True):
        if share < 0:
            parts.append(Part(np.empty(0, np.int64), np.empty(0, kind.dtype), np.nan))
            continue
        indexes = np.flatnonzero(rng.random(size) < share)
        values = (rng.normal(size=len(indexes)) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
        parts.append(quantized(values, indexes, kind))
    return parts


def restamp(data: U8) -> U8:
    """Return the bytes with the CRC-32 that fits them."""
    data = data.copy()
    data[8:12] = np.frombuffer(zlib.crc32(data[HEAD.itemsize :].tobytes()).to_bytes(4, "little"), np.uint8)
    return data


RISING = st.lists(st.integers(0, LARGE - 1), unique=True).map(sorted)
KINDS = st.sampled_from(Values)
SHARES = st.tuples(*[st.sampled_from([-1.0, 0.0, 0.01, 0.2, 0.9, 1.0])] * 3)


@given(RISING)
def test_indexes_are_encoded_as_by_hand(indexes: list[int]) -> None:
    column: I64 = np.array(indexes, np.int64)

    encoded = encode_indexes(column)

    assert encoded.tobytes() == oracle(indexes)
    assert varint_bytes(column) == len(encoded)
    found, used = decode_indexes(np.concatenate([encoded, np.zeros(3, np.uint8)]), len(indexes), LARGE)
    assert (found.tolist(), used) == (indexes, len(encoded))


@pytest.mark.parametrize(
    ("encoded", "count", "size", "message"),
    [
        (b"\x80\x80", 1, 100, "expected 1 indexes, found 0"),
        (b"\x01", 2, 100, "expected 2 indexes, found 1"),
        (b"\x80\x00", 1, 100, "shortest form"),
        (b"\x01\x80\x80\x80\x80\x80\x01", 2, 100, "at most 5 bytes"),
        (b"\x64", 1, 100, "gaps below 100, found 100"),
        (b"\x60\x60", 2, 100, "indexes below 100, found 193"),
    ],
)
def test_bytes_that_are_no_indexes_are_refused(encoded: bytes, count: int, size: int, message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        decode_indexes(np.frombuffer(encoded, np.uint8), count, size)


@given(st.binary(max_size=60), st.integers(0, 20), st.integers(1, LARGE))
def test_any_bytes_are_indexes_or_refused(data: bytes, count: int, size: int) -> None:
    try:
        indexes, used = decode_indexes(np.frombuffer(data, np.uint8), count, size)
    except Corrupt:
        return
    assert len(indexes) == count
    assert np.all(np.diff(indexes, prepend=-1) > 0)
    assert np.all(indexes < size)
    assert oracle(indexes.tolist()) == data[:used]


@given(st.integers(0, 1000), KINDS, SHARES)
def test_frames_decode_to_what_was_encoded(seed: int, kind: Values, shares: tuple[float, ...]) -> None:
    parts = parts_of(seed, kind, shares)

    found = decode_frame(encode_frame(parts, SIZES, kind), SIZES)

    for part, other in zip(parts, found, strict=True):
        np.testing.assert_array_equal(part.indexes, other.indexes)
        np.testing.assert_array_equal(part.codes, other.codes)
        np.testing.assert_array_equal(part.values(), other.values())
        np.testing.assert_equal(part.scale, other.scale)


def test_the_shortest_form_is_taken() -> None:
    def form(indexes: I64, size: int) -> Form:
        return form_of(quantized(np.ones(len(indexes), np.float32), indexes, Values.INT8), size)

    size = 1000
    for stride in range(1, 40):
        indexes = np.arange(0, size, stride)
        taken = {Form.DENSE: 0 if stride == 1 else size, Form.BITMAP: 125, Form.GAPS: len(indexes)}
        assert taken[form(indexes, size)] == min(taken.values())
    assert {form(np.arange(0, size, s), size) for s in (1, 2, 30)} == {Form.DENSE, Form.BITMAP, Form.GAPS}


@pytest.mark.parametrize("kind", Values)
@pytest.mark.parametrize("largest", [3e-39, 1.2e-38, 1e-30, 1.0, 8e37])
def test_values_are_rounded_to_nearest(kind: Values, largest: float) -> None:
    values = np.array([1.0, -0.5, 0.25, 0.003], np.float32) * np.float32(largest)

    part = quantized(values, np.arange(4), kind)

    step = largest / 127 if kind is Values.INT8 else largest * 2.0**-11
    assert np.isfinite(part.values()).all()
    if largest / 127 >= np.finfo(np.float32).tiny:
        np.testing.assert_allclose(part.values(), values, rtol=0, atol=step * 0.501)


def test_a_frame_of_one_in_a_hundred_takes_two_bytes_a_value() -> None:
    rng = np.random.default_rng(0)
    size = 100_000
    indexes = np.sort(rng.choice(size, size // 100, replace=False))
    values = rng.normal(size=len(indexes)).astype(np.float32)

    frame = encode_frame([quantized(values, indexes, Values.INT8)], [size], Values.INT8)

    assert 4 * size / len(frame) > 150


def test_frames_cut_short_or_with_more_are_refused() -> None:
    frame = encode_frame(parts_of(3, Values.INT8, (0.02, 1.0, 0.5)), SIZES, Values.INT8)
    for stop in range(len(frame)):
        with pytest.raises(Corrupt):
            decode_frame(frame[:stop], SIZES)
        if stop >= HEAD.itemsize:
            with pytest.raises(Corrupt):
                decode_frame(restamp(frame[:stop]), SIZES)
    with pytest.raises(Corrupt, match="expected a frame of"):
        decode_frame(restamp(np.append(frame, np.uint8(0))), SIZES)


def changed(field: str, value: float) -> U8:
    """Return a frame whose second segment has another entry in the table."""
    frame = encode_frame(parts_of(3, Values.FP16, (0.02, 1.0, 0.5)), SIZES, Values.FP16).copy()
    table = frame[HEAD.itemsize : HEAD.itemsize + 3 * SEGMENT.itemsize].view(SEGMENT)
    table[field][1] = value
    return restamp(frame)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (changed("form", 4), "a form of segment 1 up to 3, found 4"),
        (changed("form", Form.NOT_FINITE), "no values of segment 1"),
        (changed("scale", np.nan), "a scale of segment 1 of at least 0, found nan"),
        (changed("scale", -1.0), "a scale of segment 1"),
        (changed("scale", np.inf), "a scale of segment 1"),
        (changed("count", 16), "values of segment 1 of 17 floats, found 16"),
        (changed("count", 18), "values of segment 1 of 17 floats, found 18"),
        (changed("form", Form.BITMAP), "bits of segment 1"),
        (changed("form", Form.GAPS), "expected"),
    ],
)
def test_tables_that_cannot_be_are_refused(frame: U8, message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        decode_frame(frame, SIZES)


def test_bits_past_the_end_of_a_segment_are_refused() -> None:
    size = 17
    part = quantized(np.ones(9, np.float32), np.arange(0, size, 2), Values.INT8)
    frame = encode_frame([part], [size], Values.INT8).copy()
    assert form_of(part, size) is Form.BITMAP
    bitmap = frame[HEAD.itemsize + SEGMENT.itemsize :]
    bitmap[0], bitmap[2] = 0x54, 0x03  # bit 18 instead of bit 0

    with pytest.raises(Corrupt, match="expected 9 of 17 bits of segment 0"):
        decode_frame(restamp(frame), [size])


def test_heads_of_others_are_refused() -> None:
    frame = encode_frame(parts_of(3, Values.INT8, (0.02, 1.0, 0.5)), SIZES, Values.INT8)
    for at, value, message in (
        (0, 0, "expected a sparse gradient"),
        (2, 9, "version 9"),
        (3, 3, "values of 1 or 2 bytes, found 3"),
        (4, 1, "expected a gradient of 1317 floats"),
        (20, frame[20] ^ 1, "CRC-32"),
    ):
        other = frame.copy()
        other[at] = value
        with pytest.raises(Corrupt, match=message):
            decode_frame(other, SIZES)
    with pytest.raises(Corrupt, match="gradient of 18 floats"):
        decode_frame(frame, [1, 2, 15])


@given(st.integers(0, 50), KINDS, SHARES, st.data())
@settings(max_examples=examples(100))
def test_any_change_gives_a_frame_or_is_refused(
    seed: int, kind: Values, shares: tuple[float, ...], data: st.DataObject
) -> None:
    frame = encode_frame(parts_of(seed, kind, shares), SIZES, kind).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = restamp(frame[: data.draw(st.integers(HEAD.itemsize, len(frame)))])

    try:
        parts = decode_frame(frame, SIZES)
    except Corrupt:
        return

    for part, size in zip(parts, SIZES, strict=True):
        assert len(part.codes) == len(part.indexes) <= size
        assert np.all(np.diff(part.indexes) > 0)
        assert np.all((part.indexes >= 0) & (part.indexes < size))
        assert np.isnan(part.scale) or np.isfinite(part.codes).all()
