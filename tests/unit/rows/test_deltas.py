"""Row deltas: round trips, rounding, damaged and foreign records."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from freshet.errors import Corrupt
from freshet.rows.deltas import RowCodec, RowDelta, decode_rows, encode_rows
from freshet.types import F32, U32, Fence, TimeMs
from freshet.wires.codecs import format_for, pack_rows, unpack_rows

u64 = st.integers(1, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)


def delta(values: F32, keys: list[int] | None = None, removed: list[int] | None = None) -> RowDelta:
    return RowDelta(
        3,
        Fence(17),
        TimeMs(1_700_000_000_000),
        np.arange(1, len(values) + 1, dtype=np.uint64) if keys is None else np.array(keys, np.uint64),
        values,
        np.array(removed or [], np.uint64),
    )


@st.composite
def deltas(draw: st.DrawFn) -> RowDelta:
    n, width = draw(st.integers(0, 7)), draw(st.integers(0, 5))
    return RowDelta(
        draw(st.integers(0, 255)),
        Fence(draw(i64)),
        TimeMs(draw(i64)),
        np.array(draw(st.lists(u64, min_size=n, max_size=n)), np.uint64),
        draw(hnp.arrays(np.float32, (n, width), elements=st.floats(width=32))),
        np.array(draw(st.lists(u64, max_size=5)), np.uint64),
    )


@given(deltas())
def test_every_delta_survives_fp32_unchanged(original: RowDelta) -> None:
    back = decode_rows(encode_rows(original))

    assert (back.table, back.fence, back.event_time_ms) == (
        original.table,
        original.fence,
        original.event_time_ms,
    )
    np.testing.assert_array_equal(back.keys, original.keys)
    np.testing.assert_array_equal(back.removed, original.removed)
    assert back.values.shape == original.values.shape
    np.testing.assert_array_equal(back.values, original.values)


@given(hnp.arrays(np.uint32, 32, elements=st.integers(0, 2**32 - 1)))
def test_bf16_rounds_like_the_reference_for_every_bit_pattern(bits: U32) -> None:
    values = bits.view(np.float32).reshape(8, 4)

    back = decode_rows(encode_rows(delta(values), RowCodec.BF16)).values

    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(back, expected)


@given(hnp.arrays(np.float32, (8, 4), elements=st.floats(width=32)))
def test_fp16_rounds_like_numpy(values: F32) -> None:
    back = decode_rows(encode_rows(delta(values), RowCodec.FP16)).values

    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(back, values.astype(np.float16).astype(np.float32))


CODECS = st.sampled_from(RowCodec)


@given(deltas(), CODECS, st.integers(0, 5))
def test_a_record_holds_each_row_as_its_codec_makes_it(
    original: RowDelta, codec: RowCodec, scalars: int
) -> None:
    width = original.values.shape[1]
    form = format_for(codec, width, min(scalars, width))
    record = encode_rows(original, codec, form.scalars)

    back = decode_rows(record)

    assert len(record) == 40 + 8 * len(original.removed) + len(original.keys) * (8 + form.row_bytes)
    expected = np.empty(original.values.shape, np.float32)
    with np.errstate(all="ignore"):
        unpack_rows(pack_rows(original.values, form), form, expected)
    np.testing.assert_array_equal(back.values, expected)
    np.testing.assert_array_equal(back.keys, original.keys)
    np.testing.assert_array_equal(back.removed, original.removed)


@given(deltas(), CODECS, st.data())
def test_a_cut_record_of_any_codec_is_corrupt(
    original: RowDelta, codec: RowCodec, data: st.DataObject
) -> None:
    record = encode_rows(original, codec, original.values.shape[1] // 2)

    with pytest.raises(Corrupt):
        decode_rows(record[: data.draw(st.integers(0, len(record) - 1))])


@pytest.mark.parametrize("codec", [RowCodec.FP32, RowCodec.INT8, RowCodec.UINT8])
def test_scalars_that_a_row_cannot_have_are_refused(codec: RowCodec) -> None:
    record = bytearray(encode_rows(delta(np.ones((1, 16), np.float32)), codec, 2))
    record[36] = 17

    with pytest.raises(Corrupt, match="scalars"):
        decode_rows(bytes(record))


@given(st.binary(max_size=200))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_rows(data)


@given(deltas(), st.data())
def test_a_flipped_bit_after_the_header_is_detected(original: RowDelta, data: st.DataObject) -> None:
    record = bytearray(encode_rows(original))
    if len(record) == 40:
        return
    at = data.draw(st.integers(40, len(record) - 1))
    record[at] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(Corrupt, match="checksum"):
        decode_rows(bytes(record))


@given(deltas(), st.data())
def test_a_damaged_header_is_corrupt_or_read_within_bounds(original: RowDelta, data: st.DataObject) -> None:
    record = bytearray(encode_rows(original))
    record[data.draw(st.integers(0, 39))] = data.draw(st.integers(0, 255))

    try:
        back = decode_rows(bytes(record))
    except Corrupt:
        return
    assert len(back.keys) == len(back.values)


@pytest.mark.parametrize(("keys", "removed"), [([1, 0], [2]), ([1, 2], [0])])
def test_a_key_that_no_row_has_is_corrupt(keys: list[int], removed: list[int]) -> None:
    with pytest.raises(Corrupt, match="key 0"):
        decode_rows(encode_rows(delta(np.ones((2, 2), np.float32), keys, removed)))


@given(deltas(), st.data())
def test_a_truncated_record_is_corrupt(original: RowDelta, data: st.DataObject) -> None:
    record = encode_rows(original)

    with pytest.raises(Corrupt):
        decode_rows(record[: data.draw(st.integers(0, len(record) - 1))])


def test_counts_beyond_the_record_allocate_nothing() -> None:
    record = bytearray(encode_rows(delta(np.ones((1, 2), np.float32))))
    record[4:8] = b"\xff" * 4
    record[24:28] = b"\xff" * 4

    with pytest.raises(Corrupt, match=r"take \d+ bytes, found"):
        decode_rows(bytes(record))


def test_an_unknown_version_is_refused() -> None:
    record = bytearray(encode_rows(delta(np.ones((1, 2), np.float32))))
    record[1] = 2

    with pytest.raises(Corrupt, match="newer freshet"):
        decode_rows(bytes(record))


def test_an_unknown_codec_is_refused() -> None:
    record = bytearray(encode_rows(delta(np.ones((1, 2), np.float32))))
    record[2] = 9

    with pytest.raises(Corrupt, match="codec"):
        decode_rows(bytes(record))


def test_shapes_that_do_not_agree_are_refused_when_writing() -> None:
    with pytest.raises(ValueError, match="keys \\(N,\\)"):
        encode_rows(delta(np.ones((2, 2), np.float32), keys=[1]))


def test_a_table_id_beyond_a_byte_is_refused_when_writing() -> None:
    bad = RowDelta(
        256, Fence(0), TimeMs(0), np.empty(0, np.uint64), np.empty((0, 1), np.float32), np.empty(0, np.uint64)
    )
    with pytest.raises(ValueError, match="0 to 255"):
        encode_rows(bad)


def test_the_bytes_are_those_of_the_format_page() -> None:
    record = encode_rows(delta(np.array([[1.0]], np.float32), keys=[5], removed=[6]))

    assert record[:4] == bytes([0xB2, 1, 0, 3])
    assert record[4:8] == (1).to_bytes(4, "little")
    assert record[8:16] == (17).to_bytes(8, "little")
    assert record[24:32] == (1).to_bytes(4, "little") * 2
    assert record[40:] == (5).to_bytes(8, "little") + (6).to_bytes(8, "little") + b"\x00\x00\x80\x3f"
