"""Three bytes a parameter: errors of weights and moments within their bounds, and none in one direction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.trainer.adam_codec import GROUP, AdamCodec
from freshet.types import F32, F64

RNG = np.random.default_rng(7)


def groups(w: F64, m: F64, v: F64) -> F32:
    """(1, 3, S) of one group."""
    return np.stack([w, m, v])[None].astype(np.float32)


def sent(values: F32, base: F32, seed: int = 0) -> F64:
    codec = AdamCodec(base, seed)
    return codec.decode(codec.encode(values, 0).ravel(), 0)


def spread(low: float, high: float) -> F64:
    """(S,) powers of ten in random order."""
    return 10 ** RNG.permutation(np.linspace(low, high, GROUP))


def adam_state(v: F64) -> F32:
    return groups(RNG.normal(size=GROUP), RNG.uniform(-3, 3, GROUP) * np.sqrt(v), v)


def test_second_moments_have_a_small_relative_error() -> None:
    base = adam_state(spread(-30, 0))
    changes = spread(-0.02, 3)
    values = adam_state(base[0, 2] * changes)

    found = sent(values, base)

    off = found[0, 2] / values[0, 2].astype(np.float64) - 1
    assert np.abs(off).max() <= 1000 ** (1 / 127) - 1 + 1e-5, "one v is a thousand times as large as before"
    assert np.abs(off).max() > 0.01, "a wider bound would hold as well"


def test_first_values_of_second_moments_are_positive() -> None:
    v = spread(-11, 0)
    v[:9] = 0
    values = adam_state(v)
    nothing = groups(values[0, 0], np.zeros(GROUP), np.zeros(GROUP))

    found = sent(values, nothing)[0]

    assert (found[1:, :9] == 0).all(), "m and v of zeros"
    assert np.abs(found[2, 9:] / values[0, 2, 9:] - 1).max() <= 2 ** (1 / 6) - 1 + 1e-5
    assert (sent(adam_state(spread(-30, 0)), nothing)[0, 2] > 0).all(), "the smallest ones, too"


@pytest.mark.parametrize("first", [True, False])
def test_steps_stay_right_beside_far_larger_moments(first: bool) -> None:
    v = spread(-11, 0)
    values = adam_state(v)
    base = adam_state(v * (0 if first else 0.9))

    found = sent(values, base)[0]

    step = values[0, 1] / np.sqrt(values[0, 2].astype(np.float64))
    of_v = 0.07 if first else 0.001  # half the relative error of v
    allowed = (1 + of_v) * np.abs(step).max() / 127 + of_v * np.abs(step)
    assert (np.abs(found[1] / np.sqrt(found[2]) - step) <= allowed).all()


def test_weights_are_off_by_a_127th_of_the_largest_change() -> None:
    base = adam_state(spread(-3, 0))
    values = base.copy()
    moved = RNG.normal(0, 1e-3, GROUP)
    values[0, 0] += moved.astype(np.float32)

    found = sent(values, base)[0]

    assert np.abs(found[0] - values[0, 0]).max() <= np.abs(moved).max() / 127 * 1.001


def test_expectation_is_the_value() -> None:
    base = adam_state(spread(-8, 0))
    base[0, 2, :50] = 0
    values = adam_state(base[0, 2] * spread(-0.02, 1) + (base[0, 2] == 0) * spread(-6, 0))
    rounds = 4000
    codec = AdamCodec(base, 5)
    total, squares = np.zeros((3, GROUP)), np.zeros((3, GROUP))

    for _ in range(rounds):
        off = codec.decode(codec.encode(values, 0).ravel(), 0)[0] - values[0]
        total, squares = total + off, squares + off**2

    mean, deviation = total / rounds, np.sqrt(squares / rounds)
    for i, name in enumerate("wmv"):
        sigmas = np.divide(mean[i], deviation[i], where=deviation[i] > 0, out=np.zeros(GROUP)) * np.sqrt(
            rounds
        )
        assert abs(sigmas.sum() / np.sqrt(GROUP)) < 4, f"{name}: all values together"
        assert (np.abs(sigmas) > 4).sum() <= 1, f"{name}: {np.abs(sigmas).max()}"


def test_unchanged_states_arrive_exactly() -> None:
    base = adam_state(spread(-8, 0))

    found = sent(base, base)[0]

    np.testing.assert_array_equal(found[[0, 2]], base[0, [0, 2]].astype(np.float64))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("array", range(3))
def test_what_is_not_finite_stays_visible(array: int, broken: float) -> None:
    base = np.concatenate([adam_state(spread(-8, 0))] * 2)
    base[0, 2, 3] = 0
    values = base.copy()
    values[0, array, 3] = broken

    found = sent(values, base)

    finite = broken == -1.0 and array < 2
    assert np.isfinite(found[0, array]).all() == finite
    assert np.isfinite(found[1]).all(), "no other group"
    assert finite or np.isnan(found[0, array]).all()


def test_any_bytes_of_another_rank_decode() -> None:
    base = adam_state(spread(-8, 0))
    base[0, 2, :100] = 0

    @given(st.binary(min_size=AdamCodec.unit_bytes, max_size=AdamCodec.unit_bytes))
    def check(data: bytes) -> None:
        codec = AdamCodec(base, 0)
        assert codec.decode(np.frombuffer(data, np.uint8), 0).shape == (1, 3, GROUP)

    check()
