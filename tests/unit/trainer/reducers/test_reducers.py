"""Reducers lose nothing, give all ranks the same bits, and keep little; mutants of them are found."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from freshet.errors import Corrupt
from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.group_codecs import GroupCodec, IntegerCodec, SignCodec, SquareCodec
from freshet.trainer.reducers.ladder import LadderReducer
from freshet.trainer.reducers.levels import AdaptiveLevels
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.types import F32, U8
from freshet.wires.codecs import SCALE_BYTES
from tests.fixtures.local_ranks import SteppedDct
from tests.fixtures.rank_threads import ThreadCollectives, run_ranks
from tests.unit.trainer.reducers.checks import (
    AdamReducer,
    Make,
    check_bounded,
    check_conserved,
    check_flush_empties,
    check_not_finite,
    gradients,
)

STEPS = int(os.environ.get("FRESHET_TEST_STEPS", "200"))

SIZE = 600
"""Floats of a gradient: some groups of 256, the last of them with padding."""


def ladder_at_int8(rank: int) -> LadderReducer:
    """A ladder that has left whole gradients."""
    ladder = LadderReducer(SIZE)
    ladder.load_state({"codec": np.array([1])})
    return ladder


MAKES: dict[str, Make] = {
    "int8": lambda rank: TwoPhase(IntegerCodec(8), SIZE),
    "int4": lambda rank: TwoPhase(IntegerCodec(4), SIZE),
    "sign": lambda rank: TwoPhase(SignCodec(), SIZE),
    "levels": lambda rank: AdaptiveLevels(SIZE),
    "dct": lambda rank: SteppedDct(SIZE),
    "adam": lambda rank: AdamReducer(SIZE, 40),
    "ladder": ladder_at_int8,
}
BOUNDS = {
    "int8": 0.01,
    "int4": 0.2,
    "sign": 10,
    "levels": 2,
    "dct": 60,
    "adam": 30,
    "ladder": 0.2,
}
"""Largest residual over the largest gradient."""

each = pytest.mark.parametrize("name", MAKES)


class OtherGroup:
    """A `Collectives` of one rank whose bytes arrive shortened."""

    rank, size = 0, 1

    def all_to_all(self, parts: list[U8], sizes: object = None) -> list[U8]:
        return [part[:-1] for part in parts]

    all_gather: Any = None
    reduce: Any = None


@pytest.mark.slow
@pytest.mark.long
@each
def test_nothing_is_lost_and_ranks_are_equal(name: str) -> None:
    check_conserved(MAKES[name], SIZE, STEPS)


@each
def test_a_flush_empties(name: str) -> None:
    check_flush_empties(MAKES[name], SIZE)


@each
def test_residuals_are_bounded(name: str) -> None:
    check_bounded(MAKES[name], SIZE, BOUNDS[name])


@pytest.mark.parametrize("name", ["int8", "int4", "levels", "dct"])
def test_what_is_not_finite_arrives_and_does_not_stay(name: str) -> None:
    check_not_finite(MAKES[name], SIZE)


@pytest.mark.parametrize("name", ["sign", "adam"])
def test_signs_mark_their_whole_group_as_not_finite(name: str) -> None:
    check_not_finite(MAKES[name], SIZE, others_finite=False)


@pytest.mark.parametrize("codec", [IntegerCodec(8), IntegerCodec(4), SignCodec(), AdaptiveLevels(1).levels])
@pytest.mark.parametrize(("size", "ranks"), [(1, 2), (256, 3), (5000, 2), (5001, 3)])
def test_wire_bytes_are_those_sent(codec: GroupCodec, size: int, ranks: int) -> None:
    reducer = TwoPhase(codec, size)

    def work(group: ThreadCollectives) -> int:
        TwoPhase(codec, size).reduce(group, np.ones(size, np.float32))
        return group.sent

    assert sum(run_ranks(ranks, work)) == 2 * (ranks - 1) * reducer.groups * codec.group_bytes


def test_int8_sends_a_quarter_and_signs_a_thirtieth() -> None:
    size, whole = 1 << 16, 4 << 16
    for codec, least in ((IntegerCodec(8), 3.9), (IntegerCodec(4), 7.7), (SignCodec(), 31.0)):
        assert whole / (TwoPhase(codec, size).groups * codec.group_bytes) >= least


def test_of_one_rank_a_result_is_the_nearest_code() -> None:
    values = np.array([127 / 64, -0.5, 0.004, 0.0], np.float32)

    def work(group: ThreadCollectives) -> F32:
        gradient = values.copy()
        TwoPhase(IntegerCodec(8), 4).reduce(group, gradient)
        return gradient

    np.testing.assert_array_equal(run_ranks(1, work)[0], [127 / 64, -0.5, 0.0, 0.0])


def test_groups_of_zeros_stay_zeros() -> None:
    for codec in (IntegerCodec(8), IntegerCodec(4), SignCodec(), SquareCodec(), AdaptiveLevels(1).levels):
        values = np.zeros((2, codec.group), np.float32)
        values[1, 0] = 5
        decoded = codec.decode(codec.encode(values, 2 * codec.group))
        assert not decoded[0].any()
        assert decoded[1, 0] > 0


def test_squares_are_off_by_a_sixteenth_of_an_octave() -> None:
    codec = SquareCodec()
    values = 2.0 ** np.random.default_rng(0).uniform(-30, 0, (50, codec.group)).astype(np.float32)
    values[:, 0], values[:, 1], values[:, 2] = 1, 0, 1e-20
    values[7, 3] = np.nan

    found = codec.decode(codec.encode(values, values.size))

    assert np.isnan(found[7]).all()
    found, values = np.delete(found, 7, axis=0), np.delete(values, 7, axis=0)
    np.testing.assert_allclose(found[:, 3:], values[:, 3:], rtol=0.0443)
    assert (found[:, :2] == values[:, :2]).all()
    assert (found[:, 2] > values[:, 2]).all(), "a square became 0"


def test_the_scale_of_signs_counts_no_padding() -> None:
    codec = SignCodec()
    values = np.zeros((1, codec.group), np.float32)
    values[0, :3] = 3.0, -1.0, 0.0

    decoded = codec.decode(codec.encode(values, 3))[0, :3]

    np.testing.assert_array_equal(decoded, np.array([4 / 3, -4 / 3, 4 / 3], np.float32))


def test_parts_of_another_length_are_corrupt() -> None:
    group: Any = OtherGroup()
    with pytest.raises(Corrupt, match="expected 258 bytes of groups"):
        TwoPhase(IntegerCodec(8), 256).reduce(group, np.ones(256, np.float32))


def test_ranks_must_flush_before_they_are_others() -> None:
    reducers = [TwoPhase(IntegerCodec(4), SIZE) for _ in range(3)]

    def work(group: ThreadCollectives) -> None:
        reducers[group.rank].reduce(group, gradients(SIZE, group.rank, 0)(0))

    run_ranks(2, work)
    with pytest.raises(ValueError, match="expected a flush"):
        run_ranks(3, work)
    for reducer in reducers:
        reducer.reset()
    run_ranks(3, work)


# --- mutants


class Forgets(TwoPhase):
    """Drops error feedback."""

    def reduce(self, group: Collectives, gradient: F32) -> None:
        super().reduce(group, gradient)
        self.reset()


class ForgetsOwned(TwoPhase):
    """Drops the error feedback of owners alone."""

    def reduce(self, group: Collectives, gradient: F32) -> None:
        super().reduce(group, gradient)
        self._owned.fill(0)


class AdamForgets(AdamReducer):
    """Drops error feedback."""

    def reduce(self, group: Collectives, gradient: F32) -> None:
        super().reduce(group, gradient)
        self.inner.reset()


class StaleScale(IntegerCodec):
    """Writes the scales of its first groups."""

    heads: U8 | None = None

    def encode(self, values: F32, real: int) -> U8:
        packed = super().encode(values, real)
        if self.heads is None:
            self.heads = packed[:1, :SCALE_BYTES].copy()
        packed[:, :SCALE_BYTES] = self.heads
        return packed


def skips_flush(make: Make) -> Make:
    """Return reducers that lose their residuals in a flush."""

    def mutant(rank: int) -> Any:
        reducer: Any = make(rank)

        def flush(group: Collectives) -> F32:
            reducer.reset()
            return np.zeros(SIZE, np.float32)

        reducer.flush = flush
        return reducer

    return mutant


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        lambda rank: Forgets(IntegerCodec(8), SIZE),
        lambda rank: ForgetsOwned(IntegerCodec(8), SIZE),
        lambda rank: ForgetsOwned(SignCodec(), SIZE),
        lambda rank: AdamForgets(SIZE, 40),
    ],
)
def test_dropped_feedback_is_found(mutant: Make) -> None:
    with pytest.raises(AssertionError, match="of the gradients"):
        check_conserved(mutant, SIZE, 200)


@each
def test_a_skipped_flush_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match="of the gradients"):
        check_conserved(skips_flush(MAKES[name]), SIZE, 60)
    with pytest.raises(AssertionError, match="found nothing"):
        check_flush_empties(skips_flush(MAKES[name]), SIZE)


def test_a_stale_scale_is_found() -> None:
    with pytest.raises(AssertionError, match="a residual of"):
        check_bounded(lambda rank: TwoPhase(StaleScale(8), SIZE), SIZE, BOUNDS["int8"])


def test_ranks_that_differ_are_found() -> None:
    class Own(TwoPhase):
        def reduce(self, group: Collectives, gradient: F32) -> None:
            super().reduce(group, gradient)
            gradient[0] = np.nextafter(gradient[0], np.float32(group.rank))

    with pytest.raises(AssertionError, match="ranks differ"):
        check_conserved(lambda rank: Own(IntegerCodec(8), SIZE), SIZE, 5)
