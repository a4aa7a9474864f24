"""Steps of local copies equal the store's rows bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from freshet.config.spec.layout import Group
from freshet.rows.service import KeyGroup
from freshet.tables import Plan, RowSteps, Store, TableOptions
from freshet.types import F32, OffsetRange
from tests.fixtures.tables import (
    RULES,
    default_group,
    group,
    hedge_group,
    keys_of,
    rule,
    steps_of,
    store_of,
)

BUCKETS = 16


def of(numbers: list[int], tables: list[int] | None = None) -> KeyGroup:
    """Return keys of table 0, or of the table given for each."""
    plan = Plan(tables=np.array(tables or [0] * len(numbers), np.uint8), buckets=BUCKETS)
    plan.build(keys_of(*numbers), np.arange(len(numbers) + 1, dtype=np.uint32))
    return KeyGroup(0, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy())


def looked_up(store: Store, rows: KeyGroup) -> tuple[F32, F32]:
    made = store.layout.groups[0]
    values = np.full((len(rows.keys), made.width), 77, np.float32)
    states = np.full((len(rows.keys), made.state_floats), 77, np.float32)
    store.lookup(0, rows, values, states=states)
    return values, states


def gradients_of(rows: KeyGroup, made: Group, rng: np.random.Generator) -> F32:
    return rng.normal(0, 2, (len(rows.keys), made.width)).astype(np.float32)


@pytest.mark.parametrize("width", [1, 4, 16, 21])
@pytest.mark.parametrize("name", RULES)
def test_a_copy_takes_the_steps_of_its_row(name: str, width: int) -> None:
    optimizer = rule(name, **({"l1": 0.02, "l2": 0.1} if name == "ftrl" else {}))
    made = group(("vector", width, optimizer, 0.5), tables=(0, 1))
    store, steps, rng = store_of(made, buckets=BUCKETS), RowSteps(made), np.random.default_rng(width)
    local = of([1, 2, 3, 4, 2, 9], [0, 0, 0, 0, 1, 1])
    values, states = looked_up(store, local)
    assert states.shape[1] == steps.native.state_floats == made.state_floats

    for step in range(8):
        pushed = of([2, 3, 5, 2], [0, 1, 0, 1])  # two of local; key 3 is of another table, 5 is not local
        gradients = gradients_of(pushed, made, rng)
        store.push([OffsetRange(0, step, step + 1)], 0, [pushed], [gradients])
        assert steps.step(local, values, states, pushed, gradients) == 2
        for copy, row in zip((values, states), looked_up(store, local), strict=True):
            np.testing.assert_array_equal(copy, row, err_msg=f"step {step}")


def test_rows_of_a_hedge_and_many_in_a_bucket() -> None:
    """Hundreds of rows share a bucket and are found by binary search."""
    made = hedge_group()
    store, steps, rng = store_of(made, buckets=BUCKETS), RowSteps(made), np.random.default_rng(0)
    local, pushed = of(list(range(1, 4000))), of(list(range(2000, 6000)))
    values, states = looked_up(store, local)
    gradients = gradients_of(pushed, made, rng)
    store.push([OffsetRange(0, 0, 1)], 0, [pushed], [gradients])
    assert steps.step(local, values, states, pushed, gradients) == 2000
    for copy, row in zip((values, states), looked_up(store, local), strict=True):
        np.testing.assert_array_equal(copy, row)


@pytest.mark.parametrize("many", [1, 300])
def test_a_copy_takes_all_steps_of_a_repeated_row(many: int) -> None:
    made, rng = default_group(), np.random.default_rng(1)
    store, steps = store_of(made, buckets=2), RowSteps(made)
    local = steps_of([(key, key % 2) for key in range(1, many + 3)], buckets=2)
    values, states = looked_up(store, local)
    times = rng.integers(0, 4, many + 3)
    pushed = steps_of([(k, k % 2) for k in range(1, many + 3) for _ in range(times[k])], buckets=2)
    gradients = gradients_of(pushed, made, rng)

    store.push([OffsetRange(0, 0, 1)], 0, [pushed], [gradients])
    assert steps.step(local, values, states, pushed, gradients) == times[1:].sum()

    for copy, row in zip((values, states), looked_up(store, local), strict=True):
        np.testing.assert_array_equal(copy, row)


def test_a_non_finite_gradient_does_not_change_the_copy() -> None:
    made = hedge_group()
    store, steps = store_of(made, buckets=BUCKETS), RowSteps(made)
    local = of([1])
    values, states = looked_up(store, local)
    before = values.copy(), states.copy()
    steps.step(local, values, states, local, np.full_like(values, np.nan))
    np.testing.assert_array_equal(values, before[0])
    np.testing.assert_array_equal(states, before[1])


@pytest.mark.parametrize("name", RULES)
def test_a_row_before_admission_has_its_initial_state(name: str) -> None:
    made = group(("vector", 4, rule(name), 0.5))
    waiting = store_of(made, buckets=BUCKETS, options={0: TableOptions(admission=3)})
    for copy, row in zip(
        looked_up(waiting, of([1])), looked_up(store_of(made, buckets=BUCKETS), of([1])), strict=True
    ):
        np.testing.assert_array_equal(copy, row)
    assert waiting.memory().rows[0] == 0


def test_without_create_an_absent_row_has_no_state() -> None:
    made = hedge_group()
    store, rows = store_of(made, buckets=BUCKETS), of([1])
    values, states = np.ones((1, made.width), np.float32), np.ones((1, made.state_floats), np.float32)
    store.lookup(0, rows, values, create=False, states=states)
    assert not values.any()
    assert not states.any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: {**a, "values": a["values"][:, 1:].copy()}, "values must be"),
        (lambda a: {**a, "states": a["states"][:0]}, "states must be"),
        (lambda a: {**a, "gradients": a["gradients"][:0]}, "gradients must be"),
        (lambda a: {**a, "pushed": KeyGroup(0, *_with_starts(a["pushed"], shorter=True))}, "same buckets"),
        (lambda a: {**a, "local": KeyGroup(0, *_with_starts(a["local"], falling=True))}, "must rise"),
    ],
)
def test_arrays_of_other_shapes_are_refused(change, says) -> None:
    made = hedge_group()
    rows = of([1, 2, 3])
    values, states = looked_up(store_of(made, buckets=BUCKETS), rows)
    given = {"local": rows, "values": values, "states": states, "pushed": rows, "gradients": values.copy()}
    with pytest.raises(ValueError, match=says):
        RowSteps(made).step(**change(given))


def _with_starts(rows: KeyGroup, *, shorter: bool = False, falling: bool = False):
    starts = rows.bucket_starts.copy()
    if falling:
        starts[1] = 2**31
    return rows.keys, rows.tables, np.delete(starts, 1) if shorter else starts
