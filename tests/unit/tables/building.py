"""Layouts, batches and plans for the tests of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet.config.spec.layout import COUNT, OPTIMIZERS, Group, Layout, Slot, default_optimizer
from freshet.config.spec.model import Optimizer
from freshet.tables import Plan, PushOutcome, Store, TableOptions
from freshet.types import F32, U8, U32, U64, OffsetRange, bucket_of

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


RULES = [*OPTIMIZERS, COUNT.name]
"""All rules of the native tables: those of a spec, and that of expert counts."""


def rule(name: str, **parameters: float) -> Optimizer:
    if name == COUNT.name:
        return Optimizer(name=name, parameters={})
    usual = default_optimizer(name).parameters
    return Optimizer(name=name, parameters={n: float(parameters.get(n, v)) for n, v in usual.items()})


def group(
    *slots: tuple[str, int, Optimizer, float],
    tables: tuple[int, ...] = (0,),
    index: int = 0,
    precision: str = "fp32",
) -> Group:
    made: list[Slot] = []
    start = 0
    for name, width, optimizer, init in slots:
        made.append(Slot(name, start, width, optimizer, init))
        start += width
    return Group(index, tables, tuple(made), precision, tuple(range(len(tables))))


def hedge_group(tables: tuple[int, ...] = (0, 1), index: int = 0, precision: str = "fp32") -> Group:
    scalar = rule("adagrad")
    return group(
        ("wide", 1, scalar, 0.0),
        ("linear", 1, scalar, 0.0),
        ("vector", 16, rule("rowwise_adagrad"), 0.01),
        tables=tables,
        index=index,
        precision=precision,
    )


def default_group(tables: tuple[int, ...] = (0, 1), index: int = 0, precision: str = "fp32") -> Group:
    """Return the layout of the default model's rows."""
    scalar = rule("adagrad")
    return group(
        ("wide", 1, scalar, 0.0),
        ("fast", 1, scalar, 0.0),
        ("linear", 1, scalar, 0.0),
        ("count", 1, rule("count"), 0.0),
        ("vector", 16, rule("rowwise_adagrad"), 0.01),
        tables=tables,
        index=index,
        precision=precision,
    )


def counting_group(tables: tuple[int, ...] = (0,), index: int = 0) -> Group:
    """Return a layout of two floats per row that sum the negated gradients."""
    return group(("vector", 2, rule("sgd", lr=1.0), 0.0), tables=tables, index=index)


def store_of(
    *groups: Group,
    buckets: int = 16,
    partitions: int = 2,
    options: dict[int, TableOptions] | None = None,
    serving: bool = False,
    seed: int = 7,
) -> Store:
    return Store(
        Layout(tuple(groups), ()),
        buckets=buckets,
        partitions=partitions,
        seed=seed,
        options=options,
        serving=serving,
    )


def keys_of(*numbers: int) -> U64:
    """Return keys spread over all buckets, one for each number above 0."""
    return np.array(numbers, np.uint64) * GOLDEN


@dataclass(frozen=True, slots=True, eq=False)
class BatchKeys:
    """Keys of one group, as a `KeyGroup`."""

    group: int
    keys: U64
    tables: U8
    bucket_starts: U32
    order: U64  # (U,) place of each unique key in the keys as given


def batch_of(keys: U64, table: int = 0, group_index: int = 0, buckets: int = 16) -> BatchKeys:
    """Plan keys of one table, each given once."""
    plan = Plan(tables=np.array([table], np.uint8), buckets=buckets)
    plan.build(np.ascontiguousarray(keys), np.array([0, len(keys)], np.uint32))
    order = plan.order[plan.order_starts[:-1]].astype(np.uint64)
    return BatchKeys(group_index, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy(), order)


def steps_of(rows: Sequence[tuple[int, int]], group_index: int = 0, buckets: int = 16) -> BatchKeys:
    """Return a push's keys of (number of the key, table) rows, repeated as given, in order."""
    keys, tables = keys_of(*(key for key, _ in rows)), np.array([table for _, table in rows], np.uint8)
    of = bucket_of(keys, buckets)
    order = np.lexsort((np.arange(len(rows)), tables, keys, of)).astype(np.uint64)
    starts = np.searchsorted(of[order], np.arange(buckets + 1)).astype(np.uint32)
    return BatchKeys(group_index, keys[order], tables[order], starts, order)


def look_up(store: Store, keys: U64, table: int = 0, group_index: int = 0, *, create: bool = True) -> F32:
    """Return rows (N, S) of keys in the given order."""
    batch = batch_of(keys, table, group_index, store.buckets)
    out = np.full((len(batch.keys), store.layout.groups[group_index].width), np.nan, np.float32)
    store.lookup(group_index, batch.keys, batch.tables, batch.bucket_starts, out, create=create)
    in_order = np.empty_like(out)
    in_order[batch.order] = out
    return in_order


def push(
    store: Store,
    ranges: list[tuple[int, int, int]],
    keys: U64,
    gradients: F32,
    *,
    table: int = 0,
    group_index: int = 0,
    clock_ms: int = 0,
) -> PushOutcome:
    """Push gradients (N, S) of keys in the order given."""
    batch = batch_of(keys, table, group_index, store.buckets)
    ordered = np.ascontiguousarray(np.asarray(gradients, np.float32)[batch.order])
    return store.push([OffsetRange(*r) for r in ranges], clock_ms, [batch], [ordered])
