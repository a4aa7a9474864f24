"""The same step with matrix products in bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from freshet import _native
from freshet.config.spec.model import Spec
from freshet.model.hedge import HedgeDense
from tests.fixtures.specs import make_batch, make_spec
from tests.unit.model.oracle import Oracle

SPECS: dict[str, dict[str, Any]] = {
    "the default": {"dense": [(False, True)]},
    "odd widths": {"dims": (5, 16), "deep": (33, 7), "losses": ("logloss", "mse")},
    "no hidden layer": {"deep": ()},
}


def model_of(spec: Spec, kernels: str, precision: Any = "bf16") -> HedgeDense:
    model = HedgeDense(spec, training=True, precision=precision, kernels=kernels)
    state = model.state()
    head = state["weights/mlp/head"]
    state["weights/mlp/head"] = np.random.default_rng(5).normal(size=head.shape).astype(np.float32) * 0.1
    model.load_state(state)
    return model


def distance(found: Any, wanted: Any) -> float:
    """Length of the difference as a share of the length of what is wanted."""
    wanted = np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted)) / max(float(np.linalg.norm(wanted)), 1e-9)


@pytest.mark.parametrize("kernels", _native.kernel_names())
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", [1, 37, 256, 301])
def test_gradients_are_those_of_autograd_but_for_rounding(kernels: str, name: str, size: int) -> None:
    spec = make_spec(**SPECS[name])
    model = model_of(spec, kernels)
    batch = make_batch(spec, size, np.random.default_rng(size))
    want = Oracle(spec, model.state(), rounding=True).forward_backward(batch)
    lane = model.lane()
    result = lane.forward_backward(batch)
    assert distance(result.predictions, want["predictions"]) < 1e-4
    for found, wanted in zip(result.gradients, want["gradients"], strict=True):
        assert distance(found, wanted) < 0.01
    summed = model.named_weights("g", lane.native.gradients())
    for weight, wanted in want["weights"].items():
        assert distance(summed[f"g/{weight}"].reshape(wanted.shape), wanted.numpy()) < 0.01


@pytest.mark.skipif(
    "x86-64-v4-bf16" not in _native.kernel_names(), reason="this processor multiplies no bf16"
)
def test_processors_without_bf16_compute_what_those_with_it_do() -> None:
    spec = make_spec(**SPECS["the default"])
    batch = make_batch(spec, 200, np.random.default_rng(1))
    own = model_of(spec, "x86-64-v4-bf16").lane().forward_backward(batch)
    emulated = model_of(spec, "x86-64-v3").lane().forward_backward(batch)
    assert distance(emulated.predictions, own.predictions) < 1e-3
    for a, b in zip(emulated.gradients, own.gradients, strict=True):
        assert distance(a, b) < 2e-3


def test_training_in_bf16_ends_where_training_in_fp32_does() -> None:
    spec = make_spec(ids=4)
    rng = np.random.default_rng(2)
    batches = [make_batch(spec, 64, rng) for _ in range(60)]
    scores = []
    for precision in ("fp32", "bf16"):
        model = HedgeDense(spec, training=True, precision=precision)
        lane = model.lane()
        for batch in batches:
            lane.forward_backward(batch)
            model.step([lane])
        scores.append(model.score(batches[0]))
    np.testing.assert_allclose(scores[0], scores[1], atol=0.01)
