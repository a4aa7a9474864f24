"""The native loop does, batch after batch, what a lane does with each batch in Python: to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from freshet.model.hedge import HedgeDense
from freshet.model.inputs import Labels, ModelInputs
from freshet.model.native_loop import Ended, LoopBatches, NativeLoop, Ran
from freshet.rows.service import KeyGroup
from freshet.tables import PushOutcome
from freshet.types import I64, U8, OffsetRange
from tests.unit.model.loops import MODELS, World, batches_of, looked_up, part_of

ROW_ROWS, DENSE_ROWS = 16, 64
"""Samples of a step of rows within a batch, and of a dense step."""


def steps_within(size: int, step: int, *, in_steps: bool) -> list[list[tuple[int, int]]]:
    """The steps of rows within each dense step, for a batch of `size` samples after `step` dense steps.

    A new model's first dense steps have 1, 2, 4 ... 32 samples. Without `in_steps` a batch is one step.
    """
    if not in_steps:
        return [[(0, size)]] if size else []
    steps, first = [], 0
    while first < size:
        last = min(size, first + min(2**step, DENSE_ROWS))
        steps.append([(at, min(at + ROW_ROWS, last)) for at in range(first, last, ROW_ROWS)])
        first, step = last, step + 1
    return steps


@dataclass
class ByHand:
    """What `by_hand` has seen."""

    predictions: list[list[Any]]  # of each lane's batches
    dense_steps: int = 0
    pushes: int = 0


@dataclass
class Counts:
    """Counts of a batch's rows as it began; where some positives do not count, its steps see no others."""

    slots: Sequence[int | None]
    of: Mapping[int, float]  # by table and key

    @classmethod
    def of_batch(cls, world: World, inputs: ModelInputs, groups: Sequence[KeyGroup]) -> Counts:
        early = any(world.spec.join.is_early(label) for label in world.spec.labels)
        slots = [group.slot("count") if early else None for group in world.layout.groups]
        starts = [slot.start if slot else None for slot in slots]
        counts: dict[int, float] = {}
        for g, (at, rows) in enumerate(zip(starts, inputs.groups, strict=True)):
            if at is not None:
                keys = zip(groups[g].tables.tolist(), groups[g].keys.tolist(), strict=True)
                counts |= dict(zip(((t << 64) | k for t, k in keys), rows.rows[:, at].tolist(), strict=True))
        return cls(starts, counts)

    def restore(self, inputs: ModelInputs, groups: Sequence[KeyGroup]) -> None:
        for at, rows, of in zip(self.slots, inputs.groups, groups, strict=True):
            if at is not None:
                keys = zip(of.tables.tolist(), of.keys.tolist(), strict=True)
                rows.rows[:, at] = [self.of[(t << 64) | k] for t, k in keys]


def by_hand(world: World, lanes: Sequence[LoopBatches], learn: Sequence[Sequence[int]]) -> ByHand:
    """Every step of rows on its own: looked up, trained on, and pushed before the next one is looked up.

    Offsets count steps, of which a batch has several. All lanes begin their next batches at one time.
    """
    model, done = world.model, [0] * len(lanes)
    made, seen = [model.lane() for _ in lanes], ByHand([[] for _ in lanes])
    for k in range(max(len(flags) for flags in learn)):
        plans: list[list[list[tuple[int, int]]]] = []
        found: list[Counts] = []
        for lane, batches, flags, into in zip(made, lanes, learn, seen.predictions, strict=True):
            plans.append([])
            found.append(Counts((), {}))
            if k >= len(flags):
                continue
            first, last = ([0, *batches.ends.tolist()])[k : k + 2]
            given, groups = looked_up(world, batches, first, last)
            found[-1] = Counts.of_batch(world, given, groups)
            into.append(lane.score(replace(given, labels=None)).copy())
            plans[-1] = [
                [(first + start, first + stop) for start, stop in rows]
                for rows in steps_within(
                    last - first, model.native.steps, in_steps=world.spec.train.batch_steps
                )
            ]
        for step in range(max(len(plan) for plan in plans)):
            learned = 0
            for i, (lane, plan) in enumerate(zip(made, plans, strict=True)):
                for first, last in plan[step] if step < len(plan) else ():
                    given, groups = looked_up(world, lanes[i], first, last)
                    found[i].restore(given, groups)
                    result = lane.forward_backward(given, dense_weight=float(learn[i][k]))
                    clock = int(lanes[i].times_ms[first:last].max())
                    ranges = [OffsetRange(i, done[i], done[i] + 1)]
                    assert world.store.push(ranges, clock, groups, result.gradients) is PushOutcome.APPLIED
                    done[i] += 1
                    learned += learn[i][k] * (last - first)
            model.step(made)
            seen.dense_steps += learned > 0
    seen.pushes = sum(done)
    return seen


