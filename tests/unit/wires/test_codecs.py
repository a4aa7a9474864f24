"""Codecs of rows and gradients, held to numpy to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from freshet import _native
from freshet.types import F32
from freshet.wires.codecs import (
    ASYMMETRIC,
    RANGE_BYTES,
    RowCodec,
    RowFormat,
    Seeds,
    format_for,
    gradients_codec,
    pack_rows,
    rows_codec,
    unpack_rows,
)

SYMMETRIC = (RowCodec.INT8, RowCodec.INT4)
INTEGERS = (*SYMMETRIC, *ASYMMETRIC)

ANY_ROWS = arrays.arrays(np.float32, st.tuples(st.integers(0, 7), st.integers(1, 37)))
SEEDS = st.integers(1, 2**64 - 1)
TINY = np.finfo(np.float32).tiny
U32_MASK = 0xFFFFFFFF


def through(values: F32, codec: RowCodec, seed: int = 0, scalars: int = 0) -> F32:
    """Return the values encoded and decoded again."""
    form = RowFormat(codec, values.shape[1], scalars)
    packed = pack_rows(values, form, seed)
    assert packed.nbytes == len(values) * form.row_bytes
    out = np.full(values.shape, 77.0, np.float32)
    unpack_rows(packed, form, out)
    return out


# --- the codecs once more, in numpy


def in_bytes(codes: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Return the bytes of (N, S) codes: of 4 bits two share a byte, the first in the lower half."""
    if bits == 8:
        return (codes & 0xFF).astype(np.uint8)
    even = np.pad(codes & 0xF, ((0, 0), (0, codes.shape[1] % 2)))
    halves: NDArray[np.uint8] = (even[:, 0::2] | even[:, 1::2] << 4).astype(np.uint8)
    return halves


