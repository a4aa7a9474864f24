"""Both gathers give a network the same input, and rows the same gradients, but for the order of sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from freshet.config.spec.model import Spec
from freshet.model.device import CpuPlacement, Placement, StagedPlacement
from freshet.model.gather import DeviceGather, Gather, Gathered, HostGather, Standards
from freshet.model.inputs import ModelInputs
from freshet.model.plan import input_plan
from freshet.types import F32
from tests.fixtures.specs import make_batch, make_spec

DENSE = [(True, True), (False, False), (False, True)]

SPECS: dict[str, dict[str, Any]] = {
    "ids": {},
    "tables of two widths": {"ids": 5, "dims": (16, 5)},
    "lists": {"ids": 2, "lists": ("mean", "sum", "mean")},
    "lists alone": {"ids": 0, "lists": ("mean", "sum")},
    "two labels": {"losses": ("logloss", "huber"), "dims": (3, 8)},
    "numbers alone": {"ids": 0, "dims": (), "dense": DENSE},
    "a table without features": {"ids": 1, "dims": (16, 8)},
    "all": {"ids": 4, "dims": (16, 7), "lists": ("sum", "mean"), "dense": DENSE},
}


class Counting(StagedPlacement):
    """Counts the bytes that travel to the device."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sent: dict[str, int] = {}

    def send(self, name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
        self.sent[name] = array.nbytes
        return super().send(name, array)


def spec_of(name: str, kind: str = "deepfm") -> Spec:
    return make_spec(kind=kind, **SPECS[name])


def standards_of(spec: Spec) -> Standards:
    standard = np.array(["standard" in f.dense for f in spec.features if f.kind == "dense"], bool)
    return Standards(standard, np.where(standard, 5.0, 0.0), np.where(standard, 0.7, 1.0))


def gather_of(kind: type[HostGather] | type[DeviceGather], spec: Spec, place: Placement) -> Gather:
    return kind(input_plan(spec, fm=False), place, len(spec.labels))


def gradients(gather: Gather, inputs: ModelInputs, found: Gathered, seed: int) -> list[F32]:
    """The rows' gradients of a loss that weighs each column by itself."""
    rng = torch.Generator().manual_seed(seed)
    parts = [found.vectors, found.linear]
    loss = sum(((x * torch.rand(x.shape, generator=rng)).sum() for x in parts), torch.zeros(()))
    if not loss.requires_grad:
        return gather.row_gradients(inputs, [x.numpy() for x in found.leaves])
    of = torch.autograd.grad(loss, found.leaves, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(found.leaves, of, strict=True)]
    return gather.row_gradients(inputs, [g.numpy() for g in filled])


@pytest.mark.parametrize("kind", ["dlrm", "deepfm"])
@pytest.mark.parametrize("name", SPECS)
def test_the_device_gathers_and_sums_what_the_host_does(name: str, kind: str) -> None:
    spec = spec_of(name, kind)
    rng, standards = np.random.default_rng(0), standards_of(spec)
    host = gather_of(HostGather, spec, CpuPlacement())
    device = gather_of(DeviceGather, spec, StagedPlacement(torch.device("cpu")))
    for size, unique in ((7, 3), (64, 40), (1, 1), (33, 500), (64, 40)):
        inputs = make_batch(spec, size, rng, unique=unique)
        ours = host.gather(inputs, standards, learning=True)
        found = device.gather(inputs, standards, learning=True)

        np.testing.assert_array_equal(found.dense.numpy(), ours.dense.numpy())
        np.testing.assert_allclose(
            found.vectors.numpy(force=True), ours.vectors.numpy(force=True), rtol=1e-6, atol=1e-6
        )
        np.testing.assert_allclose(
            found.linear.numpy(force=True), ours.linear.numpy(force=True), rtol=1e-6, atol=1e-6
        )
        pairs = zip(gradients(device, inputs, found, size), gradients(host, inputs, ours, size), strict=True)
        for of_device, of_host in pairs:
            assert of_device.shape == of_host.shape
            np.testing.assert_allclose(of_device, of_host, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [HostGather, DeviceGather])
def test_samples_without_any_row_have_zeros(kind: type[HostGather] | type[DeviceGather]) -> None:
    spec = spec_of("lists")
    inputs = make_batch(spec, 5, np.random.default_rng(0))
    groups = [
        replace(group, rows=group.rows[:0], positions=np.full_like(group.positions, -1))
        for group in inputs.groups
    ]
    inputs = replace(inputs, groups=groups)
    place = CpuPlacement() if kind is HostGather else StagedPlacement(torch.device("cpu"))
    gather = gather_of(kind, spec, place)

    found = gather.gather(inputs, standards_of(spec), learning=True)
    assert not found.vectors.any()
    assert not found.linear.any()
    assert [len(g) for g in gradients(gather, inputs, found, 0)] == [0] * len(groups)


def test_a_row_travels_once_however_often_it_occurs() -> None:
    spec = make_spec(kind="deepfm", ids=20)
    place = Counting()
    inputs = make_batch(spec, 512, np.random.default_rng(0), unique=20)
    gather_of(DeviceGather, spec, place).gather(inputs, standards_of(spec), learning=False)

    rows, positions = (sum(getattr(g, name).nbytes for g in inputs.groups) for name in ("rows", "positions"))
    assert sum(place.sent.values()) == rows + positions
    assert 10 * sum(place.sent.values()) < 512 * 20 * 17 * 4


@pytest.mark.parametrize("damage", ["position", "below null", "columns", "features", "ends", "groups"])
def test_inputs_that_do_not_fit_are_refused(damage: str) -> None:
    """On a GPU an index out of range ends the process' context."""
    spec = spec_of("all")
    inputs = make_batch(spec, 8, np.random.default_rng(0))
    first, *others = inputs.groups
    lists = [None if ends is None else ends[::-1].copy() for ends in first.list_ends]
    positions = first.positions.copy()
    positions[3] = len(first.rows) if damage == "position" else -2
    of_first = {
        "position": replace(first, positions=positions),
        "below null": replace(first, positions=positions),
        "features": replace(first, list_ends=first.list_ends[1:]),
        "ends": replace(first, list_ends=lists),
    }
    wrong = replace(
        inputs,
        groups=[of_first.get(damage, first), *others][: len(inputs.groups) - (damage == "groups")],
        dense=inputs.dense[:, 1:] if damage == "columns" else inputs.dense,
    )
    gather = gather_of(DeviceGather, spec, StagedPlacement(torch.device("cpu")))
    gather.gather(inputs, standards_of(spec), learning=True)

    with pytest.raises(ValueError, match=r"expected|beyond"):
        gather.gather(wrong, standards_of(spec), learning=True)


def test_gradients_outlive_the_next_batch() -> None:
    """They are pushed while the lane's buffers take the next batch."""
    spec = spec_of("ids")
    place = StagedPlacement(torch.device("cpu"))
    gather, rng = gather_of(DeviceGather, spec, place), np.random.default_rng(0)
    inputs = make_batch(spec, 8, rng)
    leaf = place.fetch({"leaf": torch.ones(21, inputs.groups[0].rows.shape[1])})["leaf"]
    (first,) = gather.row_gradients(inputs, [leaf])
    place.fetch({"leaf": torch.zeros(21, inputs.groups[0].rows.shape[1])})
    assert first.all()
