"""Averaging: weighted means in float64, equal to the bit on all ranks; other rules for what is no mean.

Rounded to three bytes a parameter, errors of weights and moments are within their bounds, and none in one
direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.model import LABEL_MERGES, DenseModel, MergeRule, NamesMoments, build_model
from freshet.model.hedge import HedgeDense
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.quality import Quality
from freshet.trainer.state_average import GROUP, AdamCodec, average
from freshet.trainer.state_sync import DenseState, Progress, SharedMeasures
from freshet.trainer.step_coordinator import DenseLedger
from freshet.types import F32, F64
from tests.fixtures.local_ranks import Member, Together, at_once, results_of
from tests.fixtures.specs import make_batch, make_spec

SPEC = make_spec(ids=2, dims=(8,), dense=((True, False),), deep=(16,), losses=("logloss", "mse"))


@dataclass
class Arrays:
    """A `DenseModel` that is its state."""

    arrays: dict[str, np.ndarray]
    merges: Mapping[str, MergeRule]

    def state(self) -> dict[str, np.ndarray]:
        return {name: array.copy() for name, array in self.arrays.items()}

    def load_state(self, state: Mapping[str, np.ndarray], *, weights_only: bool = False) -> None:
        self.arrays = {name: np.array(array) for name, array in state.items()}


@dataclass
class Adam(Arrays):
    """A model with one tensor that Adam steps, and a buffer."""

    adam_tensors = (("weights/w", "optimizer/first", "optimizer/second"),)

    @classmethod
    def of(cls, rng: np.random.Generator, size: int = 3 * GROUP + 5) -> "Adam":
        v = 10 ** rng.uniform(-12, 0, size)
        arrays = {
            "weights/w": rng.normal(size=size),
            "optimizer/first": rng.normal(size=size) * np.sqrt(v),
            "optimizer/second": v,
            "weights/buffer": rng.normal(size=9),
        }
        return cls({name: array.astype(np.float32) for name, array in arrays.items()}, {})

    def stepped(self, rng: np.random.Generator) -> "Adam":
        """The model after some steps of a rank."""
        size = len(self.arrays["weights/w"])
        v = self.arrays["optimizer/second"] * rng.uniform(0.9, 1.5, size)
        moved = self.arrays | {
            "weights/w": self.arrays["weights/w"] + rng.normal(0, 1e-3, size),
            "optimizer/first": rng.normal(size=size) * np.sqrt(v),
            "optimizer/second": v,
        }
        return Adam({name: array.astype(np.float32) for name, array in moved.items()}, {})


def state_of(model: Any, vector: dict[int, int]) -> DenseState:
    quality = Quality(SPEC)
    state = DenseState(
        cast(DenseModel, model), DenseLedger(dict(vector)), quality, SharedMeasures(quality), Progress(), "x"
    )
    state.keep()
    return state


def averaged(
    states: Sequence[DenseState], rows: Sequence[int], step: int = 9, *, rounded: bool = False
) -> None:
    together = Together(len(states))

    def one(i: int) -> Any:
        group = cast(ProcessGroup, Member(together, i, len(states)))
        return lambda: average(states[i], group, rows[i], step, rounded=rounded)

    results_of(*(one(i) for i in range(len(states))))


def bits(state: DenseState) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.model.state().items()}


RANKS = st.integers(2, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 10_000), min_size=n, max_size=n), st.just(n), st.integers(0, 2**32 - 1)
    )
)


@given(RANKS)
def test_floats_become_the_weighted_mean_in_float64(case: tuple[list[int], int, int]) -> None:
    rows, n, seed = case
    rng = np.random.default_rng(seed)
    own = [rng.normal(size=(3, 4)).astype(np.float32) for _ in range(n)]
    states = [state_of(Arrays({"weights/w": w}, {}), {0: 0}) for w in own]

    averaged(states, rows)

    found = states[0].model.state()["weights/w"]
    total = sum(rows)
    if not total:
        np.testing.assert_array_equal(found, own[0])
        return
    wanted = sum(w.astype(np.float64) * (r / total) for w, r in zip(own, rows, strict=True))
    np.testing.assert_array_equal(found, np.asarray(wanted).astype(np.float32))
    assert all(bits(state) == bits(states[0]) for state in states)


def test_sums_integers_and_started_labels_are_not_means() -> None:
    base = {
        "weights/count": np.array([100.0]),
        "optimizer/step": np.array([7], np.int64),
        "statistics/started": np.zeros(2),
        "statistics/scale": np.ones(2),
        "weights/bias": np.zeros((2, 3)),
    }
    rules: dict[str, MergeRule] = {**LABEL_MERGES, "weights/count": "sum"}
    states = [state_of(Arrays(dict(base), rules), {0: 5, 1: 5}) for _ in range(2)]
    first, second = (cast(Arrays, state.model).arrays for state in states)
    first |= {"weights/count": np.array([110.0]), "optimizer/step": np.array([17], np.int64)}
    second |= {"weights/count": np.array([130.0]), "optimizer/step": np.array([9], np.int64)}
    first |= {"statistics/started": np.array([1.0, 1.0]), "statistics/scale": np.array([1.0, 250.0])}
    second |= {"statistics/started": np.array([1.0, 0.0])}
    first["weights/bias"] = np.array([[4.0] * 3, [8.0] * 3])
    states[0].ledger.applied[0], states[1].ledger.applied[1] = 8, 6

    averaged(states, [10, 30])

    for state in states:
        found = state.model.state()
        assert found["weights/count"].tolist() == [140.0], "what each rank has added"
        assert found["optimizer/step"].tolist() == [17]
        assert found["optimizer/step"].dtype == np.int64
        assert found["statistics/started"].tolist() == [1.0, 1.0]
        assert found["statistics/scale"].tolist() == [1.0, 250.0], "of the rank that has started the label"
        assert found["weights/bias"].tolist() == [[1.0] * 3, [8.0] * 3]
        assert state.ledger.applied == {0: 8, 1: 6}
        assert state.progress.steps == 9


def test_rank_that_learned_nothing_has_no_weight() -> None:
    states = [state_of(Arrays({"weights/w": np.array([value])}, {}), {0: 0}) for value in (3.0, np.nan)]
    states[0].sums.carry = states[1].sums.carry = np.ones(4, np.float32)

    averaged(states, [5, 0])

    assert [state.model.state()["weights/w"].tolist() for state in states] == [[3.0]] * 2
    assert [state.sums.carry for state in states] == [None, None], "the first step of rank 0 added it"


def test_carry_stays_where_no_rank_learned() -> None:
    states = [state_of(Arrays({"weights/w": np.ones(1)}, {}), {0: 0}) for _ in range(2)]
    for state in states:
        state.sums.carry = np.ones(4, np.float32)

    averaged(states, [0, 0])

    assert all(state.sums.carry is not None for state in states)


def test_another_models_report_is_refused() -> None:
    states = [
        state_of(Arrays({"weights/w": np.ones(1), f"optimizer/step{i}": np.ones(1, np.int64)}, {}), {0: 0})
        for i in range(2)
    ]
    with pytest.raises(Corrupt, match="it has no array"):
        averaged(states, [1, 1])


def test_default_model_trains_on_after_an_averaging() -> None:
    states = [state_of(HedgeDense(SPEC, training=True, precision="fp32"), {0: 0}) for _ in range(2)]
    for i, state in enumerate(states):
        rng, lane = np.random.default_rng(i), state.model.lane()
        for _ in range(5):
            lane.forward_backward(make_batch(SPEC, 64, rng))
            state.model.step([lane])
    own = [state.model.state() for state in states]

    averaged(states, [320, 320])

    merged = states[0].model.state()
    assert bits(states[0]) == bits(states[1])
    assert merged["optimizer/step"].tolist() == [5]
    np.testing.assert_allclose(
        merged["weights/mlp/0/weight"],
        (own[0]["weights/mlp/0/weight"] + own[1]["weights/mlp/0/weight"]) / 2,
        rtol=1e-6,
    )
    np.testing.assert_array_equal(
        merged["statistics/label_sums"],
        own[0]["statistics/label_sums"] + own[1]["statistics/label_sums"],
    )
    lane, rng = states[0].model.lane(), np.random.default_rng(9)
    lane.forward_backward(make_batch(SPEC, 64, rng))
    states[0].model.step([lane])
    assert states[0].model.finite()


@pytest.mark.parametrize("kind", ["mlp", "deepfm"])
def test_columns_are_standardised_as_by_one_model(kind: str) -> None:
    """The first column has values on all ranks, the second on one, the third on another from round 2 on."""
    spec = make_spec(ids=2, dims=(8,), dense=((True, False),) * 3, deep=(16,), kind=kind)
    rng, name = np.random.default_rng(6), "statistics/dense"
    models = [build_model(spec, training=True) for _ in range(3)]
    states = [state_of(model, {0: 0}) for model in models]
    seen: list[F64] = []

    for turn in range(5):
        rows = [*rng.integers(1, 200, 2).tolist(), 7 if turn == 3 else 0]
        for rank, (model, size) in enumerate(zip(models, rows, strict=True)):
            if not size:
                continue
            batch, lane = make_batch(spec, size, rng), model.lane()
            dense = (rng.normal(size=(size, 3)) * [1, 0.1, 30] + [1000, 100, -5]).astype(np.float32)
            dense[:, 1:] *= np.where([rank == 0, rank == 1 and turn >= 2], 1, np.nan).astype(np.float32)
            lane.forward_backward(replace(batch, dense=dense))
            model.step([lane])
            seen.append(dense.astype(np.float64))
        averaged(states, rows)
        for state in states:
            state.keep()
        assert all(bits(state) == bits(states[0]) for state in states)
        values = [column[np.isfinite(column)] for column in np.concatenate(seen).T]
        wanted = [(len(x), x.mean(), ((x - x.mean()) ** 2).sum()) if len(x) else (0, 0, 0) for x in values]
        np.testing.assert_allclose(models[0].state()[name].reshape(-1, 3), wanted, rtol=1e-8)


def after_steps(seed: int, ranks: int) -> tuple[list[DenseState], Adam]:
    """States of ranks that have stepped alone since `base`, which is returned too."""
    rng = np.random.default_rng(seed)
    base, states = Adam.of(rng), []
    for _ in range(ranks):
        states.append(state_of(Adam(dict(base.arrays), {}), {0: 0}))
        cast(Adam, states[-1].model).arrays = base.stepped(rng).arrays
    return states, base


@given(RANKS)
def test_rounded_mean_is_near_and_equal_on_all_ranks(case: tuple[list[int], int, int]) -> None:
    rows, n, seed = case
    states, base = after_steps(seed, n)
    own = [state.model.state() for state in states]

    averaged(states, rows, rounded=True)

    found, total = states[0].model.state(), sum(rows)
    if not total:
        return
    assert all(bits(state) == bits(states[0]) for state in states)
    w, m, v, buffer = (
        np.asarray(sum(of[name].astype(np.float64) * (r / total) for of, r in zip(own, rows, strict=True)))
        for name in base.arrays
    )
    np.testing.assert_array_equal(found["weights/buffer"], buffer.astype(np.float32))
    most = max(np.abs(of["weights/w"] - base.arrays["weights/w"]).max() for of in own)
    np.testing.assert_allclose(found["weights/w"], w, rtol=0, atol=2.1 * most / 127)
    np.testing.assert_allclose(found["optimizer/second"], v, rtol=0.01)
    roots = np.sqrt(np.max([of["optimizer/second"] for of in own], axis=0))
    assert (np.abs(found["optimizer/first"] - m) <= 2.1 * 6 / 127 * roots).all()


def test_small_steady_difference_is_not_lost() -> None:
    rng = np.random.default_rng(4)
    base = Adam.of(rng, GROUP)
    states = [state_of(Adam(dict(base.arrays), {}), {0: 0}) for _ in range(2)]
    drift, rounds = np.full(GROUP, 3e-6, np.float32), 400
    drift[0] = 1e-3  # so 3e-6 is below half of a level
    for i in range(rounds):
        factors = np.full(GROUP, 0.999, np.float32)
        factors[0] = 3 if i % 2 else 1 / 3  # so 0.999 is above the root of a power
        for state in states:
            arrays = cast(Adam, state.model).arrays
            arrays["weights/w"] += drift
            arrays["optimizer/second"] *= factors
        averaged(states, [1, 1], step=i, rounded=True)
        for state in states:
            state.keep()

    found = states[0].model.state()
    moved = found["weights/w"][1:] - base.arrays["weights/w"][1:]
    assert moved.mean() == pytest.approx(rounds * 3e-6, rel=0.05), "to nearest it would be 0"
    decayed = np.log(found["optimizer/second"][1:] / base.arrays["optimizer/second"][1:])
    assert decayed.mean() == pytest.approx(rounds * np.log(0.999), rel=0.1)


def test_rounded_averaging_sends_three_bytes_a_parameter() -> None:
    states = {rounded: after_steps(2, 4)[0] for rounded in (False, True)}
    for rounded, ranks in states.items():
        averaged(ranks, [1, 1, 1, 0], rounded=rounded)
    whole, short, idle = (states[r][i].sums.counts for r, i in ((False, 0), (True, 0), (True, 3)))
    assert (list(whole), list(short)) == (["fp32"], ["int8"])
    groups, floats = 4, 3 * (3 * GROUP + 5) + 9  # a buffer of 9 travels whole
    assert whole["fp32"].bytes_wire == pytest.approx(2 * 4 * floats * 3 / 4, abs=12)
    assert short["int8"].bytes_raw == whole["fp32"].bytes_raw == pytest.approx(2 * 4 * floats * 3 / 4, abs=12)
    sent = short["int8"].bytes_wire
    assert sent == pytest.approx(2 * (groups * AdamCodec.unit_bytes + 4 * 9) * 3 / 4, abs=12)
    assert idle["int8"].bytes_wire == pytest.approx(sent / 2, abs=12), "it sends its part of the mean"


def test_rank_without_samples_sends_no_rounded_state() -> None:
    states, _ = after_steps(3, 2)
    cast(Adam, states[1].model).arrays["weights/w"][:] = np.nan

    averaged(states, [5, 0], rounded=True)

    assert all(np.isfinite(array).all() for array in states[1].model.state().values())
    assert bits(states[0]) == bits(states[1])


@pytest.mark.parametrize("name", ["weights/w", "optimizer/first", "optimizer/second", "weights/buffer"])
def test_nan_of_one_rank_reaches_all(name: str) -> None:
    states, _ = after_steps(3, 3)
    cast(Adam, states[1].model).arrays[name][3] = np.nan

    averaged(states, [1, 1, 1], rounded=True)

    assert all(np.isnan(state.model.state()[name][3]) for state in states)
    assert bits(states[0]) == bits(states[2])


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5000])
def test_bytes_of_another_length_are_refused(length: int, rounded: bool) -> None:
    states, _ = after_steps(3, 2)
    together = Together(2)

    class Short(Member):
        def all_to_all(self, parts: Any, sizes: Any = None) -> Any:
            return super().all_to_all([np.zeros(length, np.uint8)] * 2, sizes)

    def call(rank: int) -> None:
        group = cast(ProcessGroup, (Short if rank else Member)(together, rank, 2))
        try:
            average(states[rank], group, 1, 9, rounded=rounded)
        finally:
            together.lose()

    found = at_once(lambda: call(0), lambda: call(1))
    assert isinstance(found[0], Corrupt)


@pytest.mark.parametrize("kind", ["hedge", "mlp", "deepfm"])
def test_tensors_that_adam_steps_are_named_by_models(kind: str) -> None:
    spec = make_spec(ids=2, dims=(8,), dense=((True, False),), deep=(16,), kind=kind)
    model = build_model(spec, training=True)
    assert isinstance(model, NamesMoments)
    state, names = model.state(), [name for tensor in model.adam_tensors for name in tensor]
    of_adam = [name for name in state if name.startswith(("optimizer/first/", "optimizer/second/"))]
    assert len(names) == len(set(names)) == 3 * len(of_adam) / 2 > 0
    assert set(of_adam) < set(names) <= set(state)
    for tensor in model.adam_tensors:
        assert len({(state[name].shape, state[name].dtype.name) for name in tensor}) == 1
        assert state[tensor[0]].dtype == np.float32


RNG = np.random.default_rng(7)


def groups(w: F64, m: F64, v: F64) -> F32:
    """(1, 3, S) of one group."""
    return np.stack([w, m, v])[None].astype(np.float32)


def sent(values: F32, base: F32, seed: int = 0) -> F64:
    codec = AdamCodec(base, seed)
    return codec.decode(codec.encode(values, 0).ravel(), 0)


def spread(low: float, high: float) -> F64:
    """(S,) powers of ten in random order."""
    return 10 ** RNG.permutation(np.linspace(low, high, GROUP))


def adam_state(v: F64) -> F32:
    return groups(RNG.normal(size=GROUP), RNG.uniform(-3, 3, GROUP) * np.sqrt(v), v)


def test_second_moments_have_a_small_relative_error() -> None:
    base = adam_state(spread(-30, 0))
    changes = spread(-0.02, 3)
    values = adam_state(base[0, 2] * changes)

    found = sent(values, base)

    off = found[0, 2] / values[0, 2].astype(np.float64) - 1
    assert np.abs(off).max() <= 1000 ** (1 / 127) - 1 + 1e-5, "one v is a thousand times as large as before"
    assert np.abs(off).max() > 0.01, "a wider bound would hold as well"


def test_first_values_of_second_moments_are_positive() -> None:
    v = spread(-11, 0)
    v[:9] = 0
    values = adam_state(v)
    nothing = groups(values[0, 0], np.zeros(GROUP), np.zeros(GROUP))

    found = sent(values, nothing)[0]

    assert (found[1:, :9] == 0).all(), "m and v of zeros"
    assert np.abs(found[2, 9:] / values[0, 2, 9:] - 1).max() <= 2 ** (1 / 6) - 1 + 1e-5
    assert (sent(adam_state(spread(-30, 0)), nothing)[0, 2] > 0).all(), "the smallest ones, too"


@pytest.mark.parametrize("first", [True, False])
def test_steps_stay_right_beside_far_larger_moments(first: bool) -> None:
    v = spread(-11, 0)
    values = adam_state(v)
    base = adam_state(v * (0 if first else 0.9))

    found = sent(values, base)[0]

    step = values[0, 1] / np.sqrt(values[0, 2].astype(np.float64))
    of_v = 0.07 if first else 0.001  # half the relative error of v
    allowed = (1 + of_v) * np.abs(step).max() / 127 + of_v * np.abs(step)
    assert (np.abs(found[1] / np.sqrt(found[2]) - step) <= allowed).all()


def test_weights_are_off_by_a_127th_of_the_largest_change() -> None:
    base = adam_state(spread(-3, 0))
    values = base.copy()
    moved = RNG.normal(0, 1e-3, GROUP)
    values[0, 0] += moved.astype(np.float32)

    found = sent(values, base)[0]

    assert np.abs(found[0] - values[0, 0]).max() <= np.abs(moved).max() / 127 * 1.001


def test_expectation_is_the_value() -> None:
    base = adam_state(spread(-8, 0))
    base[0, 2, :50] = 0
    values = adam_state(base[0, 2] * spread(-0.02, 1) + (base[0, 2] == 0) * spread(-6, 0))
    rounds = 4000
    codec = AdamCodec(base, 5)
    total, squares = np.zeros((3, GROUP)), np.zeros((3, GROUP))

    for _ in range(rounds):
        off = codec.decode(codec.encode(values, 0).ravel(), 0)[0] - values[0]
        total, squares = total + off, squares + off**2

    mean, deviation = total / rounds, np.sqrt(squares / rounds)
    for i, name in enumerate("wmv"):
        sigmas = np.divide(mean[i], deviation[i], where=deviation[i] > 0, out=np.zeros(GROUP)) * np.sqrt(
            rounds
        )
        assert abs(sigmas.sum() / np.sqrt(GROUP)) < 4, f"{name}: all values together"
        assert (np.abs(sigmas) > 4).sum() <= 1, f"{name}: {np.abs(sigmas).max()}"


def test_unchanged_states_arrive_exactly() -> None:
    base = adam_state(spread(-8, 0))

    found = sent(base, base)[0]

    np.testing.assert_array_equal(found[[0, 2]], base[0, [0, 2]].astype(np.float64))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("array", range(3))
def test_what_is_not_finite_stays_visible(array: int, broken: float) -> None:
    base = np.concatenate([adam_state(spread(-8, 0))] * 2)
    base[0, 2, 3] = 0
    values = base.copy()
    values[0, array, 3] = broken

    found = sent(values, base)

    finite = broken == -1.0 and array < 2
    assert np.isfinite(found[0, array]).all() == finite
    assert np.isfinite(found[1]).all(), "no other group"
    assert finite or np.isnan(found[0, array]).all()


def test_any_bytes_of_another_rank_decode() -> None:
    base = adam_state(spread(-8, 0))
    base[0, 2, :100] = 0

    @given(st.binary(min_size=AdamCodec.unit_bytes, max_size=AdamCodec.unit_bytes))
    def check(data: bytes) -> None:
        codec = AdamCodec(base, 0)
        assert codec.decode(np.frombuffer(data, np.uint8), 0).shape == (1, 3, GROUP)

    check()
