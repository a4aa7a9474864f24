"""Numbers at the edge of float32, and columns that do not vary: a model stays finite and learns on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from freshet.model import NATIVE_KINDS, build_model
from tests.fixtures.specs import make_batch, make_spec
from tests.unit.model.networks import KINDS

ALL_KINDS = (*NATIVE_KINDS, *KINDS)


def trained(spec: Any, batches: list[Any]) -> Any:
    """A model after one step for each batch."""
    model = build_model(spec, training=True)
    lane = model.lane()
    for batch in batches:
        lane.forward_backward(batch)
        model.step([lane])
    return model


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_column_of_equal_numbers_leaves_scores_finite(kind: str) -> None:
    """The rounding errors of its sum of squares about the mean may exceed the sum itself, below 0 too."""
    spec, rng = make_spec(kind=kind, dense=[(True, False)]), np.random.default_rng(1)
    batch = make_batch(spec, 100, rng)
    batch.dense[:] = 1234.567
    model = trained(spec, [batch])

    assert model.state()["statistics/dense"][..., 2].min() >= 0
    assert np.isfinite(model.score(make_batch(spec, 50, rng))).all()


@pytest.mark.parametrize("kind", ["hedge", "deepfm"])
def test_a_sum_of_squares_below_0_reads_as_0(kind: str) -> None:
    """Versions from before the bound may hold one."""
    spec, rng = make_spec(kind=kind, dense=[(True, False)]), np.random.default_rng(1)
    model = trained(spec, [make_batch(spec, 100, rng)])
    state = model.state()
    state["statistics/dense"].reshape(-1, 3)[0, 2] = -1e-6
    model.load_state(state)

    assert np.isfinite(model.score(make_batch(spec, 50, rng))).all()
