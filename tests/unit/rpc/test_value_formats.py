"""Values rounded to fewer bits, beside plain numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from freshet.rpc.frames import RowCodec, pack_values, unpack_values, value_type

rows_of_any = arrays.arrays(np.float32, st.tuples(st.integers(0, 7), st.integers(1, 21)))


def through(values, codec):
    """Packed and unpacked again."""
    packed, scales = pack_values(values, codec)
    assert packed.dtype == value_type(codec)
    out = np.full(values.shape, 77.0, np.float32)
    unpack_values(packed, codec, scales, out)
    return out


@given(values=rows_of_any)
def test_whole_values_come_back_to_the_bit(values):
    assert through(values, RowCodec.FP32).tobytes() == values.tobytes()


@given(values=rows_of_any)
def test_halves_are_those_of_numpy(values):
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(through(values, RowCodec.FP16), expected)


@given(values=rows_of_any)
def test_bf16_is_the_nearest_of_its_numbers_ties_to_even(values):
    found = through(values, RowCodec.BF16)
    bits = values.view(np.uint32).astype(np.uint64)
    low = bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & ((bits >> 16) & 1 == 1))
    expected = (((bits >> 16) + up) << 16).astype(np.uint32).view(np.float32)
    nan = np.isnan(values)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan], expected[~nan])


@given(values=rows_of_any)
def test_int8_is_within_half_a_step_of_the_rows_largest(values):
    found = through(values, RowCodec.INT8)
    finite = np.isfinite(values).all(axis=1)
    assert np.isnan(found[~finite]).all(), "a row that is not finite must stay so"
    step = np.abs(values[finite].astype(np.float64)).max(axis=1, initial=0) / 127
    error = np.abs(found[finite].astype(np.float64) - values[finite])
    assert (error <= 0.5001 * step[:, None] + 1.5e-36).all(), "rows smaller than that are zeros"


def plain_int8(values):
    """In numpy, as the native core must do it to the bit."""
    largest = np.abs(values).max(axis=1, initial=0.0)
    finite = np.isfinite(largest)
    most = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
    scales = np.minimum(largest / np.float32(127), most)
    scales[scales < np.finfo(np.float32).tiny] = 0
    factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=finite & (scales > 0))
    safe = np.where(finite[:, None], values, np.float32(0))
    packed = np.rint(np.clip(safe * factors[:, None], -127, 127)).astype(np.int8)
    return packed, np.where(finite, scales, np.float32(np.nan))


@given(values=rows_of_any)
def test_int8_is_that_of_numpy_to_the_bit(values):
    packed, scales = pack_values(values, RowCodec.INT8)
    expected, expected_scales = plain_int8(values)
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(scales, expected_scales)


@pytest.mark.parametrize("codec", [RowCodec.BF16, RowCodec.FP16, RowCodec.INT8])
def test_a_place_of_another_size_is_an_error(codec):
    packed, scales = pack_values(np.ones((3, 2), np.float32), codec)
    with pytest.raises(ValueError, match="equal shape"):
        unpack_values(packed, codec, scales, np.empty((3, 3), np.float32))


def test_int8_without_scales_is_an_error():
    with pytest.raises(ValueError, match="scales"):
        unpack_values(np.zeros((1, 1), np.int8), RowCodec.INT8, None, np.zeros((1, 1), np.float32))
