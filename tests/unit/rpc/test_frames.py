"""Frames and their packed parts are decoded as encoded, and wrong bytes are refused."""

import os
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from freshet.errors import Corrupt, Mismatch, TooLarge
from freshet.rpc.frames import (
    HEADER_BYTES,
    BadFrame,
    Frame,
    Kind,
    LargeFrame,
    NewSections,
    OtherFrame,
    Part,
    add_owned,
    add_positions,
    add_tables,
    decode_frame,
    encode_frame,
    encoded_bytes,
    read_owned,
    read_positions,
    read_tables,
)
from freshet.wires.codecs import RowCodec
from tests.fixtures.effort import examples

LIMIT = 1 << 20
FUZZED = int(os.environ.get("FRESHET_TEST_FUZZ_FRAMES", "100000"))

any_array = st.sampled_from(
    ["u1", "<u2", "<u4", "<u8", "i1", "<i4", "<i8", "<f2", "<f4", "<f8", "?"]
).flatmap(
    lambda dtype: arrays.arrays(
        np.dtype(dtype),
        st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 5), st.integers(1, 5))),
    )
)
any_frame = st.builds(
    Frame,
    kind=st.integers(0, 255),
    id=st.integers(0, 2**64 - 1),
    codec=st.sampled_from(RowCodec),
    flags=st.integers(0, 2**32 - 1),
    sections=st.dictionaries(st.tuples(st.integers(0, 255), st.integers(0, 255)), any_array, max_size=6),
)


def a_frame() -> bytes:
    """A frame of several arrays."""
    sections: dict[tuple[Part, int], NDArray[Any]] = {
        (Part.KEYS, 0): np.arange(1, 4, dtype=np.uint64),
        (Part.TABLES, 0): np.zeros(3, np.uint8),
        (Part.VALUES, 0): np.ones((3, 2), np.float32),
    }
    return encode_frame(Frame(Kind.PUSH, 7, sections=sections))


def resealed(data: bytearray) -> bytes:
    """The same with a right checksum."""
    data[4:8] = zlib.crc32(bytes(data[8:])).to_bytes(4, "little")
    return bytes(data)


@given(frame=any_frame)
def test_a_frame_is_decoded_as_encoded(frame):
    data = encode_frame(frame)
    back = decode_frame(data, max_bytes=LIMIT)

    assert (back.kind, back.id, back.codec, back.flags) == (frame.kind, frame.id, frame.codec, frame.flags)
    assert list(back.sections) == list(frame.sections)
    assert len(data) == encoded_bytes(frame.sections)
    for key, array in frame.sections.items():
        assert back.sections[key].dtype == array.dtype
        assert back.sections[key].tobytes() == array.tobytes()
        assert back.sections[key].shape == array.shape


def test_arrays_are_views_that_cannot_be_written():
    frame = decode_frame(a_frame(), max_bytes=LIMIT)
    keys = frame.array(Part.KEYS, np.uint64)

    assert not keys.flags.owndata
    assert not keys.flags.writeable
    assert keys.flags.aligned


@pytest.mark.parametrize("array", [np.float32(1), np.zeros((1, 1, 1)), np.zeros((3, 0)), np.array(["a"])])
def test_an_unsupported_array_is_refused_by_the_encoder(array):
    with pytest.raises(ValueError, match="one or two dimensions"):
        encode_frame(Frame(Kind.ROWS, sections={(Part.VALUES, 0): np.asarray(array)}))


def test_every_cut_is_refused_as_truncated():
    data = a_frame()
    for length in range(len(data)):
        with pytest.raises(BadFrame) as refused:
            decode_frame(data[:length], max_bytes=LIMIT)
        assert refused.value.reason == "truncated", length


def test_bytes_behind_the_frame_are_refused():
    with pytest.raises(BadFrame, match="expected 128 bytes, found 136"):
        decode_frame(a_frame() + bytes(8), max_bytes=LIMIT)


def test_a_frame_beyond_the_limit_is_refused_unread():
    with pytest.raises(LargeFrame, match="at most 100 bytes, found 128") as refused:
        decode_frame(a_frame(), max_bytes=100)
    assert (refused.value.reason, isinstance(refused.value, TooLarge)) == ("oversized", True)


def test_another_version_is_refused_by_name():
    data = bytearray(a_frame())
    data[1] = 3
    with pytest.raises(OtherFrame, match="expected version 2, found 3") as refused:
        decode_frame(resealed(data), max_bytes=LIMIT)
    assert (refused.value.reason, isinstance(refused.value, Mismatch)) == ("version", True)


