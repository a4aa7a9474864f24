"""Rows after steps equal the numpy reference bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.tables import PushOutcome, RowSteps, TableOptions
from freshet.types import U64, OffsetRange
from freshet.wires.codecs import format_for, pack_rows, rows_codec, unpack_rows
from tests.fixtures.tables import (
    RULES,
    default_group,
    group,
    hedge_group,
    keys_of,
    look_up,
    push,
    rule,
    steps_of,
    store_of,
)
from tests.unit.tables import reference

WIDTHS = [1, 3, 4, 8, 16, 21, 64]


def test_every_rule_of_the_spec_has_an_oracle() -> None:
    assert set(reference.STEPS) == set(RULES)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", RULES)
def test_steps_equal_the_oracle(name: str, width: int, precision: str) -> None:
    optimizer = rule(name, **({"l1": 0.02, "l2": 0.1} if name == "ftrl" else {}))
    store = store_of(group(("vector", width, optimizer, 0.5), precision=precision), seed=3)
    keys = keys_of(1, 2, 3)
    rng = np.random.default_rng(width)
    values = [reference.initial_values(3, 0, int(k), width, 0.5) for k in keys]
    if precision == "bf16":
        values = [reference.to_bf16(v) for v in values]
    states = [reference.first_state(name, optimizer.parameters, v) for v in values]

    np.testing.assert_array_equal(look_up(store, keys), np.stack(values))
    for step in range(12):
        gradients = rng.normal(0, 1 + step, (3, width)).astype(np.float32)
        assert push(store, [(0, step, step + 1)], keys, gradients) is PushOutcome.APPLIED
        for key, w, state, g in zip(keys, values, states, gradients, strict=True):
            reference.STEPS[name](optimizer.parameters, w, state, g)
            if precision == "bf16":
                w[:] = reference.to_bf16_by_chance(w, int(key), step)
        np.testing.assert_array_equal(look_up(store, keys), np.stack(values), err_msg=f"step {step}")


def test_each_slot_of_a_row_is_stepped_by_its_own_rule() -> None:
    slots = [
        ("wide", 2, rule("ftrl", l1=0.001), 0.0),
        ("cross", 2, rule("adagrad", initial_accumulator=1.0), 0.0),
        ("linear", 2, rule("adam"), 0.0),
        ("vector", 16, rule("rowwise_adagrad"), 0.01),
    ]
    store = store_of(group(*slots), seed=9)
    keys = keys_of(5)
    expected = np.concatenate(
        [np.zeros(6, np.float32), reference.initial_values(9, 0, int(keys[0]), 16, 0.01, start=6)]
    )
    np.testing.assert_array_equal(look_up(store, keys)[0], expected)
    states, start = [], 0
    for _, width, optimizer, _ in slots:
        states.append(
            reference.first_state(optimizer.name, optimizer.parameters, expected[start : start + width])
        )
        start += width
    for step in range(5):
        gradient = np.linspace(-1, 2, 22, dtype=np.float32) * np.float32(step + 1)
        push(store, [(0, step, step + 1)], keys, gradient[None])
        start = 0
        for (_, width, optimizer, _), state in zip(slots, states, strict=True):
            part = slice(start, start + width)
            reference.STEPS[optimizer.name](optimizer.parameters, expected[part], state, gradient[part])
            start += width
    np.testing.assert_array_equal(look_up(store, keys)[0], expected)


def test_adagrad_that_starts_at_zero_survives_a_gradient_of_zero() -> None:
    store = store_of(hedge_group())
    gradient = np.zeros((1, 18), np.float32)
    push(store, [(0, 0, 1)], keys_of(1), gradient)
    gradient[0, 0] = 1e-30

    push(store, [(0, 1, 2)], keys_of(1), gradient)

    assert np.isfinite(look_up(store, keys_of(1))).all()


HUGE = 1.8e19  # its square is just finite


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the oracle's intermediate infinities
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    ("name", "parameters", "gradients"),
    [
        *((name, {}, [HUGE] * 40) for name in RULES),
        ("rowwise_adagrad", {"lr": 100.0, "initial_accumulator": 0.0, "eps": 1e-40}, [0.0, 1e-30]),
        ("adagrad", {"initial_accumulator": 0.0, "eps": 1e-50}, [0.0, 1e-30]),
        ("adam", {"lr": 100.0, "beta1": 0.999999, "beta2": 0.0, "eps": 1e-50}, [HUGE, 0.0, 0.0]),
        ("ftrl", {"beta": 0.0}, [1e-30, HUGE, -HUGE, 1.0]),
        ("ftrl", {"lr": 1e-50}, [1e-30, HUGE, -HUGE, 1.0]),
    ],
)
def test_finite_gradients_make_rows_that_load_again(
    name: str, parameters: dict[str, float], gradients: list[float], width: int, precision: str
) -> None:
    optimizer, key = rule(name, **parameters), keys_of(5)
    made = group(("vector", width, optimizer, 0.5), precision=precision)
    store, loaded = store_of(made), store_of(made)
    w = look_up(store, key)[0].copy()
    state = reference.first_state(name, optimizer.parameters, w)
    for step, size in enumerate(gradients):
        gradient = np.zeros((1, width), np.float32)
        gradient[0, 0] = size
        push(store, [(0, step, step + 1)], key, gradient)
        reference.STEPS[name](optimizer.parameters, w, state, gradient[0])
        if precision == "bf16":
            w[:] = reference.to_bf16_by_chance(w, int(key[0]), step)

    loaded.import_runs(store.collect_flush().runs)

    np.testing.assert_array_equal(look_up(loaded, key, create=False)[0], w)


def test_huge_gradients_of_many_slots_load_again() -> None:
    for made in (default_group(), hedge_group(), hedge_group(precision="bf16")):
        store, loaded = store_of(made), store_of(made)
        gradient = np.zeros((1, made.width), np.float32)
        gradient[0, [slot.start for slot in made.slots]] = HUGE
        for step in range(40):
            push(store, [(0, step, step + 1)], keys_of(5), gradient)
        loaded.import_runs(store.collect_flush().runs)
        np.testing.assert_array_equal(look_up(loaded, keys_of(5)), look_up(store, keys_of(5)))


def test_initial_values_depend_on_seed_table_and_key_only() -> None:
    keys = keys_of(*range(1, 40))

    def values(seed: int, table: int, keys: U64) -> object:
        store = store_of(hedge_group((0, 1)), seed=seed, buckets=64)
        return look_up(store, keys, table=table).tolist()

    again = np.ascontiguousarray(keys[::-1])
    assert values(1, 0, keys) == values(1, 0, again)[::-1]  # type: ignore[index]
    assert values(1, 0, keys) != values(2, 0, keys)
    assert values(1, 0, keys) != values(1, 1, keys)


def test_initial_values_are_uniform_from_the_documented_start() -> None:
    store = store_of(group(("vector", 4, rule("sgd"), 1.0)), seed=0, buckets=1024)
    rows = look_up(store, keys_of(*range(1, 20_001)))

    assert abs(float(rows.mean())) < 0.01
    assert abs(float((rows**2).mean()) - 1 / 3) < 0.01
    assert rows.min() >= -1
    assert rows.max() < 1
    assert (
        look_up(store, keys_of(1))[0].tolist()
        == reference.initial_values(0, 0, int(keys_of(1)[0]), 4, 1.0).tolist()
    )


def test_bf16_values_move_by_small_steps_on_average() -> None:
    optimizer = rule("sgd", lr=1.0)
    store = store_of(group(("vector", 16, optimizer, 0.0), precision="bf16"))
    push(store, [(0, 0, 1)], keys_of(1), np.full((1, 16), -1.0, np.float32))

    for step in range(1, 2001):
        push(store, [(0, step, step + 1)], keys_of(1), np.full((1, 16), -1e-4, np.float32))

    assert abs(float(look_up(store, keys_of(1)).mean()) - 1.2) < 0.03


# Steps of a row at which its bucket may change, and those around them.
EDGES = sorted({max(2**power + more, 0) for power in range(13) for more in (-2, -1, 0, 1)})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_count_is_bucketed_by_powers_of_two(precision: str) -> None:
    store = store_of(default_group(precision=precision))
    nothing, seen = np.zeros((EDGES[-1], 20), np.float32), []
    for start, stop in zip([0, *EDGES], EDGES, strict=False):
        if stop > start:
            batch = steps_of([(3, 0)] * (stop - start))
            store.push([OffsetRange(0, start, stop)], 0, [batch], [nothing[start:stop]])
        seen.append(float(look_up(store, keys_of(3))[0, 3]) * 32)
    assert seen == [reference.count_bucket(steps) for steps in EDGES]
    assert seen[-1] == reference.COUNT_BUCKETS - 1


def test_a_count_saturates_at_the_float_limit() -> None:
    made = default_group()
    steps, row = RowSteps(made), steps_of([(1, 0)])
    values, states = np.zeros((1, 20), np.float32), np.zeros((1, made.state_floats), np.float32)
    states[0, 3] = 2**24 - 1
    for _ in range(3):
        steps.step(row, values, states, row, np.zeros((1, 20), np.float32))
        assert states[0, 3] == 2**24
        assert values[0, 3] == np.float32(11 / 32)


@pytest.mark.parametrize("bad", [0, 3, 10])
def test_a_refused_step_is_not_counted(bad: int) -> None:
    store, gradient = store_of(default_group()), np.zeros((1, 20), np.float32)
    push(store, [(0, 0, 1)], keys_of(1), gradient)
    gradient[0, bad] = np.nan

    push(store, [(0, 1, 2)], keys_of(1), gradient)

    assert look_up(store, keys_of(1))[0, 3] == np.float32(1 / 32)
    assert store.counts().not_finite == 1


Steps = list[tuple[int, int, float]]
steps_of_a_push = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 1), st.sampled_from([0.0, 0.1, 3.0, float("nan")])),
    max_size=40,
)


@given(
    st.lists(steps_of_a_push, min_size=1, max_size=4),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([1, 3]),
)
def test_rows_named_several_times_step_in_order(pushes: list[Steps], precision: str, admission: int) -> None:
    """The result equals a push per step, bit by bit."""
    options = {0: TableOptions(admission=admission)}
    at_once, apart = (store_of(default_group(precision=precision), options=options) for _ in range(2))
    every = steps_of([(key, table) for key in range(1, 7) for table in (0, 1)])
    rng, done = np.random.default_rng(0), 0
    for number, steps in enumerate(pushes):
        for store in (at_once, apart):  # a batch is looked up before it is pushed, which admission counts
            store.lookup(0, every, np.empty((12, 20), np.float32))
        sizes = np.array([size for *_, size in steps]).reshape(-1, 1)
        gradients = (rng.normal(size=(len(steps), 20)) * sizes).astype(np.float32)
        together = steps_of([(key, table) for key, table, _ in steps])
        ordered = gradients[together.order.astype(np.int64)]
        at_once.push([OffsetRange(0, number, number + 1)], 0, [together], [ordered])
        for (key, table, _), gradient in zip(steps, gradients, strict=True):
            apart.push([OffsetRange(0, done, done + 1)], 0, [steps_of([(key, table)])], [gradient[None]])
            done += 1
    found, wanted = np.empty((12, 20), np.float32), np.empty((12, 20), np.float32)
    for store, into in ((at_once, found), (apart, wanted)):
        store.lookup(0, every, into, create=False)
    np.testing.assert_array_equal(found, wanted)
    assert at_once.counts() == apart.counts()
    assert at_once.memory().rows == apart.memory().rows
    assert at_once.pending_flush() == apart.pending_flush()


@given(st.integers(0, 11), st.floats(0, 1000), st.sampled_from(["int8", "int4"]), st.integers(0, 2**32))
def test_a_count_is_exact_in_every_codec(bucket: int, largest: float, codec: str, seed: int) -> None:
    row = np.random.default_rng(seed).uniform(-largest, largest, (1, 20)).astype(np.float32)
    row[0, 0], row[0, 3] = largest, bucket / 32
    form = format_for(rows_codec(codec), 20, 4)
    unpack_rows(pack_rows(row, form), form, row)
    assert row[0, 3] == bucket / 32
