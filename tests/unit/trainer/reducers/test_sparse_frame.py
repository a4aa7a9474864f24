"""Sparse frames: what goes in comes out, in the shortest form; bytes that are no frame are refused."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.trainer.reducers.sparse_frame import (
    CHECKED,
    HEAD,
    Part,
    decode_frame,
    decode_indexes,
    encode_frame,
    encode_indexes,
    quantized,
)
from freshet.types import I64, U8
from tests.fixtures.effort import examples

SIZE = 1000
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


def part_of(seed: int, share: float) -> Part:
    """Return a random part of a gradient of SIZE floats, a tenth of it not finite."""
    rng = np.random.default_rng(seed)
    indexes = np.flatnonzero(rng.random(SIZE) < share)
    values = (rng.normal(size=len(indexes)) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
    values[rng.random(len(indexes)) < 0.1] = np.nan
    return quantized(values, indexes)


def restamp(data: U8) -> U8:
    """Return the bytes with the CRC-32 that fits them."""
    data = data.copy()
    data[3:7] = np.frombuffer(zlib.crc32(data[CHECKED:].tobytes()).to_bytes(4, "little"), np.uint8)
    return data


RISING = st.lists(st.integers(0, LARGE - 1), unique=True).map(sorted)
SHARES = st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0])


@given(RISING)
def test_indexes_are_encoded_as_by_hand(indexes: list[int]) -> None:
    column: I64 = np.array(indexes, np.int64)

    encoded = encode_indexes(column)

    assert encoded.tobytes() == oracle(indexes)
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


@given(st.integers(0, 1000), SHARES)
def test_frames_decode_to_what_was_encoded(seed: int, share: float) -> None:
    part = part_of(seed, share)

    found = decode_frame(encode_frame(part, SIZE), SIZE)

    np.testing.assert_array_equal(part.indexes, found.indexes)
    np.testing.assert_array_equal(part.codes, found.codes)
    np.testing.assert_array_equal(part.values(), found.values())
    assert part.scale == found.scale


@pytest.mark.parametrize("largest", [3e-39, 1.2e-38, 1e-30, 1.0, 3e38])
def test_values_are_rounded_to_nearest(largest: float) -> None:
    values = np.array([1.0, -0.5, np.nan, 0.003], np.float32) * np.float32(largest)

    found = quantized(values, np.arange(4)).values()

    assert np.isfinite(found).tolist() == [True, True, False, True]
    if largest / 127 >= np.finfo(np.float32).tiny:
        np.testing.assert_allclose(found, values, rtol=0, atol=largest / 127 * 0.501)


def test_a_frame_of_one_in_two_hundred_is_short() -> None:
    rng = np.random.default_rng(0)
    size = 100_000
    indexes = np.sort(rng.choice(size, size // 200, replace=False))
    values = rng.normal(size=len(indexes)).astype(np.float32)

    assert 4 * size / len(encode_frame(quantized(values, indexes), size)) > 300


def test_frames_cut_short_or_with_more_are_refused() -> None:
    frame = encode_frame(part_of(3, 0.2), SIZE)
    for stop in range(len(frame)):
        with pytest.raises(Corrupt):
            decode_frame(frame[:stop], SIZE)
        if stop >= HEAD.itemsize:
            with pytest.raises(Corrupt):
                decode_frame(restamp(frame[:stop]), SIZE)
    with pytest.raises(Corrupt, match="codes, found"):
        decode_frame(restamp(np.append(frame, np.uint8(0))), SIZE)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("magic", b"DX", "expected a sparse gradient"),
        ("version", 1, "version 1"),
        ("size", 1, "expected a gradient of 1000 floats"),
        ("scale", np.nan, "a scale of at least 0, found nan"),
        ("scale", -1.0, "a scale of at least 0"),
        ("scale", np.inf, "a scale of at least 0"),
        ("count", 3, "expected 3 codes"),
        ("count", 2000, "expected 2000 indexes"),
    ],
)
def test_heads_that_cannot_be_are_refused(field: str, value: object, message: str) -> None:
    frame = encode_frame(part_of(3, 0.2), SIZE).copy()
    frame[: HEAD.itemsize].view(HEAD)[field] = value

    with pytest.raises(Corrupt, match=message):
        decode_frame(restamp(frame), SIZE)


def test_a_changed_byte_is_found() -> None:
    frame = encode_frame(part_of(3, 0.2), SIZE)
    for at in range(CHECKED, len(frame)):
        other = frame.copy()
        other[at] ^= 1
        with pytest.raises(Corrupt, match="CRC-32"):
            decode_frame(other, SIZE)


@given(st.integers(0, 50), SHARES, st.data())
@settings(max_examples=examples(100))
def test_any_change_gives_a_frame_or_is_refused(seed: int, share: float, data: st.DataObject) -> None:
    frame = encode_frame(part_of(seed, share), SIZE).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = restamp(frame[: data.draw(st.integers(HEAD.itemsize, len(frame)))])

    try:
        part = decode_frame(frame, SIZE)
    except Corrupt:
        return

    assert len(part.codes) == len(part.indexes) <= SIZE
    assert np.all(np.diff(part.indexes) > 0)
    assert np.all((part.indexes >= 0) & (part.indexes < SIZE))
