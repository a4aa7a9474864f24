"""Ranks that judge the same offers come to the same vector, each told of its own lanes."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from freshet.batches.stream import TrainBatch
from freshet.model import Lane
from freshet.model.inputs import ModelInputs
from freshet.testing.clock import SettableClock
from freshet.trainer.ranks import Alone, Offer, RankLost
from freshet.trainer.step_coordinator import (
    EXCHANGE_S,
    Agreed,
    AloneRounds,
    ApartRounds,
    Counts,
    DenseLedger,
    RankRounds,
)
from freshet.types import Fence, OffsetRange

EMPTY = ModelInputs(1, (), np.empty((1, 0), np.float32), None)
OFFSETS = dict.fromkeys(range(4), 0)


def batch(partition: int, start: int, stop: int) -> TrainBatch:
    ids = np.zeros(stop - start, np.int64)
    return TrainBatch(
        (OffsetRange(partition, start, stop),), Fence(1), EMPTY, ids, ids.view(np.uint64), ids, {}, {}
    )


@dataclass
class Together:
    """Ranks of one test, in threads: each call meets the same call of the others."""

    size: int
    barrier: threading.Barrier = field(init=False)
    slots: list[Any] = field(init=False)
    lost: bool = False

    def __post_init__(self) -> None:
        self.barrier, self.slots = threading.Barrier(self.size), [None] * self.size

    def swap(self, rank: int, value: Any) -> list[Any]:
        if self.lost:
            raise RankLost("a rank is gone")
        self.slots[rank] = value
        self.barrier.wait(10)
        got = list(self.slots)
        self.barrier.wait(10)
        return got


@dataclass
class Member:
    """A `RankGroup` in one process."""

    all: Together
    rank: int
    size: int
    fence: Fence = Fence(1)  # noqa: RUF009 - a NewType of int

    def gather(self, offer: Offer) -> Sequence[Offer]:
        return self.all.swap(self.rank, offer)

    def reduce(self, buffers: Sequence[Any]) -> None:
        total = np.sum(self.all.swap(self.rank, [b.copy() for b in buffers]), axis=0)
        for buffer, summed in zip(buffers, total, strict=True):
            buffer[:] = summed

    def exchange(self, data: bytes) -> Sequence[bytes]:
        return self.all.swap(self.rank, data)

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        return cast(bytes, self.all.swap(self.rank, data)[source])

    def close(self) -> None:
        pass


@dataclass
class Sums:
    """A lane's sums."""

    own: np.ndarray

    def reduce_buffers(self) -> list[np.ndarray]:
        return [self.own]

    def merge(self, other: "Sums") -> None:
        self.own += other.own
        other.own[:] = 0.0


@dataclass
class Rank:
    rounds: RankRounds
    exchanges: list[bool]


def noting(exchanges: list[bool]) -> Callable[[object, bool], None]:
    return lambda group, last: exchanges.append(last)


def ranks(size: int, vectors: Sequence[dict[int, int]] = (), **flags: Callable[[], bool]) -> list[Rank]:
    together = Together(size)
    made = []
    for i in range(size):
        exchanges: list[bool] = []
        rounds = RankRounds(
            Member(together, i, size),
            DenseLedger(dict(vectors[i] if vectors else OFFSETS)),
            noting(exchanges),
            flags.get("change", lambda: False),
            SettableClock(),
        )
        made.append(Rank(rounds, exchanges))
    return made


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned or raised, all of them run at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def agree(
    made: Sequence[Rank], batches: Sequence[Sequence[TrainBatch | None]], stopping: int = -1, step: int = 0
) -> list[Agreed]:
    def one(i: int) -> Callable[[], Agreed]:
        return lambda: made[i].rounds.agree(step, batches[i], stopping=i == stopping)

    results = at_once(*(one(i) for i in range(len(made))))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_all_ranks_get_the_vector_of_all_and_the_verdicts_of_their_own_lanes() -> None:
    two = ranks(2)

    first, second = agree(two, [[batch(0, 0, 2), batch(2, 5, 6)], [batch(1, 0, 3), None]])

    assert list(first.verdicts) == [Counts.WHOLE, Counts.BACK]
    assert list(second.verdicts) == [Counts.WHOLE, None]
    assert [r.rounds.ledger.applied for r in two] == [{0: 2, 1: 3, 2: 0, 3: 0}] * 2
    assert first.steps
    assert second.steps


