"""Models that are one network, in torch around native gather and row gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, Mismatch
from freshet.model import NATIVE_KINDS, SERVING_PREFIXES, TRUST_RATIOS, build_model
from freshet.model.custom import Inputs, Model, Shape
from tests.fixtures.specs import make_batch, make_spec
from tests.unit.model.networks import KINDS, same, spec_of
from tests.unit.model.oracle import Oracle


class WrongShape(Model):
    def forward(self, x: Inputs) -> torch.Tensor:
        return torch.zeros(x.size, 7)


class NotAModel:
    pass


def shaken(spec: Spec, **options: Any) -> Any:
    """A model whose weights are away from zero, where gradients would vanish."""
    model = build_model(spec, training=True, **options)
    state, rng = model.state(), np.random.default_rng(1)
    for name, array in state.items():
        if name.startswith("weights/network"):
            state[name] = (array + rng.normal(size=array.shape) * 0.1).astype(np.float32)
    model.load_state(state)
    return model


class FromOracle(Oracle):
    """The oracle's starts, losses and steps around a network of float64."""

    def __init__(self, spec: Spec, model: Any) -> None:
        super().__init__(spec, {})
        self.experts, self.K = ("one",), 1
        self.bias, self.squares, self.loss = np.zeros((3, self.L, 1))
        with torch.random.fork_rng():
            twin = build_model(spec, training=True)
        twin.load_state(model.state())
        self.network = twin.network.double()  # type: ignore[attr-defined]
        self.weights = dict(self.network.named_parameters())
        self.first = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.second = {n: torch.zeros_like(w) for n, w in self.weights.items()}

    def logits(self, inputs: Any, rows: list[Any]) -> Any:
        x, scalars, _ = self.gathered(inputs, rows)
        shape = self.network.shape
        vectors, at = {}, shape.dense
        for name, dim in shape.vectors.items():
            vectors[name] = x[:, at : at + dim]
            at += dim
        given = Inputs(inputs.size, vectors, x[:, shape.dense :], x[:, : shape.dense], scalars["linear"])
        return self.network(given)[:, :, None]


