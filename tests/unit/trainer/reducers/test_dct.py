"""DCT selects by steps, follows the variance and the share, and loses nothing; mutants of it are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freshet.trainer.reducers.dct import SHARE, Dct
from freshet.trainer.reducers.one_bit_adam import Betas
from freshet.trainer.reducers.sparse_frame import decode_frame
from freshet.types import F32, I64, U8
from tests.fixtures.local_ranks import SteppedDct
from tests.fixtures.rank_threads import ThreadCollectives, run_ranks
from tests.unit.trainer.reducers.checks import Frames, check_conserved, gradients, step_all

SIZE = 600
MOST = (1000 / (1 - 0.999**1000)) ** 0.5
"""The bound of a rank's part, in roots of the variance without bias correction."""

Make = Callable[[], SteppedDct]


def swinging(make: Make, steps: int = 600) -> list[float]:
    """Return the shares that rank 0 sends, as gradients swing by a factor of 30."""

    def work(group: ThreadCollectives) -> list[U8]:
        reducer, frames = make(), Frames(group)
        next_gradient = gradients(SIZE, group.rank, 1)
        for step in range(steps):
            reducer.reduce(frames, next_gradient(step) * np.float32(30 ** np.sin(step / 100)))
        return [part for part in frames.parts if part[:2].tobytes() == b"DS"]

    return [len(decode_frame(part, SIZE).indexes) / SIZE for part in run_ranks(2, work)[0]]


def check_share(make: Make, share: float) -> None:
    found = swinging(make)
    assert max(found) <= 4 * share, f"a share of {max(found)}"
    assert 0.7 * share <= np.mean(found) <= 1.5 * share, f"a mean share of {np.mean(found)}"


def check_variance_follows(make: Make) -> None:
    """Gradients of two ranks have a variance of 100 each, and Adam's was 1."""

    def work(group: ThreadCollectives) -> F32:
        reducer, rng = make(), np.random.default_rng(group.rank)
        for _ in range(400):
            reducer.reduce(group, (10 * rng.normal(size=SIZE)).astype(np.float32))
        return reducer.moments.second

    first, second = run_ranks(2, work)
    assert first.tobytes() == second.tobytes()
    assert 150 < np.median(first) < 250, f"a variance of {np.median(first)}, not 200"


def quick(variance_every: int = 40) -> SteppedDct:
    """Return a reducer with a variance that is a mean of 20 steps."""
    reducer = SteppedDct(SIZE, variance_every=variance_every)
    reducer.core.betas = Betas(0.9, 0.95)
    return reducer


def of_two(work: Callable[[ThreadCollectives, SteppedDct], Any], make: Make | None = None) -> list[Any]:
    """Return the results of work in two ranks; their variance is 1, and summed again after 40 steps."""
    reducers = [make() if make else SteppedDct(SIZE) for _ in range(2)]
    for reducer in reducers:
        reducer.moments.second.fill(1)
        reducer.core._squares.fill(0.5)
    return run_ranks(2, lambda group: work(group, reducers[group.rank]))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.02])
def test_a_share_is_sent_however_gradients_swing(share: float) -> None:
    check_share(lambda: SteppedDct(SIZE, share), share)


def test_the_variance_is_that_of_whole_gradients() -> None:
    check_variance_follows(quick)


@pytest.mark.parametrize("start", [0, 5, 1000])
def test_the_variance_is_summed_at_powers_of_two(start: int) -> None:
    core = Dct(1, variance_every=256)
    core.variance_steps = start
    due = []
    for core._unsummed in range(1, 1100):
        if core._is_variance_due():
            due.append(start + core._unsummed)

    every = [*(2**i for i in range(9)), *range(512, 2100, 256)]
    assert due == [step for step in every if start < step < start + 1100]


def test_the_largest_steps_are_sent_and_no_others() -> None:
    def work(group: ThreadCollectives, reducer: SteppedDct) -> I64:
        reducer.moments.second[:3] = 1e-8, 0, 1e8
        gradient = np.ones(SIZE, np.float32)
        gradient[:3] = 1e-3, 1e3, 1e3
        gradient[77] = 2
        reducer.reduce(group, gradient)
        return np.flatnonzero(gradient)

    for found in of_two(work):
        assert found.tolist()[:1] == [0]
        assert 77 in found
        assert len(found) == 3
        assert not {1, 2} & set(found.tolist())


