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


@pytest.mark.parametrize(("loss", "wild"), [("huber", 3.4028234e38), ("mse", 1e25)])
@pytest.mark.parametrize("kind", ["hedge", "deepfm"])
def test_a_label_beyond_all_bounds_teaches_nothing(kind: str, loss: Any, wild: float) -> None:
    spec, rng = make_spec(kind=kind, losses=(loss,)), np.random.default_rng(1)
    batches = [make_batch(spec, 64, rng) for _ in range(12)]
    for batch in batches:
        assert batch.labels is not None
        batch.labels.value[:] = rng.normal(size=64) * 0.3
    usual = batches[10].labels
    assert usual is not None
    usual.value[5] = wild
    model = trained(spec, batches)

    assert model.not_finite == {"samples": 1, "steps": 0}
    assert model.finite()
    assert np.abs(model.score(make_batch(spec, 50, rng))).max() < 10


@pytest.mark.parametrize("wild", [1e25, 3.4028235e38])
@pytest.mark.parametrize("columns", [1, 3, 4])
@pytest.mark.parametrize("kind", ["mlp", "hedge", "deepfm"])
def test_a_wild_raw_number_leaves_dense_weights_learning(kind: str, columns: int, wild: float) -> None:
    """Its squared gradient is infinite; in Adam's second moment it would stop all steps for ever."""
    spec, rng = make_spec(kind=kind, dense=[(False, False)] * columns), np.random.default_rng(1)
    batches = [make_batch(spec, 64, rng) for _ in range(16)]
    batches[10].dense[5:25] = wild  # labels of both kinds: one predicted right has no gradient
    model = trained(spec, batches)
    before, lane = model.state(), model.lane()
    for batch in batches[:10]:
        lane.forward_backward(batch)
        model.step([lane])
    after = model.state()

    assert model.not_finite["steps"] == 1
    assert model.finite()
    moved = [name for name in before if name.startswith("weights/") and before[name].size > 1]
    assert moved
    for name in moved:
        assert (before[name] != after[name]).mean() > 0.3, name
        assert np.isfinite(after[name]).all(), name


@pytest.mark.parametrize("kind", ["hedge", "mlp"])
def test_infinite_moments_of_an_older_version_begin_anew(kind: str) -> None:
    """Versions of native models from before gradients were checked may hold them, with finite weights."""
    spec, rng = make_spec(kind=kind, dense=[(True, False)]), np.random.default_rng(1)
    model = trained(spec, [make_batch(spec, 64, rng) for _ in range(3)])
    state, lane = model.state(), model.lane()
    floats = [n for n in state if n.startswith("optimizer/") and state[n].dtype.kind == "f"]
    assert len(floats) > 2
    for name in floats:
        broken = {**state, name: np.full_like(state[name], np.inf)}
        model.load_state(broken)
        assert model.finite(), name
        lane.forward_backward(make_batch(spec, 64, rng))
        model.step([lane])
        assert model.finite(), name
        after = model.state()
        assert all((after[n] != state[n]).any() for n in after if n.startswith("weights/mlp")), name


@pytest.mark.parametrize("kind", ["hedge", "mlp"])
def test_what_an_optimiser_holds_counts_as_state(kind: str) -> None:
    spec = make_spec(kind=kind, dense=[(True, False)])
    model = trained(spec, [make_batch(spec, 64, np.random.default_rng(1))])
    moment = model.moments()[1]
    moment[0] = np.inf
    assert not model.finite()


@pytest.mark.parametrize("kind", ["hedge", "deepfm"])
def test_one_wild_number_leaves_a_column_as_it_was(kind: str) -> None:
    spec, rng = make_spec(kind=kind, dense=[(True, False)]), np.random.default_rng(1)
    batches = [make_batch(spec, 256, rng) for _ in range(20)]
    for batch in batches:
        batch.dense[:] = 5 + rng.normal(size=batch.dense.shape)
    batches[10].dense[7] = 1e9
    count, mean, squares = trained(spec, batches).state()["statistics/dense"].reshape(-1)

    assert count == 20 * 256
    assert abs(mean - 5) < 0.5
    assert 0.9 < np.sqrt(squares / count) < 1.8


@pytest.mark.parametrize("kind", ["hedge", "deepfm"])
def test_a_column_at_a_new_level_is_followed(kind: str) -> None:
    spec, rng = make_spec(kind=kind, dense=[(True, False)]), np.random.default_rng(1)
    batches = [make_batch(spec, 256, rng) for _ in range(60)]
    for i, batch in enumerate(batches):
        batch.dense[:] = (5 if i < 20 else 1005) + rng.normal(size=batch.dense.shape)
    count, mean, squares = trained(spec, batches).state()["statistics/dense"].reshape(-1)
    seen = np.concatenate([batch.dense for batch in batches])

    assert abs(mean - seen.mean()) < 0.3 * seen.std()
    assert 0.5 < np.sqrt(squares / count) / seen.std() < 1.2


@pytest.mark.parametrize("kind", ["hedge", "deepfm"])
@pytest.mark.parametrize("first", [0.0, 3.0])
def test_a_column_that_begins_to_vary_is_measured(kind: str, first: float) -> None:
    """It has no deviation yet that could bound what a step adds."""
    spec, rng = make_spec(kind=kind, dense=[(True, False)]), np.random.default_rng(1)
    batches = [make_batch(spec, 256, rng) for _ in range(20)]
    for i, batch in enumerate(batches):
        batch.dense[:] = first if i < 4 else np.float32(rng.random(batch.dense.shape) < 0.01)
    count, mean, squares = trained(spec, batches).state()["statistics/dense"].reshape(-1)
    seen = np.concatenate([batch.dense for batch in batches]).astype(np.float64)

    np.testing.assert_allclose([mean, squares / count], [seen.mean(), seen.var()], rtol=1e-6)
