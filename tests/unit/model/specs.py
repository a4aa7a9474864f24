"""Specs and batches for tests of the dense part, made by hand so that they need neither parser nor tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import (
    Events,
    Feature,
    Join,
    Label,
    Model,
    Optimizer,
    Retention,
    Serve,
    Spec,
    Stream,
    Table,
    TimeField,
    Train,
)
from freshet.model import GroupInputs, Labels, ModelInputs
from freshet.types import I32, U32

LossName = Literal["logloss", "huber", "mse"]


def make_spec(
    *,
    ids: int = 3,
    dims: Sequence[int] = (16,),
    lists: Sequence[Literal["sum", "mean"]] = (),
    crosses: int = 0,
    dense: Sequence[tuple[bool, bool]] = (),  # (standardised, flagged)
    losses: Sequence[LossName] = ("logloss",),
    defaults: int = 2,
    **model: Any,
) -> Spec:
    """A spec with that many features; single-valued ids are dealt out over tables of the given dims.

    `defaults`: 1 has the experts, and their weights, of specs from before there were defaults of their own.
    """
    if defaults == 1:
        model = {"experts": ("wide", "fm", "deep"), **model}
    adagrad = Optimizer(name="adagrad", parameters={"lr": 0.1, "initial_accumulator": 0.1})
    tables = [
        Table(name=f"t{i}", id=i, dim=d, optimizer=adagrad, scalar_optimizer=adagrad)
        for i, d in enumerate(dims)
    ]
    features: list[Feature] = []

    def add(kind: Any, **fields: Any) -> None:
        features.append(
            Feature(name=f"f{len(features)}", index=len(features), kind=kind, field="x", **fields)
        )

    for i in range(ids):
        add("id", table=f"t{i % len(dims)}")
    for pool in lists:
        add("list", table="t0", pool=pool, max=10)
    for standard, flag in dense:
        add("dense", dense=("standard",) if standard else ("raw",), missing="flag" if flag else "zero")
    for i in range(crosses):
        tables.append(
            Table(name=f"x{i}", id=len(tables), dim=16, optimizer=adagrad, scalar_optimizer=adagrad)
        )
        add("cross", table=f"x{i}", parts=("f0", "f1"))
    time = TimeField(path="t", unit="ms")
    served = Stream(role="served", topic="s", key=("id",), time=time)
    return Spec(
        name="test",
        defaults=defaults,
        events=Events(served=served, action=Stream(role="action", topic="a", key=("id",), time=time)),
        join=Join(),
        labels=tuple(Label(name=f"y{i}", index=i, on="true", loss=loss) for i, loss in enumerate(losses)),
        tables=tuple(tables),
        features=tuple(features),
        model=Model(**model),
        train=Train(),
        serve=Serve(),
        retention=Retention(),
    )


def make_batch(
    spec: Spec, size: int, rng: np.random.Generator, *, unique: int = 20, scale: float = 0.3
) -> ModelInputs:
    """Random rows, nulls, lists of which some are empty, dense numbers with gaps, labels of all kinds."""
    layout = layout_of(spec)
    groups = []
    for group in layout.groups:
        positions: list[I32] = []
        starts: list[int] = [0]
        ends: list[U32 | None] = []
        for index in group.features:
            if spec.features[index].kind == "list":
                end = np.cumsum(rng.integers(0, 4, size)).astype(np.uint32)
                ends.append(end)
                count = int(end[-1]) if size else 0
            else:
                ends.append(None)
                count = size
            positions.append(rng.integers(-1, unique, count).astype(np.int32))
            starts.append(starts[-1] + count)
        rows = (rng.normal(size=(unique, group.width)) * scale).astype(np.float32)
        seen = group.slot("count")
        if seen is not None:
            rows[:, seen.start] = rng.integers(0, 12, unique) / np.float32(32)
        at = np.concatenate(positions) if positions else np.empty(0, np.int32)
        groups.append(GroupInputs(rows, at, np.array(starts, np.uint32), ends))
    dense = (rng.normal(size=(size, len(layout.dense))) * 3 + 5).astype(np.float32)
    dense[rng.random(dense.shape) < 0.2] = np.nan
    head = rng.integers(0, len(spec.labels), size).astype(np.uint8)
    number = np.array([label.loss != "logloss" for label in spec.labels])[head]
    value = np.where(number, rng.normal(size=size) * 20 + 40, rng.random(size) < 0.3).astype(np.float32)
    weight = rng.choice([1.0, 2.5], size).astype(np.float32)
    return ModelInputs(size, groups, dense, Labels(head, value, weight))