@pytest.mark.parametrize(
    ("kind", "optimizer", "momentum"),
    [
        *((kind, "adam", 0.9) for kind in KINDS),
        ("deepfm", "lamb", 0.9),
        (KINDS[-1], "lamb", 0.0),
        ("dlrm", "adam", 0.0),
    ],
)
def test_gradients_and_steps_equal_autograd_of_the_whole_model(
    kind: str, optimizer: str, momentum: float
) -> None:
    spec = spec_of(kind, dense_optimizer=optimizer, dense_momentum=momentum)
    model = shaken(spec)
    oracle = FromOracle(spec, model)
    rng = np.random.default_rng(0)
    lanes = [model.lane() for _ in range(2)]
    for _ in range(4):
        parts = []
        for lane in lanes:
            batch = make_batch(spec, 90, rng)
            want = oracle.forward_backward(batch)
            found = lane.forward_backward(batch)
            np.testing.assert_allclose(found.predictions, want["predictions"], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(found.expert_losses, want["losses"], rtol=1e-3)
            for a, b in zip(found.gradients, want["gradients"], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
            parts.append(want)
        model.step(lanes)
        oracle.step(parts)
        after = model.state()
        np.testing.assert_allclose(after["weights/bias"], oracle.bias[:, 0], rtol=1e-4, atol=1e-5)
        for name, wanted in oracle.weights.items():
            np.testing.assert_allclose(after[f"weights/network/{name}"], wanted.detach(), atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("kind", KINDS)
def test_restored_network_trains_and_serves_to_the_bit(kind: str, optimizer: str) -> None:
    spec = spec_of(kind, dense_optimizer=optimizer)
    rng = np.random.default_rng(0)
    model = shaken(spec)
    lane = model.lane()
    for _ in range(3):
        lane.forward_backward(make_batch(spec, 30, rng))
        model.step([lane])
    resumed = build_model(spec, training=True)
    resumed.load_state(model.state())
    batch = make_batch(spec, 30, rng)
    for one in (model, cast(Any, resumed)):
        lane = one.lane()
        for frozen in (False, True):
            lane.forward_backward(batch)
            if frozen:
                one.freeze_variance()
            one.step([lane])
    same(model.state(), resumed.state())
    served = build_model(spec, training=False)
    state = {n: a for n, a in model.state().items() if n.startswith(SERVING_PREFIXES)}
    served.load_state(state, weights_only=True)
    np.testing.assert_array_equal(served.score(batch), model.score(batch))
    np.testing.assert_array_equal(served.score(replace(batch, labels=None)), model.score(batch))
    assert served.finite()


def test_lamb_goes_on_from_a_state_of_adam() -> None:
    rng = np.random.default_rng(0)
    adam, lamb = (shaken(spec_of("deepfm", dense_optimizer=name)) for name in ("adam", "lamb"))
    lane = adam.lane()
    lane.forward_backward(make_batch(adam.spec, 30, rng))
    adam.step([lane])
    lamb.load_state(adam.state())
    before, lane = lamb.state(), lamb.lane()
    lane.forward_backward(make_batch(lamb.spec, 30, rng))
    lamb.freeze_variance()  # as a carry of 1-bit Adam has it
    lamb.step([lane])
    assert not before[TRUST_RATIOS].any()
    assert lamb.state()[TRUST_RATIOS].all(), "the first step begins the means"


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_follow_the_seed_alone(kind: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = build_model(spec_of(kind), training=True).state()
    assert torch.rand(1) == expected
    same(first, build_model(spec_of(kind), training=True).state())
    other = build_model(spec_of(kind, seed=1), training=True).state()
    assert any((other[n] != a).any() for n, a in first.items() if n.startswith("weights/network"))


@pytest.mark.parametrize("kind", ["dlrm", "deepfm"])
def test_training_in_bf16_learns_too(kind: str) -> None:
    spec = make_spec(kind=kind, ids=4, deep=(16,))
    model = build_model(spec, training=True, precision="bf16")
    lane = model.lane()
    rng = np.random.default_rng(0)
    batch = make_batch(spec, 64, rng)
    losses = []
    for _ in range(150):
        losses.append(lane.forward_backward(batch).expert_losses.sum())
        model.step([lane])
    assert losses[-1] < 0.95 * losses[0]


def test_dense_weight_zero_leaves_a_networks_state_alone() -> None:
    model = shaken(spec_of("deepfm"))
    before = model.state()
    lane = model.lane()
    batch = make_batch(model.spec, 30, np.random.default_rng(0))
    kept = [g.copy() for g in lane.forward_backward(batch, 0.0).gradients]
    model.step([lane])
    same(model.state(), before)
    for a, b in zip(kept, lane.forward_backward(batch).gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [*NATIVE_KINDS, *KINDS, "tests.unit.model.test_networks:WrongShape"])
def test_batch_without_samples_changes_nothing(kind: str) -> None:
    """As one of blocks that were all refused; a class of a user need not compute on empty tensors."""
    model = build_model(spec_of(kind), training=True)
    before, lane = model.state(), model.lane()
    batch = make_batch(spec_of(kind), 0, np.random.default_rng(0))

    result = lane.forward_backward(batch)

    assert [g.shape for g in result.gradients] == [group.rows.shape for group in batch.groups]
    assert not any(gradient.any() for gradient in result.gradients)
    assert (result.predictions.shape, lane.score(batch).shape, model.score(batch).shape) == ((0, 2),) * 3
    assert (len(result.rows), len(result.expert_losses)) == (2, 2)
    assert not result.rows.any()
    assert not result.expert_losses.any()
    assert not any(sums.any() for sums in lane.reduce_buffers()), "ranks add zeros for such a batch"
    model.step([lane])
    same(model.state(), before)


def test_ranks_that_add_up_a_networks_sums_take_the_same_step() -> None:
    ranks = [shaken(spec_of("deepfm")) for _ in range(2)]
    lanes = [model.lane() for model in ranks]
    rng = np.random.default_rng(0)
    for lane in lanes:
        lane.forward_backward(make_batch(ranks[0].spec, 20, rng))
    for left, right in zip(*(lane.reduce_buffers() for lane in lanes), strict=True):
        left[:] = right[:] = left + right
    for model, lane in zip(ranks, lanes, strict=True):
        model.step([lane])
    same(ranks[0].state(), ranks[1].state())


def test_a_class_of_ones_own_takes_the_specs_options() -> None:
    model = build_model(spec_of(KINDS[-1], options={"width": 5}), training=True)
    assert model.state()["weights/network/inner.weight"].shape[0] == 5


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dlmr", "hedge, linear, dlrm"),
        ("no.such.module:Class", "there is no module no"),
        ("tests.unit.model.test_networks:Missing", "there is no Missing in"),
        ("tests.unit.model.test_networks:NotAModel", r"subclass of freshet\.Model"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_reason(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_model(spec_of(kind), training=True)


def test_options_that_a_class_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'depth'"):
        build_model(spec_of(KINDS[-1], options={"depth": 5}), training=True)


def test_logits_of_the_wrong_shape_are_refused() -> None:
    spec = spec_of("tests.unit.model.test_networks:WrongShape")
    model = build_model(spec, training=True)
    with pytest.raises(ConfigError, match=r"\(4, 2\).*\n.*\(4, 7\)|returned \(4, 7\)"):
        model.score(make_batch(spec, 4, np.random.default_rng(0)))


def test_dlrm_refuses_vectors_of_different_lengths() -> None:
    with pytest.raises(ConfigError, match="one dim for all tables"):
        build_model(make_spec(kind="dlrm", dims=(8, 16)), training=True)


def test_a_state_of_another_class_is_refused() -> None:
    with pytest.raises(Mismatch, match="weights/network"):
        build_model(spec_of("deepfm"), training=True).load_state(
            build_model(spec_of("dcnv2"), training=True).state()
        )


def test_a_forward_must_be_defined() -> None:
    with pytest.raises(NotImplementedError, match="must define forward"):
        Model(Shape(("y",), {}, 0, ()))(None)
