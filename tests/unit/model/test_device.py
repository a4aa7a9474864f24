"""Networks on another device learn what they do on the processor; what cannot be is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from freshet.config.spec.model import Spec
from freshet.errors import ConfigError
from freshet.model import Precision, build_model
from freshet.model.device import CpuPlacement, Placement, StagedPlacement, placement_factory
from freshet.model.torch_model import TorchDense
from freshet.model.trial import try_out
from tests.fixtures.specs import make_batch, make_spec
from tests.unit.model.networks import KINDS, spec_of

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="torch sees no GPU")


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Torch warns of some things once a process, perhaps in an earlier test."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def built(spec: Spec, new_placement: Callable[[], Placement]) -> TorchDense:
    """The spec's network in its initial state, away from zero."""
    plain: Any = build_model(spec, training=True)
    rng = np.random.default_rng(1)
    state = {
        name: (array + rng.normal(size=array.shape) * 0.1).astype(array.dtype)
        if name.startswith("weights/network")
        else array
        for name, array in plain.state().items()
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.model.seed)
        model = TorchDense(
            spec,
            type(plain.network),
            training=True,
            precision="fp32",
            new_placement=new_placement,
        )
    model.load_state(state)
    return model


def trained(model: TorchDense, *, reduced: bool) -> tuple[dict[str, Any], list[Any]]:
    """The state after six steps of two lanes on batches of many sizes, and all that the batches gave.

    `reduced`: the lanes are merged, and another rank adds its sums, equal to ours.
    """
    rng = np.random.default_rng(2)
    lanes, given = [model.lane() for _ in range(2)], []
    for size in (7, 30, 1, 45, 30, 64):
        for lane in lanes:
            batch = make_batch(model.spec, size, rng)
            result = lane.forward_backward(batch)
            given += [result.predictions, result.expert_losses, *(g.copy() for g in result.gradients)]
            given.append(lane.score(batch))
        if reduced:
            lanes[0].merge(lanes[1])
            for buffer in lanes[0].reduce_buffers():
                np.multiply(buffer, 2, out=buffer)
        model.step(lanes[:1] if reduced else lanes)
    return model.state(), given


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_staged_rows_change_only_the_order_of_sums(kind: str, reduced: bool) -> None:
    spec = spec_of(kind)
    state, given = trained(built(spec, CpuPlacement), reduced=reduced)
    staged_state, staged_given = trained(
        built(spec, lambda: StagedPlacement(torch.device("cpu"))), reduced=reduced
    )

    for name, array in state.items():
        np.testing.assert_allclose(staged_state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    for a, b in zip(given, staged_given, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("new_placement", [CpuPlacement, lambda: StagedPlacement(torch.device("cpu"))])
@pytest.mark.parametrize("size", [0, 3])
def test_read_only_arrays_are_sent(
    new_placement: Callable[[], Placement], size: int, every_warning: None
) -> None:
    """The columns of a batch that came from an embedder are views of its message."""
    column = np.frombuffer(np.arange(size, dtype=np.float32).tobytes(), np.float32)

    sent = new_placement().send("y", column)

    sent += 1
    assert sent.tolist() == list(range(1, size + 1))
    assert column.tolist() == list(range(size))


def test_writable_arrays_are_sent_without_a_copy() -> None:
    column = np.zeros(3, np.float32)
    assert np.shares_memory(CpuPlacement().send("y", column).numpy(), column)


@pytest.mark.parametrize("kind", KINDS)
def test_received_batches_are_trained_on(kind: str, every_warning: None) -> None:
    spec = spec_of(kind)
    batch = make_batch(spec, 16, np.random.default_rng(3))
    labels = batch.labels
    assert labels is not None
    for array in (batch.dense, labels.index, labels.value, labels.weight):
        array.setflags(write=False)
    lane = built(spec, CpuPlacement).lane()

    assert np.isfinite(lane.forward_backward(batch).predictions).all()


@pytest.mark.parametrize("features", [{"ids": 0, "dims": ()}, {"ids": 1, "dims": (16, 8)}])
def test_batches_whose_rows_alone_learn_are_taken(features: dict[str, Any]) -> None:
    """Batches that were applied before teach no dense weight; a spec may have no rows, or an unused table."""
    spec = make_spec(kind="dcnv2", dense=[(True, True)], **features)
    model = built(spec, lambda: StagedPlacement(torch.device("cpu")))
    lane, batch = model.lane(), make_batch(spec, 8, np.random.default_rng(3))

    result = lane.forward_backward(batch, 0.0)

    assert [g.shape for g in result.gradients] == [g.rows.shape for g in batch.groups]
    assert not model.lane().gradient.any()


def test_what_other_ranks_add_is_part_of_the_step() -> None:
    spec = spec_of("dcnv2")
    alone, _ = trained(built(spec, CpuPlacement), reduced=False)
    among, _ = trained(built(spec, CpuPlacement), reduced=True)

    assert among["statistics/dense"][0, 0] == 2 * alone["statistics/dense"][0, 0]


def test_a_staged_place_that_has_scored_can_learn() -> None:
    spec = spec_of("deepfm")
    model = built(spec, lambda: StagedPlacement(torch.device("cpu")))
    lane, rng = model.lane(), np.random.default_rng(0)
    lane.score(make_batch(spec, 8, rng))

    lane.forward_backward(make_batch(spec, 8, rng))
    model.step([lane])
    assert model.state()["optimizer/step"].tolist() == [1]


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps", ""])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"expected cpu, cuda, or cuda:N"):
        placement_factory(device)


@pytest.mark.parametrize("kind", ["hedge", "linear", "mlp"])
def test_native_kinds_say_that_they_compute_on_the_processor(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"this kind is native code"):
        build_model(make_spec(kind=kind), training=True, device="cuda")


@pytest.mark.skipif(GPU, reason="torch sees a GPU")
def test_without_a_gpu_cuda_says_so() -> None:
    with pytest.raises(ConfigError, match=r"sees no GPU"):
        build_model(spec_of("dlrm"), training=True, device="cuda")


@needs_gpu
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch sees \d+ GPUs"):
        placement_factory("cuda:99")


@needs_gpu
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_learns_what_the_processor_does(kind: str, reduced: bool) -> None:
    spec = spec_of(kind)
    state, given = trained(built(spec, CpuPlacement), reduced=reduced)
    on_gpu, given_by_gpu = trained(built(spec, placement_factory("cuda")), reduced=reduced)

    for name, array in state.items():
        np.testing.assert_allclose(on_gpu[name], array, rtol=1e-3, atol=1e-4, err_msg=name)
    for a, b in zip(given, given_by_gpu, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-4)


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_class_of_ones_own_is_tried_on_the_gpu(precision: Precision) -> None:
    spec = spec_of(KINDS[-1])
    try_out(replace(spec, train=replace(spec.train, precision=precision)), device="cuda")
