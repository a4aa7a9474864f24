"""A lane that steps rows within a batch, on copies that came with their optimiser state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from freshet.model import StepsRows
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import GroupInputs, ModelInputs
from freshet.types import F32, Bool, OffsetRange
from freshet.wires.codecs import ASYMMETRIC, RowCodec, RowFormat, format_for, pack_rows, unpack_rows
from tests.unit.model.loops import MODELS, World, batches_of, looked_up


def world_and_batch(model: str, size: int = 60) -> tuple[World, ModelInputs, list[F32]]:
    """A model and store whose rows have been stepped, a batch, and the states of the batch's rows."""
    world = World.of(model)
    lane = batches_of(world.spec, world.layout, 0, [size])
    rng = np.random.default_rng(7)
    for step in range(40):
        inputs, groups = looked_up(world, lane, 0, int(rng.integers(1, size)))
        gradients = [rng.normal(size=of.rows.shape).astype(np.float32) for of in inputs.groups]
        world.store.push([replace(lane.ranges[0][0], start=step, stop=step + 1)], 1, groups, gradients)
    inputs, groups = looked_up(world, lane, 0, size)
    states: list[F32] = []
    for g, group in enumerate(world.layout.groups):
        keys, rows = groups[g], inputs.groups[g].rows
        states.append(np.empty((len(rows), group.state_floats), np.float32))
        world.store.lookup(g, keys, rows, states=states[-1])
    return world, inputs, states


def trained(world: World, inputs: ModelInputs, states: list[F32]) -> tuple[F32, list[F32]]:
    """Predictions and gradients by a model of its own."""
    lane = HedgeDense(world.spec, training=True, precision="fp32").lane()
    lane.begin_batch(inputs, [of.copy() for of in states], dense_steps=False)
    assert not lane.advance()
    result = lane.result()
    return result.predictions, [of.copy() for of in result.gradients]


@pytest.mark.parametrize("model", MODELS)
def test_rows_as_they_came_stay_for_the_gate(model: str) -> None:
    world, inputs, states = world_and_batch(model)
    before = [group.rows.copy() for group in inputs.groups]
    trained(world, inputs, states)
    for group, rows in zip(inputs.groups, before, strict=True):
        np.testing.assert_array_equal(group.rows, rows)


def test_counts_that_a_codec_has_rounded_come_from_the_states() -> None:
    """A count is a small float of its row: one scale for it and a weight of 99 leaves nothing of it."""
    world, inputs, states = world_and_batch("deep = [16]")
    groups, wanted = [], []
    for g, group in enumerate(inputs.groups):
        wide, count = (world.layout.groups[g].slot(name) for name in ("wide", "count"))
        if wide is None or count is None:  # rows of crosses
            groups.append(group)
            wanted.append(group)
            continue
        group.rows[:, wide.start] = 99.0
        rounded = np.empty_like(group.rows)
        form = RowFormat(RowCodec.INT8, group.rows.shape[1])
        unpack_rows(pack_rows(group.rows, form), form, rounded)
        assert len(np.unique(group.rows[:, count.start])) > 2
        assert (rounded[:, count.start] == 0).all()
        exact = rounded.copy()
        exact[:, count.start] = group.rows[:, count.start]
        groups.append(replace(group, rows=rounded))
        wanted.append(replace(group, rows=exact))
    predictions, gradients = trained(world, replace(inputs, groups=groups), states)
    expected = trained(world, replace(inputs, groups=wanted), states)
    np.testing.assert_array_equal(predictions, expected[0])
    for mine, theirs in zip(gradients, expected[1], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("codec", [codec for codec in RowCodec if codec not in ASYMMETRIC])
def test_rows_of_early_positives_alone_count_no_step(codec: RowCodec) -> None:
    """Whatever codec the gradients travel in: negatives of the same requests must not find other counts."""
    for emit in ("early", "window"):
        world = World.of("deep = [16]", emit=emit)
        lane = batches_of(world.spec, world.layout, 0, [60])
        inputs, groups = looked_up(world, lane, 0, 60)
        assert inputs.labels is not None
        result = world.model.lane().forward_backward(inputs)
        travelled = []
        for gradients, layout in zip(result.gradients, world.layout.groups, strict=True):
            form = format_for(codec, layout.width, layout.scalars)
            travelled.append(np.empty_like(gradients))
            unpack_rows(pack_rows(gradients, form, seed=7), form, travelled[-1])
        world.store.push([OffsetRange(0, 0, 1)], 1, groups, travelled)
        after, _ = looked_up(world, lane, 0, 60)
        some = 0
        for g, group in enumerate(world.layout.groups):
            slot = group.slot("count")
            if slot is None:
                continue
            negative = samples_of(inputs.groups[g], inputs.labels.value == 0)
            counted = after.groups[g].rows[:, slot.start] > 0
            np.testing.assert_array_equal(counted, negative if emit == "early" else np.ones_like(counted))
            some += int((~negative).sum())
        assert some > 3, "rows that only positives have"


def samples_of(group: GroupInputs, chosen: Bool) -> Bool:
    """(U,) whether one of the chosen samples has the row."""
    found = np.zeros(len(group.rows), np.bool_)
    for f, ends in enumerate(group.list_ends):
        start, stop = group.feature_starts[f : f + 2]
        positions = group.positions[start:stop]
        sample = (
            np.arange(len(positions))
            if ends is None
            else np.searchsorted(ends, np.arange(len(positions)), "right")
        )
        found[positions[chosen[sample] & (positions >= 0)]] = True
    return found


def test_states_that_do_not_fit_are_refused() -> None:
    world, inputs, states = world_and_batch("deep = [16]")
    lane = world.model.lane()
    assert isinstance(lane, StepsRows)
    for wrong in ([], [states[0][:-1]], [states[0][:, :-1].copy()], [*states, *states]):
        with pytest.raises(ValueError, match="steps"):
            lane.begin_batch(inputs, wrong, dense_steps=False)
    with pytest.raises(ValueError, match="labels"):
        lane.begin_batch(replace(inputs, labels=None), states, dense_steps=False)
    with pytest.raises(RuntimeError, match="begin_batch first"):
        lane.advance()


@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64, 65, 300])
def test_dense_steps_are_counted_as_the_lane_makes_them(rows: int) -> None:
    world = World.of("deep = [16]")
    lane, made = world.model.lane(), 0
    lanes = batches_of(world.spec, world.layout, 0, [max(rows, 1)])
    inputs, _ = looked_up(world, lanes, 0, rows)
    states = [
        np.zeros((len(of.rows), group.state_floats), np.float32)
        for of, group in zip(inputs.groups, world.layout.groups, strict=True)
    ]
    for _ in range(3):
        expected = world.model.dense_steps(rows)
        lane.begin_batch(inputs, states, dense_steps=True)
        made, more = 0, rows > 0
        while more:
            more, made = lane.advance(), made + 1
            world.model.step([lane])
        assert made == expected
        assert len(lane.result().predictions) == rows