def test_a_part_is_bounded_and_its_rest_waits_for_the_variance() -> None:
    def work(group: ThreadCollectives, reducer: SteppedDct) -> list[float]:
        found = []
        for step in range(41):
            gradient = np.zeros(SIZE, np.float32)
            gradient[9] = 1000 * (step == 0)
            reducer.reduce(group, gradient)
            found.append(float(gradient[9]))
        return found

    for found in of_two(work):
        np.testing.assert_allclose(found[0], 2 * MOST, rtol=1e-5)
        np.testing.assert_allclose(found[1:39], 0, atol=1e-4)
        np.testing.assert_allclose(sum(found), 2000, rtol=0.05)


def test_what_is_not_finite_stands_for_its_value_alone() -> None:
    def work(group: ThreadCollectives, reducer: SteppedDct) -> tuple[F32, F32]:
        reducer.reduce(group, np.ones(SIZE, np.float32))
        before = reducer.core.residual.copy()
        gradient = np.ones(SIZE, np.float32)
        if group.rank == 1:
            gradient[[3, 5, 7]] = np.nan, -np.inf, 1e25
            assert (reducer.core.residual[[3, 5, 7]] == before[[3, 5, 7]]).all()
        reducer.reduce(group, gradient)
        return gradient, reducer.flush(group)

    for gradient, rest in of_two(work):
        assert np.flatnonzero(np.isnan(gradient)).tolist() == [3, 5, 7]
        assert np.isfinite(rest).all()
        assert np.isin(rest[[3, 5, 7]], [1, 2, 3]).all()


def test_a_rank_from_a_version_equals_one_that_went_on() -> None:
    def work(group: ThreadCollectives, reducer: SteppedDct) -> int:
        step_all(group, reducer, SIZE, 30)
        reducer.flush(group)
        if group.rank == 1:
            fresh = SteppedDct(SIZE)
            fresh.load_state(reducer.state())
            fresh.core.threshold = reducer.core.threshold
            reducer = fresh
        return step_all(group, reducer, SIZE, 60).digest

    first, second = of_two(work)
    assert first == second


def test_momentum_of_steps_before_is_delivered() -> None:
    def work(group: ThreadCollectives, reducer: SteppedDct) -> F32:
        reducer.moments.first[:] = 0.1
        got = np.zeros(SIZE, np.float32)
        for _ in range(30):
            gradient = np.zeros(SIZE, np.float32)
            reducer.reduce(group, gradient)
            got += gradient
        return got + reducer.flush(group)

    for found in of_two(work):
        np.testing.assert_allclose(found, 0.9, rtol=1e-5)


# --- mutants


class Mutant(SteppedDct):
    """A reducer with another core."""

    def __init__(self, core: type[Dct], share: float = SHARE) -> None:
        super().__init__(SIZE, share)
        self.core.__class__ = core


class Forgets(Dct):
    """Drops error feedback."""

    def _part(self, *given: Any) -> Any:
        part = super()._part(*given)
        self.residual.fill(0)
        return part


class Frozen(Dct):
    """Keeps the first threshold."""

    def _select(self, sizes: F32) -> I64:
        return np.flatnonzero(sizes > self.threshold) if self.threshold else super()._select(sizes)


class NeverSums(Dct):
    """Keeps the first variance."""

    def _is_variance_due(self) -> bool:
        return False


def test_dropped_feedback_is_found() -> None:
    with pytest.raises(AssertionError, match="of the gradients"):
        check_conserved(lambda rank: Mutant(Forgets), SIZE, 60)


def test_a_frozen_threshold_is_found() -> None:
    with pytest.raises(AssertionError, match="share of"):
        check_share(lambda: Mutant(Frozen, 0.02), 0.02)


def test_a_variance_that_is_never_summed_is_found() -> None:
    def never() -> SteppedDct:
        reducer = quick()
        reducer.core.__class__ = NeverSums
        return reducer

    with pytest.raises(AssertionError, match="a variance of"):
        check_variance_follows(never)
