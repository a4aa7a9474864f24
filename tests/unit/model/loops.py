"""Models, batches and looked-up rows for the native loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.features.decoder import GroupKeys
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.model.native_loop import LoopBatches
from freshet.rows.service import KeyGroup
from freshet.tables import Plan, Store
from freshet.types import OffsetRange

TEXT = """
name = "loop"
partitions = 4
buckets = 16
[events]
served = { schema = "i.avsc", key = ["request"], time = "ts:ms" }
action = { schema = "a.avsc", key = ["request"], time = "ts:ms" }
[join]
emit = "EMIT"
[labels]
click = { on = "action.type == 'click'" }
buy = { on = "action.type == 'buy'" }
[tables]
user = { dim = 4 }
item = { dim = 4 }
[features]
user  = { field = "user", table = "user" }
item  = { field = "item", table = "item" }
seen  = { field = "seen", table = "item", max = 3 }
price = { field = "price", dense = ["standard"] }
[model]
MODEL
[train]
batch = { rows = 16, steps = STEPS }
[serve]
score = "click"
"""
MODELS = ['kind = "linear"', "deep = [32, 16]", 'kind = "mlp"\ndeep = [16]', 'experts = ["wide", "fm"]']


def spec_of(model: str, table: str = "", emit: str = "early", steps: bool = True) -> Spec:
    """`table`: more of each table."""
    text = TEXT.replace("MODEL", model).replace("EMIT", emit).replace("STEPS", str(steps).lower())
    return parse_spec(text.replace("dim = 4", "dim = 4" + table))


def batches_of(spec: Spec, layout: Layout, lane: int, ends: Sequence[int], seed: int = 1) -> LoopBatches:
    """Random samples of a lane, whose keys no other lane has, in batches that end so.

    Their ranges are of the partition of the lane's number.
    """
    rng, n = np.random.default_rng([seed, lane]), ends[-1] if ends else 0
    groups = []
    for group in layout.groups:
        keys, starts, list_ends = [], [0], []
        for f in group.features:
            counts = rng.integers(0, 4, n) if spec.features[f].kind == "list" else np.ones(n, np.int64)
            drawn = rng.integers(1, 40, int(counts.sum())).astype(np.uint64)
            keys.append((drawn * np.uint64(4) + np.uint64(lane)) * np.uint64(0x9E3779B97F4A7C15))
            keys[-1][rng.random(len(drawn)) < 0.1] = 0  # null
            starts.append(starts[-1] + len(drawn))
            list_ends.append(counts.cumsum().astype(np.uint32) if spec.features[f].kind == "list" else None)
        groups.append(GroupKeys(np.concatenate(keys), np.array(starts, np.uint32), list_ends))
    labels = Labels(
        rng.integers(0, 2, n).astype(np.uint8),
        rng.integers(0, 2, n).astype(np.float32),
        np.ones(n, np.float32),
    )
    dense = rng.normal(size=(n, len(layout.dense))).astype(np.float32)
    # All at once: rows keep when they were touched, which else depends on how far another lane has come.
    times = np.full(n, 1_700_000_000_000)
    ranges = [(OffsetRange(lane, k, k + 1),) for k in range(len(ends))]
    return LoopBatches(groups, dense, labels, times, np.array(ends, np.int64), ranges)


@dataclass
class World:
    """A model and its rows."""

    spec: Spec
    layout: Layout
    model: HedgeDense
    store: Store

    @classmethod
    def of(cls, model: str, table: str = "", emit: str = "early", steps: bool = True) -> World:
        spec = spec_of(model, table, emit, steps)
        layout = layout_of(spec)
        return cls(spec, layout, HedgeDense(spec, training=True, precision="fp32"), Store.of(spec, layout))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(self.model.state())
        flushed = self.store.collect_flush()
        state |= {"runs": flushed.runs.body, "clock": flushed.clock_ms}
        return state


def looked_up(
    world: World, batches: LoopBatches, first: int, last: int
) -> tuple[ModelInputs, list[KeyGroup]]:
    """Samples [first, last) of a lane with their rows, and the keys of those."""
    spec, inputs, groups = world.spec, [], []
    for g, group in enumerate(world.layout.groups):
        keys = part_of(batches.groups[g], first, last, len(batches.times_ms))
        tables = [spec.table(spec.features[f].table or "").id for f in group.features]
        plan = Plan(tables=np.array(tables, np.uint8), buckets=spec.buckets)
        plan.build(keys.keys, keys.feature_starts)
        rows = np.empty((len(plan.keys), group.width), np.float32)
        world.store.lookup(g, plan, rows)
        inputs.append(GroupInputs(rows, plan.positions.copy(), keys.feature_starts, keys.list_ends))
        groups.append(KeyGroup(g, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy()))
    at = slice(first, last)
    labels = Labels(batches.labels.index[at], batches.labels.value[at], batches.labels.weight[at])
    return ModelInputs(last - first, inputs, batches.dense[at], labels), groups


def part_of(group: GroupKeys, first: int, last: int, n: int) -> GroupKeys:
    keys, starts, list_ends = [], [0], []
    for f, ends in enumerate(group.list_ends):
        low, high = group.feature_starts[f : f + 2].tolist()
        mine = group.keys[low:high]
        begin, end = (
            (first, last) if ends is None else ([0, *ends.tolist()][first], [0, *ends.tolist()][last])
        )
        keys.append(mine[begin:end])
        starts.append(starts[-1] + end - begin)
        list_ends.append(None if ends is None else ends[first:last] - np.uint32(begin))
    return GroupKeys(np.concatenate(keys), np.array(starts, np.uint32), list_ends)