def test_a_rank_without_a_batch_makes_the_step_of_the_others() -> None:
    two = ranks(2)

    first, second = agree(two, [[batch(0, 0, 2)], [None]])

    assert first.steps
    assert second.steps
    assert second.others
    assert not first.others


def test_where_nothing_counts_on_any_rank_there_is_no_step() -> None:
    two = ranks(2, [{**OFFSETS, 0: 9, 1: 9}] * 2)

    first, second = agree(two, [[batch(0, 0, 2)], [batch(1, 3, 9)]])

    assert [*first.verdicts, *second.verdicts] == [Counts.ALREADY] * 2
    assert not first.steps
    assert not second.steps


def test_the_sums_of_all_lanes_of_all_ranks_are_on_every_rank() -> None:
    two = ranks(2)
    lanes = [[Sums(np.array([float(10 * r + i)])) for i in range(2)] for r in range(2)]
    agree(two, [[batch(0, 0, 1), None], [batch(1, 0, 1), None]])

    at_once(*(lambda r=r: two[r].rounds.reduce(cast(Sequence[Lane], lanes[r])) for r in range(2)))

    assert [[lane.own[0] for lane in of] for of in lanes] == [[22.0, 0.0], [22.0, 0.0]]


def test_a_rank_lost_in_the_sum_leaves_the_vector_of_before() -> None:
    two = ranks(2)
    agree(two, [[batch(0, 0, 1)], [batch(1, 0, 1)]])
    cast(Member, two[0].rounds.group).all.lost = True

    with pytest.raises(RankLost):
        two[0].rounds.reduce([cast(Lane, Sums(np.zeros(1)))])

    assert two[0].rounds.ledger.applied == OFFSETS


def test_ranks_that_differ_in_vector_or_step_part() -> None:
    with pytest.raises(RankLost, match="differ"):
        agree(ranks(2, [OFFSETS, {**OFFSETS, 3: 1}]), [[None], [None]])
    two = ranks(2)
    steps = at_once(*(lambda i=i: two[i].rounds.agree(i, [None], stopping=False) for i in range(2)))
    assert all(isinstance(result, RankLost) for result in steps)


def test_when_one_rank_leaves_all_end_at_the_same_border_and_exchange_measures_once_more() -> None:
    two = ranks(2)

    first, second = agree(two, [[batch(0, 0, 1)], [None]], stopping=1)

    assert first.over
    assert second.over
    assert two[0].rounds.ledger.applied == OFFSETS  # the batch in hand goes back
    assert [r.exchanges for r in two] == [[True], [True]]


def test_when_somebody_waits_to_join_all_end_at_the_same_border() -> None:
    assert all(a.over for a in agree(ranks(2, change=lambda: True), [[None], [None]]))


def test_measures_are_exchanged_when_the_leader_says_so() -> None:
    two = ranks(2)
    clock = cast(SettableClock, two[0].rounds.clock)

    for seconds in (0.0, 0.5 * EXCHANGE_S, 0.5 * EXCHANGE_S, 0.1 * EXCHANGE_S):
        clock.advance(seconds)
        agree(two, [[None], [None]])

    assert [r.exchanges for r in two] == [[False, False]] * 2


def test_alone_nothing_is_asked_of_anybody_and_the_lanes_stay_apart() -> None:
    rounds, lanes = AloneRounds(DenseLedger({0: 0, 1: 0})), [cast(Lane, Sums(np.ones(1))) for _ in range(2)]

    agreed = rounds.agree(0, [batch(0, 0, 1), None], stopping=True)

    assert list(agreed.verdicts) == [Counts.WHOLE, None]
    assert agreed.steps
    assert not agreed.over
    assert rounds.reduce(lanes) is lanes
    assert rounds.agree(1, [None, None], stopping=True).over


def test_apart_a_rank_steps_on_its_own_between_two_meetings() -> None:
    clock, exchanges = SettableClock(), []
    rounds = ApartRounds(
        Alone(Fence(1)),
        DenseLedger({0: 0}),
        lambda group, last: exchanges.append(last),
        lambda: False,
        clock,
    )

    steps = [rounds.agree(i, [batch(0, i, i + 1)], stopping=False).steps for i in range(3)]
    clock.advance(EXCHANGE_S)
    rounds.agree(3, [None], stopping=False)

    assert steps == [True] * 3
    assert exchanges == [False, False]
    clock.advance(EXCHANGE_S)
    assert rounds.agree(3, [None], stopping=True).over
    assert exchanges == [False, False, True]