def with_heads(heads: NDArray[np.uint16], codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return encoded rows: a head of two bytes a number, (N, K) bf16, then their codes."""
    return np.hstack([heads.view(np.uint8).reshape(len(codes), 2 * heads.shape[1]), codes])


def uniform_of(seed: int, rows: int, width: int) -> F32:
    """Return (N, S) numbers in (-1/2, 1/2), middles of 2^16 parts, by MurmurHash3's finalizer over a counter
    and a seed: elements i and i + 8 of sixteen have the halves of one hash."""
    low, high = np.uint64(seed & U32_MASK), np.uint64(seed >> 32)
    at = np.arange(width, dtype=np.uint64)
    first = np.arange(rows, dtype=np.uint64)[:, None] * width
    z = (first + at - (at & 8) + low) & U32_MASK
    z ^= z >> 16
    z = z * 0x85EBCA6B & U32_MASK
    z ^= high
    z ^= z >> 13
    z = z * 0xC2B2AE35 & U32_MASK
    z ^= z >> 16
    halves = np.where(at & 8, z >> 16, z & 0xFFFF)
    numbers: F32 = (halves * 2.0**-16 + 2.0**-17 - 0.5).astype(np.float32)
    return numbers


def bf16_towards(values: F32, *, up: bool) -> NDArray[np.uint16]:
    """Return the bits of the bf16 at or above, or at or below, each number."""
    bits = values.view(np.uint32)
    away = ((bits & 0xFFFF) != 0) & ((bits >> 31 == 0) == up)
    heads: NDArray[np.uint16] = ((bits >> 16) + away).astype(np.uint16)
    return heads


def of_bf16(heads: NDArray[np.uint16]) -> F32:
    return (heads.astype(np.uint32) << 16).view(np.float32)


def symmetric(values: F32, bits: int, seed: int) -> NDArray[np.uint8]:
    """Return rows in symmetric codes."""
    limit = np.float32(127 if bits == 8 else 7)
    largest = np.abs(values).max(axis=1, initial=0.0)
    finite = np.isfinite(largest)
    most = of_bf16(bf16_towards(np.array([np.finfo(np.float32).max / limit], np.float32), up=False))
    exact = np.minimum(np.where(finite, largest, np.float32(0)) / limit, most)
    heads = bf16_towards(np.where(exact < TINY, np.float32(0), exact), up=True)
    scales = of_bf16(heads)
    factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=finite & (scales > 0))
    safe = np.where(finite[:, None], values, np.float32(0))
    scaled = np.clip(safe * factors[:, None], -limit, limit)
    if seed:
        u = uniform_of(seed, *values.shape)
        codes = np.rint(scaled + u)
        codes[factors == 0] = 0
    else:
        codes = np.rint(scaled)
    heads[~finite] = 0x7FC0
    return with_heads(heads[:, None], in_bytes(codes.astype(np.int64), bits))


def asymmetric(values: F32, bits: int) -> NDArray[np.uint8]:
    """Return rows in asymmetric codes."""
    limit = np.float32(255 if bits == 8 else 15)
    fits: NDArray[np.bool_] = np.all(np.abs(values) < 2.0**126, axis=1)
    safe = np.where(fits[:, None], values, np.float32(0))
    least, most = safe.min(axis=1), safe.max(axis=1)
    heads = np.empty((len(values), 2), np.uint16)
    heads[:, 0] = bf16_towards(least + np.float32(0), up=False)  # -0 is 0
    low = of_bf16(heads[:, 0])
    span = most - low
    heads[:, 1] = bf16_towards(np.where(span > 0, np.maximum(span / limit, TINY), np.float32(0)), up=True)
    factor = np.divide(np.float32(1), of_bf16(heads[:, 1]), out=np.zeros_like(low), where=span > 0)
    codes = np.rint(np.minimum((safe - low[:, None]) * factor[:, None], limit))
    heads[~fits] = (0, 0x7FC0)
    codes[~fits] = 0
    return with_heads(heads, in_bytes(codes.astype(np.int64), bits))


# --- integers


@given(ANY_ROWS, st.sampled_from(SYMMETRIC), st.just(0) | SEEDS)
@example(np.full((1, 5), np.finfo(np.float32).max, np.float32), RowCodec.INT4, 0)
@example(np.full((1, 5), -np.finfo(np.float32).max, np.float32), RowCodec.INT8, 0)
def test_symmetric_codes_are_those_of_numpy_to_the_bit(values: F32, codec: RowCodec, seed: int) -> None:
    packed = pack_rows(values, RowFormat(codec, values.shape[1]), seed)
    np.testing.assert_array_equal(packed, symmetric(values, codec.bits, seed))


@given(ANY_ROWS, st.sampled_from(ASYMMETRIC))
def test_asymmetric_codes_are_those_of_numpy_to_the_bit(values: F32, codec: RowCodec) -> None:
    packed = pack_rows(values, RowFormat(codec, values.shape[1]))
    np.testing.assert_array_equal(packed, asymmetric(values, codec.bits))


@given(ANY_ROWS, st.sampled_from(SYMMETRIC), st.just(0) | SEEDS)
def test_a_gradient_is_within_a_step_of_its_scale(values: F32, codec: RowCodec, seed: int) -> None:
    found = through(values, codec, seed)
    finite = np.isfinite(values).all(axis=1)
    assert np.isnan(found[~finite]).all(), "a row that is not finite must stay so"
    limit = 127 if codec.bits == 8 else 7
    # the scale is rounded up by 2^-7 at the most
    step = np.abs(values[finite].astype(np.float64)).max(axis=1, initial=0) / limit * (1 + 2.0**-7)
    error = np.abs(found[finite].astype(np.float64) - values[finite])
    share = 1.0001 if seed else 0.5001
    assert (error <= share * step[:, None] + limit * TINY).all()
    assert (found[finite][values[finite] == 0] == 0).all(), "zero stays zero"


@given(ANY_ROWS, st.sampled_from(ASYMMETRIC))
def test_a_row_is_within_half_a_step_of_its_span(values: F32, codec: RowCodec) -> None:
    found = through(values, codec)
    fits = (np.abs(values) < 2.0**126).all(axis=1)
    assert np.isnan(found[~fits]).all(), "a row that is not finite must stay so"
    rows = values[fits].astype(np.float64)
    least, most = rows.min(axis=1, initial=np.inf), rows.max(axis=1, initial=-np.inf)
    # low is rounded by 2^-8 at the most, which widens the span; the step by another 2^-7
    span = (most - least + np.abs(least) * 2.0**-7) * (1 + 2.0**-6) + 300 * TINY
    step = span / (255 if codec.bits == 8 else 15)
    error = np.abs(found[fits].astype(np.float64) - rows)
    assert (error <= 0.501 * step[:, None] + 1e-6 * np.abs(rows).max(axis=1, initial=0)[:, None]).all()


@pytest.mark.parametrize("codec", [*SYMMETRIC, *ASYMMETRIC])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e-7, 1e7, 1e30])
def test_no_row_vanishes_for_being_small(codec: RowCodec, magnitude: float) -> None:
    rng = np.random.default_rng(int(codec))
    values = (rng.normal(size=(64, 16)) * magnitude).astype(np.float32)
    found = through(values, codec, 9 if codec in SYMMETRIC else 0)
    error = np.linalg.norm((found - values).astype(np.float64), axis=1) / np.linalg.norm(
        values.astype(np.float64), axis=1
    )
    assert error.max() < (0.02 if codec.bits == 8 else 0.35)


@pytest.mark.parametrize("codec", SYMMETRIC)
def test_stochastic_codes_are_unbiased(codec: RowCodec) -> None:
    """The mean of 10,000 encodings is within 4 sigma, and the variance below QSGD's bound."""
    rng = np.random.default_rng(3)
    row = rng.normal(size=16).astype(np.float32)
    row[:4] = 0.0, 1e-6, -1e-3, row.max()
    n = 10_000
    exact = np.array([np.abs(row).max() / (127 if codec.bits == 8 else 7)], np.float32)
    step = float(of_bf16(bf16_towards(exact, up=True))[0])
    seeds, tiled = Seeds(11), np.tile(row, (100, 1))
    found = np.concatenate([through(tiled, codec, seeds.next()) for _ in range(n // 100)]).astype(np.float64)
    fraction = np.abs(row.astype(np.float64) / step) % 1.0
    variance = fraction * (1 - fraction) * step**2
    np.testing.assert_allclose(found.var(axis=0), variance, atol=0.02 * step**2)
    assert (np.abs(found.mean(axis=0) - row) <= 4 * np.sqrt(variance / n) + 1e-6 * step).all()


def test_each_seed_rounds_otherwise() -> None:
    values = np.random.default_rng(0).normal(size=(100, 16)).astype(np.float32)
    seeds = Seeds(5)
    form = RowFormat(RowCodec.INT8, 16)
    first, second = (pack_rows(values, form, seeds.next()) for _ in range(2))
    assert 0.1 < (first != second).mean() < 0.9
    again = pack_rows(values, form, Seeds(5).next())
    np.testing.assert_array_equal(first, again)


# --- halves and whole numbers


@given(values=ANY_ROWS)
def test_fp32_comes_back_to_the_bit(values: F32) -> None:
    assert through(values, RowCodec.FP32).tobytes() == values.tobytes()


@given(values=ANY_ROWS)
def test_fp16_is_that_of_numpy(values: F32) -> None:
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(through(values, RowCodec.FP16), expected)


@given(values=ANY_ROWS)
def test_bf16_is_the_nearest_ties_to_even(values: F32) -> None:
    found = through(values, RowCodec.BF16)
    bits = values.view(np.uint32).astype(np.uint64)
    low = bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & ((bits >> 16) & 1 == 1))
    expected = (((bits >> 16) + up) << 16).astype(np.uint32).view(np.float32)
    nan = np.isnan(values)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan], expected[~nan])


# --- names, sizes, errors


def test_a_setting_names_a_codec_for_each_direction() -> None:
    assert [rows_codec(n) for n in ("fp32", "bf16", "int8", "int4")] == [
        RowCodec.FP32,
        RowCodec.BF16,
        RowCodec.INT8,
        RowCodec.UINT4,
    ]
    assert [gradients_codec(n) for n in ("fp16", "int8", "int4")] == [
        RowCodec.FP16,
        RowCodec.INT8,
        RowCodec.INT4,
    ]


@pytest.mark.parametrize("codec", RowCodec)
@pytest.mark.parametrize("scalars", [0, 1, 5])
def test_short_rows_travel_in_what_is_shorter(codec: RowCodec, scalars: int) -> None:
    for vector in range(70):
        width = scalars + vector
        form = format_for(codec, width, scalars)
        assert form.row_bytes <= RowFormat(codec, width, scalars).row_bytes
        if form.codec is not codec:
            assert codec.bits <= 8
            assert form.codec is RowCodec.BF16
            assert vector <= RANGE_BYTES
    assert format_for(codec, scalars + 16, scalars).codec is codec


@given(arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.just(9))), st.sampled_from(INTEGERS))
def test_scalars_travel_as_bf16_before_the_vector(values: F32, codec: RowCodec) -> None:
    found = through(values, codec, scalars=3)
    np.testing.assert_array_equal(found[:, :3], through(np.ascontiguousarray(values[:, :3]), RowCodec.BF16))
    np.testing.assert_array_equal(found[:, 3:], through(np.ascontiguousarray(values[:, 3:]), codec))