@pytest.mark.parametrize("at", [0, 2, 3])
def test_another_magic_is_refused(at):
    data = bytearray(a_frame())
    data[at] ^= 0xFF
    with pytest.raises(BadFrame, match="magic") as refused:
        decode_frame(bytes(data), max_bytes=LIMIT)
    assert refused.value.reason == "magic"


def test_every_bit_that_flips_is_noticed():
    data = a_frame()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Corrupt, Mismatch)):
            decode_frame(bytes(flipped), max_bytes=LIMIT)


@pytest.mark.parametrize(
    ("change", "reason", "why"),
    [
        ({9: 9}, "shape", "codec"),
        ({HEADER_BYTES + 2: 0}, "shape", "type 0"),
        ({HEADER_BYTES + 2: 200}, "shape", "type 200"),
        ({HEADER_BYTES + 3: 3}, "shape", "3 dimensions"),
        ({HEADER_BYTES + 3: 0}, "shape", "0 dimensions"),
        ({HEADER_BYTES + 4: 0}, "shape", "0 columns"),
        ({HEADER_BYTES + 4: 2}, "shape", "1 dimensions and 2 columns"),
        ({HEADER_BYTES + 15: 0xFF}, "truncated", "does not fit"),  # rows beyond 2**63
        ({HEADER_BYTES + 8: 2}, "truncated", "expected 120 bytes, found 128"),
        ({HEADER_BYTES + 16: Part.KEYS}, "shape", "twice"),
        ({11: 0xFF}, "truncated", "directory"),
    ],
)
def test_a_directory_that_lies_is_refused_whatever_its_checksum(change, reason, why):
    data = bytearray(a_frame())
    for at, value in change.items():
        data[at] = value
    with pytest.raises(BadFrame, match=why) as refused:
        decode_frame(resealed(data), max_bytes=LIMIT)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("part", "dtype", "shape", "why"),
    [
        (Part.RANGES, np.int64, (None, 3), "expected an array RANGES.0., found none"),
        (Part.KEYS, np.int64, (None,), "of int64 .*, found uint64"),
        (Part.KEYS, np.uint64, (None, 1), r"shape \(any, 1\), found uint64 \(3,\)"),
        (Part.KEYS, np.uint64, (4,), r"shape \(4\), found uint64 \(3,\)"),
        (Part.VALUES, np.float32, (3, 3), r"found float32 \(3, 2\)"),
    ],
)
def test_a_missing_array_is_reported_with_those_present(part, dtype, shape, why):
    frame = decode_frame(a_frame(), max_bytes=LIMIT)
    with pytest.raises(BadFrame, match=why) as refused:
        frame.array(part, dtype, shape)
    assert refused.value.reason == "shape"


def test_a_text_that_is_no_utf8_is_refused():
    frame = Frame(Kind.FAILURE, sections={(Part.TEXT, 0): np.array([0xFF], np.uint8)})
    with pytest.raises(BadFrame, match="UTF-8"):
        frame.text()


@pytest.mark.slow
@pytest.mark.long
def test_broken_frames_are_refused_and_nothing_else_happens():
    """Random changes of frames, half of them with a right checksum: so that lengths are what must hold."""
    rng = np.random.default_rng(6)
    frames = [a_frame(), encode_frame(Frame(Kind.LOOKUP, 1)), encode_frame(_of_many(rng))]
    reasons = set()
    for _ in range(FUZZED):
        data = bytearray(frames[rng.integers(len(frames))])
        for _ in range(rng.integers(1, 4)):
            action = rng.integers(3)
            if action == 0 and data:
                data[rng.integers(len(data))] = rng.integers(256)
            elif action == 1:
                del data[rng.integers(len(data) + 1) :]
            else:
                data += rng.bytes(int(rng.integers(1, 32)))
        broken = resealed(data) if len(data) > HEADER_BYTES and rng.integers(2) else bytes(data)
        try:
            frame = decode_frame(broken, max_bytes=300)
        except (BadFrame, LargeFrame, OtherFrame) as error:
            reasons.add(error.reason)
        else:
            assert sum(a.nbytes for a in frame.sections.values()) <= len(broken)
    assert reasons == {"truncated", "oversized", "magic", "version", "crc", "shape"}


def _of_many(rng: np.random.Generator) -> Frame:
    sections = {(part, 0): rng.integers(0, 9, (2, 2)).astype(np.int32) for part in range(6)}
    return Frame(Kind.BATCH, 3, sections=sections)


@settings(max_examples=examples(300))
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises((Corrupt, Mismatch)):
        decode_frame(data, max_bytes=LIMIT)


