"""Every name that `train.reduce` may have is a reducer for the model's gradient."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from freshet.config.spec.model import Train
from freshet.model.hedge import HedgeDense
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.reducers.build import build_reducer
from freshet.trainer.reducers.plain import PlainReducer
from tests.fixtures.local_ranks import Member, Together, results_of
from tests.fixtures.specs import make_batch, make_spec

SPEC = make_spec(ids=2, dims=(8,), deep=(16,))
NAMES = next(f for f in fields(Train) if f.name == "reduce").metadata["form"].words


@pytest.mark.parametrize("name", NAMES)
def test_reducer_sums_the_gradient_of_the_model(name: Any) -> None:
    spec = replace(SPEC, train=replace(SPEC.train, reduce=name))
    models = [HedgeDense(spec, training=True, precision="fp32") for _ in range(2)]
    sums = [GradientSums(build_reducer(spec, model)) for model in models]
    lanes = [model.lane() for model in models]
    for i, lane in enumerate(lanes):
        lane.forward_backward(make_batch(spec, 64, np.random.default_rng(i)))
    exact = sum(lane.reduce_buffers()[0].astype(np.float64) for lane in lanes)
    together = Together(2)

    def work(i: int) -> Any:
        group = Member(together, i, 2)
        sums[i].reduce(group, [lanes[i]])
        sums[i].flush(group)

    results_of(lambda: work(0), lambda: work(1))

    assert sums[0].lossy == (name != "fp32")
    for lane, of in zip(lanes, sums, strict=True):
        whole = lane.reduce_buffers()[0] + (0 if of.carry is None else of.carry)
        np.testing.assert_allclose(whole, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    assert isinstance(sums[0].reducer, PlainReducer) == (name == "fp32")
