"""Ranks that decide on the same proposals get the same vector, and the verdicts of their lanes."""

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
from freshet.trainer.process_group import LocalProcessGroup, Proposal, RankLost
from freshet.trainer.step_coordinator import (
    EXCHANGE_S,
    Agreed,
    BatchVerdict,
    DenseLedger,
    StepCoordinator,
)
from freshet.types import U8, Fence, OffsetRange

EMPTY = ModelInputs(1, (), np.empty((1, 0), np.float32), None)
OFFSETS = dict.fromkeys(range(4), 0)


def batch(partition: int, start: int, stop: int) -> TrainBatch:
    ids = np.zeros(stop - start, np.int64)
    return TrainBatch(
        (OffsetRange(partition, start, stop),), Fence(1), EMPTY, ids, ids.view(np.uint64), ids, {}, {}
    )


@dataclass
class Together:
    """Ranks in threads of one test; each call waits for the same call of the others."""

    size: int
    barrier: threading.Barrier = field(init=False)
    slots: list[Any] = field(init=False)
    lost: bool = False

    def __post_init__(self) -> None:
        self.barrier, self.slots = threading.Barrier(self.size), [None] * self.size

    def swap(self, rank: int, value: Any) -> list[Any]:
        if self.lost:
            raise RankLost("a rank ended")
        self.slots[rank] = value
        self.barrier.wait(10)
        got = list(self.slots)
        self.barrier.wait(10)
        return got


@dataclass
class Member:
    """A `ProcessGroup` in one process."""

    all: Together
    rank: int
    size: int
    fence: Fence = Fence(1)  # noqa: RUF009 - a NewType of int

    def gather(self, proposal: Proposal) -> Sequence[Proposal]:
        return self.all.swap(self.rank, proposal)

    def reduce(self, buffers: Sequence[Any]) -> None:
        total = np.sum(self.all.swap(self.rank, [b.copy() for b in buffers]), axis=0)
        for buffer, summed in zip(buffers, total, strict=True):
            buffer[:] = summed

    def all_to_all(self, parts: Sequence[U8], sizes: Sequence[int] | None = None) -> list[U8]:
        return [parts_of[self.rank] for parts_of in self.all.swap(self.rank, list(parts))]

    def all_gather(self, part: U8, sizes: Sequence[int] | None = None) -> list[U8]:
        return list(self.all.swap(self.rank, part))

    def exchange(self, data: bytes) -> Sequence[bytes]:
        return self.all.swap(self.rank, data)

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        return cast(bytes, self.all.swap(self.rank, data)[source])

    def close(self) -> None:
        pass


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
class Rank:
    coordinator: StepCoordinator
    exchanges: list[bool]


def noting(exchanges: list[bool]) -> Callable[[object, bool], None]:
    return lambda group, last: exchanges.append(last)


def ranks(
    size: int,
    vectors: Sequence[dict[int, int]] = (),
    *,
    independent: bool = False,
    change: Callable[[], bool] = lambda: False,
) -> list[Rank]:
    together = Together(size)
    made = []
    for i in range(size):
        exchanges: list[bool] = []
        coordinator = StepCoordinator(
            Member(together, i, size),
            DenseLedger(dict(vectors[i] if vectors else OFFSETS)),
            change,
            noting(exchanges),
            independent,
            SettableClock(),
        )
        made.append(Rank(coordinator, exchanges))
    return made


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls concurrently; return the result or exception of each."""
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
        return lambda: made[i].coordinator.agree(step, batches[i], stopping=i == stopping)

    results = at_once(*(one(i) for i in range(len(made))))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


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


def test_every_rank_has_the_sums_of_all_lanes() -> None:
    two = ranks(2)
    lanes = [[Sums(np.array([float(10 * r + i)])) for i in range(2)] for r in range(2)]
    agree(two, [[batch(0, 0, 1), None], [batch(1, 0, 1), None]])

    at_once(*(lambda r=r: two[r].coordinator.reduce(cast(Sequence[Lane], lanes[r])) for r in range(2)))

    assert [[lane.own[0] for lane in of] for of in lanes] == [[22.0, 0.0], [22.0, 0.0]]


def test_rank_lost_in_reduce_restores_the_vector() -> None:
    two = ranks(2)
    agree(two, [[batch(0, 0, 1)], [batch(1, 0, 1)]])
    cast(Member, two[0].coordinator.group).all.lost = True

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


def test_independent_ranks_step_alone_between_exchanges() -> None:
    two = ranks(2, independent=True)
    agree(two, [[None], [None]])  # the first agreement

    first = two[0].coordinator
    steps = [first.agree(i, [batch(0, i, i + 1)], stopping=False).steps for i in range(3)]
    for rank in two:
        cast(SettableClock, rank.coordinator.clock).advance(EXCHANGE_S)
    agreed = agree(two, [[None], [batch(1, 0, 1)]], step=3)

    assert steps == [True] * 3
    assert [a.steps for a in agreed] == [False, True]
    assert [r.exchanges for r in two] == [[False, False]] * 2
    for rank in two:
        cast(SettableClock, rank.coordinator.clock).advance(EXCHANGE_S)
    assert all(a.over for a in agree(two, [[None], [None]], stopping=1))
    assert [r.exchanges for r in two] == [[False, False, True]] * 2


def test_rank_alone_makes_no_exchange() -> None:
    exchanges: list[bool] = []
    coordinator = StepCoordinator(
        LocalProcessGroup(Fence(1)), DenseLedger({0: 0}), exchange=noting(exchanges), independent=True
    )

    assert not coordinator.agree(0, [batch(0, 0, 1)], stopping=False).over
    assert coordinator.agree(1, [None], stopping=True).over
    assert exchanges == []


def test_several_ranks_refuse_runs_of_batches() -> None:
    with pytest.raises(ValueError, match="2 ranks agree at every step"):
        ranks(2)[0].coordinator.agree_runs([None], stopping=False)