ARRAYS = st.binary(max_size=40).map(lambda data: np.frombuffer(data, np.uint8))


def sent(sections: NewSections) -> Frame:
    return decode_frame(encode_frame(Frame(Kind.BATCH, 1, sections=sections)), max_bytes=1 << 20)


def frame_of(part: Part, array: NDArray[np.generic]) -> Frame:
    return Frame(Kind.BATCH, 1, sections={(part, 0): array})


@given(st.integers(0, 255).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60)))
def test_tables_arrive_as_they_were(ids: list[int]) -> None:
    sections: NewSections = {}
    add_tables(sections, 3, np.array(ids, np.uint8))
    np.testing.assert_array_equal(read_tables(sent(sections), 3, len(ids)), np.array(ids, np.uint8))
    assert read_tables(sent(sections), 3, len(ids)).dtype == np.uint8


@pytest.mark.parametrize(
    ("ids", "size"), [([7] * 80, 2), ([0, 1] * 40, 11), ([3, 0] * 40, 21), ([15, 1] * 40, 41)]
)
def test_tables_take_few_bits(ids: list[int], size: int) -> None:
    sections: NewSections = {}
    add_tables(sections, 0, np.array(ids, np.uint8))
    assert sections[Part.TABLES, 0].nbytes == size


@given(ARRAYS, st.integers(0, 320))
def test_any_tables_are_read_or_refused(packed: NDArray[np.uint8], rows: int) -> None:
    try:
        found = read_tables(frame_of(Part.TABLES, packed), 0, rows)
    except BadFrame:
        return
    bits = int(packed[0])
    assert found.shape == (rows,)
    assert bits in {0, 1, 2, 4, 8}
    for row in range(rows if bits else 0):
        at = row * bits
        assert found[row] == packed[1 + at // 8] >> at % 8 & (1 << bits) - 1


@given(
    st.integers(1, 70_000).flatmap(lambda rows: st.tuples(st.just(rows), st.lists(st.integers(-1, rows - 1))))
)
def test_positions_arrive_as_they_were(case: tuple[int, list[int]]) -> None:
    rows, positions = case
    sections: NewSections = {}
    add_positions(sections, 0, np.array(positions, np.int32), rows)
    assert sections[Part.POSITIONS, 0].itemsize == (2 if rows < 65_536 else 4)
    found = read_positions(sent(sections), 0, rows)
    np.testing.assert_array_equal(found, positions)
    assert found.dtype == np.int32


@given(st.integers(0, 300), ARRAYS)
def test_any_positions_lie_within_the_rows(rows: int, data: NDArray[np.uint8]) -> None:
    short = np.ascontiguousarray(data[: len(data) // 2 * 2]).view(np.uint16)
    try:
        found = read_positions(frame_of(Part.POSITIONS, short), 0, rows)
    except BadFrame:
        assert ((short >= rows) & (short != 65535)).any()
        return
    np.testing.assert_array_equal(np.where(short == 65535, -1, short.astype(np.int64)), found)
    assert (found < rows).all()


def test_positions_of_the_other_width_are_refused() -> None:
    for rows, dtype in ((65_535, np.int32), (65_536, np.uint16)):
        with pytest.raises(BadFrame, match="POSITIONS"):
            read_positions(frame_of(Part.POSITIONS, np.zeros(3, dtype)), 0, rows)


@given(st.integers(1, 9).flatmap(lambda log: st.lists(st.booleans(), min_size=1 << log, max_size=1 << log)))
def test_owned_buckets_arrive_as_they_were(owned: list[bool]) -> None:
    sections: NewSections = {}
    add_owned(sections, np.array(owned))
    np.testing.assert_array_equal(read_owned(sent(sections), len(owned)), owned)


@pytest.mark.parametrize(("slices", "size"), [(1, 1), (2, 1), (64, 8), (1024, 128)])
def test_owned_slices_take_a_bit_each(slices: int, size: int) -> None:
    sections: NewSections = {}
    add_owned(sections, np.repeat(np.arange(slices) % 2 == 0, 1024 // slices))
    assert sections[Part.OWNED, 0].nbytes == size


@given(ARRAYS, st.integers(1, 12))
def test_any_owned_buckets_are_all_or_refused(packed: NDArray[np.uint8], log: int) -> None:
    try:
        owned = read_owned(frame_of(Part.OWNED, packed), 1 << log)
    except BadFrame:
        assert len(packed) not in {2**n for n in range(10)} or 8 * len(packed) > 1 << log
        return
    assert owned.shape == (1 << log,)
    assert owned.dtype == np.bool_