def at_once(calls: Sequence[Callable[[], Ran]]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            found[i] = calls[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "lanes that wait for each other for ever"
    return found


def run_all(
    loop: NativeLoop, lanes: Sequence[LoopBatches], learn: Sequence[Sequence[int]], **options: Any
) -> list[Any]:
    def one(i: int) -> Callable[[], Ran]:
        return lambda: loop.run(i, lanes[i], flags_of(learn[i]), **options)

    return at_once([one(i) for i in range(len(lanes))])


def flags_of(flags: Sequence[int]) -> U8:
    return np.array(flags, np.uint8)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


ENDS = [[5, 21, 21, 90, 91], [16, 120]]
"""The ends of the batches of two lanes. One batch has no samples, two have several dense steps; the second
lane has fewer batches."""
LEARN = [[1, 0, 1, 1, 1], [1, 1]]


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("emit", ["early", "window"])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_run_does_what_its_steps_do_one_by_one(model: str, sync: bool, emit: str, steps: bool) -> None:
    wanted, native = (World.of(model, emit=emit, steps=steps) for _ in range(2))
    lanes = [batches_of(native.spec, native.layout, i, ends) for i, ends in enumerate(ENDS)]
    seen = by_hand(wanted, lanes, LEARN)

    loop = NativeLoop(native.spec, native.layout, native.model, native.store, 2, sync=sync)
    ran = run_all(loop, lanes, LEARN)

    for one, parts, flags in zip(ran, seen.predictions, LEARN, strict=True):
        assert (one.ended, one.trained, one.pushed, one.skipped) == (Ended.DONE, len(flags), len(flags), 0)
        np.testing.assert_array_equal(one.predictions, np.concatenate(parts))
    assert_same(native.state(), wanted.state())
    assert loop.dense_steps == seen.dense_steps == native.model.native.steps
    assert native.store.applied()[0] == [5]
    assert native.store.applied()[1] == [2]
    assert seen.pushes == (22 if steps else 6)


def test_rows_of_16_bits_are_stepped_in_32_within_a_batch() -> None:
    """Only the store rounds, by chance: what a batch teaches floats of 32 bits does not depend on it."""
    worlds = [World.of("deep = [16]", f', init = 0, precision = "{name}"') for name in ("fp32", "bf16")]
    rows = []
    for world in worlds:
        lane = batches_of(world.spec, world.layout, 0, [200])
        NativeLoop(world.spec, world.layout, world.model, world.store, 1).run(0, lane, flags_of([1]))
        given, _ = looked_up(world, lane, 0, 200)
        rows.append(given.groups[0].rows)
    vector = worlds[0].layout.groups[0].slot("vector")
    assert vector is not None
    np.testing.assert_array_equal(rows[0][:, : vector.start], rows[1][:, : vector.start])
    assert (rows[0][:, vector.start :] != rows[1][:, vector.start :]).any()
    assert_same(*(world.model.state() for world in worlds))


@pytest.mark.parametrize("model", MODELS)
def test_how_batches_are_cut_into_runs_changes_nothing(model: str) -> None:
    whole, cut = World.of(model), World.of(model)
    ends = [list(range(3, 40, 3)), list(range(5, 70, 5))]
    lanes = [batches_of(whole.spec, whole.layout, i, e) for i, e in enumerate(ends)]
    loops = [NativeLoop(w.spec, w.layout, w.model, w.store, 2) for w in (whole, cut)]
    run_all(loops[0], lanes, [[1] * len(e) for e in ends])
    for first in range(0, 13, 4):
        parts = [after(batches, first) for batches in lanes]
        run_all(loops[1], parts, [[1] * min(4, len(e) - first) for e in ends])

    assert_same(cut.state(), whole.state())


def after(batches: LoopBatches, first: int) -> LoopBatches:
    """The same without the first batches: their samples stay, as an empty batch cannot hold them."""
    n = len(batches.times_ms)
    begin = int(batches.ends[first - 1]) if first else 0
    at = slice(begin, n)
    labels = Labels(batches.labels.index[at], batches.labels.value[at], batches.labels.weight[at])
    groups = [part_of(group, begin, n, n) for group in batches.groups]
    ends: I64 = batches.ends[first:] - begin
    return LoopBatches(groups, batches.dense[at], labels, batches.times_ms[at], ends, batches.ranges[first:])


def test_a_refused_push_ends_the_lane_and_the_others_go_on() -> None:
    world = World.of("deep = [16]")
    lanes = [batches_of(world.spec, world.layout, i, [4, 8, 12, 16]) for i in range(2)]
    # The store has applied nothing of the third batch's partition, so its range does not continue `applied`.
    ranges = [lanes[0].ranges[0], lanes[0].ranges[1], (OffsetRange(3, 5, 6),), lanes[0].ranges[2]]
    lanes[0] = replace(lanes[0], ranges=ranges)

    loop = NativeLoop(world.spec, world.layout, world.model, world.store, 2)
    first, second = run_all(loop, lanes, [[1] * 4] * 2)

    assert (first.ended, first.trained, first.pushed) == (Ended.REFUSED, 3, 2)
    assert (second.ended, second.trained, second.pushed) == (Ended.DONE, 4, 4)
    assert world.store.applied()[0] == [2]
    assert world.store.applied()[1] == [4]
    assert loop.dense_steps == 6  # the first batch has three, of 1, 2 and 1 sample


def test_a_push_that_all_buckets_have_had_is_skipped() -> None:
    world = World.of("deep = [16]")
    for bucket in range(world.spec.buckets):
        world.store.set_applied(bucket, {0: 2}, 0)
    loop = NativeLoop(world.spec, world.layout, world.model, world.store, 1)

    ran = loop.run(0, batches_of(world.spec, world.layout, 0, [4, 8, 12]), flags_of([1, 1, 1]))

    assert (ran.pushed, ran.skipped) == (3, 2)
    assert loop.dense_steps == 5  # the first batch has three, of 1, 2 and 1 sample


def test_a_lane_that_fails_ends_the_others() -> None:
    world = World.of("deep = [16]")
    lanes = [batches_of(world.spec, world.layout, i, [4, 8]) for i in range(2)]
    lanes[1] = replace(lanes[1], ranges=[(OffsetRange(9, 0, 1),), (OffsetRange(9, 1, 2),)])
    loop = NativeLoop(world.spec, world.layout, world.model, world.store, 2)

    first, second = run_all(loop, lanes, [[1, 1]] * 2)

    assert first.ended is Ended.BROKEN
    assert isinstance(second, ValueError)
    assert loop.join(0).ended is Ended.BROKEN


def test_a_bucket_that_is_not_held_ends_all_lanes() -> None:
    world = World.of("deep = [16]")
    lanes = [batches_of(world.spec, world.layout, i, [40, 80]) for i in range(2)]
    world.store.drop_bucket(3)
    loop = NativeLoop(world.spec, world.layout, world.model, world.store, 2)

    found = {ran.ended for ran in run_all(loop, lanes, [[1, 1]] * 2)}

    assert Ended.NOT_HELD in found
    assert found <= {Ended.NOT_HELD, Ended.BROKEN}


def test_rows_that_are_kept_score_as_the_batch_was_predicted() -> None:
    world = World.of("deep = [16]")
    lane = batches_of(world.spec, world.layout, 0, [10, 25])
    loop = NativeLoop(world.spec, world.layout, world.model, world.store, 1)
    before = HedgeDense(world.spec, training=False, precision="fp32")
    before.load_state(world.model.state(), weights_only=True)

    ran = loop.run(0, lane, flags_of([1, 1]), keep=flags_of([1, 0]))

    ((batch, groups),) = ran.kept
    assert batch == 0
    np.testing.assert_array_equal(
        before.score(ModelInputs(10, groups, lane.dense[:10], None)), ran.predictions[:10]
    )


def test_moments_of_a_batch_rise() -> None:
    world = World.of('kind = "linear"')
    loop = NativeLoop(world.spec, world.layout, world.model, world.store, 1)

    ran = loop.run(0, batches_of(world.spec, world.layout, 0, [10, 25]), flags_of([1, 1]), moments=True)

    assert ran.moments_ns is not None
    assert (np.diff(ran.moments_ns.ravel()) >= 0).all()
    assert ran.moments_ns.min() > 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ends": np.array([30, 25])}, "ends of batches that rise"),
        ({"ends": np.array([10, 26])}, "ends of batches that rise"),
        ({"ranges": [(OffsetRange(0, 0, 1),), ()]}, "a range for each batch"),
        ({"dense": np.zeros((25, 3), np.float32)}, "dense must be"),
        ({"times_ms": np.zeros(24, np.int64)}, "differ in length"),
        ({"groups": []}, "keys of each group"),
    ],
)
def test_batches_that_do_not_fit_are_refused_and_teach_nothing(change: dict[str, Any], why: str) -> None:
    world = World.of('kind = "linear"')
    loop = NativeLoop(world.spec, world.layout, world.model, world.store, 1)
    lane = replace(batches_of(world.spec, world.layout, 0, [10, 25]), **change)

    with pytest.raises(ValueError, match=why):
        loop.run(0, lane, flags_of([1, 1]))

    assert sum(world.store.rows().values()) == 0
