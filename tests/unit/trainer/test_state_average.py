"""Averaging: weighted means in float64, equal to the bit on all ranks; other rules for what is no mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.model import LABEL_MERGES, DenseModel, MergeRule
from freshet.model.hedge import HedgeDense
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.quality import Quality
from freshet.trainer.state_average import average
from freshet.trainer.state_sync import DenseState, Progress, SharedMeasures
from freshet.trainer.step_coordinator import DenseLedger
from tests.fixtures.local_ranks import Member, Together, results_of
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


def state_of(model: Any, vector: dict[int, int]) -> DenseState:
    quality = Quality(SPEC)
    state = DenseState(
        cast(DenseModel, model), DenseLedger(dict(vector)), quality, SharedMeasures(quality), Progress(), "x"
    )
    state.keep()
    return state


def averaged(states: Sequence[DenseState], rows: Sequence[int], step: int = 9) -> None:
    together = Together(len(states))

    def one(i: int) -> Any:
        group = cast(ProcessGroup, Member(together, i, len(states)))
        return lambda: average(states[i], group, rows[i], step)

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
    assert states[0].model.step_count == 5
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
