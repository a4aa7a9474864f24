"""Steps of few rows: every row weighs the same, however many come with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from freshet.config.spec.model import Spec
from freshet.model import build_model
from tests.fixtures.specs import make_batch, make_spec

KINDS = ("mlp", "hedge", "dlrm", "deepfm", "dcnv2")


def spec_of(kind: str, batch_rows: int) -> Spec:
    spec = make_spec(kind=kind, ids=3, deep=(16,))
    return replace(spec, train=replace(spec.train, batch_rows=batch_rows))


def first_moments(spec: Spec, times: int) -> dict[str, Any]:
    """Adam's first moments after one step on eight rows, each learned `times` times: .1 of the gradient."""
    model = build_model(spec, training=True)
    rng = np.random.default_rng(1)
    state = model.state()
    for name, array in state.items():
        if name.startswith("weights/") and array.ndim and array.dtype == np.float32:
            state[name] = (array + rng.normal(size=array.shape) * 0.1).astype(np.float32)
    model.load_state(state)
    lane, batch = model.lane(), make_batch(spec, 8, np.random.default_rng(0))
    for _ in range(times):
        lane.forward_backward(batch)
    model.step([lane])
    return {name: array for name, array in model.state().items() if name.startswith("optimizer/first")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_fewer_rows_than_a_batch_is_so_much_smaller(kind: str) -> None:
    one, four = (first_moments(spec_of(kind, 256), times) for times in (1, 4))

    assert any(np.abs(array).max() > 0 for array in one.values())
    for name, array in one.items():
        np.testing.assert_allclose(four[name], 4 * array, rtol=1e-4, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_more_rows_than_a_batch_is_their_mean(kind: str) -> None:
    one, four = (first_moments(spec_of(kind, 8), times) for times in (1, 4))

    assert any(np.abs(array).max() > 0 for array in one.values())
    for name, array in one.items():
        np.testing.assert_allclose(four[name], array, rtol=1e-4, atol=1e-9, err_msg=name)


def changes(spec: Spec, scale: float) -> dict[str, Any]:
    """The changes of weights by one step on one row, whose loss has the weight `scale`."""
    model = build_model(spec, training=True)
    lane, batch = model.lane(), make_batch(spec, 1, np.random.default_rng(0))
    assert batch.labels is not None
    light = replace(batch, labels=replace(batch.labels, weight=batch.labels.weight * np.float32(scale)))
    before = model.state()
    lane.forward_backward(light)
    model.step([lane])
    return {
        name: array - before[name]
        for name, array in model.state().items()
        if name.startswith("weights/") and name != "weights/bias"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_small_step_does_not_depend_on_the_batch_size(kind: str) -> None:
    small, large = (changes(spec_of(kind, batch_rows), 1e-6) for batch_rows in (16, 65_536))

    assert any(np.abs(array).max() > 0 for array in small.values())
    for name, array in small.items():
        np.testing.assert_allclose(large[name], array, rtol=1e-2, atol=1e-7, err_msg=name)
