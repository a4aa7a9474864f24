"""The native step of the default model against autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from freshet import _native
from freshet.config.spec.model import Spec
from freshet.model.hedge import HedgeDense
from tests.fixtures.specs import make_batch, make_spec
from tests.unit.model.oracle import Oracle

SPECS: dict[str, dict[str, Any]] = {
    "the default": {"dense": [(True, True), (False, False), (True, False)]},
    "only ids": {"ids": 5},
    "odd widths": {"dims": (5,), "deep": (33, 7), "dense": [(False, True)]},
    "one hidden layer": {"deep": (24,)},
    "no hidden layer": {"deep": (), "dense": [(True, True)]},
    "three hidden layers": {"deep": (64, 48, 16)},
    "lists": {"lists": ("mean", "sum"), "dense": [(True, False)]},
    "crosses": {"crosses": 2, "experts": ("wide", "cross", "fm", "deep")},
    "several groups": {
        "ids": 6,
        "dims": (16, 8, 24),
        "lists": ("mean",),
        "crosses": 1,
        "experts": ("cross", "deep"),
    },
    "several labels": {"losses": ("logloss", "huber", "mse"), "lists": ("sum",), "dense": [(True, True)]},
    "wide only": {"experts": ("wide",)},
    "fm only": {"experts": ("fm",), "dims": (16, 4)},
    "wide and cross": {"experts": ("wide", "cross"), "crosses": 1},
    "mlp alone": {"kind": "mlp", "dims": (16, 8), "dense": [(True, True)], "lists": ("mean",)},
    "mlp of numbers alone": {"kind": "mlp", "ids": 0, "dense": [(False, False)] * 3},
    "linear alone": {"kind": "linear", "losses": ("logloss", "mse"), "lists": ("mean",)},
    "linear of numbers too": {
        "kind": "linear",
        "losses": ("logloss", "huber"),
        "dense": [(False, True), (True, False)],
    },
    "linear of numbers alone": {"kind": "linear", "ids": 0, "dense": [(False, True)] * 2},
    "experts of before, by default": {
        "defaults": 1,
        "lists": ("mean",),
        "dense": [(True, True), (False, False)],
        "losses": ("logloss", "mse"),
    },
    "linear of before": {"defaults": 1, "kind": "linear", "dense": [(False, True)]},
    "all experts": {
        "ids": 4,
        "dims": (16, 8),
        "lists": ("mean", "sum"),
        "crosses": 1,
        "dense": [(True, True), (False, True), (False, False)],
        "losses": ("logloss", "huber", "mse"),
        "experts": ("wide", "fast", "cross", "fm", "deep", "counts", "stack"),
        "deep": (20,),
    },
    "fast only": {"experts": ("fast",), "dense": [(False, True)]},
    "counts beside wide": {"experts": ("counts", "wide"), "lists": ("mean", "sum")},
    "stack of two": {"experts": ("fast", "stack", "wide"), "losses": ("mse", "logloss")},
    "stack of one": {"experts": ("stack", "deep")},
    "momentum": {"experts": ("wide", "deep"), "dense_momentum": 0.0},
}


def close(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    wanted = np.asarray(wanted, np.float64)
    size = max(1.0, float(np.abs(wanted).max(initial=0)))
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=tolerance * size, rtol=tolerance)


def agree(
    spec: Spec,
    *,
    steps: int,
    size: int = 200,
    lanes: int = 1,
    kernels: str | None = None,
    together: bool = True,
    tolerance: float = 1e-4,
) -> None:
    """Run both side by side. `together`: the oracle goes on from the model's fp32 weights after every step.

    Without it both drift apart slowly, and not by an error: Adam divides by the gradient's own size, so where
    the true gradient is 0 rounding alone decides the direction of a whole step.
    """
    rng = np.random.default_rng(3)
    model = HedgeDense(spec, training=True, precision="fp32", kernels=kernels)
    state = model.state()
    if "weights/mlp/head" in state:  # zero is a special place: gradients vanish there
        state["weights/mlp/head"] = rng.normal(size=state["weights/mlp/head"].shape).astype(np.float32) * 0.1
        model.load_state(state)
    oracle = Oracle(spec, state)
    workers = [model.lane() for _ in range(lanes)]
    for _ in range(steps):
        parts = []
        for lane in workers:
            batch = make_batch(spec, size, rng)
            want = oracle.forward_backward(batch)
            close(model.score(batch), want["predictions"], tolerance)
            result = lane.forward_backward(batch)
            close(result.predictions, want["predictions"], tolerance)
            close(result.expert_losses, want["losses"], tolerance)
            for found, wanted in zip(result.gradients, want["gradients"], strict=True):
                close(found, wanted, tolerance)
            parts.append(want)
        model.step(workers)
        oracle.step(parts)
        after = model.state()
        close(after["hedge/loss"], oracle.loss, tolerance)
        close(after["weights/bias"], oracle.bias, tolerance)
        close(model.mixture(), oracle.mixture(), tolerance)
        wanted_of = {**oracle.weights, **({"heads": oracle.heads} if oracle.heads.numel() else {})}
        assert ("weights/heads" in after) == ("heads" in wanted_of)
        for name, wanted in wanted_of.items():
            found = after[f"weights/{name}"].reshape(wanted.shape)
            close(found, wanted.detach(), tolerance)
            if together:
                wanted.data[:] = torch.tensor(found)


@pytest.mark.parametrize("name", SPECS)
def test_row_and_dense_gradients_equal_those_of_autograd(name: str) -> None:
    agree(make_spec(**SPECS[name]), steps=4)


@pytest.mark.parametrize("name", ["the default", "several labels", "several groups"])
def test_fifty_steps_follow_the_trajectory_of_autograd(name: str) -> None:
    agree(make_spec(**SPECS[name]), steps=50, size=24, together=False, tolerance=5e-3)


def test_two_lanes_step_once_on_the_sum_of_what_they_saw() -> None:
    agree(make_spec(**SPECS["several labels"]), steps=5, lanes=2)


@pytest.mark.parametrize("size", [1, 2, 7, 255, 256, 257, 600])
def test_batches_of_any_size_pass_in_chunks(size: int) -> None:
    agree(make_spec(**SPECS["the default"]), steps=2, size=size)


@pytest.mark.parametrize("kernels", _native.kernel_names())
def test_every_instruction_set_computes_the_same_step(kernels: str) -> None:
    agree(make_spec(**SPECS["several groups"]), steps=3, kernels=kernels)
