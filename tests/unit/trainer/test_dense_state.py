"""The dense state: what ranks of a new quorum start from, and the flush point that they go back to."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from freshet.config.spec.identity import SpecHash
from freshet.errors import Mismatch
from freshet.model.hedge import HedgeDense
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.process_group import ProcessGroup, RankLost
from freshet.trainer.quality import Quality
from freshet.trainer.state_sync import DenseState, Progress, SharedMeasures, terms_of
from freshet.trainer.step_coordinator import DenseLedger
from freshet.types import F32
from tests.fixtures.local_ranks import HalfReducer, Member, Together, at_once, results_of
from tests.fixtures.specs import make_batch, make_spec

SPEC = make_spec(ids=2, dims=(8,), deep=(16,))


def state_of(
    step: int, carry: F32 | None = None, spec_hash: str = "x", terms: Mapping[str, Any] | None = None
) -> DenseState:
    """A state after so many steps."""
    model, quality = HedgeDense(SPEC, training=True, precision="fp32"), Quality(SPEC)
    rng, lane = np.random.default_rng(1), model.lane()
    for _ in range(step):
        lane.forward_backward(make_batch(SPEC, 8, rng))
        model.step([lane])
    return DenseState(
        model,
        DenseLedger({0: 10 * step}),
        quality,
        SharedMeasures(quality),
        Progress(steps=step),
        spec_hash,
        GradientSums(HalfReducer(), carry),
        terms=terms or {},
    )


def sync(*states: DenseState, run: Any = results_of) -> list[Any]:
    together = Together(len(states))

    def one(i: int) -> Any:
        return lambda: states[i].sync(cast(ProcessGroup, Member(together, i, len(states))))

    return cast(list[Any], run(*(one(i) for i in range(len(states)))))


def weights(state: DenseState) -> dict[str, list[Any]]:
    return {name: array.tolist() for name, array in state.model.state().items()}


def test_ranks_take_the_state_of_the_highest_step_with_its_carry() -> None:
    ahead, behind = state_of(3, np.array([1.0, 2.0], np.float32)), state_of(1)

    sync(behind, ahead)

    assert weights(behind) == weights(ahead)
    assert cast(F32, behind.sums.carry).tolist() == [1.0, 2.0]
    assert (behind.ledger.applied, behind.progress.steps) == ({0: 30}, 3)


def test_state_without_a_carry_leaves_none() -> None:
    ahead, behind = state_of(3), state_of(1, np.ones(2, np.float32))
    cast(HalfReducer, behind.sums.reducer).residual = np.ones(2, np.float32)

    sync(ahead, behind)

    assert behind.sums.carry is None
    assert cast(HalfReducer, behind.sums.reducer).residual is None, "of steps that are made again"


class Counting(HalfReducer):
    """A reducer with a count that ranks must share."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def state(self) -> dict[str, NDArray[Any]]:
        return {"steps": np.array([self.steps])}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        self.steps = int(state["steps"][0])


def test_state_of_a_reducer_is_a_part_of_the_dense_state() -> None:
    ahead, behind = state_of(3), state_of(1)
    for steps, state in ((7, ahead), (2, behind)):
        state.sums = GradientSums(Counting())
        cast(Counting, state.sums.reducer).steps = steps

    sync(ahead, behind)
    cast(Counting, ahead.sums.reducer).steps = 8
    behind.keep()
    cast(Counting, behind.sums.reducer).steps = 9
    behind.roll_back()

    assert cast(Counting, behind.sums.reducer).steps == 7
    assert list(ahead.sums.state()) == ["reduce/Counting/steps"]
    cast(Counting, behind.sums.reducer).steps = 5
    behind.sums.load_state({"reduce/Other/steps": np.array([1])})
    assert cast(Counting, behind.sums.reducer).steps == 5, "a version of another reducer"


def test_rank_of_another_identity_ends_and_the_others_train() -> None:
    """It may even have made more steps: the group that trains goes on."""
    ranks, newcomer = [state_of(3), state_of(3)], state_of(4, spec_hash="y" * 64)
    sync(*ranks)

    *lost, ended = sync(*ranks, newcomer, run=at_once)

    assert isinstance(ended, Mismatch)
    assert f"identity hash = '{'y' * 64}', expected 'x' as at rank 0" in str(ended)
    assert [type(result) for result in lost] == [RankLost, RankLost]
    assert str(lost[0]).startswith(f"rank 2 was started with identity hash = '{'y' * 64}'")
    assert sync(*ranks) == [None, None], "the others form the next quorum"


def test_groups_that_both_train_keep_the_one_ahead() -> None:
    """A log that was away may part the ranks of a model, and a spec may change meanwhile."""
    ahead, behind = state_of(3, spec_hash="y"), [state_of(2), state_of(2)]
    sync(*behind)
    sync(ahead)

    results = sync(*behind, ahead, run=at_once)

    assert [type(result) for result in results] == [Mismatch, Mismatch, RankLost]


