"""Rows after steps equal the numpy oracle, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from freshet.spec.optimizers import OPTIMIZERS
from freshet.tables import PushOutcome
from freshet.types import U64
from tests.unit.tables import reference
from tests.unit.tables.building import group, hedge_group, keys_of, look_up, push, rule, store_of

WIDTHS = [1, 3, 4, 8, 16, 21, 64]


def test_every_rule_of_the_spec_has_an_oracle() -> None:
    assert set(reference.STEPS) == set(OPTIMIZERS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
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


def test_initial_values_depend_on_seed_table_and_key_only() -> None:
    keys = keys_of(*range(1, 40))

    def values(seed: int, table: int, keys: U64) -> object:
        store = store_of(hedge_group((0, 1)), seed=seed, buckets=64)
        return look_up(store, keys, table=table).tolist()

    again = np.ascontiguousarray(keys[::-1])
    assert values(1, 0, keys) == values(1, 0, again)[::-1]  # type: ignore[index]
    assert values(1, 0, keys) != values(2, 0, keys)
    assert values(1, 0, keys) != values(1, 1, keys)


def test_initial_values_are_uniform_and_start_at_what_the_format_says() -> None:
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


def test_bf16_values_move_by_steps_too_small_to_be_rounded_up() -> None:
    optimizer = rule("sgd", lr=1.0)
    store = store_of(group(("vector", 16, optimizer, 0.0), precision="bf16"))
    push(store, [(0, 0, 1)], keys_of(1), np.full((1, 16), -1.0, np.float32))

    for step in range(1, 2001):
        push(store, [(0, step, step + 1)], keys_of(1), np.full((1, 16), -1e-4, np.float32))

    assert abs(float(look_up(store, keys_of(1)).mean()) - 1.2) < 0.03
