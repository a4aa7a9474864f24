"""Requests scored together: who waits is taken, nobody is waited for, a bad one is alone with its error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from freshet.errors import BadInput
from freshet.inference.batching import Batcher, Pace
from freshet.inference.pipeline import Encoded
from freshet.types import BytesColumn

NOTHING = BytesColumn.of([])


def request(candidates: int = 10) -> Encoded:
    return Encoded(NOTHING, candidates)


@dataclass
class Scorer:
    """Answers a request with its candidates, and takes its time by a clock of its own."""

    candidate_s: float = 0.0
    now: float = 0.0
    batches: list[list[int]] = field(default_factory=list)

    def __call__(self, requests: Sequence[Encoded]) -> list[int | Exception]:
        sizes = [one.candidates for one in requests]
        self.batches.append(sizes)
        self.now += self.candidate_s * sum(sizes)
        if 666 in sizes and len(sizes) > 1:
            raise RuntimeError("a transform failed")
        return [BadInput("no key") if n == 13 else RuntimeError("alone") if n == 666 else n for n in sizes]

    def batcher(self, budget_s: float = 1.0) -> Batcher[int]:
        return Batcher(self, budget_s=budget_s, clock=lambda: self.now)


def asked(batcher: Batcher[int], size: int) -> asyncio.Future[int | Exception]:
    answer: asyncio.Future[int | Exception] = asyncio.get_running_loop().create_future()
    batcher.ask(request(size), answer.set_result)
    return answer


def ask(batcher: Batcher[int], *sizes: int) -> list[int | Exception]:
    async def together() -> list[int | Exception]:
        return await asyncio.gather(*(asked(batcher, n) for n in sizes))

    return asyncio.run(together())


def test_requests_that_wait_are_one_batch_and_each_gets_its_own_answer() -> None:
    scorer = Scorer()

    assert ask(scorer.batcher(), 1, 2, 3) == [1, 2, 3]
    assert scorer.batches == [[1, 2, 3]]


def test_a_request_that_comes_alone_is_scored_in_the_next_turn() -> None:
    scorer = Scorer()
    turns: list[int] = []

    async def alone() -> None:
        answer = asked(scorer.batcher(), 10)
        while not answer.done():
            turns.append(1)
            await asyncio.sleep(0)

    asyncio.run(alone())

    assert len(turns) <= 3


def test_a_bad_request_fails_alone() -> None:
    scorer = Scorer()

    good, bad, other = ask(scorer.batcher(), 1, 13, 3)

    assert (good, other) == (1, 3)
    assert isinstance(bad, BadInput)


def test_a_batch_that_raises_is_tried_one_by_one() -> None:
    scorer = Scorer()

    good, bad, other = ask(scorer.batcher(), 1, 666, 3)

    assert (good, other) == (1, 3)
    assert isinstance(bad, RuntimeError)
    assert scorer.batches == [[1, 666, 3], [1], [666], [3]]


def test_a_callback_that_raises_is_logged_and_harms_no_other_request() -> None:
    scorer = Scorer()
    batcher = scorer.batcher(budget_s=0.0)

    def broken(result: int | Exception) -> None:
        raise RuntimeError("no connection")

    async def talk() -> list[int | Exception]:
        batcher.ask(request(1), broken)
        waiting = [asked(batcher, 2), asked(batcher, 3)]
        return [*await asyncio.gather(*waiting), await asked(batcher, 4)]

    with capture_logs() as logs:
        assert asyncio.run(asyncio.wait_for(talk(), 10)) == [2, 3, 4]
    assert [str(entry["exc_info"]) for entry in logs] == ["no connection"]


def test_the_others_of_a_batch_are_answered_when_a_callback_raises() -> None:
    scorer = Scorer()
    batcher = scorer.batcher()

    def broken(result: int | Exception) -> None:
        raise RuntimeError("no connection")

    async def talk() -> int | Exception:
        batcher.ask(request(1), broken)
        return await asked(batcher, 2)

    with capture_logs():
        assert asyncio.run(asyncio.wait_for(talk(), 10)) == 2
    assert scorer.batches == [[1, 2]]


def test_a_batch_that_cannot_be_noted_does_not_end_the_scoring() -> None:
    scorer, told = Scorer(), list[str]()

    def observe(requests: int) -> None:
        if len(scorer.batches) == 1:
            raise RuntimeError("no histogram")

    async def talk() -> int | Exception:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(str(what["exception"])))
        batcher = Batcher[int](scorer, budget_s=0.0, observe=observe)
        batcher.ask(request(1), lambda result: None)
        return await asked(batcher, 2)

    assert asyncio.run(asyncio.wait_for(talk(), 10)) == 2
    assert told == ["no histogram"]


def test_a_batch_takes_no_more_than_the_budget_allows_by_what_candidates_have_cost() -> None:
    scorer = Scorer(candidate_s=1e-4)
    batcher = scorer.batcher(budget_s=5e-3)
    for _ in range(100):
        ask(batcher, 10)
    scorer.batches.clear()

    ask(batcher, *[20] * 5)

    assert scorer.batches == [[20, 20], [20, 20], [20]]


def test_a_budget_of_nothing_scores_one_by_one() -> None:
    scorer = Scorer()

    ask(scorer.batcher(budget_s=0.0), 1, 2, 3)

    assert scorer.batches == [[1], [2], [3]]


@pytest.mark.parametrize("candidates", [1, 10_000])
def test_a_request_larger_than_the_budget_is_taken_alone(candidates: int) -> None:
    pace = Pace(1e-9)

    assert pace.fits([candidates, 1]) == 1