def test_identity_of_other_defaults_is_explained() -> None:
    own = SpecHash.of("y", 2, {"x": 1})
    results = sync(state_of(0), state_of(0, spec_hash=own), run=at_once)

    assert [type(result) for result in results] == [RankLost, Mismatch]
    assert "put `defaults = 1` at the top of the spec" in str(results[1])


ONE, OTHER = {"train.reduce": "fp32", "model.dense_lr": 0.1}, {"train.reduce": "int8", "model.dense_lr": 0.1}


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("step", [2, 3, 4])
def test_newcomer_with_other_terms_ends_and_the_others_train(position: int, step: int) -> None:
    ranks = [state_of(3, terms=ONE), state_of(3, terms=ONE)]
    sync(*ranks)
    before = [weights(rank) for rank in ranks]
    newcomer = state_of(step, terms=OTHER)
    together = [*ranks[:position], newcomer, *ranks[position:]]

    results = sync(*together, run=at_once)

    ended, lost = results.pop(position), results
    assert isinstance(ended, Mismatch)
    assert "train.reduce = 'int8', expected 'fp32' as at rank" in str(ended)
    assert "dense_lr" not in str(ended)
    assert "restart all trainers with one spec" in str(ended)
    assert all(isinstance(result, RankLost) for result in lost)
    assert [weights(rank) for rank in ranks] == before
    assert sync(*ranks) == [None, None], "the others form the next quorum"


def test_new_rank_with_other_terms_than_the_lowest_ends() -> None:
    results = sync(state_of(0, terms=ONE), state_of(0, terms=OTHER), run=at_once)

    assert [type(result) for result in results] == [RankLost, Mismatch]


@pytest.mark.parametrize("terms", [{}, {"model.dense_lr": 0.1, "train.later": 1}])
def test_keys_that_a_release_does_not_report_may_differ(terms: Mapping[str, Any]) -> None:
    ranks = state_of(3, terms=ONE), state_of(1, terms=terms)

    assert sync(*ranks) == [None, None]


def test_report_of_an_earlier_release_is_accepted() -> None:
    ahead = state_of(3, terms=ONE)
    report, sent = orjson.dumps({"step": 1, "spec": "x"}), []

    def broadcast(data: bytes, _source: int) -> bytes:
        sent.append(data)
        return data

    group = SimpleNamespace(exchange=lambda mine: [mine, report], broadcast=broadcast, rank=0, size=2)
    ahead.sync(cast(ProcessGroup, group))

    assert len(sent) == 1


def test_terms_are_what_changes_the_state_of_ranks() -> None:
    train, model = SPEC.train, SPEC.model
    others = [
        replace(SPEC, model=replace(model, dense_lr=0.5)),
        replace(SPEC, model=replace(model, dense_momentum=0.5)),
        replace(SPEC, model=replace(model, dense_warmup_steps=7)),
        replace(SPEC, model=replace(model, bias_lr=0.7)),
        replace(SPEC, model=replace(model, hedge_discount=0.9)),
        replace(SPEC, train=replace(train, batch_rows=7)),
        replace(SPEC, train=replace(train, reduce="int8")),
        replace(SPEC, train=replace(train, mode="async")),
        replace(SPEC, train=replace(train, mode="async", average_every=7)),
        replace(SPEC, train=replace(train, segments=("id0",))),
        replace(SPEC, train=replace(train, measure_window_ms=5000)),
    ]

    assert terms_of(replace(SPEC, train=replace(train, version_interval_ms=7, average_every=7))) == terms_of(
        SPEC
    )
    assert len({str(terms_of(spec)) for spec in (SPEC, *others)}) == 1 + len(others)


def test_rollback_restores_the_flush_point() -> None:
    state, wanted = state_of(2, np.ones(2, np.float32)), state_of(2)
    state.keep()
    state.sums.carry = None
    lane = state.model.lane()
    lane.forward_backward(make_batch(SPEC, 8, np.random.default_rng(5)))
    state.model.step([lane])
    cast(HalfReducer, state.sums.reducer).residual = np.ones(2, np.float32)
    state.ledger.applied[0] = 99
    state.progress.steps = 7

    assert state.roll_back() == 5

    assert weights(state) == weights(wanted)
    assert cast(F32, state.sums.carry).tolist() == [1.0, 1.0]
    assert cast(HalfReducer, state.sums.reducer).residual is None
    assert (state.ledger.applied, state.progress.steps) == ({0: 20}, 2)


@pytest.mark.parametrize("times", [1, 2])
def test_state_at_a_flush_point_is_not_rolled_back(times: int) -> None:
    state = state_of(2)
    state.keep()
    state.roll_back()
    state.progress.steps = 5

    assert [state.roll_back() for _ in range(times)] == [0] * times
    assert state.progress.steps == 5