@pytest.mark.parametrize("codec", RowCodec)
def test_a_place_of_another_shape_is_an_error(codec: RowCodec) -> None:
    form = RowFormat(codec, 2)
    packed = pack_rows(np.ones((3, 2), np.float32), form)
    for shape in ((3, 5), (4, 2)):
        with pytest.raises(ValueError, match="equal shape"):
            unpack_rows(packed, form, np.empty(shape, np.float32))
    with pytest.raises(ValueError, match="rows of 2 floats"):
        pack_rows(np.ones((3, 3), np.float32), form)


def test_the_native_core_refuses_what_it_cannot_encode() -> None:
    values = np.zeros((1, 2), np.float32)
    with pytest.raises(ValueError, match="8 or 4 bits"):
        _native.pack_integers(values, 3, False, 0, 0, np.zeros((1, 1), np.uint8))
    with pytest.raises(ValueError, match="without a vector"):
        _native.pack_integers(values, 8, False, 2, 0, np.zeros((1, 8), np.uint8))
    with pytest.raises(ValueError, match="equal shape"):
        _native.pack_integers(values, 8, False, 0, 0, np.zeros((1, 7), np.uint8))


@given(st.binary(max_size=64), st.integers(1, 9), st.integers(0, 8), st.sampled_from(list(RowCodec)))
def test_any_bytes_decode_to_some_rows(data: bytes, width: int, scalars: int, codec: RowCodec) -> None:
    form = format_for(codec, width, min(scalars, width))
    n = len(data) // form.row_bytes
    packed = np.frombuffer(data, np.uint8, n * form.row_bytes).view(form.dtype).reshape(n, form.columns)
    out = np.full((n, width), 77.0, np.float32)
    with np.errstate(invalid="ignore"):
        unpack_rows(packed, form, out)
