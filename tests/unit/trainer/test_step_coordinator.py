"""Ranks that decide on the same proposals get the same vector, and the verdicts of their lanes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import pytest

from freshet.batches.stream import TrainBatch
from freshet.errors import Mismatch
from freshet.model import Lane
from freshet.model.inputs import Labels, ModelInputs
from freshet.testing.clock import SettableClock
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.process_group import LocalProcessGroup, RankLost
from freshet.trainer.reducers import PlainReducer
from freshet.trainer.step_coordinator import (
    AVERAGE_S,
    EXCHANGE_S,
    Agreed,
    BatchVerdict,
    DenseLedger,
    RankHooks,
    StepCoordinator,
)
from freshet.types import Fence, OffsetRange
from tests.fixtures.local_ranks import HalfReducer, Member, Together, at_once, results_of

EMPTY = ModelInputs(1, (), np.empty((1, 0), np.float32), None)
OFFSETS = dict.fromkeys(range(4), 0)


def batch(partition: int, start: int, stop: int) -> TrainBatch:
    ids = np.zeros(stop - start, np.int64)
    return TrainBatch(
        (OffsetRange(partition, start, stop),), Fence(1), EMPTY, ids, ids.view(np.uint64), ids, {}, {}
    )


@dataclass
class Sums:
    """The sums of a lane."""

    own: np.ndarray

    def reduce_buffers(self) -> list[np.ndarray]:
        return [self.own]

    def merge(self, other: "Sums") -> None:
        self.own += other.own
        other.own[:] = 0.0


@dataclass
class Parts:
    """The sums of a lane with several buffers."""

    parts: list[np.ndarray]

    def reduce_buffers(self) -> list[np.ndarray]:
        return self.parts


@dataclass
class Rank:
    member: Member
    exchanges: list[bool] = field(default_factory=list)
    averaged: list[tuple[int, int]] = field(default_factory=list)
    vectors: list[dict[int, int]] = field(default_factory=list)  # at flush points
    due: bool = False
    coordinator: StepCoordinator = field(init=False)

    def flush_due(self) -> bool:
        return self.due

    def average(self, group: object, rows: int, step: int) -> None:
        self.averaged.append((rows, step))
        for vector in self.member.exchange(self.coordinator.ledger.to_array().tobytes()):
            self.coordinator.ledger.raise_to(np.frombuffer(vector, np.int64).reshape(-1, 2).tolist())

    def reach_flush_point(self) -> None:
        self.vectors.append(dict(self.coordinator.ledger.applied))


def noting(exchanges: list[bool]) -> Callable[[object, bool], None]:
    return lambda group, last: exchanges.append(last)


def ranks(
    size: int,
    vectors: Sequence[dict[int, int]] = (),
    *,
    average_every: int = 0,
    change: Callable[[], bool] = lambda: False,
    lossy: bool = False,
) -> list[Rank]:
    together = Together(size)
    made = []
    for i in range(size):
        rank = Rank(Member(together, i, size))
        rank.coordinator = StepCoordinator(
            rank.member,
            DenseLedger(dict(vectors[i] if vectors else OFFSETS)),
            RankHooks(change, noting(rank.exchanges), rank.flush_due, rank.average, rank.reach_flush_point),
            GradientSums(HalfReducer() if lossy else PlainReducer()),
            average_every,
            SettableClock(),
        )
        made.append(rank)
    return made


def agree(
    made: Sequence[Rank], batches: Sequence[Sequence[TrainBatch | None]], stopping: int = -1, step: int = 0
) -> list[Agreed]:
    def one(i: int) -> Callable[[], Agreed]:
        return lambda: made[i].coordinator.agree(step, batches[i], stopping=i == stopping)

    return results_of(*(one(i) for i in range(len(made))))


def test_ranks_share_the_vector_and_get_own_verdicts() -> None:
    two = ranks(2)

    first, second = agree(two, [[batch(0, 0, 2), batch(2, 5, 6)], [batch(1, 0, 3), None]])

    assert list(first.verdicts) == [BatchVerdict.LEARN, BatchVerdict.RETURN]
    assert list(second.verdicts) == [BatchVerdict.LEARN, None]
    assert [r.coordinator.ledger.applied for r in two] == [{0: 2, 1: 3, 2: 0, 3: 0}] * 2
    assert first.steps
    assert second.steps


def test_rank_without_a_batch_joins_the_step() -> None:
    two = ranks(2)

    first, second = agree(two, [[batch(0, 0, 2)], [None]])

    assert first.steps
    assert second.steps
    assert second.others
    assert not first.others


def test_no_step_if_no_batch_counts_on_any_rank() -> None:
    two = ranks(2, [{**OFFSETS, 0: 9, 1: 9}] * 2)

    first, second = agree(two, [[batch(0, 0, 2)], [batch(1, 3, 9)]])

    assert [*first.verdicts, *second.verdicts] == [BatchVerdict.APPLIED] * 2
    assert not first.steps
    assert not second.steps


def test_batch_without_a_weight_makes_no_step() -> None:
    """A model drops the sums of such a step, and a carry or residuals in them would be lost."""
    labels = Labels(np.zeros(1, np.uint8), np.ones(1, np.float32), np.zeros(1, np.float32))
    light = replace(batch(0, 0, 1), inputs=replace(EMPTY, labels=labels))
    alone = StepCoordinator(LocalProcessGroup(Fence(1)), DenseLedger({0: 0}))

    found = [*agree(ranks(2), [[light], [None]]), alone.agree(0, [light], stopping=False)]

    assert [a.steps for a in found] == [False] * 3
    assert found[0].verdicts == [BatchVerdict.LEARN]
    assert alone.ledger.applied == {0: 1}


def test_every_rank_has_the_sums_of_all_lanes() -> None:
    two = ranks(2)
    lanes = [[Sums(np.array([float(10 * r + i)])) for i in range(2)] for r in range(2)]
    agree(two, [[batch(0, 0, 1), None], [batch(1, 0, 1), None]])

    at_once(*(lambda r=r: two[r].coordinator.reduce(cast(Sequence[Lane], lanes[r])) for r in range(2)))

    assert [[lane.own[0] for lane in of] for of in lanes] == [[22.0, 0.0], [22.0, 0.0]]


def test_rank_lost_in_reduce_restores_the_vector() -> None:
    two = ranks(2)
    agree(two, [[batch(0, 0, 1)], [batch(1, 0, 1)]])
    two[0].member.all.lose()

    with pytest.raises(RankLost):
        two[0].coordinator.reduce([cast(Lane, Sums(np.zeros(1)))])

    assert two[0].coordinator.ledger.applied == OFFSETS


def test_ranks_with_different_vector_or_step_lose_each_other() -> None:
    with pytest.raises(RankLost, match="differ"):
        agree(ranks(2, [OFFSETS, {**OFFSETS, 3: 1}]), [[None], [None]])
    two = ranks(2)
    steps = at_once(*(lambda i=i: two[i].coordinator.agree(i, [None], stopping=False) for i in range(2)))
    assert all(isinstance(result, RankLost) for result in steps)


def test_all_ranks_end_together_when_one_leaves() -> None:
    two = ranks(2)

    first, second = agree(two, [[batch(0, 0, 1)], [None]], stopping=1)

    assert first.over
    assert second.over
    assert two[0].coordinator.ledger.applied == OFFSETS  # the batch is returned unused
    assert [r.exchanges for r in two] == [[True], [True]]


def test_all_ranks_end_together_when_one_waits_to_join() -> None:
    assert all(a.over for a in agree(ranks(2, change=lambda: True), [[None], [None]]))


def test_leader_starts_the_exchange_of_measures() -> None:
    two = ranks(2)
    clock = cast(SettableClock, two[0].coordinator.clock)

    for seconds in (0.0, 0.5 * EXCHANGE_S, 0.5 * EXCHANGE_S, 0.1 * EXCHANGE_S):
        clock.advance(seconds)
        agree(two, [[None], [None]])

    assert [r.exchanges for r in two] == [[False, False]] * 2


def test_local_coordinator_keeps_lanes_separate() -> None:
    coordinator, lanes = (
        StepCoordinator(LocalProcessGroup(Fence(1)), DenseLedger({0: 0, 1: 0})),
        [cast(Lane, Sums(np.ones(1))) for _ in range(2)],
    )

    agreed = coordinator.agree(0, [batch(0, 0, 1), None], stopping=True)

    assert list(agreed.verdicts) == [BatchVerdict.LEARN, None]
    assert agreed.steps
    assert not agreed.over
    assert coordinator.reduce(lanes) is lanes
    assert coordinator.agree(1, [None, None], stopping=True).over


def test_ranks_of_async_step_alone_until_they_average() -> None:
    two = ranks(2, average_every=3)
    first, second = (rank.coordinator for rank in two)
    alone = [first.agree(i, [batch(0, 2 * i, 2 * i + 2)], stopping=False) for i in range(3)]
    alone.append(second.agree(0, [batch(1, 0, 1)], stopping=False))
    calls = [list(rank.member.calls) for rank in two]

    together = results_of(
        lambda: first.agree(3, [batch(0, 6, 8)], stopping=False),
        lambda: second.agree(1, [None], stopping=False),
    )

    assert all(a.steps for a in alone)
    assert calls == [[], []]
    assert [rank.averaged for rank in two] == [[(6, 3)], [(1, 3)]]
    assert [rank.vectors for rank in two] == [[{**OFFSETS, 0: 6, 1: 1}]] * 2
    assert [a.step for a in together] == [3, 3]
    assert [a.steps for a in together] == [True, False]
    assert [a.others for a in together] == [True, True]


def test_ranks_of_async_average_after_a_second() -> None:
    two = ranks(2, average_every=1000)
    agree(two, [[None], [None]])
    agree_alone = [r.coordinator.agree(0, [batch(i, 0, 1)], stopping=False).steps for i, r in enumerate(two)]
    for rank in two:
        cast(SettableClock, rank.coordinator.clock).advance(AVERAGE_S)
    agree(two, [[batch(0, 1, 2)], [batch(1, 1, 2)]], step=1)

    assert agree_alone == [True, True]
    assert [rank.averaged for rank in two] == [[(1, 1)]] * 2, "not where no rank has learned"
    assert two[0].vectors == [OFFSETS, {**OFFSETS, 0: 1, 1: 1}]


def test_quorum_of_async_ends_with_an_averaging() -> None:
    two = ranks(2, average_every=1000)
    two[0].coordinator.agree(0, [batch(0, 0, 1)], stopping=False)
    cast(SettableClock, two[0].coordinator.clock).advance(AVERAGE_S)

    ended = agree(two, [[batch(0, 1, 2)], [None]], stopping=1)

    assert all(a.over for a in ended)
    assert [r.coordinator.ledger.applied for r in two] == [{**OFFSETS, 0: 1}] * 2
    assert [r.exchanges for r in two] == [[True], [True]]


def test_averaging_gives_the_same_vector_despite_a_change_wish() -> None:
    two = ranks(2, average_every=1, change=lambda: True)
    assert all(a.over for a in agree(two, [[None], [None]]))
    assert [rank.vectors for rank in two] == [[OFFSETS]] * 2


def in_sites(names: tuple[str, ...], average_every: int) -> list[Rank]:
    """Ranks that step together with those of the same site."""
    made = ranks(len(names), average_every=average_every)
    sites = {name: Together(names.count(name)) for name in names}
    for i, name in enumerate(names):
        place = names[:i].count(name)
        made[i].coordinator.site = Member(sites[name], place, names.count(name))
    return made


def test_ranks_of_a_site_step_together_between_averagings() -> None:
    three = in_sites(("a", "b", "a"), average_every=2)
    pair, other = (three[0], three[2]), three[1]
    first = [agree(pair, [[batch(0, 0, 2)], [batch(2, 0, 1)]])]
    first.append(agree(pair, [[batch(0, 2, 4)], [None]], step=1))
    vectors = [dict(rank.coordinator.ledger.applied) for rank in pair]
    calls = [list(rank.member.calls) for rank in three]

    agreed = agree([three[0], other, three[2]], [[batch(0, 4, 5)], [None], [batch(2, 1, 2)]], step=2)

    assert [[a.steps for a in both] for both in first] == [[True, True], [True, True]]
    assert vectors == [{**OFFSETS, 0: 4, 2: 1}] * 2, "one vector, with the partitions of both"
    assert calls == [[], [], []], "an idle rank of a site does not make the sites meet"
    assert [rank.averaged for rank in three] == [[(5, 2)], [(0, 2)], [(0, 2)]], "one rank stands for its site"
    assert [a.steps for a in agreed] == [True, False, True]


def test_gradients_are_summed_within_a_site_only() -> None:
    three = in_sites(("a", "b", "a"), average_every=9)
    lanes = [Sums(np.array([n], np.float32)) for n in (1.0, 10.0, 100.0)]

    results_of(*(partial(r.coordinator.reduce, [cast(Lane, s)]) for r, s in zip(three, lanes, strict=True)))

    assert [float(lane.own[0]) for lane in lanes] == [101.0, 10.0, 101.0]


def test_a_site_without_batches_averages_and_may_leave() -> None:
    two = in_sites(("a", "a"), average_every=9)

    waits = agree(two, [[None], [None]])
    ended = agree(two, [[None], [None]], stopping=1)

    assert [a.over for a in (*waits, *ended)] == [False, False, True, True]


def test_ranks_of_a_site_that_differ_are_lost() -> None:
    two = in_sites(("a", "a"), average_every=9)
    two[1].coordinator.ledger.applied[0] = 7

    with pytest.raises(RankLost, match="differ"):
        agree(two, [[batch(0, 0, 1)], [None]])


def test_rank_alone_makes_no_exchange() -> None:
    exchanges: list[bool] = []
    coordinator = StepCoordinator(
        LocalProcessGroup(Fence(1)),
        DenseLedger({0: 0}),
        RankHooks(exchange=noting(exchanges)),
        average_every=4,
    )

    assert not coordinator.agree(0, [batch(0, 0, 1)], stopping=False).over
    assert coordinator.agree(1, [None], stopping=True).over
    assert exchanges == []


# --- reducers with residuals


def step(made: Sequence[Rank], number: int) -> list[float]:
    """Make a step in which each rank has a gradient of 5; return the sums that the ranks get."""
    agree(made, [[batch(i, number, number + 1)] for i in range(len(made))], step=number)
    lanes = [Sums(np.array([5.0], np.float32)) for _ in made]
    results_of(*(lambda i=i: made[i].coordinator.reduce([cast(Lane, lanes[i])]) for i in range(len(made))))
    for rank in made:
        rank.coordinator.end_round()
    return [float(lane.own[0]) for lane in lanes]


def test_flush_carries_residuals_into_the_next_step() -> None:
    two = ranks(2, lossy=True)
    first = step(two, 0)  # 2 of 5 on each rank
    second = step(two, 1)  # 4 of 3 + 5
    two[0].due = True
    third = step(two, 2)  # 2 of 5, and the carry of 4 on each

    assert (first, second, third) == ([4.0] * 2, [8.0] * 2, [4.0 + 8.0] * 2)
    assert [rank.vectors for rank in two] == [[{**OFFSETS, 0: 2, 1: 2}]] * 2
    assert [rank.coordinator.sums.carry for rank in two] == [None, None]


def test_only_the_leader_starts_a_flush() -> None:
    two = ranks(2, lossy=True)
    two[1].due = True

    step(two, 0)

    assert [rank.vectors for rank in two] == [[], []]


def test_quorum_of_a_lossy_reducer_ends_with_a_flush() -> None:
    two = ranks(2, lossy=True)
    step(two, 0)

    agree(two, [[None], [None]], stopping=0, step=1)

    assert [float(cast(np.ndarray, rank.coordinator.sums.carry)[0]) for rank in two] == [6.0, 6.0]
    assert [rank.vectors for rank in two] == [[{**OFFSETS, 0: 1, 1: 1}]] * 2


def test_plain_reducer_sends_nothing_more() -> None:
    two = ranks(2)
    two[0].due = True

    step(two, 0)
    step(two, 1)

    assert two[0].member.calls == ["gather", "reduce"] * 2
    assert two[0].vectors == [{**OFFSETS, 0: 1, 1: 1}, {**OFFSETS, 0: 2, 1: 2}], "every step is a flush point"


def test_carry_of_a_rank_alone_joins_its_first_step() -> None:
    coordinator = StepCoordinator(
        LocalProcessGroup(Fence(1)), DenseLedger({0: 0}), sums=GradientSums(carry=np.array([3.0], np.float32))
    )
    lanes = [cast(Lane, Sums(np.array([v], np.float32))) for v in (1.0, 2.0)]

    first = coordinator.reduce(lanes)
    second = coordinator.reduce(lanes)

    assert [lane.reduce_buffers()[0][0] for lane in first] == [6.0]
    assert second is lanes


def test_carry_of_another_model_is_refused() -> None:
    sums = GradientSums(carry=np.ones(3, np.float32))
    with pytest.raises(Mismatch, match="carry has shape"):
        sums.reduce(None, [cast(Lane, Sums(np.zeros(2, np.float32)))])


def test_gradient_in_several_buffers_is_reduced_as_one() -> None:
    two = [GradientSums(HalfReducer(), np.array([1.0, 2.0, 3.0], np.float32)) for _ in range(2)]
    together = Together(2)
    lanes = [
        Parts([np.array([2.0], np.float32), np.array([0.25]), np.array([4.0, 5.0], np.float32)])
        for _ in range(2)
    ]

    results_of(*(lambda i=i: two[i].reduce(Member(together, i, 2), [cast(Lane, lanes[i])]) for i in range(2)))

    for lane in lanes:
        assert [part.tolist() for part in lane.parts] == [[3.0], [0.5], [6.0, 7.0]]


def test_several_ranks_refuse_runs_of_batches() -> None:
    with pytest.raises(ValueError, match="2 ranks agree at every step"):
        ranks(2)[0].coordinator.agree_runs([None], stopping=False)
